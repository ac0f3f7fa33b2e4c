"""What a drafter is, for people: everything that its files say, and what is odd about it. Weights are read once, to see that they are finite."""

import json
import math
from pathlib import Path

from ..configuration_dflash import SLIDING
from ..hub_files import RECORD, custom_generate_source, nonfinite_sentence, weight_paths
from .card import attention_in_words, parts_in_words, vocabulary_in_words
from .checkpoint import Stored
from .engines import TITLES, blockers, export_and_serve, export_for_llamacpp, llamacpp_command, serve_command
from .gguf_files import InGguf
from .reading import LAYOUTS, OURS, Drafter, nonfinite_weights
from .zlab import DRAFTING, architecture, scales

HERE = Path(__file__).parent.parent
AUTO_MAP = {"AutoConfig": "configuration_dflash.DFlashConfig", "AutoModel": "modeling_dflash.DFlashDraftModel"}


def describe(drafter: Drafter) -> str:
    config, tensors = drafter.config, drafter.match.drafter
    elements = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    size = sum(elements[name] * tensor.dtype.itemsize for name, tensor in tensors.items())
    files = {tensor.file.name for tensor in tensors.values()}
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for name, t in tensors.items() if name != "d2t"})
    modes = {
        "chat template": {True: "yes", False: "no", None: "not recorded"}[config.target_chat],
        "thinking": {True: "on", False: "off", None: "not recorded"}[config.target_thinking],
    }
    rope = ", ".join(f"{name} {value}" for name, value in config.rope_parameters.items())
    quirks = [f"{name} {value:g}" for name, value in scales(config).items()]
    rows = [
        (
            "format",
            LAYOUTS[drafter.layout].title if drafter.layout != OURS else f"dflash-hub, version {config.format_version}",
        ),
        (
            "target",
            f"{config.target_name_or_path or 'not recorded'}"
            f"{f' at {config.target_revision}' if config.target_revision else ''}; "
            + ", ".join(f"{name}: {value}" for name, value in modes.items()),
        ),
        ("weights", f"{sum(elements.values()) / 1e6:.1f} M parameters, {size / 1e6:.1f} MB in {len(files)} file(s)"),
        ("dtype", ", ".join(dtypes)),
        ("layers", f"{config.num_hidden_layers}: {attention_in_words(config)}"),
        (
            "shape",
            f"width {config.hidden_size}, {config.num_attention_heads} heads of {config.head_dim}, "
            f"{config.num_key_value_heads} for keys, MLP {config.intermediate_size}"
            + (", attention biases" if config.attention_bias else ""),
        ),
        (
            "block",
            f"{config.block_size}: one anchor and {config.block_size - 1} mask tokens, for {config.drafts_per_block} draft tokens",
        ),
        ("target layers", f"{config.target_layer_ids} of {config.num_target_layers} layers, 0-based"),
        ("mask token", f"{config.mask_token_id} of {config.vocab_size} rows"),
        ("RoPE", f"{rope}; {config.max_position_embeddings} positions"),
        ("head", ", ".join(quirks) or "the target's, as it is"),
        ("draft vocabulary", vocabulary_in_words(config)),
        ("further parts", parts_in_words(config)),
    ]
    width = max(len(name) for name, _ in rows)
    parts = ["\n".join(f"{name:<{width}}  {value}" for name, value in rows)]
    command = serve_command if served_as_it_is(drafter) else export_and_serve
    for engine, title in TITLES.items():
        stopped = blockers(engine, config)
        parts.append(
            f"{title}: no. {'; '.join(stopped)}."
            if stopped
            else f"{title}:\n{command(engine, config, drafter.checkpoint.source)}"
        )
    if stopped := LAYOUTS["gguf"].unsupported_fields(config):
        parts.append(f"llama.cpp: no. {'; '.join(stopped)}.")
    else:
        command = llamacpp_command if drafter.layout == "gguf" else export_for_llamacpp
        parts.append(f"llama.cpp:\n{command(config, drafter.checkpoint.source)}")
    for name in ("speculators", "transformers"):
        if stopped := LAYOUTS[name].unsupported_fields(config):
            parts.append(f"{LAYOUTS[name].title}: no. {'; '.join(stopped)}.")
    if odd := warnings_about(drafter):
        parts.append("odd:\n" + "\n".join(f"- {sentence}" for sentence in odd))
    return "\n\n".join(parts)


