"""A simulated clock for draft schedules: tables of pass times and drafters of known acceptance, or recorded ones. No model runs."""

import json
import random
from pathlib import Path
from statistics import mean

from ..decode_schedule import DraftSchedule

RECORDINGS = Path(__file__).parent / "schedule_recordings.json"


def recordings() -> dict:
    """Return {"times": by machine, "texts": by set}, as `schedule_recordings` writes them."""
    return json.loads(RECORDINGS.read_text())


def line(first, last, length=8):
    """A target pass of `first` for one token and `last` for `length`, in a line between them and beyond."""
    return lambda tokens: first + (last - first) * (tokens - 1) / (length - 1)


def jump(first, second, last):
    """One token has a kernel of its own."""
    return lambda tokens: first if tokens == 1 else second + (last - second) * (tokens - 2) / 6


# Target pass by its length, and drafter pass. The CPU's are milliseconds of a small target on two cores.
TABLES = {
    "GPU, light drafter": (line(20, 20), 2),
    "GPU, usual drafter": (line(20, 21), 6),
    "GPU, heavy drafter": (line(20, 20), 20),
    "GPU, tiles of four": (lambda tokens: 20 if tokens <= 4 else 32, 4),
    "CPU, fast": (line(57, 78), 31),
    "CPU, slow": (line(57, 90), 42),
    "CPU, one token apart": (jump(57, 75, 80), 34),
    "CPU, bfloat16": (line(63, 69), 8),  # 85 for 32 tokens and 104 for 64
    "a fifth a token": (line(20, 48), 6),
    "half a token": (line(20, 90), 2),
    "linear, light drafter": (line(20, 160), 2),
    "linear, heavy drafter": (line(20, 160), 20),
}


def steady(acceptance):
    return lambda position, slot: acceptance


def fading(acceptance, factor):
    return lambda position, slot: acceptance * factor**slot


def switch(at, before, after):
    return lambda position, slot: before if position < at else after


# Where drafting may cost most: useless, poor and middling drafters, and those that change in the middle.
DRAFTERS = {
    "useless": steady(0.0),
    "poor": steady(0.15),
    "middling": steady(0.4),
    "good, then useless": switch(100, 0.8, 0.0),
    "useless, then good": switch(100, 0.0, 0.8),
    "sure after an unsure first": lambda position, slot: 0.9 if slot else 0.4,
}


# By nodes of a tree: how often a position where the best chain ends goes on in another branch.
BRANCHES = {7: 0.2, 15: 0.4, 31: 0.55}


def simulate(
    table, acceptance, num_draft, seed, tokens=200, start=0, noise=0.03, disturb=None, growth=0.0, catch_up=0.002
):
    """Run a text with a fixed number of drafts, a `DraftSchedule` or a `TreeSchedule`.

    Args:
        acceptance: (position, slot) to the probability that the slot is accepted.
        noise: relative width of the pass times; a pass is only ever slower.
        disturb: (kind and length of a pass, how often it ran, generator) to a factor on its time.
        growth: of all pass times by token of context.
        catch_up: of the drafter's pass by token that it has not seen.

    Returns:
        (seconds, seconds of plain decoding, drafted counts by round; of a tree minus its nodes)
    """
    target, drafter = TABLES[table]
    generator, seen = random.Random(seed), {}

    def timed(kind, seconds):
        seen[kind] = seen.get(kind, 0) + 1
        seconds *= (1 + growth * position) * (1 + noise * abs(generator.gauss(0, 1)))
        return seconds * disturb(kind, seen[kind], generator) if disturb else seconds

    position, unread, clock, plain, drafts = start, 50, 0.0, 0.0, []
    while position < start + tokens:
        wanted = num_draft if isinstance(num_draft, int) else num_draft.next(1, position)
        n = min(wanted, start + tokens - position - 1)
        nodes = getattr(num_draft, "num_nodes", None) if n else None
        fed = nodes or n
        target_pass, drafter_pass, accepted = timed(f"tree of {fed}" if nodes else fed + 1, target(fed + 1)), 0.0, 0
        if n:
            # After plain rounds the drafter reads what it has not seen.
            drafter_pass, unread = timed("drafter", drafter * (1 + catch_up * unread)), 0
        while accepted < n and generator.random() < acceptance(position + accepted, accepted):
            accepted += 1
        if nodes:
            chain = min(n, nodes // 2 + 1)
            on_chain = min(accepted, chain)
            while accepted < n and generator.random() < BRANCHES[nodes]:
                accepted += 1
                while accepted < n and generator.random() < acceptance(position + accepted, accepted):
                    accepted += 1
            times = (target_pass, drafter_pass)
            num_draft.observe_tree(nodes, (chain, on_chain), accepted + 1, times, position)
        elif not isinstance(num_draft, int):
            num_draft.observe(n, [accepted], target_pass, drafter_pass, 1, position)
        for _ in range(accepted + 1):
            plain += target(1) * (1 + growth * position) * (1 + 0.8 * noise)
            position += 1
        unread += accepted + 1
        clock += target_pass + drafter_pass
        drafts.append(-nodes if nodes else n)
    return clock, plain, drafts


def best_fixed(table, acceptance, block_size, seeds, **options):
    return min(mean(simulate(table, acceptance, n, s, **options)[0] for s in seeds) for n in range(block_size))


def mean_auto(table, acceptance, block_size, seeds, memory=None, **options):
    return mean(simulate(table, acceptance, DraftSchedule(block_size, memory), s, **options)[0] for s in seeds)


def play(text, times, schedule, seed, clock="thread", drafter="drafter"):
    """Generate a recorded text on a recorded machine (see `schedule_recordings`).

    Args:
        text: by anchor, how many draft tokens in a row are right, a digit each.
        times: milliseconds by clock and kind of pass, one a cycle.
        schedule: a fixed draft length, or a `DraftSchedule`, which is told the times of `clock`.
        seed: of the cycle that it starts with; each round takes the next one.
        drafter: kind of its passes.

    Returns:
        (milliseconds, forward passes of the target, drafted counts by round); the time is that of passes at their mean of the
        wall clock, so that it compares choices, not luck.
    """
    usual = {kind: mean(values) for kind, values in times["wall"].items()}
    told, anchor, clock_time, drafts = times[clock], 0, 0.0, []
    cycles = len(told["1"])
    cycle = random.Random(seed).randrange(cycles)
    while anchor < len(text):
        wanted = schedule if isinstance(schedule, int) else schedule.next(1, anchor + 100)
        n = min(wanted, len(text) - anchor - 1)
        accepted = min(int(text[anchor]), n)
        clock_time += usual[str(n + 1)] + (usual[drafter] if n else 0.0)
        if not isinstance(schedule, int):
            drafter_time = told[drafter][cycle] if n else 0.0
            schedule.observe(n, [accepted], told[str(n + 1)][cycle], drafter_time, 1, anchor + 100)
        anchor, cycle = anchor + accepted + 1, (cycle + 1) % cycles
        drafts.append(n)
    return clock_time, len(drafts), drafts
