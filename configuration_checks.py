"""Checks of a drafter's configuration, shared by `DFlashConfig` and the readers of other spellings."""

import math

import transformers

NEEDED = (5, 17)


def check_version(found: str):
    """Refuse a transformers that lacks what the Hub modules import.

    Raises:
        ImportError: names the version found and the one needed.
    """
    if tuple(int(part) for part in found.split(".")[:2]) < NEEDED:
        raise ImportError(
            f"DFlash drafters need transformers {'.'.join(map(str, NEEDED))} or newer, this is {found}: pip install -U transformers."
        )


# The loader of `trust_remote_code` comes here first, whatever it loads: older versions lack names that later modules import.
check_version(transformers.__version__)

FULL, SLIDING = "full_attention", "sliding_attention"

# RoPE whose frequencies do not depend on the length of a forward pass: keys in the KV cache stay valid for good.
# By type, what it must state: transformers fills some of it in silently.
STATIC_ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

# Parts of other methods and of other producers. A drafter that has one is another network: loading it as plain DFlash
# would run, and draft badly. Each is refused by name while its value is set.
UNSUPPORTED_PARTS = {
    "add_swa_attention_sink_bias": "attention sinks",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "a scale on attention values",
    "projector_type": "a Domino or DSpark head",
    "gru_hidden_dim": "Domino's GRU head",
    "pure_draft_prefix_len": "Domino's shifted labels",
    "shift_label": "shifted labels (position 0 predicts a token)",
    "mask_embedding": "a learned mask embedding",
}
# What every producer states, and no tensor's shape gives away: with another value a drafter loads, and drafts worse.
UNSEEN = ("hidden_act", "rms_norm_eps")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# DFlash 2's parts: each has two numbers, and both or neither are stated.
CONVOLUTION, SELECTOR = ("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")
PARTS = (*CONVOLUTION, *SELECTOR)
# DSpark's, each optional too, by our names; and what its writers call them.
DSPARK = ("markov_rank", "markov_head_type", "confidence_head", "sample_from_anchor")
MARKOV_HEADS, CONFIDENCE_HEADS = ("vanilla", "gated", "rnn"), ("hidden", "hidden+markov")
DSPARK_SPELLINGS = ("markov_rank", "enable_confidence_head", "sample_from_anchor")
GUESSING = "Guessing it would load, and draft badly."


def require_stated(config: dict, names):
    """Raise ValueError for fields that a config does not state."""
    missing = [name for name in names if config.get(name) is None]
    require(not missing, f"the drafter's config does not state {missing}. {GUESSING}")


def refuse_unsupported_parts(config: dict):
    """Raise ValueError for a part of another method, by name."""
    found = {name: "LiLiCorr's head" for name in config if name.startswith("lilicorr_")}
    for name, part in (UNSUPPORTED_PARTS | found).items():
        value = config.get(name)
        if value:
            raise ValueError(
                f"DFlashConfig: `{name}` is {value!r}: this drafter has {part}, which is not supported. Loading it "
                "without that part would run, and draft badly."
            )


def checked_rope(rope) -> dict:
    """Return RoPE parameters with their type filled in.

    Raises:
        ValueError: the base is not stated, or the type is dynamic or lacks what it needs.
    """
    require(
        isinstance(rope, dict) and rope.get("rope_theta") is not None,
        f"`rope_parameters` must state the RoPE base as `rope_theta`, got {rope!r}.",
    )
    rope = dict(rope)
    if "type" in rope:  # the name of `rope_type` before transformers 4.43
        older = rope.pop("type")
        require(rope.setdefault("rope_type", older) == older, f"`rope_parameters` states two types: {rope}, {older!r}.")
    require(
        "rope_type" in rope or set(rope) <= {"rope_theta", "partial_rotary_factor"},
        f"`rope_parameters` scales RoPE but has no `rope_type`: {rope}.",
    )
    rope_type = rope.setdefault("rope_type", "default")
    require(
        rope_type in STATIC_ROPE_TYPES,
        f"`rope_parameters` has rope_type {rope_type!r}; a drafter needs a static one, of {list(STATIC_ROPE_TYPES)}.",
    )
    for name in ("rope_theta", *STATIC_ROPE_TYPES[rope_type]):
        positive_number(rope.get(name), f"`{name}` of `rope_parameters` ({rope_type})")
    partial = rope.pop("partial_rotary_factor", None)
    require(
        partial in (None, 1.0), f"`partial_rotary_factor` is {partial}; partial rotary embeddings are not supported."
    )
    return rope


def is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def positive_number(value, what: str):
    require(is_number(value) and value > 0, f"{what} must be a positive number, got {value!r}.")


def positive(value, name: str) -> int:
    require(is_int(value) and value > 0, f"`{name}` must be a positive integer, got {value!r}.")
    return value


def require(condition: bool, message: str):
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(f"DFlashConfig: {message}")
