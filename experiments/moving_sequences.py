"""Measure what it costs that sequences of a batch accept different counts: moving keys and values, over the round's forward pass.

    python -m dflash_hub.experiments.moving_sequences --rows 4 --max-new-tokens 48

Both are taken in the same round, so that drift of the machine hits both alike, as the thread's own seconds on a CPU (others
that run beside it do not count; set OMP_NUM_THREADS=1), and the clock's on a GPU.
"""

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
from ..drafter_candidates import DFlashProposer
from ..drafter_draft import AcceptedTokens, Draft, Plan
from ..generation_dflash import speculative_generate

MOVED, EVEN = "sequences moved", "all by the same count"


class CommitClock(DFlashProposer):
    """The drafter's proposer, which times what the loop does between its calls and the target's forward passes.

    From the end of `read` to the next `propose` the loop moves the target's KV cache and plans the next round, which is a few
    numbers.
    """

    def __init__(self, drafter, target):
        super().__init__(drafter, target)
        self.ratios: dict[str, list[float]] = {MOVED: [], EVEN: []}
        self.pass_start = self.pass_seconds = self.read_end = 0.0
        self.kind, self.started = EVEN, False

    def before_pass(self, *args):
        self.pass_start = _now(self.device)

    def after_pass(self, *args):
        self.pass_seconds = _now(self.device) - self.pass_start

    def read(self, accepted: AcceptedTokens):
        super().read(accepted)
        self.kind = EVEN if accepted.counts is None else MOVED
        self.read_end = _now(self.device)

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        if self.started:
            self.ratios[self.kind].append((_now(self.device) - self.read_end) / self.pass_seconds)
        self.started = True  # what is before the first round is the prefill
        return super().propose(anchor, plan, sampler)


def measure(bench: Bench, inputs: dict) -> dict[str, list[float]]:
    """Return the ratio of each round: seconds after `read` over seconds of the target's forward pass, by whether sequences moved."""
    most, settings = bench.drafter.config.block_size - 1, {**inputs, **bench.settings}
    # The first call with a target also checks it, and moves sequences for that.
    bench.target.generate(**settings | {"max_new_tokens": 4}, assistant_model=bench.drafter, num_assistant_tokens=1)
    clock = CommitClock(bench.drafter, bench.target)
    hooks = [
        bench.target.register_forward_pre_hook(clock.before_pass),
        bench.target.register_forward_hook(clock.after_pass),
    ]
    try:
        speculative_generate(bench.target, clock, **settings, num_assistant_tokens=most)
    finally:
        for hook in hooks:
            hook.remove()
    return clock.ratios


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
    print("| moving the KV cache / forward pass of the target | rounds | median | quartiles |\n|---|---|---|---|")
    for name, values in measure(bench, inputs).items():
        if len(values) > 1:
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"| {name} | {len(values)} | {middle:.4f} | {low:.4f} to {high:.4f} |")
    print("\n" + origin(typed_command("python -m dflash_hub.experiments.moving_sequences")))


if __name__ == "__main__":
    run_plainly(typer.run, run)
