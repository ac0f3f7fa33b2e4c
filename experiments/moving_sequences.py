"""What it costs that rows of a batch accept different counts: seconds of moving keys and values over those of the round's pass.

    python -m dflash_hub.experiments.moving_sequences --rows 4 --max-new-tokens 48

Both are taken in the same round, so that drift of the machine hits both alike, as the thread's own seconds on a CPU (others
that run beside it do not count; set OMP_NUM_THREADS=1), and the clock's on a GPU.
"""

import functools
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..benchmark.bench import Bench
from ..benchmark.rows import batch_inputs, check_counts, now
from ..common.console import run_plainly, typed_command
from ..common.prompts import DEMO_PROMPTS, load_prompts
from ..common.provenance import origin
from ..common.smollm2 import smollm2
from ..target_cache import CacheRollback


def measure(bench: Bench, inputs: dict) -> dict[str, list[float]]:
    """Seconds of the cache's commit over seconds of the target's pass, one ratio a round: by whether rows moved."""
    ratios, passes = {"rows moved": [], "all rows by the same count": []}, []
    kwargs = {**inputs, **bench.settings, "assistant_model": bench.drafter}
    # The first call with a target also checks it, and moves rows for that.
    bench.target.generate(**kwargs | {"max_new_tokens": 4}, num_assistant_tokens=1)
    run, commit, trim = bench.target.forward, CacheRollback.commit, CacheRollback.trim

    @functools.wraps(run)  # `generate` looks at its signature
    def timed_pass(*args, **kwargs):
        start = _now(bench.target.device)
        outputs = run(*args, **kwargs)
        passes.append(_now(bench.target.device) - start)
        return outputs

    def timed_commit(rollback, fed, added):
        start = _now(bench.target.device)
        result = commit(rollback, fed, added)
        seconds = _now(bench.target.device) - start
        ratios["rows moved" if min(added) < max(added) else "all rows by the same count"].append(seconds / passes[-1])
        return result

    def timed_trim(rollback, count):
        start = _now(bench.target.device)
        trim(rollback, count)
        ratios["rows moved"][-1] += (_now(bench.target.device) - start) / passes[-1]

    bench.target.forward, CacheRollback.commit, CacheRollback.trim = timed_pass, timed_commit, timed_trim
    try:
        bench.target.generate(**kwargs, num_assistant_tokens=bench.drafter.config.block_size - 1)
    finally:
        del bench.target.forward
        CacheRollback.commit, CacheRollback.trim = commit, trim
    return ratios


def _now(device: torch.device) -> float:
    return now(device) if device.type == "cuda" else time.thread_time()


def run(
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Default: the shipped one.")] = None,
    dtype: str = "float32",
    rows: Annotated[int, typer.Option(min=2, help="Prompts in one call.")] = 4,
    max_new_tokens: int = 48,
):
    """Print the ratios as a Markdown table, with what they were measured on."""
    bench = Bench(
        target or smollm2()[0], drafter or str(Path(__file__).parent.parent), None, dtype, max_new_tokens, 0.0, None
    )
    prompts = load_prompts(str(DEMO_PROMPTS), rows, None)
    check_counts([prompts], [rows])
    inputs = batch_inputs(bench, prompts[1])
    print("| commit of the cache / pass of the target | rounds | median | quartiles |\n|---|---|---|---|")
    for name, values in measure(bench, inputs).items():
        if len(values) > 1:
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"| {name} | {len(values)} | {middle:.4f} | {low:.4f} to {high:.4f} |")
    print("\n" + origin(typed_command("python -m dflash_hub.experiments.moving_sequences")))


if __name__ == "__main__":
    run_plainly(typer.run, run)
