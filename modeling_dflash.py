"""The DFlash drafter (arXiv 2602.06036): a block-diffusion model that proposes a whole block of tokens in one pass.

It is a Qwen3-style decoder without embedding and head; both are the target's. In every layer its keys and values come
from two sources: the target's hidden features of the accepted text (the context) and the block itself. Queries come
from the block only, so a pass costs the block's length, whatever the length of the text.

DFlash 2 adds two parts, each optional: a convolution along the block around every attention and every MLP, here, and a
selector that chooses a path among candidates (`drafter_paths.py`). DSpark's Markov head is one in its place; its confidence
head says how likely a draft token is accepted.

Legend of shapes: B batch, C new context tokens, K block tokens, P context tokens in the cache, S = P + C + K keys,
H hidden, T target layers, D head size, W window, N blocks side by side, G groups of channels.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import capture_outputs

from .configuration_dflash import DFlashConfig
from .drafter_candidates import DFlashProposer
from .drafter_paths import CandidateSelector, ConfidenceHead, MarkovHead, MarkovScores
from .drafter_vocabulary import check_token_ids, offsets_of, token_ids_of
from .generation_dflash import assisted_generate, install_generate_hook
from .hub_files import check_finite, superseding, write_hub_files
from .target_masks import backend_mask, block_mask, is_flash

# What `save_pretrained(..., push_to_hub=True)` takes for the upload.
PUSH_ARGUMENTS = "repo_id commit_message commit_description private token revision create_pr tags".split()


@dataclass
class DFlashDraftModelOutput(ModelOutput):
    """
    Args:
        last_hidden_state: (B, K, H) after the final norm; the target's head turns the last `drafts_per_block` into
            draft logits.
        hidden_states: input of the first layer and output of every layer, each (B, K, H), when asked for.
        attentions: (B, heads, K, S) of every layer, when asked for (eager attention only).
    """

    last_hidden_state: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class DFlashRMSNorm(Qwen3RMSNorm):
    pass


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    def _apply(self, fn, recurse=True):
        # Casting the model to half precision must not round the frequencies: that costs acceptance at long contexts.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != exact.dtype:
            self.inv_freq = exact.to(self.inv_freq.device)
        return self


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `states` (B, heads, length, D) with `cos`, `sin` (B, length, D)."""
    return states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from context and block, by the same projections (paper, section 4.1)."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.block_causal = config.block_causal[layer_idx]
        self.window = config.windows[layer_idx]

        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = DFlashRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # (B, K, H)
        context: torch.Tensor,  # (B, C, H)
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # two of (B, C + K, D)
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, block_length, _ = hidden_states.shape
        sources = torch.cat([context, hidden_states], dim=1)  # (B, C + K, H)
        heads = (batch, -1, self.head_dim)

        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, heads[1:])).transpose(1, 2)  # (B, heads, K, D)
        key = self.k_norm(self.k_proj(sources).unflatten(-1, heads[1:])).transpose(1, 2)  # (B, kv heads, C + K, D)
        value = self.v_proj(sources).unflatten(-1, heads[1:]).transpose(1, 2)

        # The positions cover context and block; the queries are the last K of them.
        cos, sin = position_embeddings
        query = rotate(query, cos[:, -block_length:], sin[:, -block_length:])
        key = rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)  # (B, kv heads, S, D), a window's worth if sliding

        # Full masks say everything about causality and window, except to flash attention, which takes neither.
        backend = self.config._attn_implementation
        flash = is_flash(backend)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            is_causal=flash and self.block_causal,
            sliding_window=self.window if flash else None,
        )
        return self.o_proj(output.reshape(batch, block_length, -1)), weights


