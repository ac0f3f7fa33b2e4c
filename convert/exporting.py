"""A drafter of ours in the layout of another ecosystem, or the reason why it cannot be said there."""

import copy
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.files import new_file, new_folder
from ..common.target_source import TargetSource
from ..configuration_dflash import DFlashConfig
from ..hub_files import write_text
from .checkpoint import InMemory, SomeRows, write_tensors
from .engines import TITLES, TYPED, blockers, llamacpp_command, serve_command, warnings_of
from .gguf_files import FILE_TYPES, SUFFIX, read_gguf_target, unserved_target, write_gguf
from .names import DRAFTED_ROWS, renamed
from .reading import LAYOUTS, Target, read_drafter, read_target, target_tensors
from .zlab import dspark_parts

# What `--to` takes: an engine that reads z-lab's layout, or a layout.
GOALS = (*TITLES, *(name for name in LAYOUTS if name not in TITLES))
# Beyond, engines cannot count positions.
MOST_POSITIONS = 2**31 - 1


@dataclass
class Exported:
    """What an export wrote.

    Attributes:
        not_carried: fields of ours that the layout has no place for; they say how to use a drafter, not what it computes.
        usage: the command or the lines that use the folder.
    """

    title: str
    config: DFlashConfig
    not_carried: tuple[str, ...]
    usage: str
    warnings: list[str]


def export_drafter(
    source: str,
    destination: str | Path,
    to: str = "zlab",
    force: bool = False,
    target: str | TargetSource | None = None,
    revision: str | None = None,
    yarn: float | None = None,
    context_length: int | None = None,
    file_type: str | None = None,
) -> Exported:
    """Write a drafter for another package: a folder without code, or llama.cpp's one file.

    Args:
        to: one of `GOALS`.
        target: the target that the `speculators` layout names, and takes embedding and head from, and `gguf` the tokenizer
            and the rows of listed tokens; by default the one that is recorded. For `gguf` it may be the target's own GGUF file.
        yarn: scale RoPE by this factor with YaRN, from the positions that the drafter was made for.
        context_length: positions to state; by default those that the drafter was made for, times `yarn`.
        file_type: of `gguf`, what its matrices are written in, one of `FILE_TYPES`; by default the drafter's own type.

    Raises:
        ValueError: the layout cannot say what this drafter is, or the engine would compute something else; says why.
        FileExistsError: see `new_folder` and `new_file`.
    """
    if to not in GOALS:
        raise ValueError(f"--to {to!r} is none of {', '.join(GOALS)}.")
    _check_destination(to, str(destination), file_type)
    drafter = read_drafter(source, target, revision)
    layout_name = to if to not in TITLES else "dspark" if dspark_parts(drafter.config) else "zlab"
    layout = LAYOUTS[layout_name]
    if drafter.match.borrowed:
        raise ValueError(
            f"{source!r} carries copies of its target's tensors; `dflash-hub import` it first, which compares them with the "
            "target's."
        )
    config = lengthened(drafter.config, yarn, context_length)
    stopped = blockers(to, config) if to in TITLES else layout.unsupported_fields(config)
    if stopped:
        raise ValueError(f"{TITLES.get(to, layout.title)} cannot take this drafter: {'; '.join(stopped)}.")

    original = target or config.target_name_or_path
    if original is not None:
        original = TargetSource.of(original).for_drafter(config)
    facts = Target("" if original is None else original.path, config.num_target_layers, config.vocab_size, [])
    copies = {}
    if layout_name in ("speculators", "gguf"):
        facts = _matching_target(layout.title, original, config)
        copies = _copies(layout_name, original, config, drafter.match.listed)
    if layout_name == "speculators":
        config.target_name_or_path = original.path
    written = layout.write(config, facts)
    _check_read_back(layout, config, written, facts)
    kept = drafter.match.drafter
    if "draft_vocab_size" in layout.not_carried:
        kept = {name: tensor for name, tensor in kept.items() if name != "d2t"}
    if layout_name == "speculators" and config.draft_vocab_size is not None and DRAFTED_ROWS in kept:
        kept = kept | {DRAFTED_ROWS: SomeRows(kept[DRAFTED_ROWS], drafter.match.listed)}
    tensors = renamed(layout_name, kept | copies)
    usage = _usage(to, config, str(destination))
    title = TITLES.get(to, layout.title)
    exported = Exported(
        title, config, layout.not_carried, usage, ([TYPED] if to in TITLES else []) + warnings_of(to, config)
    )
    if to == "gguf":
        exported.warnings += unserved_target(original)
        with new_file(destination, force) as path:
            write_gguf(path, written, tensors, file_type or str(config.dtype).removeprefix("torch."), original)
        return exported
    with new_folder(destination, force) as folder:
        write_text(folder / "config.json", json.dumps(written, indent=2) + "\n")
        write_tensors(folder / "model.safetensors", tensors)
        write_text(folder / "README.md", _card(exported))
    return exported


