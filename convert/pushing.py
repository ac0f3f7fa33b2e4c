"""A folder of ours on the Hub: weights, code and card in one commit."""

import shlex
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..hub_files import RECORD, WEIGHT_FILES, code_files, write_text
from .card import address_card, check_id
from .reading import read_ours

# What belongs to a drafter beside the files that hold its tensors; a folder may hold more, from optimizer states to secrets.
PATTERNS = (
    "config.json", "configuration_dflash.py", "model.safetensors.index.json", "custom_generate/generate.py", "README.md", "LICENSE*", RECORD
)  # fmt: skip


def push_drafter(
    folder: str | Path, repository: str, private: bool = True, dry_run: bool = False
) -> tuple[list[str], str | None]:
    """Upload a drafter's folder in one commit; creates the repository if there is none.

    The same commit deletes weights and a training record that the repository holds and this folder does not: readers would
    take the old weights for the new ones. An upload that fails changes nothing, here or on the Hub.

    Args:
        private: of a repository that is created; an existing one keeps its visibility.
        dry_run: only say what would be uploaded.

    Returns:
        (files, url of the commit or None).

    Raises:
        ValueError, OSError: the folder is no complete drafter of ours, or the Hub refuses or cannot be reached.
    """
    folder = Path(folder)
    weights = {tensor.file for tensor in read_ours(folder).match.drafter.values()}
    check_id(repository)
    others = {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()} | {*code_files(folder)}
    files = sorted(path.relative_to(folder).as_posix() for path in weights | others)
    needed = ("README.md", "configuration_dflash.py", "modeling_dflash.py", "custom_generate/generate.py")
    missing = [name for name in needed if name not in files]
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}; `dflash-hub import {shlex.quote(str(folder))} NEW` writes a complete folder."
        )
    if dry_run:
        return files, None
    card = address_card((folder / "README.md").read_text(encoding="utf-8"), repository)
    contents = {name: str(folder / name) for name in files} | {"README.md": card.encode()}
    api = HfApi()
    try:
        created = not api.repo_exists(repository)
        if created:
            api.create_repo(repository, private=private)
        try:
            there = [] if created else api.list_repo_files(repository)
            stale = [name for name in there if name not in files and superseded(name)]
            operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
            operations += [CommitOperationDelete(name) for name in stale]
            commit = api.create_commit(repository, operations, commit_message="Upload a DFlash drafter")
        except BaseException:
            if created:
                api.delete_repo(repository)
            raise
    except HfHubHTTPError as error:
        raise OSError(f"the Hub refused: {error}. Nothing was changed.") from error
    except HTTPError as error:
        raise OSError(f"the Hub cannot be reached: {error}. Nothing was changed.") from error
    write_text(folder / "README.md", card)
    return files + [f"{name} (deleted, of the drafter before)" for name in stale], commit.commit_url


def superseded(name: str) -> bool:
    """Whether a file of a repository holds what each drafter has of its own: weights, or the record of its training."""
    return name == RECORD or any(fnmatch(name, pattern) for pattern in WEIGHT_FILES)
