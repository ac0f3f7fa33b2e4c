"""A folder of ours on the Hub: weights, code and card in one commit."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..hub_files import code_files, write_text
from .card import RECORD, address_card, check_id
from .reading import read_ours

# What belongs to a drafter beside the files that hold its tensors; a folder may hold more, from optimizer states to secrets.
PATTERNS = (
    "config.json", "configuration_dflash.py", "model.safetensors.index.json", "custom_generate/generate.py", "README.md", "LICENSE*", RECORD
)  # fmt: skip


def push_drafter(
    folder: str | Path, repository: str, private: bool = True, dry_run: bool = False
) -> tuple[list[str], str | None]:
    """Upload a drafter's folder in one commit; creates the repository if there is none.

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
    card = (folder / "README.md").read_text(encoding="utf-8")
    write_text(folder / "README.md", address_card(card, repository))
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            allow_patterns=files,
            commit_message="Upload a DFlash drafter",
        )
    except HfHubHTTPError as error:
        raise OSError(f"the Hub refused: {error}") from error
    except HTTPError as error:
        raise OSError(f"the Hub cannot be reached: {error}") from error
    return files, commit.commit_url
