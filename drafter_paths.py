"""Heads that look at the previous token, and the walk that chooses a path through the candidates of a block.

DFlash drafts all positions at once, so each is blind to the token that was drafted before it. Such a head scores candidates
again behind a given token. That reads a few rows of two small tables, and no further forward pass.

Legend of shapes: ... any, B sequences, n draft tokens, H hidden, C candidates, P previous tokens, R rank, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .drafter_heads import Candidates


class CandidateSelector(nn.Module):
    """Scores pairs of tokens that follow one another, of low rank (DFlash 2).

    score(previous, candidate) = sum over R of predecessor[previous] * (hidden_projection h) * successor[candidate]
    """

    def __init__(self, config):
        super().__init__()
        self.num_candidates = config.selector_top_k
        # Not `nn.Embedding`: all checkpoints but those of a bare module have these names.
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        previous_tokens: torch.LongTensor,
        ids: torch.LongTensor | None,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the scores (..., P, C) of candidates behind previous tokens, and no state.

        Args:
            hidden_states: (..., H).
            previous_tokens: (..., P).
            ids: (..., C) of the candidates; None for the whole vocabulary.
        """
        gate = self.hidden_projection(hidden_states)[..., None, :]  # (..., 1, R)
        behind = F.embedding(previous_tokens, self.predecessor_codebook) * gate  # (..., P, R)
        return scores_of_rows(behind, self.successor_codebook, ids), None


def scores_of_rows(states: torch.Tensor, table: torch.Tensor, ids: torch.LongTensor | None) -> torch.Tensor:
    """Return the products (..., P, C) of states (..., P, R) with the rows `ids` (..., C) of a table (V, R), or with all rows."""
    if ids is None:
        return states @ table.T
    return states @ F.embedding(ids, table).transpose(-1, -2)


class PathHead:
    """A head with one on top that looks at the previous token: the scores of both are added.

    Args:
        base: a head that looks at no previous token. Whatever else is asked of this one, the base answers.
        pairs: a part of the drafter, called with hidden states, previous tokens, ids and state; its scores are logits of the
            scale of the base's. Its `num_candidates` says how many candidates of a position a path is chosen from.
    """

    looks_back = True

    def __init__(self, base, pairs: nn.Module):
        self.base, self.pairs, self.num_candidates = base, pairs, pairs.num_candidates
        self.device, self.dtype = pairs.hidden_projection.weight.device, pairs.hidden_projection.weight.dtype

    def __getattr__(self, name):
        return getattr(self.base, name)

    def __call__(self, hidden_states: torch.Tensor, *places) -> Candidates:
        """Score the tokens after `hidden_states` (..., H) without looking at a previous token."""
        candidates = self.base(hidden_states, *places)
        candidates.hidden_states = hidden_states
        return candidates

    def follow(
        self, candidates: Candidates, hidden_states: torch.Tensor, previous_tokens: torch.LongTensor, state=None
    ) -> Candidates:
        """Score the candidates of positions again, behind given tokens.

        Args:
            candidates: (..., C) of these positions, scored by the base.
            hidden_states: (..., H) of them.
            previous_tokens: (..., P).
            state: what `follow` returned for them; None behind the anchor.

        Returns:
            (..., P, C).
        """
        ids, logits = candidates.ids, candidates.logits[..., None, :]
        pairs, state = self.pairs(
            hidden_states.to(self.device, self.dtype),
            previous_tokens.to(self.device),
            None if ids is None else ids.to(self.device),
            state,
        )
        logits = logits + pairs.to(logits.device, logits.dtype)
        return Candidates(logits, None if ids is None else ids[..., None, :].expand_as(logits), state=state)


def path_head(drafter, base):
    """Return the head that a drafter drafts with, over a head that looks at no previous token."""
    pairs = drafter.candidate_selector
    return base if pairs is None else PathHead(base, pairs)


def walk(
    head: PathHead, candidates: Candidates, anchor: torch.LongTensor, sampler
) -> tuple[torch.LongTensor, torch.BoolTensor | None]:
    """Choose a path through the candidates of a block, from left to right: each position looks at the token chosen before it.

    Args:
        candidates: (B, n, C) as the head gives them.
        anchor: (B, 1).
        sampler: cuts candidates and picks one, with the target's processors and noise; or `MostLikely`.

    Returns:
        (tokens, finite), each (B, n), as of `Sampler.propose`.
    """
    length, previous, state = candidates.logits.shape[1], anchor, None
    tokens, finite = [], []
    step = length if sampler.at_once else 1  # a processor may look at the tokens chosen so far
    for position in range(length):
        if position % step == 0:
            part = candidates.at(slice(position, position + step))
            short, sound = sampler.shortlist(part, head.num_candidates, position)
            finite.append(sound)
        here = Candidates(short.logits[:, position % step], short.ids[:, position % step])
        here = head.follow(here, candidates.hidden_states[:, position], previous, state)  # (B, 1, C)
        previous, state = sampler.pick(here, position), here.state
        tokens.append(previous)
    return torch.cat(tokens, dim=1), None if finite[0] is None else torch.cat(finite, dim=1)


def edges(
    head: PathHead, candidates: Candidates, anchor: torch.LongTensor, sampler, count: int
) -> tuple[torch.LongTensor, list[torch.Tensor]]:
    """Score every candidate of a block behind every one of the position before: what a draft tree is made of.

    Returns:
        (ids, log_probs): (n, C); and calibrated log probabilities, first (1, C) behind the anchor, then (n - 1, C, C) by the
        candidate of the position before.
    """
    short = sampler.likeliest(candidates, count)
    hidden = candidates.hidden_states[0]
    first = head.follow(Candidates(short.logits[:1], short.ids[:1]), hidden[:1], anchor)  # (1, 1, C)
    rest = head.follow(Candidates(short.logits[1:], short.ids[1:]), hidden[1:], short.ids[:-1])  # (n - 1, C, C)
    return short.ids, [sampler.log_probs(first.logits[0]), sampler.log_probs(rest.logits)]


class MostLikely:
    """Picks the most likely tokens: a sampler without processors and noise."""

    at_once = True

    @staticmethod
    def shortlist(candidates: Candidates, count: int, first: int) -> tuple[Candidates, None]:
        return candidates.top(count), None

    @staticmethod
    def pick(candidates: Candidates, position: int) -> torch.LongTensor:
        return candidates.best()
