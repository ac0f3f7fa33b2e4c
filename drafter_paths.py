"""Heads that look at the previous token, and the walk that chooses a path through the candidates of a block.

DFlash drafts all positions at once, so each is blind to the token that was drafted before it. Such a head scores candidates
again behind a given token. That reads a few rows of two small tables, and no further forward pass.

Legend of shapes: ... any, B sequences, n draft tokens, H hidden, C candidates, P previous tokens, R rank, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .drafter_draft import Draft
from .drafter_heads import Candidates

CANDIDATES = (
    32  # of a position, that a Markov head chooses a path from: a later one is hardly ever the best behind any token
)


class CandidateSelector(nn.Module):
    """Scores pairs of tokens that follow one another, of low rank (DFlash 2).

    score(previous, candidate) = sum over R of predecessor[previous] * (hidden_projection h) * successor[candidate]
    """

    carries_state = False

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


class MarkovScores(nn.Linear):
    """The last projection of a Markov head, a class of its own since it starts at zero."""


class MarkovHead(nn.Module):
    """Scores the tokens behind a given one, of low rank (DSpark): score(previous, candidate) = latent . markov_w2[candidate].

    With e = markov_w1[previous] the latent is, by kind: e; e gated by the position and itself; or the output of a recurrent
    unit that has seen the path so far, whose state starts at zero behind the anchor.

    Attributes:
        carries_state: whether a score depends on the whole path behind the anchor.
    """

    def __init__(self, config):
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.num_candidates = min(CANDIDATES, config.vocab_size)
        self.carries_state = config.markov_head_type == "rnn"
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = MarkovScores(rank, config.vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden + rank, rank) if config.markov_head_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank) if self.carries_state else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        previous_tokens: torch.LongTensor,
        ids: torch.LongTensor | None,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores (..., P, C) of candidates behind previous tokens, and the state (..., P, R) behind these, if any.

        Args:
            hidden_states: (..., H).
            previous_tokens: (..., P).
            ids: (..., C) of the candidates; None for the whole vocabulary.
            state: (..., P, R) as returned for the position before; None behind the anchor.
        """
        latent = self.markov_w1(previous_tokens)  # (..., P, R)
        hidden_states = hidden_states[..., None, :].expand(*latent.shape[:-1], -1)  # (..., P, H)
        if self.gate_proj is not None:
            latent = torch.sigmoid(self.gate_proj(torch.cat([hidden_states, latent], dim=-1))) * latent
        elif self.joint_proj is not None:
            before = torch.zeros_like(latent) if state is None else state
            joint = self.joint_proj(torch.cat([before, latent, hidden_states], dim=-1))
            kept, fresh, latent = joint.chunk(3, dim=-1)
            kept, latent = torch.sigmoid(kept), torch.tanh(latent)
            state = kept * before + (1 - kept) * torch.tanh(fresh)
        return scores_of_rows(latent, self.markov_w2.weight, ids), state


class ConfidenceHead(nn.Module):
    """Estimates whether a draft token is accepted where those before it were (DSpark), by its position and the token before it.

    Attributes:
        looks_back: whether it looks at the token before it.
    """

    def __init__(self, config):
        super().__init__()
        self.looks_back = config.confidence_head == "hidden+markov"
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.looks_back else 0), 1)

    def forward(self, hidden_states: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """Return log probabilities (...), or (..., P) behind previous tokens.

        Args:
            hidden_states: (..., H).
            embedded: (..., P, R) the Markov head's embeddings of previous tokens, where it looks at them.
        """
        if embedded is not None:
            hidden_states = hidden_states[..., None, :].expand(*embedded.shape[:-1], -1)
            hidden_states = torch.cat([hidden_states, embedded], dim=-1)
        return F.logsigmoid(self.proj(hidden_states)[..., 0].float())


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
        self.base, self.pairs = base, pairs
        self.num_candidates, self.carries_state = pairs.num_candidates, pairs.carries_state
        some = next(pairs.parameters())
        self.device, self.dtype = some.device, some.dtype

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


class ConfidentHead:
    """A head that also says how likely what is drafted is accepted.

    Args:
        head: scores the candidates. Whatever else is asked of this one, it answers.
        confidence: a part of the drafter; where it looks back, the head has a Markov head.
    """

    def __init__(self, head, confidence: ConfidenceHead):
        self.head, self.confidence = head, confidence
        self.of_drafter = {"device": confidence.proj.weight.device, "dtype": confidence.proj.weight.dtype}

    def __getattr__(self, name):
        return getattr(self.head, name)

    def __call__(self, hidden_states: torch.Tensor, *places) -> Candidates:
        candidates = self.head(hidden_states, *places)
        if not self.confidence.looks_back:
            candidates.confidence = self.confidence(hidden_states.to(**self.of_drafter)).to(candidates.logits.device)
        return candidates

    def follow(
        self, candidates: Candidates, hidden_states: torch.Tensor, previous_tokens: torch.LongTensor, state=None
    ) -> Candidates:
        followed = self.head.follow(candidates, hidden_states, previous_tokens, state)
        if self.confidence.looks_back:
            embedded = self.head.pairs.markov_w1(previous_tokens.to(self.of_drafter["device"]))
            confidence = self.confidence(hidden_states.to(**self.of_drafter), embedded)
            followed.confidence = confidence.to(followed.logits.device)
        return followed


def path_head(drafter, base):
    """Return the head that a drafter drafts with, over a head that looks at no previous token."""
    pairs = drafter.candidate_selector if drafter.markov_head is None else drafter.markov_head
    head = base if pairs is None else PathHead(base, pairs)
    return head if drafter.confidence_head is None else ConfidentHead(head, drafter.confidence_head)


def walk(head: PathHead, candidates: Candidates, anchor: torch.LongTensor, sampler) -> Draft:
    """Choose a path through the candidates of a block, from left to right: each position looks at the token chosen before it.

    Args:
        candidates: (B, n, C) as the head gives them.
        anchor: (B, 1).
        sampler: cuts candidates and picks one, with the target's processors and noise; or `MostLikely`.

    Returns:
        A chain (B, n). Its confidence is that of the head, or the chosen candidate's probability among the others.
    """
    length, previous, state = candidates.logits.shape[1], anchor, None
    tokens, finite, scores, confidence = [], [], [], []
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
        scores.append(here.logits)
        confidence.append(here.confidence)
    if candidates.confidence is not None:
        confidence = candidates.confidence
    elif confidence[0] is not None:
        confidence = torch.cat(confidence, dim=1)
    else:
        confidence = sampler.log_probs(torch.cat(scores, dim=1)).amax(dim=-1)
    finite = None if finite[0] is None else torch.cat(finite, dim=1)
    return Draft(torch.cat(tokens, dim=1), finite=finite, confidence=confidence)


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

    @staticmethod
    def log_probs(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(dim=-1)
