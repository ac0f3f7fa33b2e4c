"""Heads: from the hidden states of a block to the scores of candidate tokens.

Walking a chain, building a tree, replaying rounds and the training loss all ask a head in the same way: `head(hidden_states)`
scores all positions of a block in one call. A head that looks at the previous token (`looks_back`) has a second step:
`head.follow(candidates, hidden_states, previous_tokens, state)` scores the candidates of positions again, behind given tokens.

Legend of shapes: ... any, H hidden, C candidates (the vocabulary, for the head of the target), V vocabulary.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Candidates:
    """Scores of the tokens that may stand at each position.

    Args:
        logits: (..., C).
        ids: (..., C) token ids of the candidates; None where they are the whole vocabulary, in order.
        confidence: (...) log probability that the position is accepted, where a head has one.
        state: what the head carries on along a path; None where it looks at no earlier token.
        hidden_states: (..., H) that they were scored from, where the head looks at the previous token.
    """

    logits: torch.Tensor
    ids: torch.LongTensor | None = None
    confidence: torch.Tensor | None = None
    state: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None

    def at(self, positions: slice) -> "Candidates":
        """Return those of some positions, the last dimension but one of the logits."""
        ids, confidence, hidden_states = self.ids, self.confidence, self.hidden_states
        return Candidates(
            self.logits[..., positions, :],
            None if ids is None else ids[..., positions, :],
            None if confidence is None else confidence[..., positions],
            self.state,
            None if hidden_states is None else hidden_states[..., positions, :],
        )

    def top(self, count: int) -> "Candidates":
        """Keep the `count` likeliest of each position."""
        logits, chosen = self.logits.topk(min(count, self.logits.shape[-1]), dim=-1)
        ids = chosen if self.ids is None else self.ids.gather(-1, chosen)
        return Candidates(logits, ids, self.confidence, self.state, self.hidden_states)

    def over_vocabulary(self, vocab_size: int) -> torch.Tensor:
        """Return logits (..., V) of the whole vocabulary, -inf at tokens that are no candidates."""
        if self.ids is None:
            return self.logits
        # A token beyond, which some targets embed and never write, falls into a column of its own.
        whole = self.logits.new_full((*self.logits.shape[:-1], vocab_size + 1), -torch.inf)
        return whole.scatter_(-1, self.ids.clamp(max=vocab_size), self.logits)[..., :vocab_size]

    def columns(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Return the index (...) of given tokens (...) among the candidates, -1 where one is none."""
        if self.ids is None:
            return tokens
        found = (self.ids == tokens[..., None]) & (self.logits > -torch.inf)
        return found.byte().argmax(-1).masked_fill_(~found.any(-1), -1)

    def best(self) -> torch.LongTensor:
        """Return the most likely token (...)."""
        best = self.logits.argmax(-1)
        return best if self.ids is None else self.ids.gather(-1, best[..., None])[..., 0]


class TargetHead:
    """Scores the whole vocabulary with the target's LM head, scaled as the drafter was trained.

    It looks at no previous token, so all positions of a block are answered in one call. The module is called and never
    read: a quantized one has no dense weight.

    Args:
        config: of the drafter.
        module: the target's output embeddings.
        num_tokens: tokens that the target can embed; a module padded beyond them gets -inf there. None keeps its rows.

    Attributes:
        looks_back: whether it looks at the previous token.
        carries_state: whether it looks at all tokens behind the anchor, so that no single pair of tokens has a score.
        reads_text: whether its candidates depend on the text, which it is shown by `see`.
    """

    looks_back = reads_text = carries_state = False

    def __init__(self, config, module: nn.Module, num_tokens: int | None = None):
        self.module, self.num_tokens = module, num_tokens
        self.multiplier, self.softcapping = config.output_multiplier, config.final_logit_softcapping

    def unscaled(self):
        """Return this head without the drafter's scales: for the target's own hidden states."""
        head = copy.copy(self)
        head.multiplier, head.softcapping = 1.0, None
        return head

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcapping is not None:
            logits = torch.tanh(logits / self.softcapping) * self.softcapping
        return logits

    def __call__(self, hidden_states: torch.Tensor, places=None) -> Candidates:
        """Score the tokens after `hidden_states` (..., H), which are after the drafter's final norm, wherever they stand."""
        logits = self._scaled(self.module(hidden_states))
        if self.num_tokens is not None and logits.shape[-1] > self.num_tokens:
            logits[..., self.num_tokens :] = -torch.inf
        return Candidates(logits)
