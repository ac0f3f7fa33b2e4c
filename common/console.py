"""What a command line needs: plain errors, the command as typed, progress bars."""

import os
import sys
from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(disable: bool = False) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, disable=disable, transient=True)


def run_plainly(run: Callable, *arguments):
    """Run a command line. Bad input ends it with a sentence and exit code 2, as a wrong option does; 1 is a bad finding.

    With DFLASH_HUB_DEBUG set, it ends with the traceback.
    """
    try:
        run(*arguments)
    except (ValueError, OSError) as error:
        if os.environ.get("DFLASH_HUB_DEBUG"):
            raise
        print(f"dflash-hub: {error}", file=sys.stderr)
        sys.exit(2)


def typed_command(program: str = "dflash-hub") -> str:
    """What was typed, as it stands beside a number."""
    return " ".join([program, *sys.argv[1:]])
