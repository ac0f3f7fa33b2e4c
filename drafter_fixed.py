"""The drafter beside a static KV cache of the target: every forward pass has one shape, so it is compiled once.

Columns of the drafter's KV cache here: the context from the left, as wide as it can become; then the block, always in the same
place. Each pass takes W new columns of context, as many as a round can add; those behind the real ones are hidden and written over
by the next.

Legend of shapes: B sequences, C new context tokens, W columns for them, K block, S columns of keys, H hidden, T target layers,
D head size.
"""

import torch
from transformers import DynamicCache

from .drafter_draft import AcceptedTokens
from .target_compiled import FixedShapes
from .target_masks import reaches
from .target_shift import to_device

BACKENDS = ("eager", "sdpa")  # attention that takes a ready mask, and compiles nothing for it


class FixedContext:
    """Keys and values of the drafter's context at a fixed size, in place of a `DynamicCache`.

    Args:
        drafter: a `DFlashDraftModel`.
        cache: its KV cache so far, of P columns.
        seen: real context tokens by sequence, the last of the P columns; None where all are.
        start: position of the first context token.
        fixed: how long the text can become, and whether passes are compiled.
    """

    def __init__(
        self, drafter, cache: DynamicCache, seen: list[int] | None, start: int, fixed: FixedShapes, batch: int
    ):
        self.drafter, self.start, self.columns = drafter, start, cache.get_seq_length()
        config, weight = drafter.config, drafter.norm.weight
        self.width = config.drafts_per_block + 1
        room = max(fixed.length, self.columns) + self.width
        shape = (batch, config.num_key_value_heads, room + config.block_size, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in drafter.layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        padding = [self.columns - count for count in seen or [self.columns] * batch]
        self.padding = to_device(torch.tensor(padding), weight.device)[:, None]  # (B, 1) hidden columns on the left
        for layer, keys, values in zip(cache.layers, self.keys, self.values):
            if self.columns:  # a sliding layer has kept the newest only
                kept = slice(self.columns - layer.keys.shape[2], self.columns)
                keys[:, :, kept], values[:, :, kept] = layer.keys, layer.values
        self.run = _pass
        for tensor in (*self.keys, *self.values):
            torch._dynamo.mark_static_address(tensor)  # written in place, which CUDA graphs allow at known addresses
        if fixed.compile is not None and not any(hasattr(module, "_hf_hook") for module in drafter.modules()):
            self.run = fixed.compile(_pass)

    @staticmethod
    def fits(drafter, fixed: FixedShapes | None, accepted: AcceptedTokens, cache) -> bool:
        """Tell whether from here on, forward passes of this drafter can have one shape; those over a prompt have their own."""
        if fixed is None or isinstance(cache, FixedContext) or drafter.config._attn_implementation not in BACKENDS:
            return False
        return accepted.counts is None and accepted.ids.shape[1] <= drafter.config.drafts_per_block + 1

    def get_seq_length(self) -> int:
        """Return how many columns the context has, as a `DynamicCache` does."""
        return self.columns

    def denoise(self, noise_embeds: torch.Tensor, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Read new context (B, C, T * H) and run the block (B, K, H): its hidden states (B, K, H) after the final norm."""
        for part in context_hidden_states.split(self.width, dim=1):
            count = part.shape[1]
            part = torch.nn.functional.pad(part, (0, 0, 0, self.width - count))
            numbers = to_device(torch.tensor([self.columns, count, self.start]), part.device)
            hidden = self.run(self.drafter, self.keys, self.values, noise_embeds, part, numbers, self.padding)
            self.columns += count
        return hidden

    def unfixed(self) -> DynamicCache:
        """Return a KV cache of the usual kind, for a later call: of the context as it is now."""
        cache = DynamicCache(config=self.drafter.config)
        for index, (keys, values) in enumerate(zip(self.keys, self.values)):
            if self.columns:
                cache.update(keys[:, :, : self.columns].clone(), values[:, :, : self.columns].clone(), index)
        cache.activate_past_recording()
        return cache


class _Keys:
    """What the drafter's layers see as their KV cache in one pass: `update` writes at given columns and returns all of them."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], columns: torch.LongTensor):
        self.keys, self.values, self.columns = keys, values, columns

    def get_seq_length(self) -> int:
        return 0  # positions are given

    def update(self, key: torch.Tensor, value: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[index].index_copy_(2, self.columns, key)
        self.values[index].index_copy_(2, self.columns, value)
        return self.keys[index], self.values[index]


def _pass(drafter, keys, values, noise_embeds, context, numbers, padding) -> torch.Tensor:
    """Run one forward pass; only contents of tensors change between two of them.

    Args:
        keys, values: by layer, (B, heads, S, D); written in place.
        noise_embeds: (B, K, H).
        context: (B, W, T * H).
        numbers: (3) columns of context before this pass, real ones in it, and the position of the first.
        padding: (B, 1) columns on the left that are hidden.
    """
    held, count, start = numbers.unbind()
    block, width, device = noise_embeds.shape[1], context.shape[1], noise_embeds.device
    room = keys[0].shape[2] - block
    new = torch.arange(width + block, device=device)
    columns = torch.where(new < width, held + new, room - width + new)  # (W + K)
    places = torch.where(new < width, held + new, held + count - width + new) - padding  # (B, W + K) in the text
    column = torch.arange(room + block, device=device)
    key = torch.where(column < room, column, held + count - room + column)[None] - padding  # (B, S)
    real = ((column < held + count) | (column >= room)) & (key >= 0)  # (B, S)
    query = places[:, width:, None]  # (B, K, 1)
    masks = {}
    for window, causal in set(zip(drafter.config.windows, drafter.config.block_causal)):
        masks[window, causal] = (real[:, None] & reaches(query, key[:, None], window, causal))[:, None]  # (B, 1, K, S)
    ready = [masks[kind] for kind in zip(drafter.config.windows, drafter.config.block_causal)]
    return drafter(
        noise_embeds, context, ready, position_ids=places + start, cache=_Keys(keys, values, columns)
    ).last_hidden_state
