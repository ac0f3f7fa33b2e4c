"""Configuration of a DFlash drafter (arXiv 2602.06036).

`DFlashConfig` is the contract between a drafter, its target and every tool around them. It is checked when it is made:
a wrong tap, RoPE base or mask token would load without a word and only cost speed.
"""

import difflib
import math

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

FULL, SLIDING = "full_attention", "sliding_attention"

# RoPE whose frequencies do not depend on the length of a pass: keys in the cache stay valid for good.
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
    "conv_group_size": "the convolutions of DFlash 2",
    "conv_kernel_size": "the convolutions of DFlash 2",
    "selector_rank": "the path selector of DFlash 2",
    "selector_top_k": "the path selector of DFlash 2",
    "projector_type": "a Domino or DSpark head",
    "gru_hidden_dim": "Domino's GRU head",
    "markov_rank": "DSpark's Markov head",
    "enable_confidence_head": "DSpark's confidence head",
    "pure_draft_prefix_len": "Domino's shifted labels",
    "shift_label": "shifted labels (slot 0 predicts a token)",
    "sample_from_anchor": "a prediction at slot 0 (sample from anchor)",
    "draft_vocab_size": "a reduced draft vocabulary",
    "mask_embedding": "a learned mask embedding",
}
# Switches of other readers, and the one value under which they change nothing.
UNSUPPORTED_SWITCHES = {
    "gating": (False, "gates on the attention (Laguna)"),
    "is_neox_style": (True, "interleaved rotary embeddings"),
    "rope_is_neox_style": (True, "interleaved rotary embeddings"),
    "use_gemma_norm": (False, "norms that multiply by 1 + weight"),
    "use_aux_hidden_state": (True, "no tapped features"),
    "logit_scale": (1.0, "another scale on the draft logits"),
    "has_embed_tokens": (False, "embeddings of its own"),
    "has_own_lm_head": (False, "an LM head of its own"),
    "quantization_config": (None, "quantised weights"),
}
# What every producer states, and no tensor's shape gives away: with another value a drafter loads, and drafts worse.
UNSEEN = ("hidden_act", "rms_norm_eps")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
GUESSING = "Guessing it would load, and draft badly."
# The class names under which stacks save a plain DFlash drafter.
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashLagunaForCausalLM")

# Raised when a file of an earlier version would be read in another way; a file without it is of version 1.
FORMAT_VERSION = 1


