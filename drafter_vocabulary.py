"""Drafting from a part of the vocabulary: few rows of the target's LM head are read instead of all.

A drafter's draft vocabulary is a list of token ids, its tensor `d2t`: frequent ones, or those that it was trained on. The
tokens of the text at hand join it, prompt and output so far: names and numbers are rare in general and frequent here. On
the target nothing changes, so a token that is missing costs acceptance, and never the text.

Legend of shapes: ... any, B sequences, H hidden, L listed tokens, n tokens of the text that are not listed.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from .drafter_heads import Candidates, TargetHead

# A token that a sequence does not contain is first met behind its end.
NEVER = torch.iinfo(torch.long).max


def offsets_of(token_ids: torch.LongTensor) -> torch.LongTensor:
    """Return `d2t` (L,) of a list: what is added to an index of it to get the token there, as other software writes it."""
    return token_ids - torch.arange(len(token_ids), device=token_ids.device)


def token_ids_of(d2t: torch.LongTensor) -> torch.LongTensor:
    """Return the token ids (L,) that `d2t` stands for."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def check_token_ids(token_ids: torch.LongTensor, vocab_size: int):
    """Refuse a list that is none: ids must ascend, so that none is there twice, and be tokens of the target.

    Raises:
        ValueError: names what was found and expected.
    """
    if token_ids.ndim != 1 or token_ids.dtype != torch.long or not 1 <= len(token_ids) < vocab_size:
        raise ValueError(
            f"a draft vocabulary is a list of 1 to {vocab_size - 1} token ids (int64), got {token_ids.dtype} of shape "
            f"{tuple(token_ids.shape)}."
        )
    if bool((token_ids.diff() <= 0).any()):
        place = int((token_ids.diff() <= 0).nonzero()[0])
        raise ValueError(
            f"the token ids of a draft vocabulary must ascend, got {int(token_ids[place + 1])} behind {int(token_ids[place])} "
            f"(`d2t` must hold offsets: the token at index i is i + d2t[i])."
        )
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size:
        raise ValueError(
            f"the token ids of a draft vocabulary must be in [0, {vocab_size}), got {int(token_ids[0])} to {int(token_ids[-1])}."
        )


@dataclass(frozen=True)
class ListedRows:
    """A copy of the LM head's rows of listed tokens.

    Args:
        ids: (L,), ascending.
        tokens: the same, on the host.
        weight: (L, H); bias: (L,) or None.
        source: identifies what was copied, so that a head that was moved, cast or trained since is copied again.
    """

    ids: torch.LongTensor
    tokens: frozenset[int]
    weight: torch.Tensor
    bias: torch.Tensor | None
    source: tuple

    @classmethod
    def of(cls, drafter, target) -> "ListedRows":
        """Return the rows for a drafter and a target, copied once and kept as long as both live."""
        head = target.get_output_embeddings()
        tensors = [tensor for tensor in (head.weight, head.bias, drafter.d2t) if tensor is not None]
        source = tuple((t.data_ptr(), t.dtype, t.device, 0 if t.is_inference() else t._version) for t in tensors)
        of_drafter = _ROWS.setdefault(drafter, weakref.WeakKeyDictionary())
        rows = of_drafter.get(target)
        if rows is None or rows.source != source:
            ids = token_ids_of(drafter.d2t).to(head.weight.device)
            weight = head.weight.detach().index_select(0, ids)
            bias = None if head.bias is None else head.bias.detach().index_select(0, ids)
            rows = of_drafter[target] = cls(ids, frozenset(ids.tolist()), weight, bias, source)
        return rows


# Drafter -> target -> rows. Neither is kept alive.
_ROWS: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[nn.Module, ListedRows]]" = (
    weakref.WeakKeyDictionary()
)


def whole_head_reason(drafter, target) -> str | None:
    """Say why a drafter with a draft vocabulary must use the target's whole head all the same; None where it need not."""
    if drafter.d2t is None:
        return None
    head = target.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if type(head) is not nn.Linear:
        kind = f"a {type(head).__name__}"
    elif (
        hasattr(type(weight), "__tensor_flatten__")
        or weight.layout is not torch.strided
        or not weight.is_floating_point()
    ):
        kind = f"a linear layer with a {type(weight).__name__} of {weight.dtype}"
    elif weight.is_meta or drafter.d2t.is_meta:
        kind = "offloaded"
    else:
        return None
    return (
        f"the whole LM head was read in each draft, although the drafter lists {drafter.config.draft_vocab_size} tokens: the "
        f"target's head is {kind}, of which no rows can be copied"
    )


def make_head(drafter, target, num_tokens: int | None = None):
    """Return the head that a drafter drafts with: over its draft vocabulary, where it has one and the target's head is dense.

    Args:
        num_tokens: tokens that the target can embed, see `TargetHead`.
    """
    head = target.get_output_embeddings()
    if drafter.d2t is None or whole_head_reason(drafter, target) is not None:
        return TargetHead(drafter.config, head, num_tokens)
    return ListHead(drafter.config, head, ListedRows.of(drafter, target), num_tokens)


@dataclass
class Places:
    """Where in a text hidden states draft: which of its tokens were there at that time.

    Args:
        sequences: (N,) which text, of those that the head has seen.
        ends: (N,) index of the newest token, the anchor.
    """

    sequences: torch.LongTensor
    ends: torch.LongTensor


