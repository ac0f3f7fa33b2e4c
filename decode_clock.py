"""Seconds of a round, read where the loop waits for the device anyway."""

import sys
import time
from contextlib import contextmanager

import torch


class RoundClock:
    """Splits the time from one round's synchronization to the next into the drafter's and the rest.

    On a GPU the drafter's share is between two events, which are complete once the round has synchronized; no further
    synchronization is made.

    Where all work is done by this process on a CPU, seconds are those of the calling thread, which takes part in all of it.
    Time in which other processes had the core is no cost of a pass, and can be several times as long.

    Args:
        device: of the drafter.
        wanted: whether anyone will ask for the times.
        own_work: whether the calling thread waits for no device, disk or other process.
    """

    def __init__(self, device: torch.device, wanted: bool, own_work: bool = False):
        self.on_gpu, self.wanted = device.type == "cuda", wanted
        # The thread's clock of Windows is too coarse.
        self.now = time.thread_time if own_work and sys.platform != "win32" else time.perf_counter
        self.marks = []
        self.last = 0.0

    def start(self):
        """Right after a synchronization: the first round begins."""
        self.last = self.now()

    @contextmanager
    def elsewhere(self):
        """Around what is no part of a round: a streamer may take its time."""
        start = self.now()
        yield
        self.last += self.now() - start

    def mark(self):
        """Before and after the drafter's work."""
        if not self.wanted:
            return
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(self.now())

    def stop(self) -> tuple[float, float]:
        """Right after the round's synchronization: (seconds of the round less the drafter's, the drafter's)."""
        now, drafter = self.now(), 0.0
        if self.marks:
            start, end = self.marks
            drafter = start.elapsed_time(end) / 1e3 if self.on_gpu else end - start
        seconds, self.last, self.marks = now - self.last, now, []
        return max(seconds - drafter, 0.0), drafter
