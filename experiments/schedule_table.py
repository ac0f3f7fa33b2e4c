"""Adaptive draft length on a simulated clock: the table of its page in docs/results. No model runs; a minute or two.

python -m dflash_hub.experiments.schedule_table
"""

from statistics import mean

import typer

from ..common.console import run_plainly
from ..decode_schedule import DraftSchedule
from .schedule_simulation import DRAFTERS, TABLES, best_fixed, mean_auto, simulate, steady

SEEDS, LONG_SEEDS = range(30), range(10)


def second_call(table, acceptance, seed):
    first = DraftSchedule(8)
    simulate(table, acceptance, first, 1000 + seed)
    return simulate(table, acceptance, DraftSchedule(8, first.statistics), seed)[0]


def cell(table, acceptance) -> str:
    """Speed of the best fixed number over plain, then the time of `auto` above that best."""
    best, long_best = (
        best_fixed(table, acceptance, 8, seeds, tokens=tokens) for seeds, tokens in ((SEEDS, 200), (LONG_SEEDS, 1000))
    )
    plain = mean(simulate(table, acceptance, 0, seed)[0] for seed in SEEDS)
    above = (
        mean_auto(table, acceptance, 8, SEEDS) / best - 1,
        mean(second_call(table, acceptance, seed) for seed in SEEDS) / best - 1,
        mean_auto(table, acceptance, 8, LONG_SEEDS, tokens=1000) / long_best - 1,
    )
    return ", ".join([f"{plain / best:.2f}", *(f"{share:+.1%}" for share in above)])


def worst() -> tuple[float, int]:
    """The most above plain decoding over 200 tokens, and in how many runs."""
    runs = [
        simulate(table, acceptance, DraftSchedule(block_size), seed)
        for table in TABLES
        for acceptance in DRAFTERS.values()
        for block_size in (8, 16)
        for seed in range(25)
    ]
    return max(seconds / plain - 1 for seconds, plain, _ in runs), len(runs)


def run():
    """Print, by table of pass times and acceptance: the best fixed length over the baseline, and `auto` above that best."""
    for table in TABLES:
        print(f"| {table} | " + " | ".join(cell(table, steady(a)) for a in (0.6, 0.7, 0.8, 0.9)) + " |", flush=True)
    print("above plain at most: {:.1%} in {} runs".format(*worst()))


if __name__ == "__main__":
    run_plainly(typer.run, run)
