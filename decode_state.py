"""The rows of a call: their tokens, when each has ended, and what is recorded of them on the way."""

import torch
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .target_model import COUNTS_EMBEDDING
from .target_ranks import TargetRanks


class Text:
    """Tokens of every row, with its original padding, in a buffer that grows by doubling, so that no round copies them.

    Args:
        input_ids: (B, prompt).
        pad_token_id: follows a row that ended before others.
    """

    def __init__(self, input_ids: torch.LongTensor, pad_token_id: int | None):
        self.ids = input_ids.to(torch.long)
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]
        self.pad_token_id = pad_token_id
        self.reserve(256)

    def reserve(self, count: int):
        """Make room for `count` more tokens in every row."""
        rows, capacity = self.ids.shape
        if max(self.lengths) + count > capacity:
            self.ids = torch.cat([self.ids, self.ids.new_zeros(rows, max(capacity, count))], dim=1)

    def view(self, rows: slice) -> torch.LongTensor:
        """(rows, length) the tokens of rows of equal length."""
        return self.ids[rows, : self.lengths[rows.start]]

    def upto(self, num_draft: int) -> torch.LongTensor:
        """(B, length + num_draft) the text and what was drafted after it, of rows of equal length."""
        return self.ids[:, : self.lengths[0] + num_draft]

    def newest(self, count: int) -> torch.LongTensor:
        """(B, count) the anchor of every row, and what was drafted after it."""
        if min(self.lengths) == max(self.lengths):
            start = self.lengths[0] - 1
            return self.ids[:, start : start + count]
        return torch.stack([row[length - 1 : length - 1 + count] for row, length in zip(self.ids, self.lengths)])

    def finished(self) -> torch.LongTensor:
        """(B, longest) as plain `generate` returns it."""
        longest = max(self.lengths)
        ids = self.ids[:, :longest].clone()
        for row, length in zip(ids, self.lengths):
            if length < longest:
                row[length:] = self.pad_token_id
        return ids


class Stop:
    """Which rows have ended, asked once per emitted token and in order, as in plain `generate`.

    Args:
        ranks: those that share the target. Criteria are asked on each of them, and the first one's answer holds.
    """

    def __init__(self, criteria: StoppingCriteriaList, rows: int, ranks: TargetRanks):
        self.ranks = ranks
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.budget = min(lengths)  # the text is not longer, whatever a subclass makes of its length
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=float("inf"))
        self.eos = {
            token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1).tolist()
        }
        # Plain `generate` pads a row that has ended only where end tokens are in play; otherwise it goes on writing.
        self.rests = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        # End tokens and length are decided on the host; anything else may keep state, and is called.
        self.others = StoppingCriteriaList(c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria))
        # Those that look at the end of one row only.
        self.by_row = not self.others or (self.rests and all(type(c) is StopStringCriteria for c in self.others))
        # Somebody's own may look at what was streamed so far, or raise.
        self.foreign = any(type(c) not in (StopStringCriteria, MaxTimeCriteria) for c in self.others)
        self.ended = [False] * rows

    def __call__(self, rows: slice, text: torch.LongTensor, tokens: list[int], scores: tuple | None):
        """Mark those of `rows` that end with `tokens`, the last of `text` (rows, length)."""
        full = text.shape[1] >= self.max_length
        ends = [full or token in self.eos for token in tokens]
        if self.others:
            done = self.others(text.contiguous(), scores)
            if done.numel() != len(tokens):
                raise ValueError(
                    f"the stopping criteria gave a result of shape {tuple(done.shape)} for {len(tokens)} rows; expected one value a row."
                )
            ends = [a or b for a, b in zip(ends, self.ranks.agree(done.reshape(-1).tolist()))]
        self.ended[rows] = [a or b for a, b in zip(self.ended[rows], ends)]

    def resting(self, row: int) -> bool:
        """Whether a row has ended and is only padded from here on."""
        return self.ended[row] and self.rests


