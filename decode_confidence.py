"""The adaptive draft length where a drafter says how sure it is: a draft is cut where verifying more of it does not pay.

Drafter and walk have run by then, so the target's forward pass alone is at stake. The draft length changes no text, so what is
drafted may decide it. Costs are those of `decode_schedule.py`; acceptance is what it counts, moved by the drafter's confidence
as far as that has told more than chance (`decode_calibration.py`).
"""

import itertools
import math

from .decode_calibration import log_odds
from .decode_schedule import DraftSchedule, choose_num_draft, expected_tokens, round_costs, worst_costs
from .drafter_draft import Draft
from .target_ranks import TargetRanks


class ConfidentLength:
    """Cuts the drafts of one call; does nothing where drafts are of a fixed length, or say nothing of confidence.

    Args:
        schedule: of the call; what is learned is kept in its statistics.
        fixed_lengths: whether a target is compiled for each length, so that they must be few.
    """

    def __init__(self, schedule, ranks: TargetRanks, fixed_lengths: bool):
        self.schedule, self.ranks = schedule, ranks
        self.adaptive = isinstance(schedule, DraftSchedule) and not fixed_lengths
        self.planned = 0  # draft length by counts alone
        self.stated: list[list[float]] | None = None  # log odds of the tokens of the last draft, by running sequence

    def plan(self, num_draft: int) -> int:
        """Return how many tokens to draft, where the schedule asks for `num_draft`: all that may be worth it for a sure drafter."""
        self.planned = num_draft
        if not self.adaptive or num_draft == 0 or self.schedule.statistics.confidence.slope == 0:
            return num_draft
        worst, budget = worst_costs(self.schedule.statistics.times, self.schedule.most), self.schedule.budget()
        affordable = (n for n in range(self.schedule.most, num_draft, -1) if worst[n] - 1 <= budget)
        return next(affordable, num_draft)

    def cut(self, draft: Draft, running: list[int]) -> Draft:
        """Return the part of a chain that is worth verifying, at least one token.

        Args:
            running: sequences that have not ended.
        """
        self.stated = None
        if not self.adaptive or draft.confidence is None:
            return draft
        rows = draft.confidence[running].tolist()
        self.stated = [[log_odds(value) for value in row] for row in rows]
        (count,) = self.ranks.agree([self._length(len(draft))])
        return draft if count == len(draft) else draft.first(count)

    def _length(self, most: int) -> int:
        statistics, planned = self.schedule.statistics, min(self.planned or most, most)
        slope, counted = statistics.confidence.slope, expected_tokens(statistics, most)
        if slope == 0:
            return planned
        gains = [after - before for before, after in itertools.pairwise([0.0, *counted])]
        rates = [min(after / before, 1.0) if before > 0 else 0.0 for before, after in itertools.pairwise(gains)]
        tokens = [1.0] + [0.0] * most
        for row in self.stated:
            survival = 1.0
            for position, (stated, rate) in enumerate(zip(row, rates)):
                moved = slope * statistics.confidence.deviation(position, stated)
                survival *= 1 / (1 + (1 - rate) / max(rate, 1e-9) * math.exp(-moved))
                tokens[position + 1] += survival / len(self.stated)
        costs = round_costs(statistics.times, most, clip=True)
        return choose_num_draft([*itertools.accumulate(tokens)], costs, [*range(1, most + 1)], planned)

    def observe(self, accepted: list[int], drafted: int):
        """Learn from a round: by running sequence, how many of the `drafted` tokens were accepted."""
        if self.stated is not None:
            self.schedule.statistics.confidence.observe([row[:drafted] for row in self.stated], accepted)
