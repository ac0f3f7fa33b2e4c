"""What passes between the loop and whoever proposes: the plan of a round, its draft, and the tokens that were accepted.

Legend of shapes: B sequences, C new context tokens, H hidden, n draft tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .drafter_tree import best_first
from .target_compiled import FixedShapes
from .target_shift import to_device
from .target_tree import TreeShape


@dataclass
class Plan:
    """What a round may draft.

    Args:
        num_draft_tokens: positions behind the anchor; 0 for a round without draft tokens.
        num_nodes: tokens of a draft tree over these positions; None for a chain.
        fixed: how forward passes run beside a static KV cache; None beside another one.
    """

    num_draft_tokens: int
    num_nodes: int | None = None
    fixed: FixedShapes | None = None


@dataclass
class Draft:
    """Draft tokens of one round, a path (chain) or several (tree) behind the anchor.

    Parents come before their children and scores fall, so the first tokens of a draft are a draft.

    Args:
        tokens: (B, n); n is 0 in a round without draft tokens.
        parents: (n) index of each token's parent, -1 for the anchor; None for a chain. On the host, where trees are built.
        scores: (n) log probability that the token lies on the accepted path; None where the proposer has none.
        confidence: (B, n) log probability that the token of a chain is accepted where those before it were; None where the
            proposer does not say.
        finite: (B, n) False where the proposer's logits were not finite, so that it has nothing to say; None where all are.
    """

    tokens: torch.LongTensor
    parents: list[int] | None = None
    scores: list[float] | None = None
    finite: torch.BoolTensor | None = None
    confidence: torch.Tensor | None = None

    @classmethod
    def of_tree(cls, ids: torch.LongTensor, log_probs: list, num_nodes: int) -> "Draft":
        """Take the best tree of `num_nodes` nodes from candidates `ids` (n, C); see `best_first`."""
        depths, ranks, parents, scores = best_first(log_probs, num_nodes)
        return cls(ids[depths, ranks][None], parents, scores)

    def __len__(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def shape(self) -> TreeShape | None:
        """Of a tree; None for a chain."""
        return None if self.parents is None else TreeShape(self.parents)

    @property
    def depth(self) -> int:
        """How many tokens the longest path has."""
        return len(self) if self.parents is None else max(self.shape.depths)

    def first(self, count: int) -> "Draft":
        """Return the first tokens of a chain."""
        finite = None if self.finite is None else self.finite[:, :count]
        return Draft(self.tokens[:, :count], finite=finite)

    def child(self, own: list[int], at: int, token: int) -> int | None:
        """Return the row of the verified pass in which `token` follows the row `at`; None where it was not drafted.

        Args:
            own: draft tokens of one sequence.
        """
        if self.parents is None:
            return at + 1 if at < len(own) and own[at] == token else None
        return next((row for row in self.shape.children[at] if own[row - 1] == token), None)

    @cached_property
    def best_chain(self) -> list[int]:
        """Indices of the tokens that follow one another, each the likeliest behind the one before."""
        if self.parents is None:
            return [*range(len(self))]
        chain, at = [], 0
        while self.shape.children[at]:
            at = self.shape.children[at][0]
            chain.append(at - 1)
        return chain


@dataclass
class AcceptedTokens:
    """Tokens that became text, the prompt's first, and the target's hidden states at them.

    The anchor is not among them: its hidden states come with the pass that verifies the next draft.

    Args:
        ids: (B, C); the real tokens of a sequence come first.
        states: one tensor (B, C, H) a target layer; empty where the proposer reads none.
        counts: real tokens by sequence; None where all are.
    """

    ids: torch.LongTensor
    states: list[torch.Tensor]
    counts: list[int] | None = None

    @classmethod
    def of_prompt(
        cls, ids: torch.LongTensor, states: list[torch.Tensor], mask: torch.Tensor | None
    ) -> "AcceptedTokens":
        """Take those that the attention mask (B, C) of a prompt does not hide."""
        if mask is None or bool((mask != 0).all()):
            return cls(ids, states)
        hidden = (mask == 0).long()
        counts = (mask.shape[1] - hidden.sum(dim=1)).tolist()
        order = hidden.argsort(dim=1, stable=True)[:, : max(counts)]
        orders = {device: to_device(order, device) for device in {ids.device, *(layer.device for layer in states)}}
        chosen = [layer.gather(1, orders[layer.device][..., None].expand(-1, -1, layer.shape[-1])) for layer in states]
        return cls(ids.gather(1, orders[ids.device]), chosen, None if min(counts) == max(counts) else counts)

    def tokens(self) -> list[list[int]]:
        """Return the real tokens of each sequence, on the host."""
        counts = self.counts or [self.ids.shape[1]] * len(self.ids)
        return [row[:count] for row, count in zip(self.ids.tolist(), counts)]

    @classmethod
    def joined(cls, parts: list["AcceptedTokens"]) -> "AcceptedTokens":
        """Join parts, one after the other, in order."""
        if len(parts) == 1:
            return parts[0]
        ids = torch.cat([part.ids for part in parts], dim=1)
        states = [torch.cat(layers, dim=1) for layers in zip(*(part.states for part in parts))]
        if all(part.counts is None for part in parts):
            return cls(ids, states)
        real = [_first(part.counts or [part.ids.shape[1]] * len(ids), part.ids.shape[1]) for part in parts]
        return cls.of_prompt(ids, states, torch.cat(real, dim=1))


def _first(counts: list[int], width: int) -> torch.Tensor:
    """(B, width) bool, true at the first `counts[r]` columns of sequence r."""
    return torch.arange(width) < torch.tensor(counts)[:, None]


class Proposer(Protocol):
    """What the loop asks of whoever proposes draft tokens; one object serves one call.

    Attributes:
        target_layer_ids: decoder layers of the target whose hidden states it reads; empty for none.
        max_draft_tokens: how many positions it can draft in a round.
        device: where its work is done, for the clock.
        num_passes: forward passes that it made.
        notes: what the statistics of the call should say of it, a sentence each.
        no_trees: why it drafts chains only, a clause; None where it drafts trees.
    """

    target_layer_ids: list[int]
    max_draft_tokens: int
    device: torch.device
    num_passes: int
    notes: list[str]
    no_trees: str | None

    def check(self, target: PreTrainedModel):
        """Raise a ValueError where this is not a target to draft for; names what was found and expected."""

    def read(self, accepted: AcceptedTokens):
        """Take in accepted tokens, those of the prompt first, then those of each round."""

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        """Draft up to `plan.num_draft_tokens` positions (at least 1) after the anchor (B, 1).

        `sampler.propose` turns candidates into tokens. Where the plan asks for a tree, a chain will do.
        """

    def absorb(self):
        """Compress what was read so far, before more of a long prompt comes."""

    def skip(self, count: int, prefix: AcceptedTokens | None):
        """Start behind `count` tokens that will not be read: without hidden states, and without ids where prefix is None."""

    def keep(self, cache: Cache, ids: torch.LongTensor):
        """Remember the state beside the target's KV cache, which holds the tokens `ids` (B, length)."""

    def resume(self, cache: Cache, prefix: torch.LongTensor | None, batch: int, length: int) -> torch.LongTensor | None:
        """Go on from the state kept beside a cache of `length` tokens a sequence: its ids, or None if there is none."""