def selected_layers(output_hidden_states: bool | int | list[int] | None) -> list[int] | None:
    """Those that the caller chose of the hidden states; None where it is a flag, as a number is for older transformers."""
    flags = (bool, type(None)) if COUNTS_EMBEDDING else (bool, type(None), int)
    if isinstance(output_hidden_states, flags):
        return None
    return [output_hidden_states] if isinstance(output_hidden_states, int) else list(output_hidden_states)


class Record:
    """What the caller asked to get back beside the text, one entry an emitted token, as plain `generate` gives it."""

    def __init__(self, generation_config: GenerationConfig):
        wanted = generation_config.return_dict_in_generate
        self.scores = () if wanted and generation_config.output_scores else None
        self.logits = () if wanted and generation_config.output_logits else None
        self.attentions = () if wanted and generation_config.output_attentions else None
        self.hidden_states = () if wanted and generation_config.output_hidden_states else None
        self.layers = selected_layers(generation_config.output_hidden_states)  # None: all

    @property
    def wants_scores(self) -> bool:
        return self.scores is not None or self.logits is not None

    @property
    def wants_states(self) -> bool:
        return self.attentions is not None or self.hidden_states is not None

    def add(self, scores: torch.Tensor | None, logits: torch.Tensor):
        """Of one step, each (B, V), scores only where they are recorded; a copy frees the rows of the block that were rejected."""
        if self.scores is not None:
            self.scores += (scores.clone(),)
        if self.logits is not None:
            self.logits += (logits.clone(),)

    def heed_choice(self, states: tuple | None, taps: list[int]):
        """Return all hidden states where the target ignores a choice of them, as older families do.

        Args:
            states: of a pass, by layer; None for those that the target left out.
            taps: indices of those that the drafter asked for.
        """
        if self.hidden_states is not None and self.layers is not None:
            asked = {i % len(states) for i in (*taps, *self.layers)}
            if any(state is not None for i, state in enumerate(states) if i not in asked):
                self.layers = None

    def add_states(self, outputs, fed: int, added: int, lengths: list | None):
        """Hidden states and attentions of the first `added` of the `fed` tokens of a pass.

        Args:
            lengths: by layer with keys, how many a pass over the first token alone would see, and how many at most; a window
                of fixed size as a number; None for room of fixed size. In place of the list None for the prompt's pass, of
                which everything is kept.
        """
        if self.hidden_states is not None:
            states = outputs.hidden_states
            if self.layers is not None:
                layers = {i % len(states) for i in self.layers if -len(states) <= i < len(states)}
                states = tuple(layer if i in layers else None for i, layer in enumerate(states))
            if lengths is None:
                self.hidden_states += (states,)
            else:
                first = next(layer.shape[1] for layer in outputs.hidden_states if layer is not None) - fed
                self.hidden_states += tuple(
                    tuple(None if layer is None else layer[:, first + i : first + i + 1].clone() for layer in states)
                    for i in range(added)
                )
        if self.attentions is not None:
            if lengths is None:
                self.attentions += (outputs.attentions,)
            else:
                self.attentions += tuple(
                    tuple(
                        None if layer is None else _attention_of_one(layer, fed, i, keys)
                        for layer, keys in zip(outputs.attentions, lengths)
                    )
                    for i in range(added)
                )


def _attention_of_one(weights: torch.Tensor, fed: int, i: int, keys: tuple[int, int] | int | None) -> torch.Tensor:
    """The weights (B, heads, 1, keys) that token `i` of `fed` would have alone, of those of the block's pass."""
    start, end = 0, weights.shape[-1]
    if isinstance(keys, int):
        if end != keys:  # a block that fills the window, or moves it on, sees the keys before it and its own
            end = end - fed + i + 1
            start = max(end - keys, 0)
        own = weights[:, :, i : i + 1, start:end]
        return torch.nn.functional.pad(own, (0, keys - own.shape[-1]))
    if keys is not None:
        end = end - fed + i + 1
        start = end - min(keys[0] + i, keys[1])
    return weights[:, :, i : i + 1, start:end].clone()