class BlockConvolution(nn.Module):
    """Convolves along the block, before and after a sublayer (DFlash 2): a position reads those right before it.

    out[t, c] = sum over taps o of (base[o, c] + step[t, o, c // group_size]) * x[t - o, c], and x[-1] = 0. What each position
    adds to the kernel, before and after, is made from the sublayer's normed input.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.taps, self.block_size = config.conv_kernel_size, config.block_size
        self.group_size, self.groups = config.conv_group_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))  # before and after
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def steps(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what positions (B, N * K, H) add to the kernels before and after, each (B, N * K, taps, G)."""
        return self.kernel_projection(hidden_states).unflatten(-1, (2, self.taps, self.groups)).unbind(dim=2)

    def forward(self, hidden_states: torch.Tensor, side: int, steps: torch.Tensor) -> torch.Tensor:
        """Convolve (B, N * K, H), each block for itself; `side` is 0 before the sublayer and 1 after it."""
        blocks = hidden_states.unflatten(1, (-1, self.block_size))  # (B, N, K, H)
        base = self.base_kernel[side].unflatten(-1, (self.groups, self.group_size))  # (taps, G, group)
        convolved = 0
        for tap in range(self.taps):
            # The anchor has no position before it: zeros enter there.
            moved = F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size]
            kernel = base[tap] + steps[:, :, tap, :, None]  # (B, N * K, G, group)
            convolved = convolved + kernel.flatten(-2) * moved.flatten(1, 2)
        return convolved


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        convolved = config.conv_kernel_size is not None
        self.attention_conv = BlockConvolution(config) if convolved else None
        self.mlp_conv = BlockConvolution(config) if convolved else None

    # The context is positional: gradient checkpointing tracks gradients of positional arguments only.
    def forward(self, hidden_states, context, position_embeddings, attention_mask=None, cache=None) -> torch.Tensor:
        # The context passes no norm here: it was normed once, by `hidden_norm`, for all layers.
        def attend(states):
            return self.self_attn(states, context, position_embeddings, attention_mask, cache)[0]

        attended = self._convolved(self.attention_conv, attend, self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        return hidden_states + self._convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden_states))

    @staticmethod
    def _convolved(convolution: BlockConvolution | None, sublayer, states: torch.Tensor) -> torch.Tensor:
        """Run a sublayer between the two convolutions, where there are any."""
        if convolution is None:
            return sublayer(states)
        before, after = convolution.steps(states)
        return convolution(sublayer(convolution(states, 0, before)), 1, after)


class DFlashPreTrainedModel(PreTrainedModel):
    config_class = DFlashConfig
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": DFlashDecoderLayer, "attentions": DFlashAttention}

    @torch.no_grad()
    def _init_weights(self, module):
        # A fresh part changes nothing: the drafter starts as its twin without it. Of the selector's two factors only one is
        # zero, or neither would ever get a gradient.
        if isinstance(module, MarkovScores):
            init.zeros_(module.weight)
            return
        super()._init_weights(module)
        if isinstance(module, BlockConvolution):
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1.0
            init.copy_(module.base_kernel, identity)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            init.zeros_(module.successor_codebook)