def _copies(layout: str, target: TargetSource, config: DFlashConfig, listed: torch.LongTensor | None) -> dict:
    """Return what a layout carries of the target's tensors, and a list of tokens in its spelling; by our names.

    Raises:
        ValueError: the target's head has a bias, or see `target_tensors`.
    """
    if layout == "gguf" and listed is None:
        return {}
    copies = target_tensors(target, config)
    if copies.pop("lm_head.bias", None) is not None:
        raise ValueError(
            f"the head of the target {target.path!r} has a bias, for which there is no place in the layout."
        )
    if listed is None:
        return copies
    head = SomeRows(copies["lm_head.weight"], listed)
    if layout == "gguf":
        return {"lm_head.weight": head, "d2t": InMemory(None, "d2t", listed)}
    mask = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, listed, True)
    return copies | {"lm_head.weight": head, "t2d": InMemory(None, "t2d", mask)}


def _check_destination(to: str, destination: str, file_type: str | None):
    if to == "gguf" and not destination.endswith(SUFFIX):
        raise ValueError(f"{destination!r} is to be one file; give it a name that ends in {SUFFIX}.")
    if to != "gguf" and destination.endswith(SUFFIX):
        raise ValueError(
            f"{destination!r} is the name of a GGUF file, which --to gguf writes; --to {to} writes a folder."
        )
    if to != "gguf" and file_type is not None:
        raise ValueError(f"--dtype is for --to gguf; a folder for {to} keeps the drafter's own type.")
    if file_type not in (None, *FILE_TYPES):
        raise ValueError(f"--dtype {file_type!r} is none of {', '.join(FILE_TYPES)}.")


def _matching_target(title: str, source: TargetSource | None, config: DFlashConfig) -> Target:
    """Read depth and vocabulary of the target, which must be those that the drafter was made for."""
    if source is None:
        raise ValueError(f"{title} carries what belongs to the target, and none is recorded; pass --target.")
    name = source.path
    if name.endswith(SUFFIX):
        layers, vocabulary, width = read_gguf_target(name)
        if width != config.hidden_size:
            raise ValueError(f"the target {name!r} has width {width}; the drafter's is {config.hidden_size}.")
        facts = Target(name, layers, vocabulary, [])
    else:
        facts = read_target(source)
    if (facts.layers, facts.vocabulary) != (config.num_target_layers, config.vocab_size):
        raise ValueError(
            f"the target {name!r} has {facts.layers} layers and {facts.vocabulary} tokens; the drafter was made for one "
            f"with {config.num_target_layers} and {config.vocab_size}."
        )
    return facts


def lengthened(config: DFlashConfig, yarn: float | None, context_length: int | None) -> DFlashConfig:
    """The config with more positions: stated, and with `yarn` also scaled."""
    config = copy.deepcopy(config)
    positions = config.max_position_embeddings
    if yarn is not None:
        if config.rope_parameters["rope_type"] != "default":
            raise ValueError(f"--yarn {yarn:g}: RoPE is scaled already ({config.rope_parameters}).")
        if not 1 < yarn <= MOST_POSITIONS / positions:
            raise ValueError(f"--yarn {yarn:g} must be a factor above 1, for at most {MOST_POSITIONS} positions.")
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": config.rope_parameters["rope_theta"],
            "factor": float(yarn),
            "original_max_position_embeddings": positions,
        }
        config.max_position_embeddings = int(positions * yarn)
    if context_length is not None:
        if context_length < positions:
            raise ValueError(
                f"--context-length {context_length} is below the {positions} that the drafter was made for."
            )
        if context_length > MOST_POSITIONS:
            raise ValueError(f"--context-length {context_length} is above {MOST_POSITIONS}.")
        config.max_position_embeddings = context_length
    return config


def _check_read_back(layout, config: DFlashConfig, written: dict, facts: Target):
    """What was written means what the drafter is: read as an import would, field by field."""
    read_back = DFlashConfig.from_dict(layout.read(json.loads(json.dumps(written)), facts))
    for name in type(config).__annotations__:
        if name not in layout.not_carried and getattr(config, name) != getattr(read_back, name):
            raise ValueError(
                f"{layout.title} does not carry `{name}`: {getattr(config, name)!r} would be read back as "
                f"{getattr(read_back, name)!r}."
            )


def _usage(to: str, config: DFlashConfig, folder: str) -> str:
    target = config.target_name_or_path or "TARGET"
    if to == "speculators":
        return f"vllm serve {shlex.quote(folder)}"
    if to == "dspark":
        engine = next((engine for engine in ("vllm", "sglang") if not blockers(engine, config)), None)
        return serve_command(engine, config, folder) if engine else "# for the classes of NeMo AutoModel and SpecForge"
    if to == "gguf":
        return llamacpp_command(config, folder)
    if to == "transformers":
        return (
            f'drafter = AutoModel.from_pretrained({json.dumps(folder, ensure_ascii=False)}, dtype="auto")\n'
            f'# with the target {target}:\ntarget.generate(**inputs, assistant_model=drafter, speculation_type="dflash")'
        )
    return serve_command(to, config, folder)


def _card(exported: Exported) -> str:
    config = exported.config
    language = "python" if "AutoModel" in exported.usage else "bash"
    notes = "".join(f"{warning}.\n\n" for warning in exported.warnings)
    return (
        f"# DFlash drafter for {config.target_name_or_path or 'its target'}, for {exported.title}\n\n"
        f"{notes}```{language}\n{exported.usage}\n```\n\n"
        f"Written by `dflash-hub export`. {config.num_hidden_layers} layers, blocks of {config.block_size}, target layers "
        f"{config.target_layer_ids} of {config.num_target_layers}, mask token {config.mask_token_id}, "
        f"{config.max_position_embeddings} positions.\n"
    )
