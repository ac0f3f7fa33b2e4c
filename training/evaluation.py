"""Acceptance on validation prompts: in real generation, replayed over known greedy responses, and teacher-forced.

- *Real*: `target.generate(assistant_model=drafter)`, and its statistics. It is what is served.
- *Replayed*: the same rounds, found by walking the drafter's blocks along answers that the target wrote greedily before.
  The text of a greedy round cannot differ from them, so the acceptance lengths are those of real generation, at the
  speed of training (a test compares them round by round). Drafts pass through the logits processors of the target's
  generation config, as in generation, and the answers must have been written under the same config.
- *Teacher-forced*: the mean over all anchors of an answer. It is higher: a long accepted run is met once by real rounds
  but counted from each of its tokens, so random anchors see the easy places more often than rounds start there.
"""

import itertools
import statistics
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from ..decode_choice import Sampler
from ..decode_state import StoppingState, TokenBuffer
from ..decode_statistics import Speculation
from ..drafter_heads import Candidates
from ..drafter_paths import path_head
from ..drafter_vocabulary import Places, make_head
from ..target_model import PassLimits, embedding_rows
from ..target_ranks import TargetRanks
from .blocks import block_labels, denoise
from .data import row_context, rows_of, single_row
from .responses import PreparedCall


@dataclass
class GreedyCall:
    """What `generate` prepares for the greedy call that wrote an answer.

    Args:
        sampler: the target's logits processors, for this prompt and answer.
        ended: whether the answer ends with an end token.
        limit: new tokens that the call allowed; None where an answer that ended does not say.
    """

    sampler: Sampler
    ended: bool
    limit: int | None

    @classmethod
    def of(cls, target, row: dict) -> "GreedyCall":
        """The call of a row, prepared by `generate` itself from the target's generation config.

        An answer without an end token is taken to have reached its limit, also where it was cut later: what was drafted
        before is the same. `row["max_new_tokens"]` is the limit of one that ended.

        Raises:
            ValueError: the target's generation config asks for what generation with a drafter refuses, or replay cannot
                follow; or the answer cannot be the target's under this config. Names what was found.
        """
        answer, limit = row["response_ids"], row.get("max_new_tokens")
        call = PreparedCall.of(
            target, [row["prompt_ids"]], do_sample=False, max_new_tokens=max(limit or 0, len(answer))
        )
        stop = StoppingState(call.criteria, 1, TargetRanks(target, 1))
        if stop.others:
            raise ValueError(
                f"rounds cannot be replayed under {type(stop.others[0]).__name__}, which the target's generation config asks "
                "for: it is not known where it ended an answer. Unset it, or measure real generation only."
            )
        if not isinstance(call.cache, (DynamicCache, type(None))):
            raise ValueError(
                f"rounds cannot be replayed with `cache_implementation={call.config.cache_implementation!r}` of the target's "
                "generation config, which limits how many tokens a round drafts. Unset it, or measure real generation only."
            )
        ended = answer[-1] in stop.eos
        if stop.eos.intersection(answer[:-1]):
            raise ValueError(
                f"the answer to {row['id']!r} goes on after an end token of the target's generation config, so it was written "
                "under another one; make the answers again with `dflash-hub regenerate`, or pass --sampled-responses to replay none."
            )
        if ended and limit is None and call.config.forced_eos_token_id is not None:
            raise ValueError(
                f"the target's generation config forces an end token at the limit, and the answer to {row['id']!r} does not say "
                "what its limit was; make the answers again with `dflash-hub regenerate`."
            )
        text = TokenBuffer(torch.tensor([row["prompt_ids"] + answer], device=target.device), None)
        sampler = Sampler(call.processors, text, None, embedding_rows(target), ragged=False)
        return cls(sampler, ended, limit if ended else len(answer))

    def drafts(self, positions: torch.Tensor, candidates: Candidates) -> torch.LongTensor:
        """Choose draft tokens (N,) from candidates (N, C) for `positions` (N,) of prompt and answer."""
        if not self.sampler.of_drafts.processors:
            return candidates.best().to(self.sampler.text.ids.device)
        logits = candidates.over_vocabulary(self.sampler.vocab_size)
        return self._processed(positions, logits.to(self.sampler.text.ids.device, torch.float32)).argmax(-1)

    def walked(
        self, positions: torch.Tensor, candidates: Candidates, head, previous_tokens: torch.LongTensor, state
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Choose draft tokens (N,) as `drafts` does, with a head that looks at the tokens (N,) before them, and its state there."""
        if self.sampler.of_drafts.processors:
            logits = candidates.over_vocabulary(self.sampler.vocab_size)
            logits = self._processed(positions, logits.to(self.sampler.text.ids.device, torch.float32))
            short = Candidates(logits).top(head.num_candidates)
        else:
            short = candidates.top(head.num_candidates)
        followed = head.follow(short, candidates.hidden_states, previous_tokens[:, None], state)
        return followed.best()[:, 0], followed.state

    def _processed(self, positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Process draft logits (N, V) for `positions` (N,): scores (N, V)."""
        sampler, nothing = self.sampler.of_drafts, positions[None, :0]
        if sampler.scores_only:  # they look at no prefix
            return sampler.choose_block(nothing, logits[None], keep_scores=True)[1][0]
        scores = []
        for position, of_one in zip(positions.tolist(), logits[:, None, None]):
            sampler.text.lengths = [position]  # as where the text has come so far
            scores.append(sampler.choose_block(nothing, of_one, keep_scores=True)[1])
        return torch.cat(scores)[:, 0]


@torch.no_grad()
def replay(
    target, drafter, rows: list[dict], blocks_at_once: int = 64, walked: bool = True
) -> tuple[Speculation, list[int], float]:
    """Replayed and teacher-forced acceptance over answers that the target wrote greedily.

    Args:
        walked: whether a selector chooses; False takes the likeliest token of each position instead.

    Returns:
        (speculation, forced, first): the rounds, one row of statistics an answer; the acceptance length at every anchor;
        and the share of anchors at which the first drafted token is right.

    Raises:
        ValueError: see `GreedyCall.of`.
    """
    most, limits = drafter.config.drafts_per_block, PassLimits(target)
    replayed, forced, first = Speculation([], [], []), [], []
    for row in rows:
        call = GreedyCall.of(target, row)
        right = right_drafts(target, drafter, row, call, blocks_at_once, walked=walked)
        last = len(row["response_ids"]) - 1
        rounds, anchor = [], 0
        while anchor < last:
            # At a limit on length, the target itself adds the last token; at an end token it may be a draft.
            left = most if call.limit is None else min(most, call.limit - anchor - 2)
            drafted = limits.most_drafts(len(row["prompt_ids"]) + anchor, max(left, 0))
            accepted = min(right[anchor], drafted)
            added = min(accepted + 1, last - anchor)
            rounds.append((added, drafted, accepted))
            anchor += added
        for into, values in zip((replayed.acceptance_lengths, replayed.drafted, replayed.accepted), zip(*rounds)):
            into.append(list(values))
        forced += [min(count + 1, last - anchor) for anchor, count in enumerate(right)]
        first += [count > 0 for count in right]
    return replayed, forced, statistics.mean(first) if first else float("nan")


def right_drafts(
    target,
    drafter,
    row: dict,
    call: GreedyCall,
    blocks_at_once: int,
    layer_ids: list[int] | None = None,
    walked: bool = True,
) -> list[int]:
    """For each anchor of an answer, how many of its drafts in a row are the answer's tokens.

    `layer_ids`: other target layers than the drafter's, to see what they would give; `walked`: see `replay`.
    """
    batch, config = single_row(row, target.device), drafter.config
    rows = rows_of(batch)
    context, drafted = row_context(target, batch, layer_ids or config.target_layer_ids), config.drafts_per_block
    head = make_head(drafter, target, embedding_rows(target))
    head = path_head(drafter, head) if walked else head
    if head.reads_text:
        head.see([row["prompt_ids"] + row["response_ids"]])
    possible = (rows.answer_mask[0, :-1] & rows.answer_mask[0, 1:]).nonzero()[:, 0]
    counts = []
    for anchors in possible.split(blocks_at_once):
        anchors = anchors[None]
        valid = torch.ones_like(anchors, dtype=torch.bool)
        hidden = denoise(drafter, config, target, rows, context, anchors, valid)[0, :, -drafted:]  # (N, drafted, H)
        labels, supervised = block_labels(rows, anchors, valid, drafted + 1)
        count = torch.zeros_like(anchors[0])
        # Position by position, where all before it were right: the head costs most, and few blocks go far.
        alive, state = torch.arange(len(hidden), device=hidden.device), None
        for offset in range(drafted):
            if len(alive) == 0:
                break
            places = Places(torch.zeros_like(alive), anchors[0, alive])
            candidates = head(hidden[alive, offset].to(target.dtype), places)  # (alive, C)
            finite = candidates.logits.amax(-1).isfinite()  # generation drafts nothing where they are not
            if head.looks_back:  # all before this one were right, so the walk comes here over the text's own tokens
                before = rows.input_ids[0, anchors[0, alive] + offset]
                drafts, state = call.walked(anchors[0, alive] + offset + 1, candidates, head, before, state)
            else:
                drafts = call.drafts(anchors[0, alive] + offset + 1, candidates)
            right = (drafts.to(labels.device) == labels[0, alive, offset]) & finite.to(labels.device)
            right &= supervised[0, alive, offset]
            alive, state = alive[right], None if state is None else state[right.to(state.device)]
            count[alive] += 1
        counts += count.tolist()
    return counts


def acceptance_prior(position_acceptance: list[float]) -> list[float]:
    """Return what `DFlashConfig.acceptance_prior` holds, from `Speculation.position_acceptance`."""
    reached = [1.0, *position_acceptance]
    return [round(later / earlier, 2) for earlier, later in itertools.pairwise(reached) if earlier]


@torch.no_grad()
def generate(target, drafter, prompts: list[list[int]], max_new_tokens: int) -> Speculation:
    """Acceptance in real greedy generation; one row of statistics a prompt."""
    result = Speculation([], [], [])
    for ids in prompts:
        input_ids = torch.tensor([ids], device=target.device)
        target.generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), assistant_model=drafter, do_sample=False,
            max_new_tokens=max_new_tokens, num_assistant_tokens=drafter.config.drafts_per_block,
        )  # fmt: skip
        of_prompt = drafter.last_speculation
        result.acceptance_lengths += of_prompt.acceptance_lengths
        result.drafted += of_prompt.drafted
        result.accepted += of_prompt.accepted
    return result
