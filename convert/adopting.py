"""Adopt drafters of foreign classes: make a drafter of ours that shares the tensors of the object that a user holds.

`AutoModel.from_pretrained("z-lab/...", trust_remote_code=True)` returns z-lab's own class; SpecForge, NeMo AutoModel and the
speculators package have classes too. Their configs and tensors are read as strictly as `dflash-hub import` reads files.
"""

import json
import weakref
from dataclasses import dataclass

import torch
from torch import nn

from . import dspark, native, speculators, zlab


@dataclass(frozen=True)
class Adopted:
    """A drafter of ours, and where the tensors of the foreign object were when it was made."""

    drafter: nn.Module
    addresses: list[int]


# Foreign object -> target -> what was made of the one for the other. Neither is kept alive.
_ADOPTED: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, Adopted]]" = (
    weakref.WeakKeyDictionary()
)


def recognizes(assistant) -> bool:
    """Say by its config whether `assistant` is a DFlash drafter, or looks like one."""
    config = _config_dict(assistant)
    return any(layout.recognizes(config) for layout in (zlab, dspark, speculators, native)) or (
        {"block_size", "target_layer_ids"} <= set(config)
    )


def adopt(assistant, target):
    """Return a drafter of our class that shares the tensors of `assistant`, for use with `target`.

    It is made once and remembered as long as both objects live; tensors that were moved, cast or replaced since make it anew.

    Args:
        assistant: an object that `recognizes` accepts; it is not changed.
        target: states what some layouts leave open (its depth), and owns the embedding and head that a drafter may copy.

    Raises:
        ValueError: the object cannot be adopted; names its class and what is missing or not supported.
    """
    name = f"{type(assistant).__module__}.{type(assistant).__qualname__}"
    try:
        if not isinstance(assistant, nn.Module):
            raise ValueError("it is not a torch module, so there are no tensors to share.")
        tensors = _tensors(assistant)
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        by_target = _ADOPTED.setdefault(assistant, weakref.WeakKeyDictionary())
        known = by_target.get(target)
        if known is None or known.addresses != addresses:
            known = by_target[target] = Adopted(_make_drafter(assistant, target, tensors), addresses)
        return known.drafter
    except Exception as error:  # transformers and torch raise many kinds for a value that makes no sense
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"`assistant_model` is a {name}. Its config looks like that of a DFlash drafter, but it cannot be adopted: {reason}"
        ) from error


def _config_dict(assistant) -> dict:
    """The config of an object as its config.json would state it; empty where there is none."""
    config = getattr(assistant, "config", None)
    if hasattr(config, "to_json_string"):
        return json.loads(config.to_json_string())
    return config if isinstance(config, dict) else dict(getattr(config, "__dict__", {}))


def _tensors(assistant: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of the object would hold, not copied; and its RoPE frequencies, to be compared with the config."""
    tables = {name: table.cpu() for name, table in assistant.named_buffers() if name.endswith("rotary_emb.inv_freq")}
    return tables | assistant.state_dict(keep_vars=True)


def _make_drafter(assistant: nn.Module, target, tensors: dict[str, torch.Tensor]):
    # Not above: transformers is still being imported when this module is, and the models that these need may not be there yet.
    from ..configuration_dflash import DFlashConfig
    from ..hub_files import check_finite
    from ..modeling_dflash import DFlashDraftModel, DFlashRotaryEmbedding
    from .checkpoint import InMemory
    from .names import expected_shapes, match
    from .reading import Target, compare_borrowed, read_fields, recognize

    source = getattr(assistant, "name_or_path", None) or type(assistant).__name__
    stated = _config_dict(assistant)
    text = target.config.get_text_config(decoder=True)
    facts = Target(speculators.verifier(stated), text.num_hidden_layers, text.vocab_size, target.config.architectures)
    layout = recognize(stated, source)
    config = DFlashConfig.from_dict(read_fields(layout, stated, facts))
    if layout == "dspark" and dspark.is_interleaved(stated):
        raise ValueError(
            "its RoPE turns neighboring channels, so its tensors cannot be shared; `dflash-hub import` its folder."
        )
    if layout != "dflash-hub" and config.markov_rank is not None and config.draft_vocab_size is not None:
        raise ValueError(
            "its Markov head is of a reduced vocabulary, so it cannot be shared; `dflash-hub import` its folder."
        )
    found = match(
        layout, {name: InMemory(None, name, tensor) for name, tensor in tensors.items()}, expected_shapes(config), config,
        source,
    )  # fmt: skip
    shared = {name: stored.tensor for name, stored in found.drafter.items() if name != "d2t"}
    _check_ordinary(shared)
    check_finite(shared, "this drafter")
    if found.borrowed:
        own = {"embed_tokens.weight": target.get_input_embeddings(), "lm_head.weight": target.get_output_embeddings()}
        rows = {name: InMemory(None, name, module.weight[: config.vocab_size]) for name, module in own.items()}
        compare_borrowed(found.borrowed, rows, target.config.name_or_path or type(target).__name__, found.listed)

    some = next(iter(shared.values()))
    config.dtype, config.name_or_path = some.dtype, source
    with torch.device("meta"):
        drafter = DFlashDraftModel(config)
    for name, tensor in shared.items():
        module, _, leaf = name.rpartition(".")
        # The very parameter, so that it moves with the foreign object; some rows of one are a view.
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        setattr(drafter.get_submodule(module), leaf, parameter)
    drafter.rotary_emb = DFlashRotaryEmbedding(config).to(some.device)
    if found.listed is not None:
        drafter.d2t = found.drafter["d2t"].tensor
    return drafter.eval()


def _check_ordinary(tensors: dict[str, torch.Tensor]):
    """Refuse tensors that a drafter of ours cannot compute with as they are."""
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} is a {type(tensor).__name__}; expected an ordinary tensor, neither sharded nor quantized."
            )
        if tensor.is_meta:
            raise ValueError(f"{name} is offloaded (on the meta device); load the drafter onto one device.")
    for what in ("device", "dtype"):
        found = sorted({str(getattr(tensor, what)) for tensor in tensors.values()})
        if len(found) > 1:
            raise ValueError(
                f"its tensors have more than one {what} ({', '.join(found)}); use one, with `drafter.to(...)`."
            )
