"""Write the demo as a Space: `python -m dflash_hub.demo.space build/space`, or `make space`.

The folder is complete: `app.py`, the card with the Space's settings, its requirements, and this package with the shipped
drafter. Pushed as it is, it runs.
"""

import argparse
import shutil
from importlib.metadata import version
from pathlib import Path

from ..common.files import new_folder

ROOT = Path(__file__).parent.parent
APP = '''"""The Space's entry point; everything is in the package beside it."""

from dflash_hub.demo.app import main

main()
'''
# What the Space's image does not bring itself, in the versions that are installed here.
REQUIREMENTS = ("torch", "transformers", "accelerate", "safetensors")


def card() -> str:
    """The Space's README: its settings, and what it is."""
    return f"""---
title: DFlash, the same text in fewer passes
emoji: 🏁
colorFrom: green
colorTo: gray
sdk: gradio
sdk_version: {version("gradio")}
python_version: "3.11"
app_file: app.py
license: apache-2.0
short_description: Plain decoding against a DFlash drafter, side by side
models:
- HuggingFaceTB/SmolLM2-135M-Instruct
preload_from_hub:
- HuggingFaceTB/SmolLM2-135M-Instruct
---

# DFlash, the same text in fewer passes

SmolLM2-135M-Instruct against itself with a DFlash drafter, on the same CPU, in turns. Accepted draft tokens are marked,
and the numbers are measured while you look. The package with the drafter is in `dflash_hub/`; the method is described in
[arXiv 2602.06036](https://arxiv.org/abs/2602.06036).
"""


def write_space(folder: Path):
    """Write the Space into a new folder.

    Raises:
        FileExistsError: the folder holds something already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; remove it first, or name another folder.")
    if folder.exists():
        folder.rmdir()
    with new_folder(folder) as beside:
        _fill(beside)


def _fill(beside: Path):
    package = beside / "dflash_hub"
    for room in ("common", "convert", "demo"):  # what the app and the package itself import
        (package / room).mkdir(parents=True)
        for source in (*(ROOT / room).glob("*.py"), *(ROOT / room).glob("*.jsonl")):
            shutil.copy(source, package / room)
    for source in [*ROOT.glob("*.py"), ROOT / "config.json", ROOT / "model.safetensors", ROOT / "LICENSE"]:
        if source.name not in ("cli.py", "__main__.py"):
            shutil.copy(source, package)
    pins = [f"{name}=={version(name).partition('+')[0]}" for name in REQUIREMENTS]
    (beside / "requirements.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
    (beside / "README.md").write_text(card(), encoding="utf-8")
    (beside / "app.py").write_text(APP, encoding="utf-8")
    (beside / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Write the demo as a folder that is a Space.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_space(folder)
    print(f"wrote {folder}\nnext: hf upload YOUR_NAME/dflash-demo {folder} . --repo-type space")


if __name__ == "__main__":
    main()
