"""What a conversion costs: peak resident memory, which stays far below the size of the drafter, and seconds.

    python -m dflash_hub.experiments.conversion_memory --parameters 60000000

Random weights with the proportions of Qwen3-8B-DFlash-b16. Each command runs in a process of its own, since a peak of memory is
a process's.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..common.console import run_plainly, typed_command
from ..common.provenance import origin, resident_bytes
from ..configuration_dflash import DFlashConfig
from ..modeling_dflash import DFlashDraftModel

PROGRAM = "python -m dflash_hub.experiments.conversion_memory"


def make(folder: str, parameters: int):
    """Save a drafter in bfloat16: 5 layers of 11.5 width^2 parameters, and a context projection of 5 width^2."""
    width = max(1, round((parameters / 62.5) ** 0.5 / 128)) * 128
    config = DFlashConfig(
        vocab_size=151936, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=5, num_attention_heads=32,
        num_key_value_heads=8, head_dim=width // 32, max_position_embeddings=40960, rope_parameters={"rope_theta": 1e6},
        block_size=16, mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33], num_target_layers=36,
    )  # fmt: skip
    DFlashDraftModel._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


# A process starts with the peak of the one that started it, so a small one stands between.
LAUNCHER = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
)


def measure(command: list[str], folder: str | None = None) -> tuple[int, float]:
    """(peak resident bytes, seconds) of a process that runs in `folder`.

    Raises:
        ValueError: it failed.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True, cwd=folder
    )
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with exit code {done.returncode}.")
    return resident_bytes(int(done.stdout)), time.perf_counter() - started


def main(
    parameters: Annotated[int, typer.Option(min=1, help="Of the drafter, about.")] = 62 * 2**24 + 2**23,
    only_make: Annotated[str | None, typer.Option(hidden=True)] = None,
):
    """Print the table."""
    if only_make is not None:
        make(only_make, parameters)
        return
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, so that this one stays small.
        making = [
            "-m",
            "dflash_hub.experiments.conversion_memory",
            "--parameters",
            str(parameters),
            "--only-make",
            "ours",
        ]
        convert = ["-m", "dflash_hub"]
        commands = {
            "`dflash-hub export ours zlab`": [*convert, "export", "ours", "zlab"],
            "`dflash-hub import zlab back`": [*convert, "import", "zlab", "back"],
            "the same imports of Python, nothing else": ["-c", "import dflash_hub.convert.importing"],
        }
        measure([sys.executable, *making], folder)
        size = Path(folder, "ours", "model.safetensors").stat().st_size
        typer.echo(
            f"| {size / 2e9:.2f} billion parameters in bfloat16, {size / 1e9:.1f} GB | peak resident memory | seconds |"
        )
        typer.echo("|---|---|---|")
        for name, command in commands.items():
            peak, seconds = measure([sys.executable, *command], folder)
            typer.echo(f"| {name} | {peak / 1e6:.0f} MB | {seconds:.1f} |")
    typer.echo("\n" + origin(typed_command(PROGRAM)))


if __name__ == "__main__":
    run_plainly(typer.run, main)