def served_as_it_is(drafter: Drafter) -> bool:
    """Whether engines find all of it where they look, and read it as it is meant; an export puts it there otherwise."""
    found, config = drafter.checkpoint, drafter.config
    stated = found.config | (found.config.get("dflash_config") or {})
    slides = [layer_type == SLIDING for layer_type in config.layer_types]
    causal = found.config.get("is_causal")
    return (
        drafter.layout == "zlab"
        and drafter.match.listed is None
        and found.config.get("model_type") == "qwen3"
        and found.config.get("architectures") == [architecture(config)]
        and found.config_path == found.folder / "config.json"
        and set(found.tensors) == set(drafter.match.drafter)
        and all(isinstance(t, Stored) and t.file.parent == found.folder for t in found.tensors.values())
        and all(stated.get(name) is not None for name in (*DRAFTING, "num_target_layers"))
        and not any(stated.get(name) for name in ("use_swa", "eagle_aux_hidden_state_layer_ids"))
        and not (any(slides) and not found.config.get("use_sliding_window"))
        and config.block_causal == (slides if causal is None else [causal] * len(slides))
    )


def warnings_about(drafter: Drafter) -> list[str]:
    """What is allowed, and still worth a look."""
    config, found = drafter.config, []
    folder = drafter.checkpoint.folder
    if names := nonfinite_weights(drafter):
        found.append(nonfinite_sentence(names, "it"))
    if config.target_name_or_path is None:
        found.append("no target is recorded; dflash-hub import --target records it")
    tensors = [tensor for name, tensor in drafter.match.drafter.items() if name != "d2t"]
    if quantized := sorted({t.kind for t in tensors if isinstance(t, InGguf) and t.kind != t.code}):
        found.append(
            f"weights are quantized ({', '.join(quantized)}); they are read as float32, with the rounding that they have"
        )
    if drafter.layout != "gguf" and len({tensor.dtype for tensor in tensors}) > 1:
        found.append("tensors of several types: loading with dtype='auto' casts all to the type of most")
    stated = drafter.checkpoint.config.get("dtype") or drafter.checkpoint.config.get("torch_dtype")
    if stated and stated != str(config.dtype).removeprefix("torch."):
        found.append(f"config.json says {stated}, the weights are {str(config.dtype).removeprefix('torch.')}")
    if (
        drafter.layout == OURS
        and len({path.name.endswith(".index.json") for path in weight_paths(folder)}) > 1
        and any(tensor.file.name == "model.safetensors" for tensor in drafter.match.drafter.values())
    ):
        found.append(
            "model.safetensors and an index of several files: all readers take the first, the others may be stale"
        )
    if config.target_layer_ids != sorted(config.target_layer_ids):
        found.append("the target layers are not in order; the context projection reads them as they are listed")
    for name in ("bos_token_id", "pad_token_id"):
        if config.mask_token_id == getattr(config, name):
            found.append(f"the mask token is also `{name}`, which means something else in a text")
    if config.sliding_window is not None and config.sliding_window < config.block_size:
        found.append(f"the window {config.sliding_window} is shorter than a block")
    if drafter.layout == OURS:
        if changed := _foreign_code(folder):
            found.append(
                f"code that differs from the installed dflash-hub's: {', '.join(changed)}; dflash-hub import writes the folder "
                "anew"
            )
        if (auto_map := drafter.checkpoint.config.get("auto_map")) not in (None, AUTO_MAP):
            found.append(f"config.json names other code to load with trust_remote_code, auto_map is {auto_map}")
        if not (folder / RECORD).is_file():
            found.append(f"no {RECORD}: how it was trained is not recorded")
    return found


def _foreign_code(folder: Path) -> list[str]:
    """Python files that loading with `trust_remote_code` can reach and that are not the installed package's."""

    def differs(path: Path) -> bool:
        if not path.read_bytes().strip():  # the repository's custom_generate/ is a package, whose __init__.py is empty
            return False
        if path.parent != folder:
            return path.name != "generate.py" or path.read_bytes() != custom_generate_source().encode()
        mine = HERE / path.name
        return not mine.is_file() or path.read_bytes() != mine.read_bytes()

    found = [*sorted(folder.glob("*.py")), *sorted(folder.glob("custom_generate/*.py"))]
    return [path.relative_to(folder).as_posix() for path in found if differs(path)]


def mapping(lines: list[tuple[str, str]], config) -> str:
    """The lines of a dry run: which tensor becomes what, and the config that would be written."""
    width = max(len(name) for name, _ in lines)
    tensors = "\n".join(f"{name:<{width}}  {becomes}" for name, becomes in lines)
    fields = json.dumps(config.to_diff_dict(), indent=2, default=str, sort_keys=True)
    return f"{tensors}\n\n{fields}"
