"""Which keys a position of a block attends to: one rule, for generation, for ragged batches and for training.

Inside the layers of a drafter a block attends to the target's hidden states before its anchor (the context) and to itself
(paper, sections 4.1 and 4.2). `reaches` is the rule between two positions; the functions below say which positions there are.

Legend of shapes: B sequences, K block, C new context tokens, P context tokens in the drafter's KV cache, keys = P + C + K.
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask


def reaches(query, key, window: int | None, causal: bool):
    """Tell whether the position `query` attends to the position `key` of the same text, or of the same block.

    Args:
        query, key: positions, as tensors that broadcast or as the index tensors of flex attention.
        window: W of a sliding layer: `|query - key| < W`; None for full attention.
        causal: whether a position attends only to those up to itself. The context lies before the block in any case.

    Returns:
        bool tensor, or True where neither hides anything.
    """
    seen = True
    if causal:
        seen = key <= query
    if window is not None:
        seen = seen & ((query - key).abs() < window)
    return seen


def block_mask(
    keys: int, block_length: int, window: int | None, causal: bool, attention_mask: torch.Tensor | None, device
) -> torch.Tensor | None:
    """Build the mask of one block over the last `keys` keys, whose last `block_length` are its own.

    Args:
        attention_mask: (B, at least keys) with 0 at padding, or None.

    Returns:
        (B or 1, 1, K, keys) bool, True where attended to; None where all are.
    """
    if attention_mask is None and not causal and (window is None or keys <= window):
        return None
    key = torch.arange(keys, device=device)[None, :]
    query = key[:, keys - block_length :].transpose(0, 1)  # (K, 1)
    visible = torch.ones(block_length, keys, dtype=torch.bool, device=device) & reaches(query, key, window, causal)
    visible = visible[None, None]  # (1, 1, K, keys)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, -keys:].to(device=device, dtype=torch.bool)
    return visible


def ragged_masks(positions: torch.Tensor, real: torch.Tensor, block: torch.Tensor, past: int, kinds: list) -> list:
    """Build the masks of a batch whose sequences hold different numbers of context tokens, by position.

    Args:
        positions: (B, P + C + K) of all keys; negative at padding.
        real: (B, P + C + K) bool, False at padding.
        block: (B, K) positions of the block.
        past: P, of which a sliding layer's cache keeps the last W - 1.
        kinds: (window, causal) of each layer.

    Returns:
        One mask a layer, (B, 1, K, keys of that layer) bool; layers of one kind share theirs.
    """
    masks, behind = {}, positions.shape[1] - past
    for window, causal in set(kinds):
        keys = behind + (past if window is None else min(past, window - 1))
        key, query = positions[:, None, None, -keys:], block[:, None, :, None]
        visible = real[:, None, None, -keys:].expand(-1, -1, block.shape[1], -1)
        masks[window, causal] = visible & reaches(query, key, window, causal)  # (B, 1, K, keys)
    return [masks[kind] for kind in kinds]


def backend_mask(mask, backend: str, dtype: torch.dtype):
    """Turn a boolean mask into the form that an attention backend takes; other masks are used as given."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or backend == "sdpa":
        return mask
    if backend == "flex_attention":
        batch, _, queries, keys = mask.shape
        if batch == 1:  # the same for every sequence
            return create_block_mask(lambda b, h, q, k: mask[0, 0, q, k], None, None, queries, keys, mask.device)
        return create_block_mask(lambda b, h, q, k: mask[b, 0, q, k], batch, None, queries, keys, mask.device)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def is_flash(backend: str | None) -> bool:
    """Tell whether a backend is a flash attention, which takes causality and window itself and no ready mask."""
    return backend is not None and "flash" in backend
