"""The adaptive choice between chains and draft trees, and of a tree's size.

A round with a tree of m nodes costs T(m + 1), the tree's own work included, and one forward pass of the drafter. It is expected
to add a prior share more than the chain, until rounds with trees of that size tell. The tree is drafted whose tokens a second are
the most, if they are more than those of the best chain and of the baseline (`decode_schedule.py`, whose budget it shares).
"""

from .decode_memory import ScheduleMemory
from .decode_schedule import (
    CATCHING_UP,
    CLIP,
    DRAFTING,
    FADE,
    REMEASURE,
    SLOPE,
    SWITCH,
    DraftedRound,
    DraftSchedule,
    DraftStatistics,
    FixedSchedule,
    PassTimes,
    drafter_seconds,
    expected_tokens,
    round_costs,
    target_seconds,
    worst_costs,
)

# By nodes: tokens that a tree adds beside the target's own, over those that the chain adds. Replayed on six sets with the drafter
# for SmolLM2 (docs/results/2026-12-01-draft-trees.md).
GAIN = {7: 1.35, 15: 1.6, 31: 1.85}
TRIES = 4.0  # tokens of chains that this is worth
# Of an untried tree, in baseline passes: what it costs beyond its forward passes, and a further node, as hoped.
OVERHEAD, HOPED_SLOPE = 0.1, 0.01


def kind_of(nodes: int) -> str:
    """Return the name of a forward pass over a tree, among the times."""
    return f"tree of {nodes}"


def tree_tokens(trees: dict[int, tuple[float, float]], chain: float, nodes: int) -> float:
    """Return the tokens that a round with a tree is expected to add.

    Args:
        trees: by nodes, faded counts of tokens: what chains were expected to add beside the target's own, and what trees did.
        chain: expected tokens of the longest chain.
    """
    expected, added = trees.get(nodes, (0.0, 0.0))
    return 1 + (chain - 1) * (TRIES * GAIN[nodes] + added) / (TRIES + expected)


def _largest_tried(times: PassTimes, nodes: int) -> tuple[int, float]:
    """Return the tokens and the seconds of the largest pass that was measured, of at most `nodes + 1` tokens."""
    longest = max(kind for kind in times.median if isinstance(kind, int) and kind <= nodes + 1)
    tried = [(longest, target_seconds(times, longest)[-1])]
    return max(
        tried
        + [(size + 1, times.median[kind_of(size)]) for size in GAIN if size < nodes and kind_of(size) in times.median]
    )


def tree_cost(times: PassTimes, nodes: int, kind: str = DRAFTING, clip: bool = False) -> float:
    """Return the cost of a round with a tree, in baseline passes: as measured, or as the largest smaller pass says.

    Args:
        kind: of the drafter's forward pass.
        clip: for the choice, not the charge: as in `target_seconds`. An untried tree is hoped to cost little more than a smaller
            one, so that it is tried once.
    """
    baseline, name = target_seconds(times, 1)[1], kind_of(nodes)
    tokens, seconds = _largest_tried(times, nodes)
    seconds += (OVERHEAD + (HOPED_SLOPE if clip else SLOPE) * (nodes + 1 - tokens)) * baseline
    if times.count(name) > 1:
        seconds = times.median[name]
    elif name in times.median:
        seconds = min(times.median[name], CLIP * seconds if clip else (nodes + 1) * baseline)
    return (seconds + drafter_seconds(times, kind)) / baseline


def worst_tree_cost(times: PassTimes, nodes: int) -> float:
    """Return the same at worst: each further node of an untried tree costs what one of the largest smaller pass does."""
    tokens, seconds = _largest_tried(times, nodes)
    if times.count(kind_of(nodes)) > 1:
        return tree_cost(times, nodes)
    if tokens == 1:
        return worst_costs(times, nodes)[-1]
    baseline = target_seconds(times, 1)[1]
    node = max(seconds - baseline, SLOPE * baseline) / (tokens - 1)
    return (seconds + (nodes + 1 - tokens) * node + drafter_seconds(times)) / baseline


