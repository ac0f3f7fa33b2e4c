"""The adaptive draft length: how many tokens to draft in a round.

A round that drafts n tokens costs a forward pass of the target over the anchor and the draft tokens, T(n + 1), and one of the
drafter, D. It is expected to add E(n) tokens to each sequence. A baseline round (n = 0) costs T(1) and adds one:

    E(n) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_n        a_k: acceptance of position k where those before it were accepted
    n*   = argmax over n of E(n) / (T(n + 1) + D)

Acceptance starts from a prior, which the drafter's config may state, and wears it down by counts. Costs are medians of
measurements at the machine's pace: other work beside it slows all forward passes alike, and leaves their ratios. What is not
known well speaks for drafting, which ends by evidence and not by a few unlucky measurements.

An exploration budget bounds what this may cost, counted in baseline passes. A drafted round takes its excess
(T + D) / T(1) - tokens from it, or adds its gain, and every token brings a little back. A round drafts only if the budget
covers its worst case, nothing accepted. So whatever the drafter does, N tokens take at most
`BUDGET + EARLY_REFILL * min(N, EARLY) + REFILL * max(0, N - EARLY)` baseline passes more than the baseline: 2.2% of 200
tokens and less of more, as far as costs repeat.
"""

import copy
import itertools
import math
from dataclasses import dataclass, field

from .decode_calibration import Calibration
from .decode_floor import is_at_floor

BUDGET, BUDGET_CAP = 3.6, 13.0  # baseline passes that exploration may cost: at first, and at most after gains
# What a token brings back, in baseline passes: the first 200, and others.
EARLY_REFILL, REFILL, EARLY = 0.004, 0.0225, 200
UNSETTLED = 16  # rounds that are charged less where their costs turn out to be less
# Acceptance if none is stated; tries that it, and a stated one, are worth.
PRIOR, PRIOR_TRIES, STATED_TRIES = [0.75], 2.0, 8.0
FADE, CARRY_OVER = 0.95, 5.0  # of the counts by round; the tries that those of another text are worth
# Untried, in baseline passes: a further token, the drafter, and at worst.
SLOPE, DRAFTER, WORST_DRAFTER = 0.05, 0.3, 0.75
KEPT = 16  # latest measurements of a kind
PACES, NOISE = 9, 0.1  # latest measurements whose median is the pace; their standard deviation until it is known
CLIP = 1.5  # factor by which one measurement may differ from what is known
DOUBT = 1.0  # standard deviations by which acceptance may be better than it looks
SWITCH = 0.03  # by how much another draft length must be better than the last one
REMEASURE = 0.01  # share of the time that measuring T(1) again may cost while drafting is faster
COOLDOWN = (8, 64)  # baseline rounds between two tries while drafting is slower: doubled by each failure

# Kinds of the drafter's passes. The latter also reads the prompt, or what baseline rounds wrote.
DRAFTING, CATCHING_UP = "drafter", "drafter, catching up"


