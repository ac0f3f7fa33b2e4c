"""The state of one call: the text, which sequences have finished, and what `generate` prepared."""

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .decode_outputs import OutputRecorder
from .decode_schedule import DraftSchedule, FixedSchedule
from .decode_statistics import Speculation
from .target_ranks import TargetRanks


class TokenBuffer:
    """Accepted tokens of every sequence, with its padding, in a buffer that grows by doubling, so that no round copies them.

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
        """Make room for `count` more tokens in every sequence."""
        rows, capacity = self.ids.shape
        if max(self.lengths) + count > capacity:
            self.ids = torch.cat([self.ids, self.ids.new_zeros(rows, max(capacity, count))], dim=1)

    def view(self, rows: slice, ahead: int = 0) -> torch.LongTensor:
        """Return the tokens (r, length + ahead) of sequences of equal length, the last of them only written ahead."""
        return self.ids[rows, : self.lengths[rows.start] + ahead]

    def write_ahead(self, rows: slice, tokens: torch.LongTensor, after: int = 0):
        """Write tokens (r, n) behind the end of sequences of equal length, which stays where it is: no text is copied.

        Args:
            after: how far behind the end.
        """
        start = self.lengths[rows.start] + after
        self.ids[rows, start : start + tokens.shape[1]] = tokens

    def anchor(self) -> torch.LongTensor:
        """Return the newest token (B, 1) of every sequence."""
        if min(self.lengths) == max(self.lengths):
            return self.ids[:, self.lengths[0] - 1 : self.lengths[0]]
        return torch.stack([row[length - 1 : length] for row, length in zip(self.ids, self.lengths)])

    def finished(self) -> torch.LongTensor:
        """(B, longest) as plain `generate` returns it."""
        longest = max(self.lengths)
        ids = self.ids[:, :longest].clone()
        for row, length in zip(ids, self.lengths):
            if length < longest:
                row[length:] = self.pad_token_id
        return ids


class StoppingState:
    """Which sequences have finished, asked once per emitted token and in order, as in plain `generate`.

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


@dataclass
class Call:
    """What `generate` prepared for the loop, and what the caller handed past it.

    Args:
        processors, criteria, config, model_kwargs: as prepared by `generate`.
        passed_cache: the caller's cache, who may go on with it although the call fails; None without one.
        read_prefix: whether the proposer reads a prefix that comes in a cache without its context.
        schedule: chooses how many tokens to draft.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict
    streamer: object | None
    passed_cache: Cache | None
    read_prefix: bool
    schedule: DraftSchedule | FixedSchedule

    @property
    def keeps_cache(self) -> bool:
        """Whether the KV cache outlives the call."""
        return self.config.return_dict_in_generate or self.passed_cache is not None


class DecodeState:
    """The text of one call as far as it is written, which sequences have finished, and what is recorded.

    Args:
        input_ids: (B, prompt).
        ranks: the processes that share the target.
    """

    def __init__(self, input_ids: torch.LongTensor, call: Call, ranks: TargetRanks):
        self.prompt, self.ranks = input_ids, ranks
        self.batch, self.device = input_ids.shape[0], input_ids.device
        pad = call.config._pad_token_tensor
        self.text = TokenBuffer(input_ids, None if pad is None else int(pad))
        self.stopping = StoppingState(call.criteria, self.batch, ranks)
        self.recorder = OutputRecorder(call.config)
        self.speculation = Speculation.of_rows(self.batch)
        self.prefix: torch.LongTensor | None = None  # what came in the cache
        self.lockstep = True  # whether all sequences advance by one count
        if self.recorder.attentions is not None and self.batch > 1:
            raise ValueError(
                f"`output_attentions` is supported for one sequence, got {self.batch}, together with a DFlash drafter. Call "
                "`generate` for each of them."
            )

    @property
    def finished(self) -> bool:
        """Whether every sequence has finished."""
        return all(self.stopping.ended)

    @property
    def resting(self) -> list[bool]:
        """By sequence, whether it has finished and is only padded from here on."""
        return [self.stopping.resting(row) for row in range(self.batch)]

    @property
    def running(self) -> list[int]:
        """Sequences that go on."""
        return [row for row, ended in enumerate(self.resting) if not ended]

    @property
    def groups(self) -> list[slice]:
        """Sequences that advance together."""
        return [slice(0, self.batch)] if self.lockstep else [slice(row, row + 1) for row in range(self.batch)]

    @property
    def anchor(self) -> torch.LongTensor:
        """The newest token (B, 1) of every sequence."""
        return self.text.anchor()
