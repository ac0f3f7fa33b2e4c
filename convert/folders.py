"""Folders that appear complete or not at all, and folders that one process at a time writes to."""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def new_folder(destination: str | Path, force: bool = False):
    """A folder to fill beside `destination`, renamed to it when the block ends without an error.

    Raises:
        FileExistsError: `destination` exists and `force` is not set; nothing is touched then.
    """
    destination = Path(destination).absolute()
    if destination.exists() and not force:
        raise FileExistsError(f"{destination} exists; choose another destination, or pass --force to replace it.")
    if destination.exists() and not (destination / "config.json").is_file():
        raise FileExistsError(f"{destination} exists and is no model folder (it has no config.json); not replacing it.")
    new_parents = [parent for parent in destination.parents if not parent.exists()]
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}-"))
        try:
            filling = beside / "new"
            filling.mkdir()
            yield filling
            if destination.exists():
                destination.rename(beside / "old")
            try:
                filling.rename(destination)
            except OSError:
                if (beside / "old").exists():
                    (beside / "old").rename(destination)
                raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except BaseException:
        for parent in new_parents:
            with contextlib.suppress(OSError):  # somebody else put something there
                parent.rmdir()
        raise


@contextlib.contextmanager
def one_writer(folder: str | Path):
    """Let no other process write to `folder` meanwhile; where one does, say so and wait for it.

    The lock is the operating system's: it ends with the process that holds it, however that ends.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{folder} is being written by another process; waiting for it.", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
