"""A drafter of any known format becomes a complete folder of ours."""

import contextlib
import copy
import io
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.files import new_folder
from ..common.target_source import TargetSource
from ..configuration_dflash import DFlashConfig
from ..modeling_dflash import DFlashDraftModel
from .checkpoint import InMemory, Stored, write_tensors
from .reading import LAYOUTS, OURS, check_borrowed, read_drafter


@dataclass
class Imported:
    """What an import did, or with `dry_run` would do.

    Attributes:
        title: the format that was recognized.
        lines: of each tensor of the file, what became of it.
    """

    title: str
    config: DFlashConfig
    lines: list[tuple[str, str]]
    notes: list[str]


def import_drafter(
    source: str,
    destination: str | Path | None,
    force: bool = False,
    target: str | TargetSource | None = None,
    chat: bool | None = None,
    thinking: bool | None = None,
    revision: str | None = None,
    config_file: str | None = None,
    allow_pickle: bool = False,
    check_target: bool = True,
    dry_run: bool = False,
) -> Imported:
    """Turn a checkpoint (folder or Hub repository) of any known format into a complete folder of ours.

    A folder of ours is written anew: with the code and the config format of the installed version.

    Args:
        target, chat, thinking: what the drafter was made for, recorded in the config; most formats have no place for it.
            `target` is also where copies of its tensors are compared with, and where its depth comes from.
        check_target: False drops copies of the target's embedding and head without comparing them.
        dry_run: look only; `destination` may be None then.

    Raises:
        ValueError, OSError: see `read_drafter` and `check_borrowed`.
        FileExistsError: see `new_folder`.
    """
    drafter = read_drafter(source, target, revision, config_file, allow_pickle)
    config, notes = drafter.config, []
    for name, value in (("target_chat", chat), ("target_thinking", thinking)):
        if value is not None:
            setattr(config, name, value)
    if target is not None:
        config.target_revision = TargetSource.of(target).recorded_revision or config.target_revision
    if drafter.match.borrowed and not check_target:
        notes.append(f"{', '.join(drafter.match.borrowed)}: dropped, and not compared with the target")
    elif drafter.match.borrowed:
        original = target or config.target_name_or_path
        if original is None:
            raise ValueError(
                f"{source!r} holds copies of the target's tensors, and does not say of which; pass --target to compare them, or "
                "--no-check-target to drop them as they are."
            )
        original = TargetSource.of(original).for_drafter(config)
        check_borrowed(drafter, original)
        notes.append(f"{', '.join(drafter.match.borrowed)}: equal to those of {original.path}, dropped")
    if not dry_run:
        with new_folder(destination, force) as folder:
            write_drafter(folder, config, drafter.match.drafter)
    title = LAYOUTS[drafter.layout].title if drafter.layout != OURS else "a folder of ours"
    return Imported(title, config, drafter.match.lines, notes)


def write_drafter(folder: Path, config: DFlashConfig, tensors: dict[str, Stored | InMemory]):
    """A complete folder of ours: config, code, `custom_generate/`, card, and the tensors piece by piece."""
    with torch.device("meta"):
        model = DFlashDraftModel(copy.deepcopy(config)).to(config.dtype)
    # transformers announces weights that are none; ours follow.
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, state_dict={})
    write_tensors(folder / "model.safetensors", tensors)
