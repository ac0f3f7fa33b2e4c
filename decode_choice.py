"""The one rule of the text: the target chooses each token, and a drafted token stays while it equals the choice.

Greedy, the choice is the argmax of the target's processed scores. Sampled, it is the argmax after adding Gumbel noise
that depends only on (seed, row, position), so the text has exactly the target's distribution and, for a given seed,
does not depend on the drafter, the draft length or timing. The drafter proposes with the same noise: the two agree
whenever their distributions do.
"""

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

# Built-in processors by what they look at. Anything else, subclasses included, may keep state and runs once per
# emitted token, in order, exactly as in plain `generate`.
SCORES_ONLY = {
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
}
PREFIX = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
}


class GumbelNoise:
    """Gumbel noise of one row's positions, drawn in order and kept until a position is emitted.

    Args:
        seed: of this row; the positions' noise follows from it alone.
        first: index in the row of the first token to be chosen.
        span: how many positions are looked at together, at most (the block size).
    """

    def __init__(self, seed: int, first: int, span: int, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.drawn = first  # index of the next position to draw
        self.span = span
        self.ring: torch.Tensor | None = None  # (span, V) float64; position p is at row p % span

    def at(self, start: int, count: int, vocab_size: int) -> torch.Tensor:
        """Noise (count, V) of positions start to start + count - 1."""
        if self.ring is None:
            self.ring = torch.empty(self.span, vocab_size, dtype=torch.float64, device=self.generator.device)
        while self.drawn < start + count:
            # One draw a position, whatever is drafted. -log of an exponential is Gumbel; it never meets an exact zero.
            self.ring[self.drawn % self.span].exponential_(generator=self.generator).log_().neg_()
            self.drawn += 1
        first = start % self.span
        if first + count <= self.span:
            return self.ring[first : first + count]
        return torch.cat([self.ring[first:], self.ring[: first + count - self.span]])


class TargetChoice:
    """Scores and choices of all rows, from raw logits, with the processors that `generate` prepared.

    Args:
        processors: in the order of plain `generate`.
        noises: one a row; None for greedy decoding.
        apart: how many rows have texts of lengths of their own, and are processed one by one; 0 where all are equal.
    """

    def __init__(self, processors: LogitsProcessorList, noises: list[GumbelNoise] | None, apart: int = 0):
        self.processors = processors
        self.noises = noises
        self.scores_only = all(type(processor) in SCORES_ONLY for processor in processors)
        usable = LogitsProcessorList(p for p in processors if type(p) in SCORES_ONLY | PREFIX)
        self.stateless = len(usable) == len(processors)
        # Those with state must see emitted tokens only, so they say nothing about a proposal.
        self.of_drafts = self if self.stateless else TargetChoice(usable, noises)
        self.by_row = [processors_of_row(processors, row) for row in range(apart)]

    def scores(self, ids: torch.Tensor, starts: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Processed scores (B, n, V) of the positions from `starts[r]` on, given their logits (B, n, V).

        Each position sees its own prefix of `ids` (B, at least start + n - 1), drafts included. For stateless
        processors, which are harmless at positions that will be rejected.
        """
        if self.by_row:
            rows = [
                _processed(by_row, ids[r : r + 1], starts[r], logits[r : r + 1]) for r, by_row in enumerate(self.by_row)
            ]
            return torch.cat(rows)
        return _processed(self.processors, ids, starts[0], logits)

    def choose(self, scores: torch.Tensor, starts: list[int]) -> torch.LongTensor:
        """Choices (B, n) of scores (B, n, V) at positions starts[r]..; -1 where no token is possible."""
        if self.noises is None:
            return scores.argmax(dim=-1)
        noise = [noise.at(start, *scores.shape[1:]) for noise, start in zip(self.noises, starts)]
        return gumbel_argmax(scores, noise[0][None] if len(noise) == 1 else torch.stack(noise))

    def propose(self, ids: torch.Tensor, starts: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Draft tokens (B, n) of draft logits (B, n, V), by the same processors and noise, written to `ids` as well.

        Processors with state are left out. The text cannot depend on a proposal.
        """
        chooser, count = self.of_drafts, logits.shape[1]
        step = count if chooser.scores_only else 1
        drafts = []
        for i in range(0, count, step):
            at = [start + i for start in starts]
            chosen = chooser.choose(chooser.scores(ids, at, logits[:, i : i + step]), at).clamp(min=0)
            for row, start in enumerate(at):
                ids[row, start : start + step] = chosen[row]
            drafts.append(chosen)
        return drafts[0] if len(drafts) == 1 else torch.cat(drafts, dim=1)


def _processed(processors: LogitsProcessorList, ids: torch.Tensor, start: int, scores: torch.Tensor) -> torch.Tensor:
    for processor in processors:
        if type(processor) in SCORES_ONLY:
            scores = processor(ids[:, :start], scores.flatten(0, 1)).view_as(scores)
        else:
            columns = [processor(ids[:, : start + i], scores[:, i]) for i in range(scores.shape[1])]
            scores = torch.stack(columns, dim=1) if len(columns) > 1 else columns[0][:, None]
    return scores


# Stateless, but they hold the prompts of the whole batch.
_WHOLE_BATCH = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
}


def separable(processors: LogitsProcessorList) -> bool:
    """Whether rows can be processed one by one: nothing keeps state, or needs the batch."""
    return all(type(processor) in (SCORES_ONLY | PREFIX) - _WHOLE_BATCH for processor in processors)


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The same processors for one row of the batch."""
    chosen = LogitsProcessorList()
    for processor in processors:
        if type(processor) is logits_process.RepetitionPenaltyLogitsProcessor:
            processor = copy.copy(processor)
            if isinstance(ignored := processor.prompt_ignore_length, torch.Tensor):  # one number a row
                processor.prompt_ignore_length = ignored[row : row + 1]
        chosen.append(processor)
    return chosen


def gumbel_argmax(scores: torch.Tensor, noise: torch.Tensor) -> torch.LongTensor:
    """Sample softmax(scores) (..., V) with Gumbel noise (..., V) in float64: choices (...), -1 where none is possible."""
    best, choices = (scores.double() + noise).max(dim=-1)
    return choices.masked_fill(~best.isfinite(), -1)
