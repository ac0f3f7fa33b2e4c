"""What a command line needs: plain errors, the command as typed, progress, and what to do after an interruption."""

import contextlib
import errno
import os
import shlex
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .files import DiskFull, disk_is_full

LINE_SECONDS = 30.0  # between lines of progress where there is no terminal


class SteadyProgress(Progress):
    """A progress bar at a terminal; elsewhere a line on standard error now and then, so that a log shows that work goes on.

    Args:
        columns: of the bar.
        every: seconds between lines.
    """

    def __init__(self, *columns, disable: bool = False, every: float = LINE_SECONDS):
        console = Console(stderr=True)
        self.in_lines, self.every, self.last = not disable and not console.is_terminal, every, time.monotonic()
        super().__init__(*columns, console=console, transient=True, disable=disable or not console.is_terminal)

    def advance(self, task_id, advance: float = 1):
        super().advance(task_id, advance)
        now, task = time.monotonic(), self.tasks[self.task_ids.index(task_id)]
        if self.in_lines and now - self.last >= self.every:
            self.last = now
            left = f", {task.fields['speed']:.0f} tokens/s" if "speed" in task.fields else ""
            left += "" if task.time_remaining is None else f", about {duration(task.time_remaining)} left"
            print(
                f"{task.description}: {task.completed:.0f} of {task.total:.0f} after {duration(task.elapsed or 0)}{left}",
                file=sys.stderr, flush=True,
            )  # fmt: skip


def progress_bar(disable: bool = False) -> SteadyProgress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return SteadyProgress(*columns, disable=disable)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes as a person says them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def run_plainly(run: Callable, *arguments):
    """Run a command line. Bad input ends it with a sentence and exit code 2, as a wrong option does; 1 is a bad finding.

    With DFLASH_HUB_DEBUG set, it ends with the traceback.
    """
    try:
        run(*arguments)
    except Exception as error:
        expected = isinstance(error, (ValueError, OSError)) or disk_is_full(error)
        if os.environ.get("DFLASH_HUB_DEBUG") or not expected:
            raise
        print(f"dflash-hub: {sentence(error)}", file=sys.stderr)
        sys.exit(2)


def sentence(error: Exception) -> str:
    """An error as a sentence; those of the operating system name their file first."""
    if disk_is_full(error) and not isinstance(error, DiskFull) and getattr(error, "filename", None):
        return str(DiskFull(error.filename))
    if isinstance(error, OSError) and error.errno == errno.ENOENT and error.filename:
        return f"there is no file {error.filename}."
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error)


@contextlib.contextmanager
def interruptible(how_to_go_on: Callable[[], str]):
    """Let Ctrl-C end a command with a sentence: where it stopped, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ndflash-hub: stopped. {how_to_go_on()}", file=sys.stderr)
        sys.exit(130)


def typed_command(program: str = "dflash-hub") -> str:
    """What was typed, as it stands beside a number; it can be pasted."""
    return shlex.join([*program.split(), *sys.argv[1:]])


def command_line(*parts) -> str:
    """A command of ours with its arguments quoted, to be pasted."""
    return shlex.join(["dflash-hub", *map(str, parts)])
