"""The baseline against DFlash on the same target, in turns: what the app shows, without the app.

Both write at the same time to the eye, but only one computes at any moment: after each round the one whose own clock is
behind goes on. So neither takes the other's cores, and the seconds of each are those that it would need alone.
"""

import itertools
import threading
import time
from collections.abc import Iterator

import torch

from ..decode_statistics import Speculation
from .pair import DraftedText, Pair

MAX_PROMPT_TOKENS = 512


class _Closed(Exception):
    """Ends a lane's thread in the middle of its call of `generate`."""


class Lane:
    """One call of `generate`, a round at a time; a streamer to it, and a thread that waits between rounds.

    Args:
        call: keyword arguments of `generate`.
        with_drafter: whether the pair's drafter takes part.
        seed: of torch's generator, set when the call begins.
    """

    def __init__(self, pair: Pair, call: dict, with_drafter: bool, seed: int):
        self.pair, self.call, self.with_drafter, self.seed = pair, call, with_drafter, seed
        self.text = DraftedText(pair.tokenizer)
        self.parts: list[tuple[str, bool]] = []
        self.pieces: list[list[int]] = []  # prefill gives the first, each round one more
        self.seconds = 0.0  # in which this lane computed
        self.output = None
        self.error: Exception | None = None
        self.closed = False
        self._prompt_seen = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self):
        """Let the call run until it has written the next piece, or is done.

        Raises:
            Exception: whatever the call raised.
        """
        self._go.release()
        self._paused.acquire()
        if self.error is not None:
            raise self.error

    def close(self):
        """End the call where it is; waits until its thread is gone."""
        self.closed = True
        self._go.release()
        self._thread.join()

    # What is shown.

    @property
    def done(self) -> bool:
        return self.output is not None

    @property
    def speculation(self) -> Speculation | None:
        return self.output.speculation if self.done and self.with_drafter else None

    @property
    def tokens(self) -> list[int]:
        return [*itertools.chain(*self.pieces)]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def passes(self) -> int:
        """Forward passes of the target."""
        return self.speculation.target_passes if self.speculation else len(self.pieces)

    @property
    def accepted(self) -> list[int]:
        """Accepted draft tokens, by round; while the call runs, a round is taken to end on the target's own token."""
        return self.speculation.accepted[0] if self.speculation else [len(piece) - 1 for piece in self.pieces[1:]]

    @property
    def acceptance_length(self) -> float | None:
        """Return the mean number of tokens that a round adds; None before the first round."""
        rounds = self.pieces[1:]
        return sum(map(len, rounds)) / len(rounds) if rounds else None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    # The call's own thread: a streamer that `generate` puts the prompt to, and then one round after the other.

    def put(self, value: torch.Tensor):
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        piece = value.flatten().tolist()
        self.seconds += time.perf_counter() - self._since
        self.pieces.append(piece)
        self.parts += self.text.add(piece, len(piece) - 1)
        self._paused.release()
        self._wait()

    def end(self):
        pass

    def _wait(self):
        self._go.acquire()
        if self.closed:
            raise _Closed
        self._since = time.perf_counter()

    def _run(self):
        try:
            self._wait()
            torch.manual_seed(self.seed)
            drafter = self.pair.drafter if self.with_drafter else None
            output = self.pair.target.generate(
                **self.call, assistant_model=drafter, streamer=self, return_dict_in_generate=True
            )
            self.seconds += time.perf_counter() - self._since
            if self.with_drafter:
                self._mark_last_round(output.speculation.accepted[0])
            self.parts += self.text.finish()
            self.output = output
        except _Closed:
            self.parts += self.text.finish()
            return
        except Exception as error:
            self.error = error
        self._paused.release()

    def _mark_last_round(self, accepted: list[int]):
        """The last round may have ended the text on a drafted token, which shows only now."""
        if accepted and accepted[-1] == len(self.pieces[-1]):
            self.text = DraftedText(self.pair.tokenizer)
            counts = [0, *accepted]
            self.parts = [part for piece, drafted in zip(self.pieces, counts) for part in self.text.add(piece, drafted)]


class Race:
    """The baseline and DFlash, one prompt, one seed.

    Args:
        settings: keyword arguments of `generate`, for both.
        drafts: tokens to draft a round, or "auto" for the adaptive draft length.

    Raises:
        ValueError: an empty prompt, one of more than `MAX_PROMPT_TOKENS` tokens, or of more than the target has positions.
    """

    def __init__(self, pair: Pair, prompt: str, seed: int, settings: dict, drafts: int | str = "auto"):
        if not prompt.strip():
            raise ValueError("The prompt is empty: write one, or take one of those offered.")
        inputs = pair.encode([{"role": "user", "content": prompt}])
        length = inputs["input_ids"].shape[1]
        if length > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"The prompt has {length} tokens, and this page takes {MAX_PROMPT_TOKENS}, so that others get their turn: "
                "shorten it, or run dflash-hub generate yourself."
            )
        self.settings = settings = pair.fitting(settings, inputs)
        call = {**inputs, **settings}
        # DFlash goes first: it takes its own seed from torch's generator when it begins, and the baseline keeps using that.
        self.dflash = Lane(pair, call | {"num_assistant_tokens": drafts}, True, seed)
        self.baseline = Lane(pair, call, False, seed)

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.dflash, self.baseline

    def run(self) -> Iterator["Race"]:
        """Yield this race after every round of either; whoever stops early closes the lanes by closing the iterator."""
        try:
            while not self.over:
                min((lane for lane in self.lanes if not lane.done), key=lambda lane: lane.seconds).step()
                yield self
        finally:
            for lane in self.lanes:
                lane.close()

    @property
    def over(self) -> bool:
        return all(lane.done for lane in self.lanes)

    @property
    def same_text(self) -> bool:
        """Whether both wrote the same tokens; of a race that is over."""
        return self.dflash.tokens == self.baseline.tokens
