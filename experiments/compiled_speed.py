"""What compiling brings: tokens a second of the baseline and of a drafter, eager and compiled, side by side.

    python -m dflash_hub.experiments.compiled_speed --count 4 --max-new-tokens 96 --repeats 3

Compiled calls have a static KV cache and go through `compile_config`, as on a GPU; a CPU is asked for by transformers' own switch for
tests. One turn of all methods warms up, in which everything is compiled. Then methods take turns, prompt by prompt.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch._dynamo.utils import counters
from transformers import CompileConfig

from ..benchmark.bench import Bench, provenance
from ..common.console import run_plainly, typed_command
from ..common.prompts import DEMO_PROMPTS, load_prompts
from ..common.smollm2 import smollm2
from ..common.tables import table

MODES = {"cuda": "reduce-overhead"}  # elsewhere there are no graphs to replay


def calls(bench: Bench, room: int) -> dict[str, dict]:
    """Return the arguments of `generate` by method."""
    config = CompileConfig(mode=MODES.get(bench.target.device.type))
    config._compile_all_devices = True
    fast = {"cache_implementation": "static", "max_cache_len": room, "compile_config": config}
    drafted = {"assistant_model": bench.drafter}
    return {
        "baseline, eager": {}, "baseline, compiled": fast, "drafter, eager": drafted, "drafter, compiled": drafted | fast,
    }  # fmt: skip


@torch.no_grad()
def measure(bench: Bench, rows: list[dict], repeats: int) -> tuple[dict[str, list[float]], set[str]]:
    """Return tokens a second by method, and the methods that wrote another text than the eager baseline.

    Raises:
        ValueError: something was compiled after the warm-up.
    """
    prompts = [bench.inputs(row) for row in rows]
    new = bench.settings["max_new_tokens"]
    methods = calls(bench, max(inputs["input_ids"].shape[1] for inputs in prompts) + new)
    speeds, others, graphs = {name: [] for name in methods}, set(), 0
    for repeat in range(repeats + 1):
        for inputs in prompts:
            texts = {}
            for name, arguments in methods.items():
                start = time.perf_counter()
                output = bench.target.generate(**inputs, **bench.settings, **arguments)
                texts[name] = output.tolist()
                seconds = time.perf_counter() - start
                if repeat:
                    speeds[name].append((output.shape[1] - inputs["input_ids"].shape[1]) / seconds)
            others |= {name for name, text in texts.items() if text != texts["baseline, eager"]}
        if repeat and counters["stats"]["unique_graphs"] > graphs:
            raise ValueError(f"{counters['stats']['unique_graphs'] - graphs} graphs were compiled after the warm-up")
        graphs = counters["stats"]["unique_graphs"]
    return speeds, others


def run(
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Default: the shipped one.")] = None,
    dtype: str = "float32",
    max_new_tokens: int = 96,
    count: Annotated[int, typer.Option(min=2, help="Prompts.")] = 4,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
):
    """Print medians as a Markdown table, with what they were measured on."""
    bench = Bench(
        target or smollm2()[0], drafter or str(Path(__file__).parent.parent), None, dtype, max_new_tokens, 0.0, None
    )
    _, rows = load_prompts(str(DEMO_PROMPTS), count, None)
    speeds, others = measure(bench, rows, repeats)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(
        table(
            ["method", "tokens a second", "over the eager baseline", "text"],
            [
                [
                    name,
                    f"{speed:.1f}",
                    f"{speed / medians['baseline, eager']:.2f}",
                    "another" if name in others else "same",
                ]
                for name, speed in medians.items()
            ],
        )
    )
    command = typed_command("python -m dflash_hub.experiments.compiled_speed")
    print("\n" + ", ".join(f"{name} {value}" for name, value in provenance(command, bench).items()))


if __name__ == "__main__":
    run_plainly(typer.run, run)
