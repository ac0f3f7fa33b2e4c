"""Configuration of a DFlash drafter (arXiv 2602.06036).

`DFlashConfig` is the contract between a drafter, its target and every tool around them. It is checked when it is made:
a wrong target layer, RoPE base or mask token would load without a word and only cost speed.
"""

import difflib

import transformers
from transformers.activations import ACT2FN

from .configuration_checks import (
    CONFIDENCE_HEADS,
    CONVOLUTION,
    DSPARK,
    FULL,
    GUESSING,
    MARKOV_HEADS,
    PARTS,
    SCALES,
    SELECTOR,
    SLIDING,
    UNSEEN,
    checked_rope,
    is_int,
    is_number,
    positive,
    positive_number,
    refuse_unsupported_parts,
    require,
    require_stated,
)
from .configuration_zlab import ARCHITECTURES, ZlabReader

# Raised when a file of an earlier version would be read in another way; a file without it is of version 1.
FORMAT_VERSION = 1


class DFlashConfig(transformers.PreTrainedConfig):
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
        block_causal: one bool a layer: whether a position sees only those before it inside the block. When not given,
            sliding layers are causal and full layers are bidirectional, as in z-lab's releases.
        block_size: positions of a block: the anchor and `block_size - 1` mask tokens (paper, section 4.1).
        mask_token_id: row of the target's embedding that stands for a token to be drafted.
        target_layer_ids: decoder layers of the target whose hidden states are read, 0-based; layer `i` is transformers' `hidden_states[i + 1]`.
        num_target_layers: decoder layers of the target.
        input_embedding_scale, output_multiplier, final_logit_softcapping: what z-lab's package makes of them: a factor
            on the block's raw embeddings, a factor on the draft logits, and `c * tanh(logits / c)` after it.
        conv_kernel_size, conv_group_size: of DFlash 2's convolutions along the block: taps, and channels that share a kernel
            made from the input; None without them.
        selector_rank, selector_top_k: of DFlash 2's selector of paths: width of its codebooks, and candidates of a position;
            None without it.
        markov_rank, markov_head_type: of DSpark's Markov head: its width, and "vanilla" (the default), "gated" or "rnn"; None
            without it.
        confidence_head: what DSpark's confidence head looks at: "hidden", or "hidden+markov", the Markov head's embedding of the
            previous token as well; None without it.
        sample_from_anchor: whether the anchor's position predicts the token after it (DSpark): a block then drafts
            `block_size` tokens, otherwise one less.
        num_draft_tokens: draft tokens per round unless `generate` is told otherwise: a number up to `drafts_per_block`, or
            "auto" (the default), the adaptive draft length.
        acceptance_prior: what the drafter is known to accept, for the adaptive draft length: by draft position, the share
            that is accepted where all positions before it were. Positions beyond the list are like the one before. None
            where it was not measured.
        draft_vocab_size: tokens of the list that it drafts from, the tensor `d2t`, to which the tokens of the text at hand are
            added; None where it drafts from the whole vocabulary.
        num_tree_nodes: nodes of a draft tree unless `generate` is told otherwise, "auto" for chains or trees as they are faster;
            None (the default) for chains.
        target_name_or_path, target_revision: the model that the drafter was made for.
        target_rows: a few values of its embedding and head, see `target_identity.py`; None when not recorded.
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
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    confidence_head: str | None = None
    sample_from_anchor: bool = False
    num_draft_tokens: int | str | None = None
    acceptance_prior: list[float] | None = None
    draft_vocab_size: int | None = None
    num_tree_nodes: int | str | None = None
    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_rows: str | None = None
    target_chat: bool | None = None
    target_thinking: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        refuse_unsupported_parts(kwargs)
        if self.layer_types is None:
            self.layer_types = [FULL] * positive(self.num_hidden_layers, "num_hidden_layers")
        if self.block_causal is None:
            self.block_causal = [layer_type == SLIDING for layer_type in self.layer_types]
        positive(self.block_size, "block_size")
        if self.markov_rank is not None and self.markov_head_type is None:
            self.markov_head_type = MARKOV_HEADS[0]
        if self.num_draft_tokens is None:
            self.num_draft_tokens = "auto"
        if self.draft_vocab_size == self.vocab_size:  # how some files say that nothing is left out
            self.draft_vocab_size = None
        for name in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
            require(
                kwargs.pop(name, None) is None, f"`{name}` belongs into `rope_parameters`, the only place for RoPE."
            )
        for name in kwargs:
            meant = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85)
            require(
                not meant or hasattr(transformers.PreTrainedConfig, name),
                f"unknown field `{name}`; did you mean {meant}?",
            )
        self.rope_parameters = checked_rope(self.rope_parameters)
        super().__post_init__(**kwargs)
        self._check()

    def _check(self):
        self._check_names()
        self._check_shape()
        self._check_block()
        self._check_target_layers()
        self._check_layers()
        self._check_parts()

    def _check_names(self):
        require(
            is_int(self.format_version) and self.format_version == FORMAT_VERSION,
            f"`format_version` is {self.format_version!r}, this code reads {FORMAT_VERSION}. A newer file needs a newer "
            "dflash-hub.",
        )
        for name in ("target_name_or_path", "target_revision"):
            # They are shown in snippets and commands.
            value = getattr(self, name)
            require(
                value is None or (isinstance(value, str) and value.isprintable() and not set(value) & set('"\\`')),
                f"`{name}` must be a name in one line, without quotes and backslashes, or None; got {value!r}.",
            )
        require(
            self.target_rows is None or (isinstance(self.target_rows, str) and self.target_rows.isascii()),
            f"`target_rows` must be base64 text, as training writes it, or None; got {str(self.target_rows)[:60]!r}.",
        )

    def _check_shape(self):
        for name in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim max_position_embeddings num_target_layers"
        ).split():
            positive(getattr(self, name), name)
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
            f"({self.num_key_value_heads}).",
        )
        require(self.head_dim % 2 == 0, f"`head_dim` must be even for RoPE, got {self.head_dim}.")
        for name in ("rms_norm_eps", "initializer_range", "input_embedding_scale", "output_multiplier"):
            positive_number(getattr(self, name), f"`{name}`")
        if self.final_logit_softcapping is not None:
            positive_number(self.final_logit_softcapping, "`final_logit_softcapping`, unless None,")
        require(
            is_number(self.attention_dropout) and 0 <= self.attention_dropout < 1,
            f"`attention_dropout` must be in [0, 1), got {self.attention_dropout!r}.",
        )
        require(self.hidden_act in ACT2FN, f"`hidden_act` {self.hidden_act!r} is no activation of transformers.")
        for name in ("attention_bias", "tie_word_embeddings", "sample_from_anchor", "target_chat", "target_thinking"):
            allowed = (True, False) if not name.startswith("target") else (True, False, None)
            value = getattr(self, name)
            require(any(value is one for one in allowed), f"`{name}` must be one of {list(allowed)}, got {value!r}.")
        require(
            not self.tie_word_embeddings, "a drafter has no embeddings to tie: `tie_word_embeddings` must be false."
        )

    def _check_block(self):
        require(
            is_int(self.block_size) and self.block_size >= 2,
            f"`block_size` must be at least 2 (one anchor and one draft token), got {self.block_size!r}.",
        )
        require(
            is_int(self.mask_token_id) and 0 <= self.mask_token_id < self.vocab_size,
            f"`mask_token_id` must be a row of the target's embedding, in [0, {self.vocab_size}), got "
            f"{self.mask_token_id!r}.",
        )
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        require(
            self.mask_token_id not in ends,
            f"`mask_token_id` {self.mask_token_id} ends a text (`eos_token_id`); a mask token stands for nothing else.",
        )
        require(
            self.num_draft_tokens == "auto"
            or (is_int(self.num_draft_tokens) and 1 <= self.num_draft_tokens <= self.drafts_per_block),
            f"`num_draft_tokens` must be 'auto' or in [1, {self.drafts_per_block}] for `block_size` {self.block_size}, "
            f"got {self.num_draft_tokens!r}.",
        )
        prior = self.acceptance_prior
        require(
            prior is None
            or (isinstance(prior, list) and prior and all(is_number(rate) and 0 <= rate <= 1 for rate in prior)),
            "`acceptance_prior` must be None or a list of numbers from 0 to 1, one a draft position: the share that is "
            f"accepted where all positions before it were; got {prior!r}.",
        )
        require(
            self.draft_vocab_size is None
            or (is_int(self.draft_vocab_size) and 1 <= self.draft_vocab_size < self.vocab_size),
            f"`draft_vocab_size` must be in [1, {self.vocab_size}], the target's tokens, or None; got {self.draft_vocab_size!r}.",
        )
        require(
            self.num_tree_nodes in (None, "auto") or (is_int(self.num_tree_nodes) and self.num_tree_nodes >= 1),
            f"`num_tree_nodes` must be None (chains), 'auto' or at least 1, got {self.num_tree_nodes!r}.",
        )

    def _check_target_layers(self):
        layers = self.target_layer_ids
        require(
            isinstance(layers, list) and len(layers) > 0 and all(is_int(layer) for layer in layers),
            f"`target_layer_ids` must be a list of decoder layer indices, got {layers!r}.",
        )
        require(len(set(layers)) == len(layers), f"`target_layer_ids` must not repeat a layer, got {layers}.")
        for layer in layers:
            require(
                0 <= layer < self.num_target_layers,
                f"`target_layer_ids` are 0-based layers of a target with {self.num_target_layers} layers; {layer} is none "
                "of them.",
            )
            require(
                layer != self.num_target_layers - 1,
                f"`target_layer_ids` must not hold the target's last layer ({layer}): transformers returns it after the "
                "final norm, other engines before it, so the drafter would read other hidden states there. "
                f"Use a layer below {layer}.",
            )

    def _check_layers(self):
        require(
            isinstance(self.layer_types, list)
            and len(self.layer_types) == self.num_hidden_layers
            and set(self.layer_types) <= {FULL, SLIDING},
            f"`layer_types` must name {FULL!r} or {SLIDING!r} for each of the {self.num_hidden_layers} layers, got "
            f"{self.layer_types!r}.",
        )
        require(
            isinstance(self.block_causal, list)
            and len(self.block_causal) == self.num_hidden_layers
            and all(isinstance(causal, bool) for causal in self.block_causal),
            f"`block_causal` must hold one bool for each of the {self.num_hidden_layers} layers, got "
            f"{self.block_causal!r}.",
        )
        if SLIDING in self.layer_types:
            require(
                is_int(self.sliding_window) and self.sliding_window >= 2,
                f"a sliding layer needs a `sliding_window` of at least 2, got {self.sliding_window!r}.",
            )

    def _check_parts(self):
        for names in (CONVOLUTION, SELECTOR):
            values = [getattr(self, name) for name in names]
            require(
                None not in values or values == [None, None],
                f"`{names[0]}` and `{names[1]}` belong together: both numbers, or both None; got {values}.",
            )
            for name, value in zip(names, values):
                if value is not None:
                    positive(value, name)
        require(
            self.conv_group_size is None or self.hidden_size % self.conv_group_size == 0,
            f"`conv_group_size` ({self.conv_group_size}) must divide `hidden_size` ({self.hidden_size}).",
        )
        require(
            self.selector_top_k is None or self.selector_top_k <= self.vocab_size,
            f"`selector_top_k` ({self.selector_top_k}) must not exceed `vocab_size` ({self.vocab_size}).",
        )

        self._check_dspark()

    def _check_dspark(self):
        if self.markov_rank is not None:
            positive(self.markov_rank, "markov_rank")
            require(
                self.markov_head_type in MARKOV_HEADS,
                f"`markov_head_type` must be one of {list(MARKOV_HEADS)}, got {self.markov_head_type!r}.",
            )
        require(
            self.markov_rank is not None or self.markov_head_type is None,
            f"`markov_head_type` is {self.markov_head_type!r}, but there is no `markov_rank`.",
        )
        heads = (None, *CONFIDENCE_HEADS[: 1 if self.markov_rank is None else None])
        require(
            self.confidence_head in heads,
            f"`confidence_head` must be one of {list(heads)} {'without' if self.markov_rank is None else 'with'} a Markov head, "
            f"got {self.confidence_head!r}.",
        )
        both = [[name for name in names if getattr(self, name)] for names in (PARTS, DSPARK)]
        require(
            not all(both),
            f"the drafter has parts of two methods, {both[0]} of DFlash 2 and {both[1]} of DSpark; use one.",
        )

    @property
    def drafts_per_block(self) -> int:
        """How many tokens one block drafts: those of its last so many positions."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

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
        require_stated(config, (*UNSEEN, "layer_types", "block_causal"))
        # Files of versions without DSpark have none of its fields, and their anchors draft nothing.
        layout = ("sample_from_anchor",) if set(DSPARK) & set(config) else ()
        missing = [name for name in ("sliding_window", *SCALES, *layout) if name not in config]
        require(not missing, f"config.json does not state {missing}, where null is a value too. {GUESSING}")


def read_config_dict(config: dict) -> dict:
    """Turn the config.json of a DFlash drafter, ours or in z-lab's spelling, into the fields of `DFlashConfig`.

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
    return ZlabReader(config, FIELDS).read()


def spread_target_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """Spread `count` target layers evenly from the second to the third-last layer of the target (paper, section 4.1).

    >>> spread_target_layer_ids(36, 5)
    [1, 9, 17, 25, 33]
    """
    if count == 1:
        return [num_target_layers // 2]
    last = num_target_layers - 3
    require(
        last - 1 >= count - 1,
        f"a target of {num_target_layers} layers is too shallow for {count} target layers between its second and third-last "
        f"layer; use at most {max(last, 1)}.",
    )
    return [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]


DFlashConfig.register_for_auto_class()
