"""The one rule of the text: the target chooses each token, and a drafted token stays while it equals the choice.

Greedy, the choice is the argmax of the target's processed scores. Sampled, it is the argmax after adding Gumbel noise
that depends only on (seed, row, position), so the text has exactly the target's distribution and, for a given seed,
does not depend on the drafter, the draft length or timing. The drafter proposes with the same noise: the two agree
whenever their distributions do.
"""

import copy
import math

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from .decode_state import TokenBuffer
from .drafter_heads import Candidates

CHUNK = 1 << 15  # logits that are processed and sampled at once, where the processors allow for several sequences
# Drafters are surer than they are right. The factor on their scores with which the expected length of a tree's path is the real
# one, found by replay for greedy decoding and for sampling alike (docs/results/trees.md).
CALIBRATION = 0.6

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


class Sampler:
    """Chooses tokens from raw logits, with the processors that `generate` prepared, and proposes with the same noise.

    Args:
        processors: in the order of plain `generate`.
        text: the accepted tokens; each position sees its own prefix of them.
        noises: one a sequence; None for greedy decoding.
        vocab_size: V of the target's own logits, which some targets cut where their head is padded.
        ragged: whether sequences have texts of lengths of their own, and are processed one by one.
    """

    def __init__(
        self, processors: LogitsProcessorList, text: TokenBuffer, noises: list[GumbelNoise] | None, vocab_size: int, ragged: bool
    ):  # fmt: skip
        self.processors, self.text, self.noises, self.vocab_size = processors, text, noises, vocab_size
        self.scores_only = all(type(processor) in SCORES_ONLY for processor in processors)
        usable = LogitsProcessorList(p for p in processors if type(p) in SCORES_ONLY | PREFIX)
        self.stateless = len(usable) == len(processors)
        # Those with state must see emitted tokens only, so they say nothing about a proposal.
        self.of_drafts = self if self.stateless else Sampler(usable, text, noises, vocab_size, ragged)
        self.by_sequence = [processors_of_row(processors, row) for row in range(len(text.lengths) * ragged)]

    def with_noises(self, noises: list[GumbelNoise] | None) -> "Sampler":
        """Return this sampler with other noises; None proposes the most likely tokens."""
        ragged = bool(self.by_sequence)
        return Sampler(self.processors, self.text, noises, self.vocab_size, ragged)

    def propose(self, candidates: Candidates) -> tuple[torch.LongTensor, torch.BoolTensor]:
        """Turn candidates (B, n, C) into draft tokens, with the target's processors and noise.

        Processors with state are left out. The text cannot depend on a proposal.

        Returns:
            (tokens, finite): each (B, n); `finite` is False where the logits hold a nan or an infinity that is no mask.
        """
        if candidates.ids is not None and self.noises is None and not self.of_drafts.processors:
            finite = is_finite(candidates.logits.amax(dim=-1))
            return candidates.best().to(self.text.ids.device), finite.to(self.text.ids.device)
        logits = self._draft_logits(candidates)
        greedy, chosen = logits.max(dim=-1)
        finite = is_finite(greedy)  # -inf is a token that is not possible, but not all are
        sampler = self.of_drafts
        if not sampler.processors and sampler.noises is None:
            return chosen, finite
        self.text.reserve(logits.shape[1] + 1)
        for rows, positions, scores, starts in sampler._by_chunk(logits):
            choices = sampler._choose(scores, starts, rows)
            choices = choices if sampler.noises is None else choices.clamp_(min=0)
            chosen[rows, positions] = choices
            if not sampler.scores_only:  # the next position looks at this one
                self.text.write_ahead(rows, choices, positions.start)
        return chosen, finite

    def _draft_logits(self, candidates: Candidates) -> torch.Tensor:
        """Return candidates as logits (B, n, V) of the target's vocabulary, where and in what the text is chosen."""
        logits = candidates.over_vocabulary(self.vocab_size)[..., : self.vocab_size]
        return logits.to(self.text.ids.device, torch.float32)

    @property
    def at_once(self) -> bool:
        """Whether all draft positions can be processed together: no processor looks at the tokens drafted before one."""
        return self.of_drafts.scores_only

    @property
    def temperature(self) -> float:
        """What logits are divided by."""
        warpers = [p for p in self.of_drafts.processors if type(p) is logits_process.TemperatureLogitsWarper]
        return math.prod(warper.temperature for warper in warpers)

    def shortlist(self, candidates: Candidates, count: int, first: int = 0) -> tuple[Candidates, torch.BoolTensor]:
        """Keep the `count` likeliest candidates of each position, which a path is chosen from.

        Their logits are what the target's processors and the position's noise make of them, in the scale of the drafter's: the
        noise is known, and what the target will choose is rarely among the likeliest without it.

        Args:
            candidates: (B, m, C) of a drafter; m is 1 unless `at_once`.
            first: draft position of the first of them, from 0.

        Returns:
            (candidates (B, m, count), finite (B, m) as of `propose`).
        """
        sampler = self.of_drafts
        logits = self._draft_logits(candidates)
        finite = is_finite(logits.amax(dim=-1))
        if sampler.noises is None and not sampler.processors:
            return Candidates(logits).top(count), finite
        self.text.reserve(first + logits.shape[1] + 1)
        best = logits.new_empty(*logits.shape[:2], min(count, self.vocab_size))
        ids = torch.empty_like(best, dtype=torch.long)
        for rows, positions, scores, starts in sampler._by_chunk(logits, first):
            if sampler.noises is not None:
                scores = scores + sampler._noise(starts, rows, scores)
            best[rows, positions], ids[rows, positions] = scores.topk(best.shape[-1], dim=-1)
        return Candidates(best * self.temperature, ids), finite

    def pick(self, candidates: Candidates, position: int) -> torch.LongTensor:
        """Choose the draft token (B, 1) of one position among candidates (B, 1, C) of a shortlist."""
        tokens = candidates.best()
        if not self.at_once:  # the next position looks at this one
            for rows, _ in self.of_drafts._chunks_of_rows(candidates.logits):
                self.text.write_ahead(rows, tokens[rows], position)
        return tokens

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return calibrated log probabilities (..., C) of candidates by logits of a shortlist."""
        return (CALIBRATION / self.temperature * logits).log_softmax(dim=-1)

    def choose_block(
        self, draft: torch.LongTensor, logits: torch.Tensor, keep_scores: bool = False
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Choose the tokens after the text and after each token of a chain, for stateless processors.

        Args:
            draft: (B, n) the chain; at positions behind a rejected token the choice does no harm.
            logits: (B, n + 1, V) of the target.

        Returns:
            (choices, scores): (B, n + 1), -1 where no token is possible; the processed scores (B, n + 1, V), or None unless
            `keep_scores`.
        """
        if not self.processors and self.noises is None:
            return logits.argmax(dim=-1), logits if keep_scores else None
        choices = torch.empty(logits.shape[:2], dtype=torch.long, device=logits.device)
        scores = torch.empty_like(logits) if keep_scores else None
        if not self.scores_only:
            for rows, _ in self._chunks_of_rows(logits):
                self.text.write_ahead(rows, draft[rows])
        for rows, positions, chunk_scores, starts in self._by_chunk(logits):
            choices[rows, positions] = self._choose(chunk_scores, starts, rows)
            if keep_scores:
                scores[rows, positions] = chunk_scores
        return choices, scores

    def choose_nodes(self, logits: torch.Tensor, depths: list[int]) -> tuple[torch.LongTensor, torch.Tensor]:
        """Choose the token after each node of a tree, for processors that look at scores only.

        All nodes of one depth stand at one position, so they share its noise.

        Args:
            logits: (1, F, V) of the target, the anchor's first.
            depths: of each of the F tokens.

        Returns:
            (choices, scores): (1, F), -1 where no token is possible; the processed scores (1, F, V).
        """
        logits = logits[:, : len(depths)]
        scores = logits.flatten(0, 1)
        for processor in self.processors:
            scores = processor(self.text.view(slice(0, 1)), scores)
        scores = scores.view_as(logits)
        if self.noises is None:
            return scores.argmax(dim=-1), scores
        noise = self.noises[0].at(self.text.lengths[0], max(depths) + 1, scores.shape[-1])  # (depths, V)
        return gumbel_argmax(scores, noise[depths][None]), scores

    def likeliest(self, candidates: Candidates, count: int, position: int | None = None) -> Candidates:
        """Return the `count` likeliest tokens (n, C) of each draft position of one sequence, their logits as of `shortlist`.

        Processors that look at the text are left out: what stands before a token of a tree differs from node to node.

        Args:
            candidates: (1, n, C) of a drafter.
            position: draft position, from 0, that all n of them stand at; None where they stand at the first n.
        """
        if candidates.ids is not None and self.noises is None and not self.processors:
            ids = candidates.ids.expand(candidates.logits.shape)[0]
            best = Candidates(candidates.logits[0].float(), ids).top(count)
            return Candidates(best.logits, best.ids.to(self.text.ids.device))
        scores = self._draft_logits(candidates)[0]  # (n, V)
        for processor in self.processors:
            if type(processor) in SCORES_ONLY:
                scores = processor(self.text.view(slice(0, 1)), scores)
        if self.noises is not None:
            first, positions = (0, len(scores)) if position is None else (position, 1)
            scores = scores + self.noises[0].at(self.text.lengths[0] + first, positions, scores.shape[-1])
        best = Candidates(scores).top(count)
        return Candidates(best.logits * self.temperature, best.ids)

    def rank(self, candidates: Candidates, count: int) -> tuple[torch.LongTensor, torch.Tensor]:
        """Return the `count` likeliest tokens of each draft position and their calibrated log probabilities, each (n, C).

        When sampling, the noise of the position is known, so it belongs to the weight.

        Args:
            candidates: (1, n, C) of a drafter.
        """
        best = self.likeliest(candidates, count)
        return best.ids, self.log_probs(best.logits)

    def choose_next(self, logits: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor]:
        """Choose the token after the text from logits (B, V), with processors of any kind, which see it once: ((B), scores (B, V))."""
        scores = self.processors(self.text.view(slice(0, len(self.text.lengths))).contiguous(), logits)
        return self._choose(scores[:, None], self.text.lengths)[:, 0], scores

    def _choose(self, scores: torch.Tensor, starts: list[int], rows: slice = slice(None)) -> torch.LongTensor:
        """Choices (r, n) of the scores (r, n, V) of some sequences at positions starts[i]..; -1 where no token is possible."""
        if self.noises is None:
            return scores.argmax(dim=-1)
        return gumbel_argmax(scores, self._noise(starts, rows, scores))

    def _noise(self, starts: list[int], rows: slice, scores: torch.Tensor) -> torch.Tensor:
        """Return the noise of the positions that scores (r, n, V) are of, in their shape or one that expands to it."""
        noise = [noise.at(start, *scores.shape[1:]) for noise, start in zip(self.noises[rows], starts)]
        return noise[0][None] if len(noise) == 1 else torch.stack(noise)

    def _by_chunk(self, logits: torch.Tensor, first: int = 0):
        """Yield (rows, positions, scores, starts) of one chunk of a block, whose first draft position is `first`, after the other.

        Processing and sampling take several times the memory of the logits that they work on, so they never work on a
        whole batch of large blocks: a chunk is some sequences, one at least, or one position of all. Where processors look at the
        prefix a chunk has one position, and sees the text and what is written ahead of its end.
        """
        step = logits.shape[1] if self.scores_only else 1
        for rows, processors in self._chunks_of_rows(logits):
            for i in range(0, logits.shape[1], step):
                starts, scores = [n + first + i for n in self.text.lengths[rows]], logits[rows, i : i + step]
                for processor in processors:
                    scores = processor(self.text.view(rows, first + i), scores.flatten(0, 1)).view_as(scores)
                yield rows, slice(i, i + step), scores, starts

    def _chunks_of_rows(self, logits: torch.Tensor) -> list[tuple[slice, LogitsProcessorList]]:
        count = len(self.text.lengths)
        if self.by_sequence and self.processors:
            return [(slice(row, row + 1), processors) for row, processors in enumerate(self.by_sequence)]
        if self.scores_only:
            size = max(CHUNK // logits[0].numel(), 1)
            return [(slice(row, min(row + size, count)), self.processors) for row in range(0, count, size)]
        return [(slice(0, count), self.processors)]


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
    return torch.where(is_finite(best), choices, -1)


def is_finite(values: torch.Tensor) -> torch.BoolTensor:
    """Tell which values are neither an infinity nor a nan: in two kernels, where `isfinite` takes four."""
    return values - values == 0
