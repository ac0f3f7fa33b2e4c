"""What a call of `generate` with a drafter did, round by round."""

import itertools
from dataclasses import dataclass, field


@dataclass
class Speculation:
    """Statistics of one call. A round is one target pass after the prompt's, and the draft that it verified.

    Args:
        acceptance_lengths: by row, then by round: tokens that the round added, the target's own included.
        drafted: by row, then by round: tokens that the drafter proposed.
        accepted: by row, then by round: proposals that became text.
        target_passes: passes of the target, the prompt's included.
        drafter_passes: passes of the drafter.
    """

    acceptance_lengths: list[list[int]] = field(default_factory=lambda: [[]])
    drafted: list[list[int]] = field(default_factory=lambda: [[]])
    accepted: list[list[int]] = field(default_factory=lambda: [[]])
    target_passes: int = 0
    drafter_passes: int = 0

    def add_round(self, drafted: int, accepted: int, added: int):
        self.drafted[0].append(drafted)
        self.accepted[0].append(accepted)
        self.acceptance_lengths[0].append(added)

    @property
    def tau(self) -> float:
        """Mean acceptance length of the rounds; nan if there was none."""
        lengths = [*itertools.chain(*self.acceptance_lengths)]
        return sum(lengths) / len(lengths) if lengths else float("nan")

    @property
    def num_drafted(self) -> int:
        return sum(map(sum, self.drafted))

    @property
    def num_accepted(self) -> int:
        return sum(map(sum, self.accepted))

    @property
    def slot_acceptance(self) -> list[float]:
        """For slot k = 1, 2, ...: of the rounds that drafted slot k, the share whose slots 1 to k were all accepted."""
        rounds = [*zip(itertools.chain(*self.drafted), itertools.chain(*self.accepted))]
        shares = []
        for slot in range(1, max((drafted for drafted, _ in rounds), default=0) + 1):
            reached = [accepted >= slot for drafted, accepted in rounds if drafted >= slot]
            shares.append(sum(reached) / len(reached))
        return shares
