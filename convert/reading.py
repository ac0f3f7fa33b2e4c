"""From a checkpoint of any format that is known to a drafter: its config and, by our names, its tensors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import cached_file

from ..common.files import in_a_line
from ..common.target_source import TargetSource
from ..configuration_dflash import DFlashConfig, check_stated, read_config_dict
from ..hub_files import nonfinite_sentence
from . import dspark, gguf_layout, native, speculators, zlab
from .checkpoint import DTYPES, Checkpoint, InMemory, Stored, open_checkpoint, tensors_of
from .gguf_files import SUFFIX, TARGET_NAMES, InGguf, open_gguf
from .init import borrowed_names, read_target_config, target_skeleton, weight_files
from .names import Match, expected_shapes, match


@dataclass(frozen=True)
class Layout:
    """A format: how it is told from others, and both directions of its config."""

    title: str
    recognizes: Callable[[dict], bool]
    read: Callable[[dict, "Target"], dict]
    unsupported_fields: Callable[[DFlashConfig], list[str]]
    write: Callable[[DFlashConfig, "Target"], dict]
    not_carried: tuple[str, ...]
    needs_target: bool


def _layout(title: str, module, needs_target: bool) -> Layout:
    return Layout(
        title, module.recognizes, module.read, module.unsupported_fields, module.write, module.NOT_CARRIED, needs_target
    )


# In this order they are tried.
LAYOUTS = {
    "speculators": _layout("speculators", speculators, needs_target=True),
    "transformers": _layout("transformers' native class", native, needs_target=True),
    "dspark": _layout("DSpark's layout", dspark, needs_target=False),
    "zlab": _layout("z-lab's layout", zlab, needs_target=False),
    "gguf": _layout("llama.cpp's GGUF", gguf_layout, needs_target=True),
}
OURS = "dflash-hub"


@dataclass(frozen=True)
class Target:
    """What a format takes from the target's config instead of stating it."""

    name: str
    layers: int
    vocabulary: int
    architectures: list[str]


@dataclass
class Drafter:
    """A drafter as it was found: nothing of its weights is read yet."""

    layout: str
    config: DFlashConfig
    match: Match
    checkpoint: Checkpoint


def read_target(source: TargetSource) -> Target:
    try:
        config = read_target_config(source)
        text = config.get_text_config(decoder=True)
        return Target(source.path, text.num_hidden_layers, text.vocab_size, config.architectures or [])
    except Exception as error:  # transformers raises many kinds for a value that makes no sense
        raise ValueError(
            f"cannot read the config of the target {source.path!r}; pass --target. ({in_a_line(error)})"
        ) from error


def read_drafter(
    source: str,
    target: str | TargetSource | None = None,
    revision: str | None = None,
    config_file: str | None = None,
    allow_pickle: bool = False,
) -> Drafter:
    """Recognize a checkpoint, and find every tensor of its drafter.

    Args:
        target: the model that it was made for, where the file does not name it.

    Raises:
        ValueError, OSError: it is of no format that is known, damaged, incomplete, or has what is not supported.
    """
    gguf_file = source.endswith(SUFFIX) and not Path(source).is_dir()
    checkpoint = open_gguf(source) if gguf_file else open_checkpoint(source, revision, config_file, allow_pickle)
    config = checkpoint.config
    for place in (config, config.get("transformer_layer_config")):
        layers = place.get("num_hidden_layers", place.get("dflash.block_count")) if isinstance(place, dict) else None
        if isinstance(layers, int) and layers > len(checkpoint.tensors):
            # Before anything is made as long as that.
            raise ValueError(
                f"{source!r} states {layers} layers, but its files hold {len(checkpoint.tensors)} tensors."
            )
    layout = recognize(config, source)
    facts = stated = None
    target = None if target is None else TargetSource.of(target)
    if layout != OURS and LAYOUTS[layout].needs_target:
        stated = speculators.verifier(config) if layout == "speculators" else None
        if target is None and stated is None:
            raise ValueError(f"{source!r} does not say how many layers its target has; pass --target.")
        facts = read_target(target or TargetSource(stated))
    try:
        fields = read_fields(layout, config, facts)
        if target is not None:
            name = fields.get("target_name_or_path") if facts is None else stated
            known = name, fields.get("target_revision")
            name, pinned = target.recorded_over(*known)
            fields = fields | {"target_name_or_path": name, "target_revision": known[1] if name == known[0] else pinned}
        drafter_config = DFlashConfig.from_dict(fields)
        expected = expected_shapes(drafter_config)
    except Exception as error:  # transformers and torch raise many kinds for a value that makes no sense
        raise ValueError(f"the config of {source!r} cannot be used: {in_a_line(error)}") from error
    found = match(layout, checkpoint.tensors, expected, drafter_config, source)
    if layout == "dspark" and dspark.is_interleaved(config):
        found.drafter = dspark.with_halves(found.drafter, drafter_config)
    # What lies in the file is what counts: the stated type may be another one, or none.
    drafter_config.dtype = _main_dtype(found)
    return Drafter(layout, drafter_config, found, checkpoint)