class DFlashConfig(PreTrainedConfig):
    """Everything that defines a DFlash drafter. There is no default for what depends on the target.

    Args:
        vocab_size: number of tokens of the target's configuration.
        hidden_size: width of the drafter, equal to the target's.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act,
            rms_norm_eps, attention_bias, attention_dropout, initializer_range: shape of the Qwen3-style decoder
            layers; head shape and depth need not be the target's.
        max_position_embeddings: positions that the RoPE was made for.
        rope_parameters: transformers' RoPE dictionary; must state `rope_theta`. Static types only (default, linear,
            yarn, llama3).
        layer_types: one of "full_attention", "sliding_attention" a layer; all full when not given.
        sliding_window: W; a query of a sliding layer sees keys with `|q - k| < W`.
        block_causal: one bool a layer: whether a slot sees only the slots before it inside the block. When not given,
            sliding layers are causal and full layers are bidirectional, as in z-lab's releases.
        block_size: positions of a block: one anchor and `block_size - 1` mask tokens (paper, section 4.1).
        mask_token_id: row of the target's embedding that stands for a token to be drafted.
        target_layer_ids: tapped decoder layers, 0-based; layer `i` is transformers' `hidden_states[i + 1]`.
        num_target_layers: decoder layers of the target.
        input_embedding_scale, output_multiplier, final_logit_softcapping: what z-lab's package makes of them: a factor
            on the block's raw embeddings, a factor on the draft logits, and `c * tanh(logits / c)` after it.
        num_draft_tokens: tokens drafted a round unless `generate` is told otherwise: a number up to `block_size - 1`, or
            "auto" (the default), as many as pay.
        target_name_or_path, target_revision: the model that the drafter was made for.
        target_chat, target_thinking: whether it was made for text in the target's chat template, and for its thinking
            mode; None when not recorded.
        format_version: of config.json, see `FORMAT_VERSION`.

    Raises:
        TypeError: a field without a default is missing.
        ValueError: an impossible value, named with what was expected.
    """

    model_type = "dflash"
    # There is no drafter without a target, so there is no default configuration.
    has_no_defaults_at_init = True

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict
    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    num_target_layers: int
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    block_causal: list[bool] | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    num_draft_tokens: int | str | None = None
    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_chat: bool | None = None
    target_thinking: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        _refuse_unsupported_parts(kwargs, self.vocab_size)
        if self.layer_types is None:
            self.layer_types = [FULL] * _positive(self.num_hidden_layers, "num_hidden_layers")
        if self.block_causal is None:
            self.block_causal = [layer_type == SLIDING for layer_type in self.layer_types]
        _positive(self.block_size, "block_size")
        if self.num_draft_tokens is None:
            self.num_draft_tokens = "auto"
        for name in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
            _require(
                kwargs.pop(name, None) is None, f"`{name}` belongs into `rope_parameters`, the only place for RoPE."
            )
        for name in kwargs:
            meant = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85)
            _require(not meant or hasattr(PreTrainedConfig, name), f"unknown field `{name}`; did you mean {meant}?")
        self.rope_parameters = _checked_rope(self.rope_parameters)
        super().__post_init__(**kwargs)
        self._check()

    def _check(self):
        _require(
            _is_int(self.format_version) and self.format_version == FORMAT_VERSION,
            f"`format_version` is {self.format_version!r}, this code reads {FORMAT_VERSION}. A newer file needs a newer "
            "dflash-hub.",
        )
        for name in ("target_name_or_path", "target_revision"):
            # They are shown in snippets and commands.
            value = getattr(self, name)
            _require(
                value is None or (isinstance(value, str) and value.isprintable() and not set(value) & set('"\\`')),
                f"`{name}` must be a name in one line, without quotes and backslashes, or None; got {value!r}.",
            )
        for name in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim max_position_embeddings num_target_layers"
        ).split():
            _positive(getattr(self, name), name)
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
            f"({self.num_key_value_heads}).",
        )
        _require(self.head_dim % 2 == 0, f"`head_dim` must be even for RoPE, got {self.head_dim}.")
        for name in ("rms_norm_eps", "initializer_range", "input_embedding_scale", "output_multiplier"):
            _positive_number(getattr(self, name), f"`{name}`")
        if self.final_logit_softcapping is not None:
            _positive_number(self.final_logit_softcapping, "`final_logit_softcapping`, unless None,")
        _require(
            _is_number(self.attention_dropout) and 0 <= self.attention_dropout < 1,
            f"`attention_dropout` must be in [0, 1), got {self.attention_dropout!r}.",
        )
        _require(self.hidden_act in ACT2FN, f"`hidden_act` {self.hidden_act!r} is no activation of transformers.")
        for name in ("attention_bias", "tie_word_embeddings", "target_chat", "target_thinking"):
            allowed = (True, False) if not name.startswith("target") else (True, False, None)
            value = getattr(self, name)
            _require(any(value is one for one in allowed), f"`{name}` must be one of {list(allowed)}, got {value!r}.")
        _require(
            not self.tie_word_embeddings, "a drafter has no embeddings to tie: `tie_word_embeddings` must be false."
        )

        _require(
            _is_int(self.block_size) and self.block_size >= 2,
            f"`block_size` must be at least 2 (one anchor and one drafted token), got {self.block_size!r}.",
        )
        _require(
            _is_int(self.mask_token_id) and 0 <= self.mask_token_id < self.vocab_size,
            f"`mask_token_id` must be a row of the target's embedding, in [0, {self.vocab_size}), got "
            f"{self.mask_token_id!r}.",
        )
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        _require(
            self.mask_token_id not in ends,
            f"`mask_token_id` {self.mask_token_id} ends a text (`eos_token_id`); a mask token stands for nothing else.",
        )
        _require(
            self.num_draft_tokens == "auto"
            or (_is_int(self.num_draft_tokens) and 1 <= self.num_draft_tokens < self.block_size),
            f"`num_draft_tokens` must be 'auto' or in [1, {self.block_size - 1}] for `block_size` {self.block_size}, "
            f"got {self.num_draft_tokens!r}.",
        )

        taps = self.target_layer_ids
        _require(
            isinstance(taps, list) and len(taps) > 0 and all(_is_int(tap) for tap in taps),
            f"`target_layer_ids` must be a list of decoder layer indices, got {taps!r}.",
        )
        _require(len(set(taps)) == len(taps), f"`target_layer_ids` must not repeat a layer, got {taps}.")
        for tap in taps:
            _require(
                0 <= tap < self.num_target_layers,
                f"`target_layer_ids` are 0-based layers of a target with {self.num_target_layers} layers; {tap} is none "
                "of them.",
            )
            _require(
                tap != self.num_target_layers - 1,
                f"`target_layer_ids` must not hold the target's last layer ({tap}): transformers returns it after the "
                "final norm, other engines before it, so the drafter would see other features there. "
                f"Use a layer below {tap}.",
            )

        _require(
            isinstance(self.layer_types, list)
            and len(self.layer_types) == self.num_hidden_layers
            and set(self.layer_types) <= {FULL, SLIDING},
            f"`layer_types` must name {FULL!r} or {SLIDING!r} for each of the {self.num_hidden_layers} layers, got "
            f"{self.layer_types!r}.",
        )
        _require(
            isinstance(self.block_causal, list)
            and len(self.block_causal) == self.num_hidden_layers
            and all(isinstance(causal, bool) for causal in self.block_causal),
            f"`block_causal` must hold one bool for each of the {self.num_hidden_layers} layers, got "
            f"{self.block_causal!r}.",
        )
        if SLIDING in self.layer_types:
            _require(
                _is_int(self.sliding_window) and self.sliding_window >= 2,
                f"a sliding layer needs a `sliding_window` of at least 2, got {self.sliding_window!r}.",
            )

    @property
    def windows(self) -> list[int | None]:
        """The attention window of each layer, None where it is full."""
        return [self.sliding_window if layer_type == SLIDING else None for layer_type in self.layer_types]

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config_dict:
            raise OSError(f"no config.json in {str(pretrained_model_name_or_path)!r}.")
        check_stated(config_dict)
        return read_config_dict(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # Overrides are checked with the rest, not set afterwards.
        overrides = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        return super().from_dict(read_config_dict(config_dict) | overrides, **kwargs)

    def to_diff_dict(self):
        """Every field, also where it has its default: the file stays right when a default changes."""
        complete = self.to_dict()
        return super().to_diff_dict() | {name: complete[name] for name in FIELDS}


FIELDS = tuple(name for name in DFlashConfig.__annotations__)


def check_stated(config: dict):
    """Refuse a config.json of ours that lost a field: `save_pretrained` writes every one, whatever its value.

    Raises:
        ValueError: a field is not there that changes what is drafted; names it.
    """
    if config.get("model_type") == "dflash" and "dflash_config" not in config:
        _require_stated(config, (*UNSEEN, "layer_types", "block_causal"))
        missing = [name for name in ("sliding_window", *SCALES) if name not in config]
        _require(not missing, f"config.json does not state {missing}, where null is a value too. {GUESSING}")


def read_config_dict(config: dict) -> dict:
    """Turn the config.json of a DFlash drafter, ours or in z-lab's spelling, into the fields of `DFlashConfig`.

    z-lab's spelling (also SpecForge's and Model-Optimizer's) is a Qwen3 configuration with a nested `dflash_config`,
    `block_size` in either place, RoPE flat or nested, and windows and in-block causality in several forms.

    Raises:
        ValueError: the file is of another kind, two places disagree, something needed is not stated, or the drafter
            has a part that is not supported. Names what was found.
    """
    if config.get("model_type") == "dflash" and "dflash_config" not in config:
        return config
    known = isinstance(config.get("architectures"), list) and set(config["architectures"]) & set(ARCHITECTURES)
    if "dflash_config" not in config and not known:
        raise ValueError(
            f"not the configuration of a DFlash drafter: model_type {config.get('model_type')!r}, architectures "
            f"{config.get('architectures')!r}, no `dflash_config`. `dflash-hub import` reads more formats."
        )
    return _ZlabReader(config).read()


class _ZlabReader:
    """Reads one z-lab style dictionary; `top` and `nested` are the two places where a value may stand."""

    NESTED_NAMES = {
        "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "use_swa", "swa_window_size", "causal",
        "causal_head", "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    }  # fmt: skip

    def __init__(self, config: dict):
        self.top = config
        self.nested = config.get("dflash_config") or {}
        _require(
            isinstance(self.nested, dict), f"`dflash_config` must be a dictionary, it is {type(self.nested).__name__}."
        )

    def read(self) -> dict:
        architectures = self.top.get("architectures") or ["DFlashDraftModel"]
        _require(
            len(architectures) == 1 and architectures[0] in ARCHITECTURES,
            f"expected one of the architectures {list(ARCHITECTURES)}, found {architectures}. Drafters of other methods are "
            "not supported.",
        )
        for place in (self.top, self.nested):
            _refuse_unsupported_parts(place, self.top.get("vocab_size"))
            for name, (harmless, part) in UNSUPPORTED_SWITCHES.items():
                _require(
                    place.get(name) in (None, harmless),
                    f"`{name}` is {place.get(name)!r}: this drafter has {part}, which is not supported. Loading it without "
                    "that part would run, and draft badly.",
                )
        unknown = sorted(set(self.nested) - self.NESTED_NAMES - set(UNSUPPORTED_PARTS))
        _require(not unknown, f"`dflash_config` holds {unknown}, which this version does not know how to honour.")

        _require_stated(self.top, (*FIELDS[: FIELDS.index("rope_parameters")], *UNSEEN))
        # What says the same in both spellings keeps its name; the rest of a Qwen3 configuration does not touch a drafter.
        read = {name: self.top[name] for name in FIELDS if name in self.top}
        read |= {name: self.top[name] for name in ("dtype", "torch_dtype") if name in self.top}
        read |= {"model_type": "dflash", "architectures": ["DFlashDraftModel"], "tie_word_embeddings": False}
        for name in ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids"):
            value = self.one(name, self.top.get(name), self.nested.get(name))
            _require(
                value is not None, f"`{name}` is stated neither at the top level nor in `dflash_config`. {GUESSING}"
            )
            read[name] = value
        for name in SCALES:
            value = self.one(name, self.top.get(name), self.nested.get(name))
            if value is not None:
                read[name] = value
        read["rope_parameters"] = self.rope()
        read["layer_types"], read["sliding_window"] = self.layer_types()
        read["block_causal"] = self.block_causal(read["layer_types"])
        return read

    @staticmethod
    def one(name: str, *values):
        """The single value that is stated, or None; two different ones are an error."""
        stated = [value for value in values if value is not None]
        _require(all(value == stated[0] for value in stated), f"`{name}` is stated twice and differs: {stated}.")
        return stated[0] if stated else None

    def rope(self) -> dict:
        rope = dict(self.top.get("rope_parameters") or {})
        scaled = "rope_scaling" in self.top or "rope_type" in rope or "type" in rope
        scaling = dict(self.top.get("rope_scaling") or {})
        for name in sorted(set(rope) & set(scaling)):
            self.one(f"rope {name}", rope[name], scaling[name])
        rope |= scaling
        if (partial := self.top.get("partial_rotary_factor")) is not None:
            rope["partial_rotary_factor"] = self.one(
                "partial_rotary_factor", partial, rope.get("partial_rotary_factor")
            )
        theta = self.one("rope_theta", rope.get("rope_theta"), self.top.get("rope_theta"))
        _require(
            theta is not None,
            f"the RoPE base is not stated: expected `rope_theta`, or `rope_parameters` with it. {GUESSING}",
        )
        _require(
            scaled,
            "how RoPE is scaled is not stated: expected `rope_scaling` (null for not at all), or `rope_parameters` with a "
            f"`rope_type`. {GUESSING}",
        )
        return _checked_rope(rope | {"rope_theta": theta})

    def layer_types(self) -> tuple[list[str], int | None]:
        """(layer_types, sliding_window): `layer_types`, or a switch for all layers, Model-Optimizer's `use_swa` or Qwen3's."""
        depth = self.top["num_hidden_layers"]
        layer_types = self.top.get("layer_types")
        use_swa = self.one("use_swa", self.top.get("use_swa"), self.nested.get("use_swa"))
        if use_swa:
            _require(
                layer_types is None or set(layer_types) <= {FULL} or set(layer_types) <= {SLIDING},
                f"`use_swa` makes all layers sliding, but `layer_types` is mixed: {layer_types}.",
            )
            layer_types = [SLIDING] * depth
        elif layer_types is None:
            # Qwen3's own rule for what `max_window_layers` leaves to slide is wrong where the last layer is the full one.
            _require(
                self.top.get("use_sliding_window") is False,
                f"which layers slide is not stated: expected `layer_types`, or `use_sliding_window: false`. {GUESSING}",
            )
            layer_types = [FULL] * depth
        if SLIDING not in layer_types:
            return list(layer_types), None
        _require(
            use_swa or self.top.get("use_sliding_window") is not False,
            "`layer_types` has sliding layers, but `use_sliding_window` is false.",
        )
        swa_window = self.one("swa_window_size", self.nested.get("swa_window_size"), self.top.get("swa_window_size"))
        if use_swa and swa_window is not None:
            return list(layer_types), swa_window
        return list(layer_types), self.one("sliding_window", self.top.get("sliding_window"), swa_window)

    def block_causal(self, layer_types: list[str]) -> list[bool]:
        """One switch for all layers where it is stated; else sliding layers are causal and full ones are not."""
        if self.top.get("block_causal") is not None:
            return self.top["block_causal"]  # our own word, layer by layer
        places = (self.top.get("is_causal"), self.nested.get("causal"), self.nested.get("causal_head"))
        causal = self.one("in-block causality", *places)
        if causal is not None:
            _require(
                isinstance(causal, bool), f"in-block causality must be true or false for all layers, got {causal!r}."
            )
            return [causal] * len(layer_types)
        _require(
            not self.nested.get("use_swa") and not self.top.get("use_swa"),
            "`use_swa` without `dflash_config.causal`: producers disagree on whether the block is causal then. State it.",
        )
        return [layer_type == SLIDING for layer_type in layer_types]


def spread_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Taps spread evenly from the second to the third-last layer of the target (paper, section 4.1).

    >>> spread_target_layer_ids(36, 5)
    [1, 9, 17, 25, 33]
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    last = num_target_layers - 3
    _require(
        last - 1 >= num_taps - 1,
        f"a target of {num_target_layers} layers is too shallow for {num_taps} taps between its second and third-last "
        f"layer; use at most {max(last, 1)}.",
    )
    return [round(1 + i * (last - 1) / (num_taps - 1)) for i in range(num_taps)]


def _require_stated(config: dict, names):
    missing = [name for name in names if config.get(name) is None]
    _require(not missing, f"the drafter's config does not state {missing}. {GUESSING}")


def _refuse_unsupported_parts(config: dict, vocab_size: int | None):
    for name, part in UNSUPPORTED_PARTS.items():
        value = config.get(name)
        if value and not (name == "draft_vocab_size" and value == vocab_size):
            raise ValueError(
                f"DFlashConfig: `{name}` is {value!r}: this drafter has {part}, which is not supported. Loading it "
                "without that part would run, and draft badly."
            )


def _checked_rope(rope) -> dict:
    _require(
        isinstance(rope, dict) and rope.get("rope_theta") is not None,
        f"`rope_parameters` must state the RoPE base as `rope_theta`, got {rope!r}.",
    )
    rope = dict(rope)
    if "type" in rope:  # the name of `rope_type` before transformers 4.43
        older = rope.pop("type")
        _require(
            rope.setdefault("rope_type", older) == older, f"`rope_parameters` states two types: {rope}, {older!r}."
        )
    _require(
        "rope_type" in rope or set(rope) <= {"rope_theta", "partial_rotary_factor"},
        f"`rope_parameters` scales RoPE but has no `rope_type`: {rope}.",
    )
    rope_type = rope.setdefault("rope_type", "default")
    _require(
        rope_type in STATIC_ROPE_TYPES,
        f"`rope_parameters` has rope_type {rope_type!r}; a drafter needs a static one, of {list(STATIC_ROPE_TYPES)}.",
    )
    for name in ("rope_theta", *STATIC_ROPE_TYPES[rope_type]):
        _positive_number(rope.get(name), f"`{name}` of `rope_parameters` ({rope_type})")
    partial = rope.pop("partial_rotary_factor", None)
    _require(
        partial in (None, 1.0), f"`partial_rotary_factor` is {partial}; partial rotary embeddings are not supported."
    )
    return rope


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _positive_number(value, what: str):
    _require(_is_number(value) and value > 0, f"{what} must be a positive number, got {value!r}.")


def _positive(value, name: str) -> int:
    _require(_is_int(value) and value > 0, f"`{name}` must be a positive integer, got {value!r}.")
    return value


def _require(condition: bool, message: str):
    if not condition:
        raise ValueError(f"DFlashConfig: {message}")


DFlashConfig.register_for_auto_class()