class DFlashDraftModel(DFlashPreTrainedModel):
    """The drafter. `target.generate(..., assistant_model=drafter)` is all that a user needs of it."""

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        # The fixed layout of DFlash checkpoints: fc, hidden_norm, layers, norm; no embedding and no head. Further parts
        # have the names of the first releases that had them.
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DFlashRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank is not None else None
        self.markov_head = MarkovHead(config) if config.markov_rank is not None else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head is not None else None
        self.rotary_emb = DFlashRotaryEmbedding(config)
        # Offsets, as other software writes them: the token at index i of the draft vocabulary is i + d2t[i].
        listed = config.draft_vocab_size
        self.register_buffer("d2t", None if listed is None else torch.zeros(listed, dtype=torch.long))
        self.gradient_checkpointing = False
        self.last_speculation = None  # statistics of the last finished call of generate
        self.post_init()

    def set_draft_vocabulary(self, token_ids: torch.LongTensor | None):
        """Draft from a list of tokens, and those of the text at hand, instead of the whole vocabulary.

        Args:
            token_ids: (L,) int64, ascending; None for the whole vocabulary.

        Raises:
            ValueError: it is no such list; names what was found and expected.
        """
        if token_ids is not None:
            check_token_ids(token_ids, self.config.vocab_size)
        self.d2t = None if token_ids is None else offsets_of(token_ids).to(self.device)
        self.config.draft_vocab_size = None if token_ids is None else len(token_ids)

    @capture_outputs
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask=None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> DFlashDraftModelOutput:
        """Denoise a block, or several blocks side by side (paper, section 4.1 and, for several, 4.2).

        Args:
            noise_embeds: (B, K, H) raw target embeddings of the block: the anchor, then mask tokens. K is `block_size`;
                several blocks (`blocks * block_size`) need a ready mask.
            context_hidden_states: (B, C, T * H) target hidden states of the tokens that were accepted since the last
                call, at the target layers, concatenated in the order of `target_layer_ids`.
            attention_mask: None; or (B, S) with 0 at padding; or a ready mask, used as given, for all layers or as a
                list with one a layer: (B or 1, 1, K, keys) bool or additive, or a flex `BlockMask`.
            position_ids: (B, C + K) positions of context and block; by default they continue the cache.
            cache: keys and values of the context so far. This call adds context and block to it; the caller crops the
                block off again (`cache.crop(-K)`), since only accepted tokens may stay.
            past_key_values: the name of `cache` before transformers 5.24.

        Returns:
            `DFlashDraftModelOutput`; its `last_hidden_state` (B, K, H) is after the final norm.

        Raises:
            ValueError: shapes that do not fit; names what was found and expected.
        """
        cache = past_key_values if cache is None else cache
        self._check_inputs(noise_embeds, context_hidden_states)
        dtype = self.norm.weight.dtype
        block_length, new_context = noise_embeds.shape[1], context_hidden_states.shape[1]
        past = cache.get_seq_length() if cache is not None else 0

        if position_ids is None:
            position_ids = torch.arange(past, past + new_context + block_length, device=noise_embeds.device)[None]
        masks = self._layer_masks(attention_mask, past, noise_embeds.to(dtype), new_context)

        context = self.hidden_norm(self.fc(context_hidden_states.to(dtype)))  # (B, C, T * H) -> (B, C, H)
        hidden_states = noise_embeds.to(dtype)
        if self.config.input_embedding_scale != 1.0:
            hidden_states = hidden_states * self.config.input_embedding_scale
        position_embeddings = self.rotary_emb(hidden_states, position_ids)  # cos and sin, each (B, C + K, D)
        for layer, mask in zip(self.layers, masks):
            hidden_states = layer(hidden_states, context, position_embeddings, attention_mask=mask, cache=cache)
        return DFlashDraftModelOutput(last_hidden_state=self.norm(hidden_states))

    def _check_inputs(self, noise_embeds: torch.Tensor, context_hidden_states: torch.Tensor):
        hidden, layers = self.config.hidden_size, len(self.config.target_layer_ids)
        if noise_embeds.ndim != 3 or noise_embeds.shape[2] != hidden:
            raise ValueError(f"`noise_embeds` must be (batch, block, {hidden}), got {tuple(noise_embeds.shape)}.")
        if context_hidden_states.ndim != 3 or context_hidden_states.shape[2] != layers * hidden:
            raise ValueError(
                f"`context_hidden_states` must be (batch, new, {layers} target layers * {hidden}), got "
                f"{tuple(context_hidden_states.shape)}."
            )
        if noise_embeds.shape[1] % self.config.block_size:
            raise ValueError(
                f"a block has `block_size` {self.config.block_size} tokens, but `noise_embeds` has {noise_embeds.shape[1]}, which "
                "are no whole blocks."
            )
        if noise_embeds.shape[0] != context_hidden_states.shape[0]:
            raise ValueError(
                f"`noise_embeds` has batch size {noise_embeds.shape[0]}, `context_hidden_states` "
                f"{context_hidden_states.shape[0]}."
            )

    def _layer_masks(self, attention_mask, past: int, noise_embeds: torch.Tensor, new_context: int) -> list:
        """One mask a layer, in the form that the attention backend takes."""
        backend = self.config._attn_implementation
        dtype, device, block_length = noise_embeds.dtype, noise_embeds.device, noise_embeds.shape[1]
        depth = len(self.layers)

        ready = attention_mask if isinstance(attention_mask, (list, tuple)) else [attention_mask] * depth
        if len(ready) != depth:
            raise ValueError(f"`attention_mask` lists {len(ready)} masks for {depth} layers.")
        if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2):
            if is_flash(backend):
                raise ValueError(f"{backend!r} takes no ready mask; use 'sdpa', 'eager' or 'flex_attention' for it.")
            return [backend_mask(mask, backend, dtype) for mask in ready]

        if block_length != self.config.block_size:
            raise ValueError(
                f"a block has `block_size` {self.config.block_size} tokens, but `noise_embeds` has {block_length}. Feed "
                "one whole block, or several with a ready mask that keeps them apart."
            )
        keys = past + new_context + block_length
        if attention_mask is not None and attention_mask.shape[1] != keys:
            raise ValueError(
                f"`attention_mask` covers {attention_mask.shape[1]} keys; cache, context and block are {keys}."
            )
        masks = {}
        for window, causal in zip(self.config.windows, self.config.block_causal):
            if (window, causal) not in masks:
                # A sliding layer's cache keeps the W - 1 keys that its next query can still see.
                kept = past if window is None else min(past, window - 1)
                in_cache = kept + new_context + block_length
                if is_flash(backend):
                    mask = None if attention_mask is None else attention_mask[:, -in_cache:]
                else:
                    visible = block_mask(in_cache, block_length, window, causal, attention_mask, device)
                    mask = backend_mask(visible, backend, dtype)
                masks[window, causal] = mask
        return [masks[key] for key in zip(self.config.windows, self.config.block_causal)]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """As in transformers, but strict: missing, unexpected and misshaped tensors are errors, by name."""
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        faults = []
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info[kind])
            if names:
                shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                faults.append(f"{kind.split('_')[0]}: {shown}")
        if faults:
            raise ValueError(
                f"the weights in {str(pretrained_model_name_or_path)!r} are not those of this drafter ({'; '.join(faults)}). "
                f"Expected exactly fc, hidden_norm, norm and {model.config.num_hidden_layers} layers with Qwen3's names, the parts "
                "of DFlash 2 or DSpark that config.json states, and the shapes that it states."
            )
        if model.d2t is not None and not model.d2t.is_meta:
            check_token_ids(token_ids_of(model.d2t), model.config.vocab_size)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """Write a complete Hub folder: config, weights, code, `custom_generate/` and, where there is none, a card.

        Weights that were there before are removed, in whatever files; so are the record of their training and what a card of
        ours says of them, unless the weights are the same.

        Raises:
            ValueError: a weight is not finite; names its tensor. Nothing is written.
        """
        # The upload comes last: made inside transformers' method it would miss what is written here.
        push = (
            {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs} if kwargs.get("push_to_hub") else {}
        )
        push_to_hub = kwargs.pop("push_to_hub", False)
        saved = kwargs.get("state_dict")
        state = self.state_dict() if saved is None else saved
        check_finite(state, "this drafter")
        # A variant is saved beside what is there.
        with superseding(Path(save_directory), state, self.config, is_main_process and not kwargs.get("variant")):
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            write_hub_files(save_directory, self.config)
        if push_to_hub:
            self.push_to_hub(push.pop("repo_id", Path(save_directory).name), **push)

    def __getattr__(self, name):
        # Not a method: transformers takes a class with `generate` for one that writes text.
        if name == "generate":
            raise AttributeError(
                "a DFlash drafter writes no text of its own: call `target.generate(..., assistant_model=drafter)` with the "
                f"model that it was made for ({self.config.target_name_or_path or 'not recorded in its config'})."
            )
        return super().__getattr__(name)

    def proposer(self, target: PreTrainedModel) -> DFlashProposer:
        """Make what proposes with this drafter in one call of `generate`; a subclass may hand in another one."""
        return DFlashProposer(self, target)

    def assisted_generate(self, target: PreTrainedModel, generate, **kwargs):
        """Run `target.generate(**kwargs)` with this drafter; what the hook and `custom_generate` hand over to."""
        return assisted_generate(self, target, generate, kwargs)


DFlashDraftModel.register_for_auto_class("AutoModel")
install_generate_hook()
