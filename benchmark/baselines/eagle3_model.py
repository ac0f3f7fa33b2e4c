"""The EAGLE-3 draft model: one decoder layer that reads a token's target hidden states and the embedding of the token after it.

From this pair it drafts the token after these two. Its own output stands in for the target's hidden states of a token that is
only drafted, so each draft token takes one forward pass (Li et al., "EAGLE-3", 2025).

Legend of shapes: B sequences, C pairs of a pass, S pairs in the KV cache, H width of the draft model, T target layers, Ht width of
the target, L draft vocabulary, V vocabulary, D dimension of an attention head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...drafter_heads import Candidates


@dataclass(frozen=True)
class Eagle3Options:
    """What an EAGLE-3 checkpoint states beside the fields of a Llama layer.

    Args:
        target_layer_ids: decoder layers of the target that it reads, from 0, ascending.
        target_hidden_size: Ht.
        draft_vocab_size: L, rows of its own LM head.
        listed: whether the draft vocabulary is a list of the target's tokens; else it is the whole vocabulary.
        own_embedding: whether it has an embedding of its own; else it borrows the target's.
        qk_norm: RMSNorm of queries and keys, as in Qwen3.
        norm_before_residual: the residual is the normed hidden state.
        norm_before_fc: one RMSNorm of all target hidden states before they are fused.
        fc_norm: one RMSNorm a target layer before they are fused (EAGLE-3.1).
        norm_output: the next step reads the normed output, which the LM head takes as it is (EAGLE-3.1).
    """

    target_layer_ids: list[int]
    target_hidden_size: int
    draft_vocab_size: int
    listed: bool = False
    own_embedding: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Attention(nn.Module):
    """Llama's attention over inputs twice as wide: the embedding, then the hidden state."""

    def __init__(self, config: LlamaConfig, qk_norm: bool):
        super().__init__()
        self.head_dim, width, bias = config.head_dim, config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if qk_norm else nn.Identity()

    def forward(self, pairs: torch.Tensor, rotation, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Attend from pairs (B, C, 2 H) to those in the cache and among themselves, where `mask` (B, 1, C, S + C) is True."""
        by_head = (*pairs.shape[:2], -1, self.head_dim)
        queries = self.q_norm(self.q_proj(pairs).view(by_head)).transpose(1, 2)  # (B, heads, C, D)
        keys = self.k_norm(self.k_proj(pairs).view(by_head)).transpose(1, 2)
        values = self.v_proj(pairs).view(by_head).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotation)
        keys, values = cache.update(keys, values, 0)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Eagle3Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: LlamaConfig, options: Eagle3Options):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps=eps)  # of the embedding
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.self_attn = Eagle3Attention(config, options.qk_norm)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)
        self.mlp = LlamaMLP(config)
        self.norm_before_residual = options.norm_before_residual

    def forward(self, hidden_states, embeds, rotation, mask, cache) -> torch.Tensor:
        normed = self.hidden_norm(hidden_states)
        pairs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        residual = normed if self.norm_before_residual else hidden_states
        hidden_states = residual + self.self_attn(pairs, rotation, mask, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3DraftModel(nn.Module):
    """The draft model with its own LM head. Parameters have the names of SafeAILab's checkpoints.

    Args:
        config: the layer's fields; RoPE is the draft model's own, never the target's.
        name: what numbers of it stand beside.
    """

    main_input_name = "hidden_states"

    def __init__(self, config: LlamaConfig, options: Eagle3Options, name: str = "EAGLE-3"):
        super().__init__()
        self.config, self.options, self.name = config, options, name
        width, count, eps = config.hidden_size, len(options.target_layer_ids), config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(count * options.target_hidden_size, eps=eps) if options.norm_before_fc else None
        norms = [LlamaRMSNorm(options.target_hidden_size, eps=eps) for _ in range(count)]
        self.fc_norm = nn.ModuleList(norms) if options.fc_norm else None
        self.fc = nn.Linear(count * options.target_hidden_size, width, bias=False)
        self.midlayer = Eagle3Layer(config, options)
        self.norm = LlamaRMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, options.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if options.own_embedding else None
        self.rotary_emb = LlamaRotaryEmbedding(config)
        # The token at index i of the draft vocabulary is i + d2t[i].
        listed = torch.zeros(options.draft_vocab_size, dtype=torch.long) if options.listed else None
        self.register_buffer("d2t", listed)

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights."""
        return self.fc.weight.dtype

    def placed(self, device: torch.device, dtype: torch.dtype) -> "Eagle3DraftModel":
        """Move to a device and a type. RoPE's frequencies stay in float32: rounded, they are others."""
        self.to(device, dtype)
        self.rotary_emb = LlamaRotaryEmbedding(self.config).to(device)
        return self

    @property
    def token_ids(self) -> torch.LongTensor | None:
        """Ids (L) of the draft vocabulary; None where it is the whole one."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Fuse target hidden states, one tensor (B, C, Ht) a target layer, to one vector (B, C, H) a token."""
        weight = self.fc.weight
        states = [layer.to(weight.device, weight.dtype) for layer in states]
        if self.fc_norm is not None:
            states = [norm(layer) for norm, layer in zip(self.fc_norm, states)]
        joined = torch.cat(states, dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(
        self,
        hidden_states: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.LongTensor,
        mask: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:
        """Read pairs of a hidden state and the embedding of the token after it.

        Args:
            hidden_states: (B, C, H) of `fuse`, or this method's own output.
            embeds: (B, C, H).
            position_ids: (B, C) of the hidden states' tokens.
            mask: (B, 1, C, S + C) bool, True where attended to.
            cache: grows by the C pairs.

        Returns:
            (B, C, H): what the next step reads in the place of target hidden states, and `logits` scores tokens from.
        """
        embeds = embeds.to(hidden_states.device, hidden_states.dtype)
        rotation = self.rotary_emb(hidden_states, position_ids)
        hidden_states = self.midlayer(hidden_states, embeds, rotation, mask, cache)
        return self.norm(hidden_states) if self.options.norm_output else hidden_states

    def candidates(self, hidden_states: torch.Tensor) -> Candidates:
        """Score the tokens (..., L) two behind the hidden states' own, from what `forward` returned (..., H)."""
        normed = hidden_states if self.options.norm_output else self.norm(hidden_states)
        logits = self.lm_head(normed)
        ids = self.token_ids
        return Candidates(logits, None if ids is None else ids.expand(logits.shape))
