"""What a drafter's own confidence is worth, learned from what became of its draft tokens."""

import math
from dataclasses import dataclass, field

FADE = 0.98  # of the sums by round
DOUBT = 3.0  # variances of the slope that chance is given
MOST = 10.0  # log odds that a drafter may state


def log_odds(log_probability: float) -> float:
    """Return the log odds of an event, within bounds; those of nan count as the worst."""
    if not log_probability > -MOST:
        return -MOST
    return min(log_probability - math.log(-math.expm1(min(log_probability, -1e-9))), MOST)


@dataclass
class Calibration:
    """How the log odds that a drafter states relate to acceptance, from faded sums over draft tokens that were reached.

    The odds of acceptance are those of the position as counted, moved by what the drafter states beyond its mean there:

        log odds = log odds of the position + slope * (stated - mean stated at the position)

    The slope is that of two normal distributions with one variance, of accepted and of rejected tokens, less what chance may
    have made of it: a drafter whose confidence says nothing is left to the counts.

    Args:
        tried, stated: by draft position, tokens and the sum of their log odds.
        accepted, rejected: tokens, and the sum of their deviations from the mean of the position.
        squares: sum of the squares of these deviations.
    """

    tried: list[float] = field(default_factory=list)
    stated: list[float] = field(default_factory=list)
    accepted: tuple[float, float] = (0.0, 0.0)
    rejected: tuple[float, float] = (0.0, 0.0)
    squares: float = 0.0

    def deviation(self, position: int, stated: float) -> float:
        """Return by how much stated log odds differ from the mean of the position; 0 where nothing is known of it."""
        if position >= len(self.tried):
            return 0.0
        return stated - self.stated[position] / self.tried[position]

    @property
    def slope(self) -> float:
        """What a difference in stated log odds is worth, at least 0."""
        (count, total), (others, rest) = self.accepted, self.rejected
        if min(count, others) < 1:
            return 0.0
        variance = (self.squares - total**2 / count - rest**2 / others) / (count + others)
        if variance <= 1e-6:
            return 0.0
        slope = (total / count - rest / others) / variance
        chance = DOUBT * (count + others) / (count * others * variance)  # of the slope's square
        return slope * max(1 - chance / slope**2, 0.0) if slope > 0 else 0.0

    def observe(self, rows: list[list[float]], accepted: list[int]):
        """Take in a round: by sequence the log odds of its draft tokens, and how many were accepted."""
        self.tried, self.stated = [FADE * count for count in self.tried], [FADE * total for total in self.stated]
        sums = [tuple(FADE * value for value in pair) for pair in (self.rejected, self.accepted)]
        self.squares *= FADE
        for row, count in zip(rows, accepted):
            for position, stated in enumerate(row[: count + 1]):
                if position == len(self.tried):
                    self.tried.append(0.0)
                    self.stated.append(0.0)
                self.tried[position] += 1
                self.stated[position] += stated
                deviation = self.deviation(position, stated)
                tokens, total = sums[position < count]
                sums[position < count] = tokens + 1, total + deviation
                self.squares += deviation**2
        self.rejected, self.accepted = sums
