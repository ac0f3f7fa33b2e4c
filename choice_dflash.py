"""The one rule of the text: the target chooses each token, and a drafted token stays while it equals the choice.

Greedy, the choice is the argmax of the target's processed scores. Sampled, it is the argmax after adding Gumbel noise
that depends only on (seed, row, position), so the text has exactly the target's distribution and, for a given seed,
does not depend on the drafter, the draft length or timing. The drafter proposes with the same noise: the two agree
whenever their distributions do.
"""

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
            self.ring = torch.empty(
                self.span, vocab_size, dtype=torch.float64, device=self.generator.device
            )  # fmt: skip
        while self.drawn < start + count:
            # One draw a position, whatever is drafted. -log of an exponential is Gumbel; it never meets an exact zero.
            self.ring[self.drawn % self.span].exponential_(generator=self.generator).log_().neg_()
            self.drawn += 1
        first = start % self.span
        if first + count <= self.span:
            return self.ring[first : first + count]
        return torch.cat([self.ring[first:], self.ring[: first + count - self.span]])


class TargetChoice:
    """Scores and choices of one row, from raw logits, with the processors that `generate` prepared.

    Args:
        processors: in the order of plain `generate`.
        noise: None for greedy decoding.
    """

    def __init__(self, processors: LogitsProcessorList, noise: GumbelNoise | None):
        self.processors = processors
        self.noise = noise
        self.stateless = all(type(processor) in SCORES_ONLY | PREFIX for processor in processors)

    def scores(self, text: torch.Tensor, start: int, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores (n, V) of the positions from `start` on, given their logits (n, V).

        Each position sees its own prefix of `text` (1, at least start + n - 1), drafts included. For stateless
        processors, which are harmless at positions that will be rejected.
        """
        scores = logits
        for processor in self.processors:
            if type(processor) in SCORES_ONLY:
                scores = processor(text[:, :start], scores)
            else:
                rows = [processor(text[:, : start + i], scores[i : i + 1]) for i in range(len(scores))]
                scores = torch.cat(rows) if len(rows) > 1 else rows[0]
        return scores

    def choose(self, scores: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(choices, valid), each (n,), of scores (n, V) at positions start..; not valid where no token is possible."""
        if self.noise is None:
            choices = scores.argmax(dim=-1)
            return choices, torch.ones_like(choices, dtype=torch.bool)
        return gumbel_argmax(scores, self.noise.at(start, *scores.shape))

    def propose(self, text: torch.Tensor, start: int, logits: torch.Tensor) -> torch.Tensor:
        """Draft tokens (n,) of draft logits (n, V), by the same processors and noise, written to `text` as well.

        Processors with state are left out: they must see emitted tokens only. The text cannot depend on a proposal.
        """
        usable = [p for p in self.processors if type(p) in SCORES_ONLY | PREFIX]
        chooser = TargetChoice(usable, self.noise)
        if all(type(processor) in SCORES_ONLY for processor in usable):
            drafts, _ = chooser.choose(chooser.scores(text, start, logits), start)
            text[0, start : start + len(drafts)] = drafts
            return drafts
        for i in range(len(logits)):
            draft, _ = chooser.choose(chooser.scores(text, start + i, logits[i : i + 1]), start + i)
            text[0, start + i] = draft[0]
        return text[0, start : start + len(logits)]


def gumbel_argmax(scores: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample softmax(scores) (n, V) with Gumbel noise (n, V) in float64: (choices, valid), each (n,)."""
    best, choices = (scores.double() + noise).max(dim=-1)
    return choices, best.isfinite()