class TreeSchedule(DraftSchedule):
    """A chain, a tree of one of the sizes in `GAIN`, or nothing for each round of one call; arguments as for `DraftSchedule`."""

    wants_trees = True

    def __init__(self, block_size: int, memory: DraftStatistics | None = None, prior: list[float] | None = None):
        super().__init__(block_size, memory, prior)
        self.sizes = (*GAIN,)

    def without_trees(self):
        """Draft chains from here on."""
        self.sizes = ()

    def next(self, rows: int = 1, context: int = 0) -> int:
        """Return how many positions to draft; `num_nodes` says of what: a tree of so many nodes, None for a chain."""
        num_draft, self.num_nodes = super().next(rows, context), None
        statistics, times = self.statistics, self.statistics.times
        if (
            rows > 1
            or 1 not in times.median
            or self._is_elsewhere(rows, context)
            or (num_draft == 0 and not self.trying)
        ):
            return num_draft
        tokens, rate = expected_tokens(statistics, self.most), 1.0
        if num_draft > 0 and not self.trying:
            rate = tokens[num_draft] / round_costs(times, num_draft, clip=True)[-1]
        budget, best = self.budget(), None
        for nodes in self.sizes:
            if worst_tree_cost(times, nodes) - 1 > budget:
                continue
            expected = tree_tokens(statistics.trees, tokens[-1], nodes) / tree_cost(times, nodes, clip=True)
            if expected > (1 + SWITCH * (best is None)) * rate:
                best, rate = nodes, expected
        if best is None:
            return num_draft
        self.trying = False
        if statistics.since_baseline * max(REMEASURE, times.error(1) ** 2) >= 1 - 1 / rate:
            return 0
        self.num_nodes = best
        return self.most

    def observe_tree(self, nodes: int, chain: tuple[int, int], tokens: int, seconds: tuple[float, float], context: int):
        """Record a round with a tree.

        Args:
            nodes: of the tree.
            chain: length of its best chain, and how many of these tokens became text.
            tokens: that the round added.
            seconds: of the round less the drafter's, and of the drafter, as in `observe`.
            context: tokens in the target's cache.
        """
        statistics, kind = self.statistics, DRAFTING if self.drafted else CATCHING_UP
        nodes = min((size for size in GAIN if size >= nodes), default=max(GAIN))
        statistics.times.add(kind_of(nodes), seconds[0])
        statistics.times.add(kind, seconds[1])
        length, accepted = chain
        chain_tokens = expected_tokens(statistics, self.most)[-1]
        self._count_acceptance(length, [accepted])
        expected, added = statistics.trees.get(nodes, (0.0, 0.0))
        statistics.trees[nodes] = FADE * expected + chain_tokens - 1, FADE * added + tokens - 1
        statistics.waited = 0
        statistics.since_baseline += 1
        cost = tree_cost(statistics.times, nodes, kind)
        self._end_round(DraftedRound(self.most, kind, cost, tokens, self._refill(tokens), nodes), context)

    def _cost_now(self, drafted: DraftedRound, costs: dict[str, list[float]]) -> float:
        if drafted.nodes is None:
            return super()._cost_now(drafted, costs)
        cost = tree_cost(self.statistics.times, drafted.nodes, drafted.kind)
        return min(cost, drafted.cost) if self.statistics.times.count(kind_of(drafted.nodes)) == 1 else cost


def make_schedule(num_draft_tokens: int | str, num_nodes: int | str | None, most: int, memory: ScheduleMemory):
    """Make what chooses the drafts of one call.

    Args:
        num_draft_tokens: a number or "auto"; with trees, their depth.
        num_nodes: of trees, "auto" for chains or trees, or None for chains.
        most: positions that the proposer can draft.
        memory: of the drafter and the target.
    """
    depth = most if num_draft_tokens == "auto" else num_draft_tokens
    if num_nodes == "auto" and depth > 0:
        return TreeSchedule(depth + 1, memory.statistics, memory.prior)
    if num_nodes is None and num_draft_tokens == "auto":
        return DraftSchedule(depth + 1, memory.statistics, memory.prior)
    return FixedSchedule(depth, num_nodes if depth > 0 else None)
