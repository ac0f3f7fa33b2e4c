"""Anchors, blocks and masks of training (paper, section 4.2): many blocks of one text denoised in a single pass.

In training the text is known, so blocks at many anchors go side by side. Each must see what it will see in generation and
nothing more: the features before its anchor, in its own document, and itself. The anchor's own features do not exist yet
when a block is drafted; a block that saw them would learn to read the answer, reach a low loss, and accept nothing.

Legend of shapes: B rows, S tokens of a row, N blocks of a row, K block size.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..target_masks import reaches
from ..target_model import raw_embeddings

PADDING = -1  # document id of padding


@dataclass
class Rows:
    """Texts in rows; a row holds one document, or several one after the other (packed).

    Args:
        input_ids: (B, S).
        document_ids: (B, S), equal inside a document, `PADDING` at padding.
        answer_mask: (B, S) bool, true where the target wrote the token.
        position_ids: (B, S), counted inside each document.
    """

    input_ids: torch.LongTensor
    document_ids: torch.LongTensor
    answer_mask: torch.Tensor
    position_ids: torch.LongTensor


def draw_anchors(
    rows: Rows, num_anchors: int, generator: torch.Generator, fixed: bool = False
) -> tuple[torch.LongTensor, torch.Tensor]:
    """Random anchors: answer tokens whose next token is an answer token of the same document.

    An answer's first token is an anchor but never drafted, as in generation, where the prompt's pass gives it. Blocks may
    reach past the end of a document; what lies there has no label.

    Args:
        num_anchors: at most so many a row.
        generator: on the CPU, so that a seed gives the same anchors on every device.
        fixed: always `num_anchors` of them, for kernels that compile for a shape; else no more than the fullest row has.

    Returns:
        (anchors, valid): (B, N) indices in ascending order, 0 where `valid` (B, N) is false.
    """
    possible = rows.answer_mask[:, :-1] & rows.answer_mask[:, 1:]
    possible &= rows.document_ids[:, :-1] == rows.document_ids[:, 1:]
    count = min(num_anchors, possible.shape[1])
    if not fixed:
        count = max(1, min(count, int(possible.sum(1).max())))  # a row without any gets one of padding
    scores = torch.rand(possible.shape, generator=generator).to(possible.device)
    scores, anchors = scores.masked_fill(~possible, -1.0).topk(count, dim=1)
    valid = scores >= 0
    anchors, order = anchors.masked_fill(~valid, possible.shape[1]).sort(dim=1)
    valid = valid.gather(1, order)
    anchors = anchors.masked_fill(~valid, 0)
    if fixed and count < num_anchors:
        missing = (0, num_anchors - count)
        anchors, valid = torch.nn.functional.pad(anchors, missing), torch.nn.functional.pad(valid, missing)
    return anchors, valid


def block_labels(
    rows: Rows, anchors: torch.LongTensor, valid: torch.Tensor, block_size: int
) -> tuple[torch.LongTensor, torch.Tensor]:
    """(labels, supervised), each (B, N, K - 1): the tokens after each anchor, and which of them belong to its answer."""
    index = anchors[:, :, None] + torch.arange(1, block_size, device=anchors.device)  # (B, N, K - 1)
    inside = index < rows.input_ids.shape[1]
    flat = index.clamp(max=rows.input_ids.shape[1] - 1).flatten(1)
    labels = rows.input_ids.gather(1, flat).view_as(index)
    own = rows.document_ids.gather(1, anchors)[:, :, None]
    supervised = rows.answer_mask.gather(1, flat).view_as(index) & inside & valid[:, :, None]
    supervised &= rows.document_ids.gather(1, flat).view_as(index) == own
    return labels, supervised


def block_ids(rows: Rows, anchors: torch.LongTensor, block_size: int, mask_token_id: int) -> torch.LongTensor:
    """(B, N * K) tokens of the blocks: each anchor's, then mask tokens."""
    ids = anchors.new_full((*anchors.shape, block_size), mask_token_id)
    ids[:, :, 0] = rows.input_ids.gather(1, anchors)
    return ids.flatten(1)


