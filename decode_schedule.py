"""How many tokens to draft in a round: what pays, by measured pass times and the acceptance seen so far.

A round that drafts n tokens takes T(n + 1) + D, a target pass over the anchor and the drafts and a drafter pass, and is
expected to add E(n) tokens to each row; a plain round (n = 0) takes T(1), no drafter pass, and adds one:

    E(n) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_n        a_k: acceptance of slot k where slots 1 to k - 1 were accepted
    n*   = argmax over n of E(n) / (T(n + 1) + D)

T and D are medians of the latest measurements, a_k are counts that fade. The choice is hopeful about what it has not
tried, and an allowance bounds what hope may cost. It is counted in plain passes: a drafted round takes its excess
(T + D) / T(1) - tokens from it, or adds its gain, and every token brings a little back. A round is drafted only if the
allowance covers its worst case, nothing accepted. So whatever the drafter does, N tokens take at most
`ALLOWANCE + EARLY * min(N, 200) + LATER * max(0, N - 200)` plain passes more than plain decoding, 2.5% of 200 tokens and less
of more, as far as pass times repeat.
"""

import copy
from dataclasses import dataclass, field

ALLOWANCE = 4.2  # plain passes that trying may cost
EARLY, LATER = 0.004, 0.0225  # plain passes of allowance that a token brings back: a call's first ones, and others
FIRST = 200  # how many tokens are the first ones
EARNED = 13.0  # the most allowance that gains build up: what a drafter that turns useless may cost from there on
FADE = 0.95  # of the acceptance counts, at each drafted round
HOPE, HOPE_WEIGHT = 0.75, 2.0  # acceptance of a slot before it is tried, and how many tries this is worth
HOPED_SLOPE = 0.05  # what a token adds to an untried target pass, in plain passes
HOPED_DRAFTER, WORST_DRAFTER = 0.3, 0.75  # an untried drafter pass, in plain passes
FASTER = 0.85  # a pass this much below its median tells that the machine has sped up
DISBELIEF = 1.5  # a first measurement counts up to this multiple of what was expected: it may be a warm-up
KEPT, KEPT_ROUNDS = 5, 128  # measurements of one kind that are kept, and for how many rounds
REFRESH = 0.01  # share of the time that measuring T(1) again may cost while drafting pays
PAUSES = (8, 64)  # plain rounds between two tries while drafting does not pay: doubled by each failure
PAUSE_AT_START = 16  # at most, where an earlier call with the pair left a longer one
STALE = 0.95  # of the acceptance counts, at each plain round: what is not tried grows uncertain
CARRIED = 5.0  # tries that this leaves, and that an earlier call's acceptance is worth: each text has its own


