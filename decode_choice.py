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
    """Gumbel noise of one sequence's positions, drawn in order and kept until a position is emitted.

    Args:
        seed: of this sequence; the positions' noise follows from it alone.
        first: index in the sequence of the first token to be chosen.
        span: how many positions are looked at together, at most (the draft tokens and one more).
    """

    def __init__(self, seed: int, first: int, span: int, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.drawn = first  # index of the next position to draw
        self.span = span
        self.ring: torch.Tensor | None = None  # (span, V) float32; position p is at row p % span

    def at(self, start: int, count: int, vocab_size: int) -> torch.Tensor:
        """Return the noise (count, V) of positions start to start + count - 1."""
        device = self.generator.device
        if self.ring is None:
            self.ring = torch.empty(self.span, vocab_size, dtype=torch.float32, device=device)
        while self.drawn < start + count:
            # One draw a position, whatever is drafted. -log of an exponential is Gumbel; it never meets an exact zero. The
            # draw is in float64: in float32 the smallest exponentials, which win, come in steps of 2^-24 on a GPU.
            exponential = torch.empty(vocab_size, dtype=torch.float64, device=device)
            self.ring[self.drawn % self.span] = exponential.exponential_(generator=self.generator).log_().neg_()
            self.drawn += 1
        first = start % self.span
        if first + count <= self.span:
            return self.ring[first : first + count]
        return torch.cat([self.ring[first:], self.ring[: first + count - self.span]])


class TargetChoice:
    """Chooses the tokens of all sequences from raw logits, with the processors that `generate` prepared.

    Args:
        processors: in the order of plain `generate`.
        noises: one a sequence; None for greedy decoding.
        apart: how many sequences have texts of lengths of their own, and are processed one by one; 0 where all are equal.
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

    def choose_block(
        self, ids: torch.LongTensor, starts: list[int], logits: torch.Tensor, keep_scores: bool = False
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Choose the tokens of the positions from `starts[r]` on, given their logits (B, n, V), for stateless processors.

        Args:
            ids: (B, at least start + n - 1) the text and its draft tokens: each position sees its own prefix. At positions
                that will be rejected this does no harm.

        Returns:
            (choices, scores): (B, n), -1 where no token is possible; the processed scores (B, n, V), or None unless
            `keep_scores`.
        """
        choices = torch.empty(logits.shape[:2], dtype=torch.long, device=logits.device)
        scores = torch.empty_like(logits) if keep_scores else None
        for rows, positions, chunk_scores, chunk_choices in self._by_chunk(ids, starts, logits):
            choices[rows, positions] = chunk_choices
            if keep_scores:
                scores[rows, positions] = chunk_scores
        return choices, scores

    def propose(self, ids: torch.LongTensor, starts: list[int], logits: torch.Tensor) -> torch.LongTensor:
        """Draft tokens (B, n) of draft logits (B, n, V), by the same processors and noise, written to `ids` as well.

        Processors with state are left out. The text cannot depend on a proposal.
        """
        drafts = torch.empty(logits.shape[:2], dtype=torch.long, device=logits.device)
        for rows, positions, _, choices in self.of_drafts._by_chunk(ids, starts, logits):
            drafts[rows, positions] = choices.clamp(min=0)
            for row in range(len(starts))[rows]:
                at = slice(starts[row] + positions.start, starts[row] + positions.stop)
                ids[row, at] = drafts[row, positions]
        return drafts

    def choose(self, scores: torch.Tensor, starts: list[int], rows: slice = slice(None)) -> torch.LongTensor:
        """Choices (r, n) of the scores (r, n, V) of some sequences at positions starts[i]..; -1 where no token is possible."""
        if self.noises is None:
            return scores.argmax(dim=-1)
        noise = [noise.at(start, *scores.shape[1:]) for noise, start in zip(self.noises[rows], starts)]
        return gumbel_argmax(scores, noise[0][None] if len(noise) == 1 else torch.stack(noise))

    def _by_chunk(self, ids: torch.LongTensor, starts: list[int], logits: torch.Tensor):
        """Yield (rows, positions, scores, choices) of one chunk of a block after the other.

        Processing and sampling take several times the memory of the logits that they work on, so they never work on a
        whole batch of blocks: a chunk is one sequence, or one position of all. Where processors look at the prefix a chunk
        has one position, and sees what was written to `ids` for those before it.
        """
        step = logits.shape[1] if self.scores_only else 1
        for rows, processors in self._chunks_of_rows(len(starts)):
            for i in range(0, logits.shape[1], step):
                at, scores = [start + i for start in starts[rows]], logits[rows, i : i + step]
                for processor in processors:
                    scores = processor(ids[rows, : at[0]], scores.flatten(0, 1)).view_as(scores)
                yield rows, slice(i, i + step), scores, self.choose(scores, at, rows)

    def _chunks_of_rows(self, rows: int) -> list[tuple[slice, LogitsProcessorList]]:
        if self.noises is None and not self.processors:  # a mere argmax takes no memory
            return [(slice(0, rows), self.processors)]
        if self.by_row:
            return [(slice(row, row + 1), processors) for row, processors in enumerate(self.by_row)]
        if self.scores_only:
            return [(slice(row, row + 1), self.processors) for row in range(rows)]
        return [(slice(0, rows), self.processors)]


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
    """Sample softmax(scores) (..., V) with Gumbel noise (..., V): choices (...), -1 where no token is possible."""
    best, choices = (scores + noise).max(dim=-1)
    return choices.masked_fill(~best.isfinite(), -1)
