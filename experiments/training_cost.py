"""What a training step costs: time, anchors a second and peak memory, and how they grow with anchors, block and length.

    python -m dflash_hub.experiments.training_cost --vary num_anchors --steps 2
    python -m dflash_hub.experiments.training_cost --base-only --num-anchors 16 --length 128 --layers 1 --steps 1   # a quick try

Each configuration runs in a process of its own, since a peak of memory is a process's. Texts are random tokens: the cost does
not depend on what they say.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..common.console import run_plainly, typed_command
from ..common.loading import load_target
from ..common.provenance import origin, peak_bytes
from ..common.smollm2 import smollm2
from ..target_model import embedding_rows
from ..training.data import Collator, PackedRows
from ..training.losses import BlockLoss, default_gamma
from ..training.options import TrainOptions
from ..training.train import fresh_drafter, training_arguments
from ..training.trainer import DFlashTrainer, checkpoint_activations

BASE = {"num_anchors": 64, "block_size": 8, "length": 256, "layers": 3, "gradient_checkpointing": False}
# One thing varies at a time.
VARIED = {
    "num_anchors": [16, 256],
    "block_size": [4, 16],
    "length": [128, 1024],
    "layers": [5],
    "gradient_checkpointing": [True],
}


def measure(
    target: str, num_anchors, block_size, length, layers, gradient_checkpointing, steps: int, dtype: str
) -> dict:
    """Seconds of a step of one row, and the process's peak memory, of which the models alone take a part."""
    loaded, _ = load_target(target, dtype)
    vocabulary = embedding_rows(loaded)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary // 2, vocabulary, (length,), generator=generator).tolist()
    row = {"id": "random", "turn": 0, "prompt_ids": tokens[: length // 4], "response_ids": tokens[length // 4 :]}
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(target, [], folder, layers=layers, block_size=block_size, max_steps=steps, batch_size=1)
        drafter = fresh_drafter(options, Path(folder))
        if gradient_checkpointing:
            checkpoint_activations(drafter)
        before = peak_bytes()
        arguments = training_arguments(options, 1, Path(folder))
        arguments.eval_strategy = arguments.save_strategy = "no"
        trainer = DFlashTrainer(
            drafter, loaded, arguments, PackedRows([row] * (steps + 1), None, 0), Collator(), BlockLoss("ce", default_gamma(block_size)),
            num_anchors, [], 0, 8,
        )  # fmt: skip
        trainer.train()
        started = time.perf_counter()
        trainer.train()
        seconds = (time.perf_counter() - started) / steps
    return {"seconds": seconds, "peak": peak_bytes(), "models": before}


def main(
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 3,
    vary: Annotated[list[str] | None, typer.Option(help=f"{', '.join(VARIED)}; repeatable. Default: all.")] = None,
    base_only: Annotated[bool, typer.Option("--base-only", help="Vary nothing: one configuration.")] = False,
    num_anchors: Annotated[int, typer.Option(min=1, help="Of the base.")] = BASE["num_anchors"],
    block_size: Annotated[int, typer.Option(min=2, help="Of the base.")] = BASE["block_size"],
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row, of the base.")] = BASE["length"],
    layers: Annotated[int, typer.Option(min=1, help="Of the base.")] = BASE["layers"],
    dtype: Annotated[str, typer.Option(help="Of the target.")] = "float32",
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
):
    """Print the table."""
    target = target or smollm2()[0]
    if one is not None:
        typer.echo("RESULT " + json.dumps(measure(target, **json.loads(one), steps=steps, dtype=dtype)))
        return
    base = BASE | {"num_anchors": num_anchors, "block_size": block_size, "length": length, "layers": layers}
    unknown = sorted(set(vary or []) - set(VARIED))
    if unknown:
        raise ValueError(f"--vary {unknown[0]!r} is none of {', '.join(VARIED)}.")
    varied = [] if base_only else vary or VARIED
    configurations = [base] + [base | {name: value} for name in varied for value in VARIED[name]]
    typer.echo(
        "| anchors a row | block | tokens a row | layers | checkpointing | seconds a row | anchors/s | peak memory | of it models |"
    )
    typer.echo("|---|---|---|---|---|---|---|---|---|")
    for configuration in configurations:
        command = [
            sys.executable,
            "-m",
            "dflash_hub.experiments.training_cost",
            "--target",
            target,
            "--steps",
            str(steps),
            "--dtype",
            dtype,
        ]
        done = subprocess.run([*command, "--one", json.dumps(configuration)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{configuration} failed: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.split("RESULT ")[1])
        c = configuration
        anchors = min(c["num_anchors"], c["length"] - c["length"] // 4 - 1)
        typer.echo(
            f"| {anchors} | {c['block_size']} | {c['length']} | {c['layers']} | {'on' if c['gradient_checkpointing'] else 'off'} | "
            f"{found['seconds']:.2f} | {anchors / found['seconds']:.0f} | {found['peak'] / 2**30:.2f} GiB | {found['models'] / 2**30:.2f} GiB |"
        )
    typer.echo("\n" + origin(typed_command("python -m dflash_hub.experiments.training_cost")))


if __name__ == "__main__":
    run_plainly(typer.run, main)
