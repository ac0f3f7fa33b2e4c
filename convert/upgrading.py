"""From a DFlash drafter to a DFlash 2 that drafts the same, to be trained further."""

from pathlib import Path

import torch
from torch import nn

from ..common.files import new_folder
from ..configuration_dflash import DFlashConfig
from ..drafter_paths import CandidateSelector
from ..modeling_dflash import BlockConvolution, DFlashDraftModel
from .checkpoint import InMemory
from .importing import write_drafter
from .parts import RANK, parts_of
from .reading import read_ours
from .zlab import parts


def upgrade_drafter(
    source: str | Path,
    destination: str | Path,
    convolution: bool = True,
    selector: bool = True,
    rank: int = RANK,
    seed: int = 0,
    force: bool = False,
) -> DFlashConfig:
    """Write a drafter with the parts of DFlash 2 added: an identity convolution and a selector that says nothing.

    It drafts bit for bit as `source` does, until it is trained.

    Args:
        source: a folder of ours. Parts that it has stay as they are.
        seed: of the one fresh tensor that is random, the codebook of previous tokens.

    Raises:
        ValueError: nothing is to be added, or see `read_ours`.
        FileExistsError: see `new_folder`.
    """
    drafter = read_ours(source)
    old = drafter.config
    wanted = parts_of("dflash2", old.hidden_size, old.vocab_size, convolution, selector, rank)
    added = {name: value for name, value in wanted.items() if getattr(old, name) is None}
    if not added:
        raise ValueError(f"{source} has {', '.join(parts(old)) or 'nothing to add'}; there is no part to add.")
    config = DFlashConfig.from_dict(old.to_dict() | added)
    config.dtype = old.dtype
    torch.manual_seed(seed)
    fresh = {name: tensor for name, tensor in fresh_parts(config).items() if name not in drafter.match.drafter}
    tensors = drafter.match.drafter | {name: InMemory(None, name, tensor) for name, tensor in fresh.items()}
    with new_folder(destination, force) as folder:
        write_drafter(folder, config, tensors)
    return config


def fresh_parts(config: DFlashConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of fresh parts of DFlash 2, by name; no other tensor is allocated."""
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, (BlockConvolution, CandidateSelector)):
            _initialize(model, module)
            tensors |= {f"{name}.{leaf}": tensor.to(config.dtype) for leaf, tensor in module.state_dict().items()}
    return tensors


def _initialize(model: DFlashDraftModel, module: nn.Module):
    module.to_empty(device="cpu")
    for part in [*module.children(), module]:
        model._init_weights(part)
