"""Files and folders: read with a clear error, written whole or not at all."""

import contextlib
import errno
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

LARGEST_JSON = 64 * 2**20


# By these parts of their messages errors of safetensors and torch are known that come from a full disk.
FULL_DISK = ("No space left on device", "PytorchStreamWriter failed writing", "inline_container.cc", "iostream error")


class DiskFull(OSError):
    """The disk is full, with the path that was being written."""

    def __init__(self, path: str | Path):
        super().__init__(f"the disk is full: {path} could not be written. Free some space, and run the command again.")


def disk_is_full(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that the disk is full. safetensors and torch have errors of their own."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(part in str(error) for part in FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def writing(path: str | Path):
    """Name the path in the error of a full disk, which often names none.

    Raises:
        DiskFull: names the path.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFull) or not disk_is_full(error):
            raise
        raise DiskFull(path) from error


def refuse_other_content(folder: str | Path, *markers: str):
    """Refuse to fill a folder that holds something else: two things in one folder would be taken for one.

    Args:
        markers: files by which the command knows a folder of its own.

    Raises:
        ValueError: it holds files, and none of these; names some.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; pass a folder as --output.")
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    if found and not any((folder / name).exists() for name in markers):
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        raise ValueError(f"{folder} holds something else ({shown}); pass a new or an empty folder as --output.")


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
            with writing(destination):
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
def new_file(destination: str | Path, force: bool = False):
    """A path beside `destination` to write to, renamed to it when the block ends without an error.

    Raises:
        FileExistsError: `destination` exists and `force` is not set, or is a folder; nothing is touched then.
    """
    destination = Path(destination).absolute()
    if destination.is_dir():
        raise FileExistsError(f"{destination} is a folder; name a file.")
    if destination.exists() and not force:
        raise FileExistsError(f"{destination} exists; choose another destination, or pass --force to replace it.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    beside = destination.with_name(f".{destination.name}.part")
    try:
        yield beside
        beside.replace(destination)
    finally:
        beside.unlink(missing_ok=True)


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


def in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_json(path: Path, *fields: str) -> dict:
    """The object in a file, which must have `fields`.

    Raises:
        ValueError: it is no JSON object, or lacks one of them; names the file.
    """
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; that is no config and no index.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON, truncated perhaps: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(found).__name__}.")
    if missing := [name for name in fields if name not in found]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it is damaged, or was not written by dflash-hub.")
    return found


def json_lines(path: Path) -> Iterator[str]:
    """Read a JSONL file line by line; `splitlines` would also break at separators that a JSON string may hold.

    Raises:
        ValueError: it is no UTF-8; names the file.
    """
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        try:
            for line in file:
                yield line.removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is no text in UTF-8, so no JSON lines: {error.reason} at byte {error.start}."
            ) from None


def refuse_repeated(what: str, names: list[str]):
    if again := repeated(names):
        raise ValueError(
            f"several times the {what} {again[0]!r}, so its records could not be told apart; name it once."
        )


def repeated(names) -> list:
    """What is named more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def appending(path: Path):
    """A file of JSON lines, open for further ones: a line that an interruption cut is ended first."""
    cut = path.exists() and not (b"\n" + path.read_bytes()).endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    file.write("\n" * cut)
    return file


def complete_lines(path: Path) -> list[dict]:
    """Of a file of JSON lines, where it exists; a line that an interruption cut is left out."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def read_yaml(text: str, source: str):
    """Read YAML in which only `true` and `false` are booleans, as in version 1.2: `no`, `on` and `y` are text.

    Raises:
        ValueError: it is no YAML; names the source.
    """
    import yaml

    boolean = "tag:yaml.org,2002:bool"

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [(tag, rule) for tag, rule in rules if tag != boolean]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver(boolean, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is no YAML: {' '.join(str(error).split())}") from error
