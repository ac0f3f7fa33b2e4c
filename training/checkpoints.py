"""Checkpoints of a run: each is saved with a list of its files, so that damage is seen before a run goes on from it."""

import json
import sys
from pathlib import Path

import accelerate
from transformers import TrainerCallback

from ..common.files import read_json
from ..hub_files import write_text
from .features import checksum

FILES = "files.json"


class FileLists(TrainerCallback):
    """Lists the files of a checkpoint, with sizes and checksums, once all of them are written."""

    def on_save(self, args, state, control, **kwargs):
        accelerate.PartialState().wait_for_everyone()  # each process saves a random state of its own
        if state.is_world_process_zero:
            list_files(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def list_files(checkpoint: Path):
    """Write `files.json`: by name, bytes and checksum of every file of a checkpoint."""
    paths = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != FILES]
    files = {path.relative_to(checkpoint).as_posix(): [path.stat().st_size, checksum(path)] for path in paths}
    write_text(checkpoint / FILES, json.dumps(files, indent=1))


def damage(checkpoint: Path) -> str | None:
    """Say what is wrong with a checkpoint that was saved to its end, None where it is whole."""
    try:
        files = read_json(checkpoint / FILES)
    except ValueError as error:
        return str(error)
    for name, (size, expected) in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
        if checksum(path) != expected:
            return f"{name} is not what was written (checksum)"
    return None


def not_resumable(checkpoint: Path) -> str | None:
    """Say why a run cannot go on from a checkpoint, None where it can."""
    if found := damage(checkpoint):
        return found
    names = [*read_json(checkpoint / FILES)]
    for state in ("optimizer", "scheduler"):
        if not any(name.startswith(state) for name in names):
            return f"it holds no {state} state (save_only_model)"
    return None


def saved_checkpoints(output: Path) -> list[Path]:
    """The checkpoints of a run that were saved to their end, the newest first."""
    folders = [path for path in (output / "checkpoints").glob("checkpoint-*") if (path / FILES).exists()]
    return sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True)


def resumable_checkpoint(output: Path) -> Path | None:
    """The newest checkpoint that a run can go on from; None where none was saved to its end yet.

    Says which checkpoints are left out, and why.

    Raises:
        ValueError: there are checkpoints, but none to go on from; says what is wrong with each.
    """
    left_out, chosen = [], None
    for folder in (output / "checkpoints").glob("checkpoint-*"):
        if not (folder / FILES).exists():
            left_out.append(f"{folder.name}: its saving was interrupted")
    saved = saved_checkpoints(output)
    for folder in saved:
        if reason := not_resumable(folder):
            left_out.append(f"{folder.name}: {reason}")
        elif chosen is None:
            chosen = folder
    if saved and chosen is None:
        raise ValueError(
            f"no checkpoint in {output}/checkpoints can be resumed: {'; '.join(left_out)}. Start anew with another --output; "
            "--drafter takes the weights of a checkpoint along."
        )
    if left_out and accelerate.PartialState().is_main_process:
        where = chosen.name if chosen is not None else "the first step"
        print(f"left out: {'; '.join(left_out)}. The run goes on from {where}.", file=sys.stderr)
    return chosen


def best_checkpoint(output: Path, best: str | None) -> Path:
    """The checkpoint with the best evaluation, or the newest one where there is none or it is damaged, which is said.

    Raises:
        ValueError: none is whole.
    """
    candidates = [Path(best)] if best is not None else []
    for folder in [*candidates, *saved_checkpoints(output)]:
        if (reason := damage(folder)) is None:
            return folder
        print(f"{folder} is left out: {reason}.", file=sys.stderr)
    raise ValueError(f"no checkpoint in {output}/checkpoints is whole, so no drafter can be made of them.")