class Samples:
    """The latest measurements of one kind of pass, in seconds.

    `median` is the lower one, of two the smaller, since what disturbs a pass makes it slower.
    """

    def __init__(self):
        self.kept: list[tuple[int, float]] = []  # (round, seconds)

    def add(self, round_index: int, seconds: float):
        recent = [sample for sample in self.kept if round_index - sample[0] < KEPT_ROUNDS]
        self.kept = recent[1 - KEPT :] + [(round_index, seconds)]
        self.median = sorted(seconds for _, seconds in self.kept)[(len(self.kept) - 1) // 2]

    def __len__(self):
        return len(self.kept)


@dataclass
class DraftStatistics:
    """What was measured with one drafter and one target: everything that the choice depends on.

    Args:
        target: measured target passes, by their length in tokens.
        drafter: measured drafter passes that followed a drafted round.
        catching_up: those that did not: they also read the prompt, or what plain rounds wrote.
        tried, accepted: by slot, faded counts of rows that reached the slot, and of those that accepted it.
        allowance: plain passes that drafting may still lose.
        pause, waited: plain rounds between two tries, and since the last drafted round.
        rounds: rounds so far, the clock of the samples.
        rows, context: number of rows at the last plain round, context length at the last round.
        first_tried, first_accepted: drafts whose first slot was verified, and accepted; these counts do not fade.
    """

    target: dict[int, Samples] = field(default_factory=dict)
    drafter: Samples = field(default_factory=Samples)
    catching_up: Samples = field(default_factory=Samples)
    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    allowance: float = ALLOWANCE
    pause: int = PAUSES[0]
    waited: int = 0
    rounds: int = 0
    rows: int = 1
    context: int = 0
    first_tried: int = 0
    first_accepted: int = 0

    @property
    def drafter_passes(self) -> Samples:
        """Those that tell D: of rounds among drafted ones, until there are any those that caught up."""
        return self.drafter or self.catching_up


# ------------------------------------------------------------------------------------------------------------------
# The policy: pure functions of the statistics.


def choose_num_draft(statistics: DraftStatistics, most: int) -> tuple[int, float]:
    """The best number of drafted tokens, 1 to `most`, among those whose worst case the allowance covers.

    Needs a measured plain pass.

    Returns:
        (n, gain): n drafted tokens, and the share of plain decoding's time that they are expected to save, negative where
        plain decoding is faster; (0, 0.0) where the allowance covers no draft.
    """
    plain, drafter = plain_seconds(statistics), drafter_seconds(statistics)
    target, tokens = target_seconds(statistics, most + 1), expected_tokens(statistics, most)
    cost = {
        n: (target[n + 1] + drafter) / tokens[n]
        for n in range(1, most + 1)
        if worst_excess(statistics, n) <= statistics.allowance
    }
    if not cost:
        return 0, 0.0
    best = min(cost, key=cost.get)
    return best, 1 - cost[best] / plain


def expected_tokens(statistics: DraftStatistics, most: int) -> list[float]:
    """E(0) to E(most), tokens that a round adds to a row."""
    slot_acceptance, all_accepted, tokens = HOPE, 1.0, [1.0]
    for slot in range(most):
        # A slot is believed to be like the one before it, or better.
        slot_acceptance = max(slot_acceptance, (slot_acceptance + HOPE) / 2)
        if slot < len(statistics.tried):
            hoped = HOPE_WEIGHT * slot_acceptance
            slot_acceptance = (hoped + statistics.accepted[slot]) / (HOPE_WEIGHT + statistics.tried[slot])
        all_accepted *= slot_acceptance
        tokens.append(tokens[-1] + all_accepted)
    return tokens


def plain_seconds(statistics: DraftStatistics) -> float:
    """T(1); while it was measured only once, not more than any longer pass."""
    if len(statistics.target[1]) > 1:
        return statistics.target[1].median
    return min(samples.median for samples in statistics.target.values())


def target_seconds(statistics: DraftStatistics, longest: int) -> dict[int, float]:
    """T by pass length, 1 to `longest`: measured, between two measured ones, or a hopeful guess."""
    plain = plain_seconds(statistics)
    measured = {length: samples.median for length, samples in statistics.target.items()} | {1: plain}
    known = dict(measured)
    for length, samples in statistics.target.items():
        if len(samples) == 1 and length > 1:
            others = {other: seconds for other, seconds in measured.items() if other != length}
            known[length] = min(measured[length], DISBELIEF * _between(others, length, HOPED_SLOPE * plain))
    return {length: _between(known, length, HOPED_SLOPE * plain) for length in range(1, longest + 1)}


def _between(known: dict[int, float], length: int, slope: float) -> float:
    """Linear between the neighbors of `length`; beyond the longest known pass it rises by `slope` a token."""
    below = max(known_length for known_length in known if known_length <= length)
    above = min((known_length for known_length in known if known_length >= length), default=None)
    if above is None:
        return known[below] + slope * (length - below)
    share = (length - below) / max(above - below, 1)
    return known[below] * (1 - share) + known[above] * share


def drafter_seconds(statistics: DraftStatistics) -> float:
    """D, of a round among drafted ones; until one follows another, what is known counts at most as a plain pass."""
    plain, samples = plain_seconds(statistics), statistics.drafter_passes
    if not samples:
        return HOPED_DRAFTER * plain
    return samples.median if len(statistics.drafter) > 1 else min(samples.median, plain)


def worst_excess(statistics: DraftStatistics, num_draft: int) -> float:
    """What a round loses against plain decoding if nothing is accepted, in plain passes.

    An untried target pass costs at worst in proportion to its length.
    """
    plain, length = plain_seconds(statistics), num_draft + 1
    nearest = max(measured for measured in statistics.target if measured <= length)
    target = min(length * plain, statistics.target[nearest].median * length / nearest)
    drafter = drafter_seconds(statistics) if statistics.drafter_passes else WORST_DRAFTER * plain
    return (target + drafter) / plain - 1


# ------------------------------------------------------------------------------------------------------------------
# The state of a call.


class DraftSchedule:
    """How many tokens each round of one call of `generate` drafts.

    No clock is read here: the loop passes the times in. Before each round it asks `next`, after each it tells `observe`.

    Args:
        block_size: of the drafter; a round drafts at most `block_size - 1` tokens.
        memory: the `statistics` of an earlier call with the same drafter and target, on the same devices. They are
            copied, so calls that run at once can start from one memory; keep `statistics` of the one that ends last.
    """

    num_nodes = None  # it drafts chains

    def __init__(self, block_size: int, memory: DraftStatistics | None = None):
        self.most = block_size - 1
        self.statistics = copy.deepcopy(memory) if memory is not None else DraftStatistics()
        # The bound holds for each call. Each text has its own acceptance, so what earlier ones had is believed a little only,
        # unless none had any.
        self.statistics.allowance = ALLOWANCE
        if not self._is_at_floor():
            self.statistics.pause = min(self.statistics.pause, PAUSE_AT_START)
            self._fade_acceptance(CARRIED / max([CARRIED, *self.statistics.tried]))
        self.trying = False
        self.drafted = False  # whether the last round did
        self.sped_up = False  # by the last drafted pass, since T(1) was measured
        self.deaf_until = 0  # the round up to which that is not believed
        self.tokens = 0.0  # of this call, by row

    def next(self, rows: int = 1, context: int = 0) -> int:
        """Tokens to draft in the coming round, 0 for a plain round. The loop may draft fewer, where the text ends.

        Args:
            rows: rows in the batch.
            context: tokens in the target's cache.
        """
        statistics = self.statistics
        if self._plain_is_unknown(rows, context):
            return 0
        num_draft, gain = choose_num_draft(statistics, self.most)
        self.trying = gain <= 0
        if self.trying:
            return num_draft if statistics.waited >= statistics.pause else 0
        since_plain = statistics.rounds - statistics.target[1].kept[-1][0]
        return num_draft if since_plain * REFRESH < gain else 0

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
            num_draft: tokens that were drafted, 0 for a plain round.
            accepted: by row, drafts that became text; where rows advance in lockstep, the count they advanced by.
            target_seconds: the round's time less the drafter's: the target's pass and all that plain rounds do as well.
            drafter_seconds: of the drafter's pass and the proposal.
            rows, context: as given to `next`.
        """
        statistics = self.statistics
        statistics.rounds += 1
        tokens = 1 + sum(accepted) / len(accepted)
        if num_draft == 0:
            if 1 in statistics.target and self._is_elsewhere(rows, context):
                self._rescale(target_seconds / plain_seconds(statistics))
            elif self.sped_up and target_seconds < FASTER * plain_seconds(statistics):
                self._rescale(target_seconds / plain_seconds(statistics))
            elif self.sped_up:
                self.deaf_until = statistics.rounds + PAUSES[1]
            self.sped_up = False
            statistics.target.setdefault(1, Samples()).add(statistics.rounds, target_seconds)
            statistics.rows = rows
            statistics.waited += 1
            if statistics.tried and statistics.tried[0] > CARRIED and not self._is_at_floor():
                self._fade_acceptance(STALE)
        else:
            self._count_time(num_draft, tokens, target_seconds, drafter_seconds)
            self._count_acceptance(num_draft, accepted)
            statistics.waited = 0
            if self.trying and tokens >= 2:  # promising: try again at once
                statistics.pause = statistics.waited = PAUSES[0]
            elif self.trying:
                statistics.pause = min(2 * statistics.pause, PAUSES[1])
        statistics.context = context
        self.drafted = num_draft > 0
        self.tokens += tokens
        refill = tokens * (EARLY if self.tokens <= FIRST else LATER)
        statistics.allowance = max(statistics.allowance, min(statistics.allowance + refill, ALLOWANCE))

    def _is_at_floor(self) -> bool:
        return is_at_floor(self.statistics.first_tried, self.statistics.first_accepted)

    def _fade_acceptance(self, kept: float):
        statistics = self.statistics
        statistics.tried = [kept * count for count in statistics.tried]
        statistics.accepted = [kept * count for count in statistics.accepted]

    def _plain_is_unknown(self, rows, context) -> bool:
        target = self.statistics.target
        if 1 not in target or self.sped_up or self._is_elsewhere(rows, context):
            return True
        # A single measurement above that of a longer pass was disturbed.
        longer = [samples.median for length, samples in target.items() if length > 1]
        return len(target[1]) == 1 and bool(longer) and target[1].median > 1.2 * min(longer)

    def _is_elsewhere(self, rows, context) -> bool:
        """Whether rows or context differ so much from where the times were measured that T(1) must be measured again."""
        pairs = ((rows, self.statistics.rows), (context + 256, self.statistics.context + 256))
        return any(max(pair) >= 2 * min(pair) for pair in pairs)

    def _rescale(self, factor: float):
        """Take over times measured with other rows or context, or on a slower machine: one sample of each kind, in proportion
        to T(1)."""
        statistics = self.statistics
        for samples in (*statistics.target.values(), statistics.drafter, statistics.catching_up):
            if samples:
                samples.kept = []
                samples.add(statistics.rounds, samples.median * factor)
        del statistics.target[1]

    def _count_time(self, num_draft, tokens, target_seconds, drafter_seconds):
        statistics, length = self.statistics, num_draft + 1
        target = statistics.target.setdefault(length, Samples())
        # Other work on the machine ended, say. A T(1) from before would make drafting look better than it is; where the machine
        # slows down, drafting looks worse, and the plain rounds that follow measure T(1).
        believed = len(target) > 0 and statistics.rounds >= self.deaf_until
        self.sped_up = believed and target_seconds < FASTER * target.median
        target.add(statistics.rounds, target_seconds)
        drafter = statistics.drafter if self.drafted else statistics.catching_up
        drafter.add(statistics.rounds, drafter_seconds)
        # A disturbance, which can hit a plain pass as well, is not the drafter's loss.
        plain = min(plain_seconds(statistics), *(seconds for _, seconds in statistics.target[1].kept))
        target_limit = length * plain if len(target) == 1 else 2 * target.median
        drafter_limit = 1.5 * plain if len(drafter) == 1 else 2 * drafter.median
        spent = min(target_seconds, target_limit) + min(drafter_seconds, drafter_limit)
        statistics.allowance = min(statistics.allowance - (spent / plain - tokens), EARNED)

    def _count_acceptance(self, num_draft, accepted):
        statistics = self.statistics
        missing = num_draft - len(statistics.tried)
        statistics.tried += [0.0] * missing
        statistics.accepted += [0.0] * missing
        for slot in range(num_draft):
            reached, passed = sum(count >= slot for count in accepted), sum(count > slot for count in accepted)
            statistics.tried[slot] = FADE * statistics.tried[slot] + reached
            statistics.accepted[slot] = FADE * statistics.accepted[slot] + passed
        statistics.first_tried += len(accepted)
        statistics.first_accepted += sum(count > 0 for count in accepted)


class FixedSchedule:
    """The same number of draft tokens in every round; 0 for none at all.

    Args:
        num_draft_tokens: that each round drafts, where the text has room for them; in a tree, its depth.
        num_nodes: tokens of a draft tree; None for a chain.
    """

    statistics = None

    def __init__(self, num_draft_tokens: int, num_nodes: int | None = None):
        self.most, self.num_nodes = num_draft_tokens, num_nodes

    def next(self, rows: int = 1, context: int = 0) -> int:
        """Return the number of tokens to draft."""
        return self.most

    def observe(self, *round_that_ended):
        """Learn nothing."""


# ------------------------------------------------------------------------------------------------------------------
# A drafter that does not fit.

FLOOR, FLOOR_TRIES = 0.1, 20
FLOOR_WARNING = (
    "Of the first tokens that this DFlash drafter proposed, less than one in ten was accepted: the text is right, but drafting "
    "does not make it faster. Likely causes: the target is another revision than the drafter was made for, fine-tuned or "
    "quantized; the prompts lack the chat template that the drafter was trained with, or use the other thinking mode; the "
    "drafter's `target_layer_ids` or `mask_token_id` are not those of its training; or the prompts are unlike its training "
    "data. Try a prompt like those, and compare `drafter.config` with what the drafter's card says."
)


def is_at_floor(tried: int, accepted: int) -> bool:
    """Whether `FLOOR_WARNING` is due: of at least 20 drafts, less than a tenth had their first token accepted.

    A drafter that gets every third first token right is below that in one of 300 runs of 20.

    Args:
        tried, accepted: `first_tried` and `first_accepted` of `DraftStatistics`, or counts of a fixed schedule.
    """
    return tried >= FLOOR_TRIES and accepted < FLOOR * tried
