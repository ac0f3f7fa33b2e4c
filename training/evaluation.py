"""Acceptance on held-out prompts: in real generation, replayed over known greedy answers, and teacher-forced.

- *Real*: `target.generate(assistant_model=drafter)`, and its statistics. It is what is served.
- *Replayed*: the same rounds, found by walking the drafter's blocks along answers that the target wrote greedily before.
  The text of a greedy round cannot differ from them, so the acceptance lengths are those of real generation, at the
  speed of training (a test compares them round by round).
- *Teacher-forced*: the mean over all anchors of an answer. It is higher: a long accepted run is met once by real rounds
  but counted from each of its tokens, so random anchors see the easy places more often than rounds start there.
"""

import statistics

import torch

from ..decode_statistics import Speculation
from ..demo.pair import end_tokens
from ..target_model import embedding_rows
from .blocks import block_labels, denoise
from .data import row_context, rows_of, single_row


@torch.no_grad()
def replay(target, drafter, rows: list[dict], blocks_at_once: int = 64) -> tuple[Speculation, list[int], float]:
    """Replayed and teacher-forced acceptance over answers that the target wrote greedily.

    Returns:
        (speculation, forced, first): the rounds, one row of statistics an answer; the acceptance length at every anchor;
        and the share of anchors at which the first drafted token is right.
    """
    slots, ends = drafter.config.block_size - 1, end_tokens(target)
    replayed, forced, first = Speculation([], [], []), [], []
    for row in rows:
        batch = single_row(row, target.device)
        right = right_drafts(target, drafter, batch, blocks_at_once)
        ended, last = row["answer_ids"][-1] in ends, len(row["answer_ids"]) - 1
        rounds, anchor = [], 0
        while anchor < last:
            # At a limit on length, the target itself adds the last token; at an end token it may be a draft.
            drafted = slots if ended else min(slots, last - anchor - 1)
            accepted = min(right[anchor], drafted)
            added = min(accepted + 1, last - anchor)
            rounds.append((added, drafted, accepted))
            anchor += added
        for into, values in zip((replayed.acceptance_lengths, replayed.drafted, replayed.accepted), zip(*rounds)):
            into.append(list(values))
        forced += [min(count + 1, last - anchor) for anchor, count in enumerate(right)]
        first += [count > 0 for count in right]
    return replayed, forced, statistics.mean(first) if first else float("nan")


def right_drafts(target, drafter, batch: dict, blocks_at_once: int, layer_ids: list[int] | None = None) -> list[int]:
    """For each anchor of a single document's answer, how many of its drafts in a row are the answer's tokens.

    `layer_ids`: other taps than the drafter's, to see what they would give.
    """
    rows, config = rows_of(batch), drafter.config
    context = row_context(target, batch, layer_ids or config.target_layer_ids)
    head, vocab_rows = target.get_output_embeddings(), embedding_rows(target)
    possible = (rows.answer_mask[0, :-1] & rows.answer_mask[0, 1:]).nonzero()[:, 0]
    counts = []
    for anchors in possible.split(blocks_at_once):
        anchors = anchors[None]
        valid = torch.ones_like(anchors, dtype=torch.bool)
        hidden = denoise(drafter, config, target, rows, context, anchors, valid)[0, :, 1:]  # (N, K - 1, H)
        labels, supervised = block_labels(rows, anchors, valid, config.block_size)
        count = torch.zeros_like(anchors[0])
        # Slot by slot, where all before it were right: the head costs most, and few blocks go far.
        alive = torch.arange(len(hidden), device=hidden.device)
        for slot in range(config.block_size - 1):
            if len(alive) == 0:
                break
            logits = drafter.draft_logits(hidden[alive, slot, None].to(target.dtype), head)[:, 0]
            best, drafts = logits[:, :vocab_rows].max(-1)  # a padded head has rows that are no tokens
            # The largest of logits with a NaN is NaN, at an index that means nothing: no draft.
            right = (drafts == labels[0, alive, slot]) & best.isfinite()
            alive = alive[right & supervised[0, alive, slot]]
            count[alive] += 1
        counts += count.tolist()
    return counts


@torch.no_grad()
def generate(target, drafter, prompts: list[list[int]], max_new_tokens: int) -> Speculation:
    """Acceptance in real greedy generation; one row of statistics a prompt."""
    result = Speculation([], [], [])
    for ids in prompts:
        input_ids = torch.tensor([ids], device=target.device)
        target.generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), assistant_model=drafter, do_sample=False,
            max_new_tokens=max_new_tokens, num_assistant_tokens=drafter.config.block_size - 1,
        )  # fmt: skip
        of_prompt = drafter.last_speculation
        result.acceptance_lengths += of_prompt.acceptance_lengths
        result.drafted += of_prompt.drafted
        result.accepted += of_prompt.accepted
    return result