def block_positions(rows: Rows, anchors: torch.LongTensor, block_size: int) -> torch.LongTensor:
    """(B, S + N * K) positions of context and blocks; a block's continue those before its anchor."""
    offsets = torch.arange(block_size, device=anchors.device)
    blocks = rows.position_ids.gather(1, anchors)[:, :, None] + offsets
    return torch.cat([rows.position_ids, blocks.flatten(1)], dim=1)


class Visibility:
    """Which keys (context, then all blocks) a query of a block may see. One rule, for dense and for flex masks.

    Args:
        window: W of a sliding layer, by position, as in generation: `|q - k| < W`.
        causal: whether a token of a block sees only those up to itself in it.
    """

    def __init__(self, rows: Rows, anchors, valid, block_size: int, window: int | None, causal: bool):
        self.length, self.block_size, self.window, self.causal = rows.input_ids.shape[1], block_size, window, causal
        self.anchors, self.valid, self.documents = anchors, valid, rows.document_ids

    def __call__(self, b, h, q, kv):
        block, offset = q // self.block_size, q % self.block_size
        anchor = self.anchors[b, block]
        column = torch.clamp(kv, max=self.length - 1)
        in_context = (kv < self.length) & self.valid[b, block]
        # Strictly before the anchor: its own features come with the pass that verifies this block.
        in_context = in_context & (kv < anchor) & (self.documents[b, column] == self.documents[b, anchor])
        own = kv - self.length - block * self.block_size  # offset of the key, if it lies in the query's block
        # A block of padding sees itself too: a query that sees nothing is a nan.
        in_block = (kv >= self.length) & (own >= 0) & (own < self.block_size)
        # Inside a document positions and indices differ by a constant.
        in_context = in_context & reaches(anchor + offset, kv, self.window, causal=False)
        in_block = in_block & reaches(offset, own, self.window, self.causal)
        return in_context | in_block

    def dense(self) -> torch.Tensor:
        """(B, 1, N * K, S + N * K) bool."""
        batch, blocks = self.anchors.shape
        queries = torch.arange(blocks * self.block_size, device=self.anchors.device)
        keys = torch.arange(self.length + len(queries), device=self.anchors.device)
        rows = torch.arange(batch, device=self.anchors.device)
        return self(rows[:, None, None], None, queries[None, :, None], keys[None, None, :])[:, None]

    def flex(self, create=create_block_mask) -> BlockMask:
        """The same as a block mask without a dimension of heads, which would multiply its memory."""
        batch, blocks = self.anchors.shape
        queries = blocks * self.block_size

        def rule(b, h, q, kv):  # a function: a compiled `create` would compile again for every new object
            return self(b, h, q, kv)

        return create(rule, batch, None, queries, self.length + queries, device=self.anchors.device)


def denoise(model, config, target, rows: Rows, context, anchors, valid, create=create_block_mask) -> torch.Tensor:
    """Hidden states (B, N, K, H) of the blocks at `anchors`, all in one pass of the drafter.

    Args:
        model: the drafter, or what wraps it for several processes; `config` is the drafter's.
        context: (B, S, T * H) features of the rows.
        create: makes block masks, for flex attention; it may be compiled.
    """
    ids = block_ids(rows, anchors, config.block_size, config.mask_token_id)
    hidden = model(
        raw_embeddings(target.get_input_embeddings(), ids),
        context,
        attention_mask=layer_masks(config, rows, anchors, valid, config._attn_implementation, create),
        position_ids=block_positions(rows, anchors, config.block_size),
    ).last_hidden_state
    return hidden.unflatten(1, (-1, config.block_size))


def layer_masks(config, rows: Rows, anchors, valid, backend: str, create=create_block_mask) -> list:
    """One mask a layer of the drafter, those of equal layers made once."""
    masks = {}
    for kind in zip(config.windows, config.block_causal):
        if kind not in masks:
            rule = Visibility(rows, anchors, valid, config.block_size, *kind)
            masks[kind] = rule.flex(create) if backend == "flex_attention" else rule.dense()
    return [masks[kind] for kind in zip(config.windows, config.block_causal)]