@dataclass
class PassTimes:
    """Seconds of forward passes by kind: the target's by its tokens, the drafter's `DRAFTING` or `CATCHING_UP`.

    Args:
        kept: the latest measurements by kind, over the pace at the time.
        median: the lower one of these: of two the smaller, since what disturbs a pass makes it slower.
        pace: by how much slower the machine is than at the first one: the lower median of `paces`.
        paces: what the latest measurements of the target say of it. It moves late, but at once and all the way, so that what
            is kept is hardly ever taken at a wrong one.
        noise: standard deviation of the logarithm of measurements, and of how many this is known.
    """

    kept: dict[int | str, list[float]] = field(default_factory=dict)
    median: dict[int | str, float] = field(default_factory=dict)
    pace: float = 1.0
    paces: list[float] = field(default_factory=lambda: [1.0] * PACES)
    noise: tuple[float, int] = (NOISE, 1)

    def add(self, kind: int | str, seconds: float):
        """Take in a measurement."""
        seconds = max(seconds, 1e-9)  # a coarse clock may say 0
        if self.count(kind) > 1:
            change = min(max(seconds / self.pace / self.median[kind], 1 / CLIP), CLIP)
            deviation, count = self.noise
            variance = (deviation**2 * count + math.log(change) ** 2) / (count + 1)
            self.noise = math.sqrt(variance), min(count + 1, 2 * KEPT)
            if kind not in (DRAFTING, CATCHING_UP):
                self.paces = [*self.paces, seconds / self.median[kind]][-PACES:]
                self.pace = sorted(self.paces)[(len(self.paces) - 1) // 2]
        self.keep(kind, [*self.kept.get(kind, []), seconds / self.pace][-KEPT:])

    def keep(self, kind: int | str, measured: list[float]):
        """Know these measurements of a kind, and no others."""
        self.kept[kind], self.median[kind] = measured, sorted(measured)[(len(measured) - 1) // 2]

    def count(self, kind: int | str) -> int:
        """Return how many measurements of a kind there are."""
        return len(self.kept.get(kind, []))

    def error(self, *kinds: int | str) -> float:
        """Return the standard error of a ratio of these kinds, as a share; an untried one counts as measured once."""
        return self.noise[0] * math.sqrt(sum(1 / max(self.count(kind), 1) for kind in kinds))

    def move(self, seconds: float):
        """Go where passes take other times, one token now `seconds`: ratios are kept until they are measured again."""
        self.pace = seconds / self.median[1]
        self.paces = [self.pace] * PACES
        for kind, median in [*self.median.items()]:
            self.keep(kind, [median])


@dataclass
class DraftStatistics:
    """What was measured with one drafter and one target: everything that the choice depends on.

    Args:
        times: of forward passes.
        prior: acceptance by draft position before anything was counted, and how many tries it is worth.
        tried, accepted: by draft position, faded counts of sequences that reached it, and of those that accepted it.
        num_draft: the last draft length.
        cooldown, waited: baseline rounds between two tries, and since the last drafted round.
        since_baseline: drafted rounds since the last baseline round.
        rows, context: sequences, and tokens in the KV cache, where the times were measured.
        first_tried, first_accepted: drafts whose first token was verified, and accepted; these counts do not fade.
        trees: by nodes, faded counts of tokens that chains were expected to add in rounds with a tree, and that trees did.
        confidence: what the drafter's own confidence is worth.
    """

    times: PassTimes = field(default_factory=PassTimes)
    prior: tuple[list[float], float] = (PRIOR, PRIOR_TRIES)
    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    num_draft: int = 0
    cooldown: int = COOLDOWN[0]
    waited: int = 0
    since_baseline: int = 0
    rows: int = 1
    context: int = 0
    first_tried: int = 0
    first_accepted: int = 0
    trees: dict[int, tuple[float, float]] = field(default_factory=dict)
    confidence: Calibration = field(default_factory=Calibration)

    def fade(self, kept: float):
        """Keep a share of the counts."""
        self.tried, self.accepted = ([kept * count for count in counts] for counts in (self.tried, self.accepted))


# ------------------------------------------------------------------------------------------------------------------
# The policy: pure functions of the statistics.


def choose_num_draft(tokens: list[float], costs: list[float], lengths: list[int], last: int = 0) -> int:
    """Choose the draft length of the most tokens a second.

    Args:
        tokens: expected tokens of a round, by draft length from 0.
        costs: of a round, by draft length.
        lengths: to choose from, at least one.
        last: the draft length in use, which stays unless another is better by `SWITCH`.
    """
    best = max(lengths, key=lambda n: tokens[n] / costs[n])
    if last in lengths and tokens[best] / costs[best] < (1 + SWITCH) * tokens[last] / costs[last]:
        return last
    return best


def expected_tokens(statistics: DraftStatistics, most: int, doubt: float = 0.0) -> list[float]:
    """Return E(0) to E(most), tokens that a round adds to a sequence.

    Args:
        doubt: standard deviations by which the acceptance of each position may be better than it looks.
    """
    (prior, weight), rate, all_accepted, tokens = statistics.prior, PRIOR[0], 1.0, [1.0]
    for position in range(most):
        # Where the prior says nothing, a position is like the one before it.
        rate = prior[position] if position < len(prior) else rate
        tried, accepted = weight, weight * rate
        if position < len(statistics.tried):
            tried, accepted = tried + statistics.tried[position], accepted + statistics.accepted[position]
        rate = accepted / tried
        all_accepted *= min(rate + doubt * math.sqrt(rate * (1 - rate) / (tried + 1)), 1.0)
        tokens.append(tokens[-1] + all_accepted)
    return tokens


def target_seconds(times: PassTimes, longest: int, clip: bool = False) -> list[float]:
    """Return T(0) to T(longest): measured, on a line between two measured ones, or rising by `SLOPE` beyond the longest.

    T(0) is 0. T(1) is at most that of any longer pass, which is at most that of its tokens one by one.

    Args:
        clip: for the choice, not the charge: a single measurement, which may hold a warm-up, counts up to what the others say,
            and an untried length is hoped to be little slower than the next shorter one, so that it is tried once.
    """
    measured = {kind: median for kind, median in times.median.items() if isinstance(kind, int)}
    baseline = min(measured.values())
    known = {0: 0.0, 1: baseline} | {tokens: min(median, tokens * baseline) for tokens, median in measured.items()}
    trusted = {tokens: seconds for tokens, seconds in known.items() if tokens < 2 or times.count(tokens) > 1}
    for tokens in known.keys() - trusted.keys():
        known[tokens] = min([known[tokens], *(CLIP * trusted[longer] for longer in trusted if longer > tokens)])
    if clip:
        line = _line(trusted, max(known))
        known = {
            tokens: min(seconds, line[tokens]) if tokens not in trusted else seconds
            for tokens, seconds in known.items()
        }
    return _line(known, longest, hopeful=clip)


def _line(known: dict[int, float], longest: int, hopeful: bool = False) -> list[float]:
    """Return values at 0 to `longest` on the lines through the known ones, rising by `SLOPE` of that at 1 beyond the last.

    Args:
        hopeful: whether they rise no faster between the known ones either, as where kernels work on tiles.
    """
    points, line = sorted(known.items()), []
    for (start, first), (end, last) in itertools.pairwise(points):
        for at in range(start, end):
            between = first + (last - first) * (at - start) / (end - start)
            line.append(min(between, first + SLOPE * known[1] * (at - start)) if hopeful and start else between)
    start, first = points[-1]
    line += [first + SLOPE * known[1] * (at - start) for at in range(start, longest + 1)]
    return line[: longest + 1]


def drafter_seconds(times: PassTimes, kind: str = DRAFTING) -> float:
    """Return D; until it was measured twice at most T(1), or a prior share of it."""
    if times.count(kind) > 1:
        return times.median[kind]
    baseline = target_seconds(times, 1)[1]
    measured = [times.median[either] for either in (kind, CATCHING_UP) if either in times.median]
    return min(measured[0], baseline) if measured else DRAFTER * baseline


def round_costs(times: PassTimes, most: int, kind: str = DRAFTING, clip: bool = False) -> list[float]:
    """Return the cost of a round by draft length, 0 to `most`, in baseline passes."""
    target, drafter = target_seconds(times, most + 1, clip), drafter_seconds(times, kind)
    return [1.0] + [(seconds + drafter) / target[1] for seconds in target[2:]]


def worst_costs(times: PassTimes, most: int) -> list[float]:
    """Return the same at worst: an untried pass of the target costs in proportion to its tokens."""
    baseline = target_seconds(times, 1)[1]
    known = DRAFTING in times.median or CATCHING_UP in times.median
    drafter = drafter_seconds(times) / baseline if known else WORST_DRAFTER
    costs = [1.0]
    for tokens in range(2, most + 2):
        shares = [seconds / kind for kind, seconds in times.median.items() if isinstance(kind, int) and kind <= tokens]
        costs.append(tokens * min(baseline, *shares) / baseline + drafter)
    return costs


# ------------------------------------------------------------------------------------------------------------------
# The state of a call.


@dataclass
class DraftedRound:
    """A round that the budget is charged for.

    Args:
        num_draft: draft length, 0 for a baseline round.
        kind: of the drafter's forward pass.
        cost: in baseline passes, by the times when it ended.
        tokens: by sequence.
        refill: of the budget, that these bring.
        nodes: of a draft tree; None for a chain.
    """

    num_draft: int
    kind: str
    cost: float
    tokens: float
    refill: float
    nodes: int | None = None


class DraftSchedule:
    """How many tokens each round of one call of `generate` drafts.

    No clock is read here: the loop passes the times in. Before each round it asks `next`, after each it tells `observe`.

    Args:
        block_size: of the drafter; a round drafts at most `block_size - 1` tokens.
        memory: the `statistics` of an earlier call with the same drafter and target, on the same devices. They are
            copied, so calls that run at once can start from one memory; keep `statistics` of the one that ends last.
        prior: `acceptance_prior` of the drafter's config.
    """

    num_nodes, wants_trees = None, False  # it drafts chains

    def __init__(self, block_size: int, memory: DraftStatistics | None = None, prior: list[float] | None = None):
        self.most = block_size - 1
        self.statistics = copy.deepcopy(memory) if memory is not None else DraftStatistics()
        if prior is not None:
            self.statistics.prior = prior, STATED_TRIES
        # Each text has its own acceptance, so what earlier ones had is believed a little only, unless none had any.
        if not self._is_low():
            self.statistics.fade(CARRY_OVER / max([CARRY_OVER, *self.statistics.tried]))
        self.settled, self.rounds = BUDGET, []  # the budget is one of each call
        self.trying = self.drafted = False  # whether the last round was a try, and had draft tokens
        self.tokens = 0.0  # by sequence

    def next(self, rows: int = 1, context: int = 0) -> int:
        """Return how many tokens to draft in the coming round. The loop may draft fewer, where the text ends.

        Args:
            rows: sequences in the batch.
            context: tokens in the target's cache.
        """
        statistics, times = self.statistics, self.statistics.times
        if 1 not in times.median or self._is_elsewhere(rows, context) or self._baseline_was_disturbed():
            return 0
        budget, worst = self.budget(), worst_costs(times, self.most)
        lengths = [n for n in range(1, self.most + 1) if worst[n] - 1 <= budget]
        if not lengths:
            return 0
        tokens, costs = expected_tokens(statistics, self.most), round_costs(times, self.most, clip=True)
        num_draft = choose_num_draft(tokens, costs, lengths, statistics.num_draft or self.most)
        if lengths[-1] == self.most:
            statistics.num_draft = num_draft
        hoped = expected_tokens(statistics, num_draft, DOUBT)[-1] * (1 + times.error(1, num_draft + 1))
        gain = 1 - costs[num_draft] / hoped
        self.trying = gain <= 0
        if self.trying:
            # Saves the budget for the length that is best by what is known, which a full one covers.
            affordable = [n for n in range(1, self.most + 1) if worst[n] - 1 <= max(budget, BUDGET)]
            is_best = num_draft == choose_num_draft(tokens, costs, affordable, num_draft)
            return num_draft if is_best and statistics.waited >= statistics.cooldown else 0
        remeasure = max(REMEASURE, times.error(1) ** 2)
        return num_draft if statistics.since_baseline * remeasure < gain else 0

    def budget(self) -> float:
        """Return the baseline passes that drafting may still lose in this call."""
        return self._charged(self.rounds)

    def observe(
        self,
        num_draft: int,
        accepted: list[int],
        target_seconds: float,
        drafter_seconds: float = 0.0,
        rows: int = 1,
        context: int = 0,
    ):
        """Record the round that just ended.

        Args:
            num_draft: tokens that were drafted, 0 for a baseline round.
            accepted: by sequence, draft tokens that became text; where sequences advance in lockstep, the count they advanced by.
            target_seconds: the round's time less the drafter's: the target's pass and all that baseline rounds do as well.
            drafter_seconds: of the drafter's pass and the proposal.
            rows, context: as given to `next`.
        """
        statistics = self.statistics
        tokens = 1 + sum(accepted) / len(accepted)
        kind = DRAFTING if self.drafted else CATCHING_UP
        if num_draft == 0:
            self._count_baseline(target_seconds, rows, context)
        else:
            statistics.times.add(num_draft + 1, target_seconds)
            statistics.times.add(kind, drafter_seconds)
            self._count_acceptance(num_draft, accepted)
            statistics.waited = 0
            statistics.since_baseline += 1
            if self.trying and tokens >= 2:  # promising: try again at once
                statistics.cooldown = statistics.waited = COOLDOWN[0]
            elif self.trying:
                statistics.cooldown = min(2 * statistics.cooldown, COOLDOWN[1])
        cost = round_costs(statistics.times, num_draft, kind)[-1]
        self._end_round(DraftedRound(num_draft, kind, cost, tokens, self._refill(tokens)), context)

    def _refill(self, tokens: float) -> float:
        self.tokens += tokens
        return tokens * (EARLY_REFILL if self.tokens <= EARLY else REFILL)

    def _end_round(self, drafted: DraftedRound, context: int):
        self.statistics.context, self.drafted = context, drafted.num_draft > 0
        self.rounds.append(drafted)
        if len(self.rounds) == 2 * UNSETTLED:
            self._settle(UNSETTLED)

    def _is_low(self) -> bool:
        return is_at_floor(self.statistics.first_tried, self.statistics.first_accepted)

    def _baseline_was_disturbed(self) -> bool:
        """Tell whether the only measurement of T(1) is above that of a longer pass."""
        times = self.statistics.times
        return times.count(1) == 1 and times.median[1] > CLIP * target_seconds(times, 1)[1]

    def _is_elsewhere(self, rows: int, context: int) -> bool:
        """Tell whether rows or context differ so much from where times were measured that T(1) must be measured again."""
        pairs = ((rows, self.statistics.rows), (context + 256, self.statistics.context + 256))
        return any(max(pair) >= 2 * min(pair) for pair in pairs)

    def _count_baseline(self, seconds: float, rows: int, context: int):
        statistics, times = self.statistics, self.statistics.times
        if 1 in times.median and self._is_elsewhere(rows, context):
            self._settle(len(self.rounds))
            times.move(seconds)
        elif 1 in times.median and self._baseline_was_disturbed():
            times.keep(1, [seconds / times.pace])
        else:
            times.add(1, seconds)
        statistics.rows, statistics.since_baseline = rows, 0
        statistics.waited += 1
        if statistics.tried and statistics.tried[0] > CARRY_OVER and not self._is_low():
            statistics.fade(FADE)  # what is not tried grows uncertain

    def _count_acceptance(self, num_draft: int, accepted: list[int]):
        statistics = self.statistics
        statistics.fade(FADE)
        missing = [0.0] * (num_draft - len(statistics.tried))
        statistics.tried, statistics.accepted = statistics.tried + missing, statistics.accepted + missing
        for position in range(num_draft):
            reached, passed = sum(count >= position for count in accepted), sum(count > position for count in accepted)
            statistics.tried[position] += reached
            statistics.accepted[position] += passed
        statistics.first_tried += len(accepted)
        statistics.first_accepted += sum(count > 0 for count in accepted)

    def _settle(self, count: int):
        """Charge the first rounds for good."""
        self.settled, self.rounds = self._charged(self.rounds[:count]), self.rounds[count:]

    def _charged(self, rounds: list[DraftedRound]) -> float:
        """Return what is left of the settled budget after these rounds."""
        times, budget = self.statistics.times, self.settled
        costs = {kind: round_costs(times, self.most, kind) for kind in (DRAFTING, CATCHING_UP)}
        for drafted in rounds:
            if drafted.num_draft:
                budget = min(budget - (self._cost_now(drafted, costs) - drafted.tokens), BUDGET_CAP)
            budget = max(budget, min(budget + drafted.refill, BUDGET))
        return budget

    def _cost_now(self, drafted: DraftedRound, costs: dict[str, list[float]]) -> float:
        cost = costs[drafted.kind][drafted.num_draft]
        # A single measurement may hold a warm-up, as T(1) did at the time.
        return min(cost, drafted.cost) if self.statistics.times.count(drafted.num_draft + 1) == 1 else cost


class FixedSchedule:
    """The same number of draft tokens in every round; 0 for none at all.

    Args:
        num_draft_tokens: that each round drafts, where the text has room for them; in a tree, its depth.
        num_nodes: tokens of a draft tree; None for a chain.
    """

    statistics = None

    def __init__(self, num_draft_tokens: int, num_nodes: int | None = None):
        self.most, self.num_nodes, self.wants_trees = num_draft_tokens, num_nodes, num_nodes is not None

    def next(self, rows: int = 1, context: int = 0) -> int:
        """Return the number of tokens to draft."""
        return self.most

    def observe(self, *round_that_ended):
        """Learn nothing."""
