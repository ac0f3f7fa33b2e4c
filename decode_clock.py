"""Seconds of a round, read where the loop waits for the device anyway."""

import time
from contextlib import contextmanager

import torch


class RoundClock:
    """Splits the time from one round's synchronization to the next into the drafter's and the rest.

    On a GPU the drafter's share is between two events, which are complete once the round has synchronized; no further
    synchronization is made.

    Args:
        device: of the drafter.
        wanted: whether anyone will ask for the times.
    """

    def __init__(self, device: torch.device, wanted: bool):
        self.on_gpu, self.wanted = device.type == "cuda", wanted
        self.marks = []
        self.last = 0.0

    def start(self):
        """Right after a synchronization: the first round begins."""
        self.last = time.perf_counter()

    @contextmanager
    def elsewhere(self):
        """Around what is no part of a round: a streamer may take its time."""
        start = time.perf_counter()
        yield
        self.last += time.perf_counter() - start

    def mark(self):
        """Before and after the drafter's work."""
        if not self.wanted:
            return
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def stop(self) -> tuple[float, float]:
        """Right after the round's synchronization: (seconds of the round less the drafter's, the drafter's)."""
        now, drafter = time.perf_counter(), 0.0
        if self.marks:
            start, end = self.marks
            drafter = start.elapsed_time(end) / 1e3 if self.on_gpu else end - start
        seconds, self.last, self.marks = now - self.last, now, []
        return max(seconds - drafter, 0.0), drafter