def read_ours(folder: str | Path) -> Drafter:
    """A drafter in a folder of our own layout, whose weights are finite. They are read once.

    Raises:
        OSError: there is no folder.
        ValueError: see `read_drafter`, or it is of another layout, or a weight is not finite.
    """
    if not Path(folder).is_dir():
        raise OSError(f"{folder} is no folder.")
    drafter = read_drafter(str(folder))
    if drafter.layout != OURS:
        raise ValueError(f"{folder} is in another format ({drafter.layout}); `dflash-hub import` it first.")
    if found := nonfinite_weights(drafter):
        raise ValueError(nonfinite_sentence(found, str(folder)))
    return drafter


def nonfinite_weights(drafter: Drafter) -> list[str]:
    """List the tensors of a file that hold NaN or infinity, reading them piece by piece."""
    tensors = drafter.match.drafter.values()
    return [tensor.name for tensor in tensors if not all(bool(piece.isfinite().all()) for piece in tensor.pieces())]


def recognize(config: dict, source: str) -> str:
    """The layout of a config.json."""
    if config.get("model_type") == "dflash" and "dflash_config" not in config:
        return OURS
    for name, layout in LAYOUTS.items():
        if layout.recognizes(config):
            return name
    raise ValueError(
        f"{source!r} is of no format that is known: model_type {config.get('model_type')!r}, architectures "
        f"{config.get('architectures')!r}. Known: {OURS}, {', '.join(LAYOUTS)}."
    )


def read_fields(layout: str, config: dict, facts: Target | None) -> dict:
    """The fields of `DFlashConfig` that a config of this layout states."""
    if layout == OURS:
        check_stated(config)
        return read_config_dict(config)
    return LAYOUTS[layout].read(config, facts)


def _main_dtype(found: Match) -> torch.dtype:
    """The type of most elements: norms may be kept in another one."""
    elements = {}
    for tensor in found.drafter.values():
        if tensor.code not in DTYPES:  # a list of tokens
            continue
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return max(elements, key=elements.get)


def target_tensors(source: TargetSource, config: DFlashConfig) -> dict[str, Stored | InGguf]:
    """`embed_tokens.weight` and `lm_head.weight` as they lie in the target's files; one tensor twice where they are tied.

    A head's bias comes as `lm_head.bias` where there is one.

    Args:
        source: a folder, a repository, or a GGUF file.
        config: of the drafter that is to borrow them.

    Raises:
        ValueError: they cannot be found there, are of no float type, or have another shape than the drafter was made for.
    """
    target = source.path
    found = _in_gguf(target) if target.endswith(SUFFIX) else _in_safetensors(source)
    for name, tensor in found.items():
        if name != "lm_head.bias" and tensor.shape != (config.vocab_size, config.hidden_size):
            raise ValueError(
                f"{tensor.name} of the target {target!r} has shape {list(tensor.shape)}; the drafter was made for one of "
                f"{[config.vocab_size, config.hidden_size]}."
            )
    return found


