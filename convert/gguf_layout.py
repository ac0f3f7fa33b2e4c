"""llama.cpp's layout: metadata and tensors of its architecture `dflash`, in one GGUF file.

Read in llama.cpp, build 11434: its converter, the loader of the architecture, and its drafting. Target layers are counted from the
embeddings there. The file also carries the target's tokenizer, of which drafting uses the size and the mask token alone.
"""

import math

from ..configuration_checks import PARTS
from ..configuration_dflash import FULL, SLIDING, DFlashConfig, read_config_dict
from .zlab import NOT_CARRIED as ZLAB_NOT_CARRIED
from .zlab import SCALES, dspark_parts, parts

ARCHITECTURE = "dflash"
# Depth and vocabulary come from the target's config, the special tokens in the file are those of the target's tokenizer.
NOT_CARRIED = (
    *(name for name in ZLAB_NOT_CARRIED if name != "draft_vocab_size"), "vocab_size", "num_target_layers", "attention_dropout",
    "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
MASK = "tokenizer.ggml.mask_token_id"
# Architectures of which build 11434 hands on the hidden states that a drafter reads; it stops at the first prompt of others.
HANDS_ON = (
    "llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "gpt-oss", "gemma4", "lfm2", "deepseek4",
    "minimax-01", "minimax-m2", "nemotron_h", "nemotron_h_moe", "hunyuan_vl", "hunyuan-dense", "bailingmoe3", "mimo2",
    "muse-glimmer", "nanbeige", "clef",
)  # fmt: skip
# How many tokens a drafter lists. No file states it: it is the length of the tensor of that name.
LISTED = "d2t"
# Their names behind `dflash.`, and ours.
NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_size": "block_size",
}
SCALE_NAMES = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}
# By type of RoPE, what of it the layout states. YaRN's attention factor follows from the factor there.
ROPE = {
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
KNOWN = {
    *NUMBERS, *PARTS, *SCALE_NAMES, *(f"rope.scaling.{name}" for names in ROPE.values() for name in names), "attention.value_length",
    "attention.causal", "attention.sliding_window", "attention.sliding_window_pattern", "hidden_act", "rope.freq_base",
    "rope.scaling.type", "rope.dimension_sections", "target_layers", "vocab_size",
}  # fmt: skip


def recognizes(config: dict) -> bool:
    return "general.architecture" in config


def read(metadata: dict, facts) -> dict:
    """The fields of `DFlashConfig`; vocabulary and depth of the target come from its own config.

    Raises:
        ValueError: a model of another architecture, or something that is not supported or not stated.
    """
    architecture = metadata["general.architecture"]
    if architecture != ARCHITECTURE:
        raise ValueError(f"`general.architecture` is {architecture!r}; a drafter's file says {ARCHITECTURE!r}.")
    prefix = f"{ARCHITECTURE}."
    said = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    if unknown := sorted(set(said) - KNOWN):
        raise ValueError(f"the file states {unknown}, which this version does not know how to honor.")
    required = [*NUMBERS, "rope.freq_base", "target_layers"]
    if missing := [name for name in required if said.get(name) is None]:
        raise ValueError(f"the file does not state {[prefix + name for name in missing]}.")
    if metadata.get(MASK) is None:
        raise ValueError(f"the file does not state the mask token, {MASK!r}.")
    for name, only in (("attention.value_length", said["attention.key_length"]), ("hidden_act", "silu")):
        if said.get(name, only) != only:
            raise ValueError(f"`{prefix}{name}` is {said[name]!r}; only {only!r} is supported.")
    slides = _sliding(said)
    causal = said.get("attention.causal", False)
    fields = {ours: said[theirs] for theirs, ours in NUMBERS.items()}
    fields |= {ours: said[theirs] for theirs, ours in SCALE_NAMES.items() if theirs in said}
    fields |= {name: said[name] for name in PARTS if name in said}
    # 0 stands for none there.
    fields = {name: value for name, value in fields.items() if not (name in (*SCALES, *PARTS) and value == 0)}
    if LISTED in metadata:
        fields["draft_vocab_size"] = metadata[LISTED]
    return read_config_dict(
        fields
        | {
            "architectures": ["DFlashDraftModel"],
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_parameters": _rope(said),
            "layer_types": [SLIDING if slide else FULL for slide in slides],
            "sliding_window": said["attention.sliding_window"] if any(slides) else None,
            "block_causal": [causal] * len(slides),
            "mask_token_id": metadata[MASK],
            "target_layer_ids": [layer - 1 for layer in said["target_layers"]],
            "vocab_size": facts.vocabulary,
            "num_target_layers": facts.layers,
            "target_name_or_path": facts.name,
            "dflash_config": {},
        }
    )


def _sliding(said: dict) -> list[bool]:
    """Which layers slide: a window without a pattern is not read there either."""
    depth = said["block_count"]
    if not said.get("attention.sliding_window"):
        return [False] * depth
    pattern = said.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != depth:
        raise ValueError(
            f"`{ARCHITECTURE}.attention.sliding_window_pattern` must say of each of the {depth} layers whether it slides, got "
            f"{pattern!r}."
        )
    return [bool(slide) for slide in pattern]


def _rope(said: dict) -> dict:
    kind = said.get("rope.scaling.type", "none")
    rope = {"rope_type": "default" if kind == "none" else kind, "rope_theta": said["rope.freq_base"]}
    if kind == "none":
        return rope
    if kind not in ROPE:
        raise ValueError(f"RoPE is scaled by {kind!r}; supported are {list(ROPE)}.")
    named = {ours: said.get(f"rope.scaling.{theirs}") for theirs, ours in ROPE[kind].items()}
    return rope | {name: value for name, value in named.items() if value is not None}


def unsupported_fields(config: DFlashConfig) -> list[str]:
    """What llama.cpp has no way to say or computes in another way, a sentence each."""
    found = []
    if len(set(config.block_causal)) > 1:
        found.append(
            f"`block_causal` is {config.block_causal}; it knows one value for all layers, and takes a layout without the value for "
            "bidirectional"
        )
    found += [f"`{name}` is {value}; it knows no DSpark" for name, value in dspark_parts(config).items()]
    has = parts(config)
    if 0 < len(has) < len(PARTS):
        name = next(iter(has))
        found.append(f"`{name}` is {has[name]} without the other part; it reads DFlash 2 with both")
    elif has and config.hidden_size < (most := config.selector_top_k * (config.selector_top_k + 1)):
        found.append(
            f"the hidden size {config.hidden_size} is below the {most} numbers that `selector_top_k` {config.selector_top_k} makes; it "
            "hands on a selector's scores in place of hidden states"
        )
    if config.attention_bias:
        found.append("`attention_bias` is true; its attention has no biases")
    if config.hidden_act != "silu":
        found.append(f"`hidden_act` is {config.hidden_act!r}; its converter knows only 'silu'")
    rope = config.rope_parameters
    known = {"rope_type", "rope_theta", *ROPE.get(rope["rope_type"], {}).values()}
    if rope["rope_type"] not in ("default", *ROPE):
        found.append(f"RoPE is of the type {rope['rope_type']!r}; supported are default, {', '.join(ROPE)}")
    elif unknown := sorted(set(rope) - known):
        found.append(f"`rope_parameters` holds {unknown}, which it computes by a rule of its own")
    if SLIDING in config.layer_types and not all(config.block_causal) and config.sliding_window < config.block_size:
        found.append(
            f"the window {config.sliding_window} is shorter than a block; it applies a window to earlier positions alone"
        )
    return found


def write(config: DFlashConfig, facts) -> dict:
    """The metadata, without the tokenizer: numbers, truth values, and lists of either; and `LISTED`, which is none."""
    prefix = f"{ARCHITECTURE}."
    said = {theirs: getattr(config, ours) for theirs, ours in NUMBERS.items()}
    said["attention.value_length"] = config.head_dim
    rope = config.rope_parameters
    said["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] != "default":
        said["rope.scaling.type"] = rope["rope_type"]
        for theirs, ours in ROPE[rope["rope_type"]].items():
            if rope.get(ours) is not None:
                positions = ours == "original_max_position_embeddings"
                said[f"rope.scaling.{theirs}"] = int(rope[ours]) if positions else float(rope[ours])
    for theirs, ours in SCALE_NAMES.items():
        if getattr(config, ours) != SCALES[ours]:
            said[theirs] = float(getattr(config, ours))
    said["target_layers"] = [layer + 1 for layer in config.target_layer_ids]
    slides = [layer_type == SLIDING for layer_type in config.layer_types]
    if any(slides):
        said["attention.sliding_window"] = config.sliding_window
        said["attention.sliding_window_pattern"] = slides
    said["attention.causal"] = config.block_causal[0]
    said |= parts(config)
    listed = {} if config.draft_vocab_size is None else {LISTED: config.draft_vocab_size}
    return {
        "general.architecture": ARCHITECTURE,
        **{prefix + name: value for name, value in said.items()},
        MASK: config.mask_token_id,
        **listed,
    }


def float32(value: float) -> float:
    """A number as the file holds it, read back in as few digits as tell it apart: 1e-06, not 9.999999974752427e-07."""
    import numpy as np

    return float(str(np.float32(value))) if math.isfinite(value) else value