class ListHead(TargetHead):
    """Scores listed tokens and those that the text contains: of one call of `generate`, or of texts that are known.

    A token of one sequence's text is no candidate for another: what is drafted for a sequence does not depend on the batch.

    Args:
        config, module, num_tokens: see `TargetHead`; the module has a dense weight.
        listed: rows of the draft vocabulary.
    """

    reads_text = True

    def __init__(self, config, module: nn.Linear, listed: ListedRows, num_tokens: int | None = None):
        super().__init__(config, module, num_tokens)
        self.listed, self.text = listed, TextRows(module, listed)
        self.limit = len(module.weight) if num_tokens is None else min(num_tokens, len(module.weight))
        self.own: list[dict[int, None]] = []  # by sequence, its tokens that are not listed, in the order of the text
        self.lengths: list[int] = []
        self.unmarked: list[tuple[int, int, int]] = []  # (sequence, column, position) that `first` does not hold yet
        self.first: torch.Tensor | None = None  # (B, capacity) where a sequence has the token of a column first

    def see(self, text: list[list[int]]):
        """Take in what was added to the text of each sequence."""
        if not self.lengths:
            self.own, self.lengths = [{} for _ in text], [0] * len(text)
        found = []
        for row, tokens in enumerate(text):
            for position, token in enumerate(tokens, start=self.lengths[row]):
                if token not in self.listed.tokens and token not in self.own[row] and 0 <= token < self.limit:
                    self.own[row][token] = None
                    found.append((row, token, position))
            self.lengths[row] += len(tokens)
        self.text.add([token for _, token, _ in found])
        self.unmarked += [(row, self.text.columns[token], position) for row, token, position in found]

    def __call__(self, hidden_states: torch.Tensor, places: Places | None = None) -> Candidates:
        """Score the tokens after `hidden_states`, which are after the drafter's final norm.

        Args:
            hidden_states: (B, ..., H), one a sequence that was seen; or (N, ..., H) at N places.
        """
        logits = self._scaled(F.linear(hidden_states, self.listed.weight, self.listed.bias))
        if self.text.count:
            own = self._scaled(self.text.logits(hidden_states))
            if len(self.lengths) > 1 or places is not None:
                allowed = self._allowed(places)
                own = own.masked_fill(~allowed.view(len(allowed), *[1] * (own.ndim - 2), -1), -torch.inf)
            logits = torch.cat([logits, own], dim=-1)
        return Candidates(logits, self.text.ids.expand_as(logits))

    def _allowed(self, places: Places | None) -> torch.Tensor:
        """(B or N, n) bool: which tokens of the text stand in each sequence, or did at each place."""
        count, device = self.text.count, self.module.weight.device
        if self.first is None or self.first.shape[1] < count:
            first = torch.full((len(self.lengths), self.text.capacity), NEVER, device=device)
            if self.first is not None:
                first[:, : self.first.shape[1]] = self.first
            self.first = first
        if self.unmarked:
            rows, columns, positions = torch.tensor(self.unmarked, device=device).unbind(1)
            self.first[rows, columns], self.unmarked = positions, []
        first = self.first[:, :count]
        if places is None:
            return first < NEVER
        return first[places.sequences.to(device)] <= places.ends.to(device)[:, None]


class TextRows:
    """Rows of the LM head for tokens of the text, copied once as they come, into buffers that grow by doubling.

    Args:
        module: the LM head.
        listed: whose ids stand before those of the text in `ids`.
    """

    def __init__(self, module: nn.Linear, listed: ListedRows):
        self.module, self.listed = module, len(listed.ids)
        self.columns: dict[int, int] = {}  # by token
        self.capacity = 0
        self._ids, self._weight = listed.ids, listed.weight[:0]
        self._bias = None if listed.bias is None else listed.bias[:0]

    @property
    def count(self) -> int:
        return len(self.columns)

    @property
    def ids(self) -> torch.LongTensor:
        """(L + n,) listed tokens, then those of the text."""
        return self._ids[: self.listed + self.count]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., n) of the text's tokens."""
        return F.linear(
            hidden_states, self._weight[: self.count], None if self._bias is None else self._bias[: self.count]
        )

    def add(self, tokens: list[int]):
        """Copy the rows of those tokens that are not there yet."""
        start = self.count
        for token in tokens:
            self.columns.setdefault(token, len(self.columns))
        if self.count == start:
            return
        if self.count > self.capacity:
            self.capacity = max(256, 2 * self.capacity, self.count)
            self._ids = self._grown(self._ids, self.listed + start, self.listed + self.capacity)
            self._weight = self._grown(self._weight, start, self.capacity)
            self._bias = None if self._bias is None else self._grown(self._bias, start, self.capacity)
        index = torch.tensor([*self.columns][start:], device=self._ids.device)
        self._ids[self.listed + start : self.listed + self.count] = index
        self._weight[start : self.count] = self.module.weight.detach()[index]
        if self._bias is not None:
            self._bias[start : self.count] = self.module.bias.detach()[index]

    @staticmethod
    def _grown(buffer: torch.Tensor, filled: int, capacity: int) -> torch.Tensor:
        grown = buffer.new_empty(capacity, *buffer.shape[1:])
        grown[:filled] = buffer[:filled]
        return grown