def _in_safetensors(source: TargetSource) -> dict[str, Stored]:
    target = source.path
    try:
        skeleton = target_skeleton(read_target_config(source), source)
    except Exception as error:  # as above
        raise ValueError(f"the config of the target {target!r} cannot be used: {in_a_line(error)}") from error
    files = weight_files(target, source.revision)
    embedding, head = borrowed_names(skeleton, files)
    tied = skeleton.config.get_text_config(decoder=True).tie_word_embeddings
    head = embedding if tied else head
    if embedding is None or head is None:
        raise ValueError(f"no embedding and head in the safetensors files of the target {target!r}.")
    names = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    bias = f"{head.removesuffix('weight')}bias"
    names |= {"lm_head.bias": bias} if bias in files else {}
    return {ours: _stored(source, files, name) for ours, name in names.items()}


def _in_gguf(file: str) -> dict[str, InGguf]:
    tensors = open_gguf(file).tensors
    found = {ours: tensors[theirs] for ours, theirs in TARGET_NAMES.items() if theirs in tensors}
    if "embed_tokens.weight" not in found:
        raise ValueError(f"no embedding in the target's file {file!r}.")
    # Tied where there is no head.
    return {"lm_head.weight": found["embed_tokens.weight"]} | found


def _stored(source: TargetSource, files: dict[str, str], name: str) -> Stored:
    path = Path(cached_file(source.path, files[name], revision=source.revision))
    stored = tensors_of({path: None}).get(name)
    if stored is None:
        raise ValueError(f"{path}: {name} is in the index, but not in the file.")
    if stored.dtype is None:
        raise ValueError(f"{name} of the target {source.path!r} is {stored.code}; expected one of {', '.join(DTYPES)}.")
    return stored


def check_borrowed(drafter: Drafter, target: str | TargetSource):
    """Compare copies of the target's tensors with the target's.

    Raises:
        ValueError: one differs, or the target's files cannot be read; names it.
    """
    found, source = drafter.match, TargetSource.of(target)
    compare_borrowed(found.borrowed, target_tensors(source, drafter.config), source.path, found.listed)


def compare_borrowed(
    copies: dict[str, Stored | InMemory],
    theirs: dict[str, Stored | InMemory],
    target: str,
    listed: torch.LongTensor | None,
):
    """Compare copies with the target's tensors of the same names, a chunk of rows at a time.

    Args:
        listed: the rows that a copy of the head holds, ascending; None for all of them.

    Raises:
        ValueError: one differs; names it.
    """
    for name, copy in copies.items():
        for here, there in _side_by_side(copy, theirs[name], listed if name == "lm_head.weight" else None):
            there = copy.rounded(there) if isinstance(copy, InGguf) else there
            if not _equal_up_to_dtype(here, there):
                raise ValueError(
                    f"{name} differs from that of the target {target!r}: the drafter has one of its own, which is not "
                    "supported, or belongs to another target."
                )


def _equal_up_to_dtype(here: torch.Tensor, there: torch.Tensor) -> bool:
    # Either of the two may have been cast to a narrower type when it was loaded or saved.
    dtype = min(here.dtype, there.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(here.to(dtype), there.to(here.device, dtype))


def _side_by_side(
    copy: Stored | InMemory, whole: Stored | InMemory, listed: torch.LongTensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = max(1, 2**24 // max(1, whole.shape[1]))
    for start in range(0, whole.shape[0], step):
        count = min(step, whole.shape[0] - start)
        if listed is None:
            yield copy.rows(start, count).whole(), whole.rows(start, count).whole()
            continue
        first, end = torch.searchsorted(listed, torch.tensor([start, start + count])).tolist()
        if first < end:
            rows = whole.rows(start, count).whole()
            yield copy.rows(first, end - first).whole(), rows[(listed[first:end] - start).to(rows.device)]
