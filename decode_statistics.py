"""What a call of `generate` with a drafter did, round by round."""

import itertools
from dataclasses import dataclass, field


@dataclass
class Speculation:
    """Statistics of one call. A round is one draft and the target pass that verified it, after the prompt's pass.

    Args:
        acceptance_lengths: by row, then by round: tokens that the round added, the target's own included.
        drafted: by row, then by round: tokens that the drafter proposed.
        accepted: by row, then by round: proposals that became text.
        target_passes: passes of the target that this call made: the prompt's (one a chunk), one a round, and those below.
        drafter_passes: passes of the drafter.
        prefix_passes: of the target, over a prefix that came in a cache without the drafter's context.
        replay_passes: of the target, over accepted tokens once more, where a recurrent state had no other way back.
        check_passes: of the target, whether it reads several tokens as it reads them one by one; in the first call of a kind.
        stopped_drafting: whether drafting ended because the drafter's logits were not finite.
        processor_passes: of the target, made by logits processors (guidance), and not among `target_passes`.
    """

    acceptance_lengths: list[list[int]] = field(default_factory=lambda: [[]])
    drafted: list[list[int]] = field(default_factory=lambda: [[]])
    accepted: list[list[int]] = field(default_factory=lambda: [[]])
    target_passes: int = 0
    drafter_passes: int = 0
    prefix_passes: int = 0
    replay_passes: int = 0
    check_passes: int = 0
    processor_passes: int = 0
    stopped_drafting: bool = False

    @classmethod
    def of_rows(cls, rows: int) -> "Speculation":
        return cls(*([[] for _ in range(rows)] for _ in range(3)))

    def add_round(self, row: int, drafted: int, accepted: int, added: int):
        self.drafted[row].append(drafted)
        self.accepted[row].append(accepted)
        self.acceptance_lengths[row].append(added)

    @property
    def tau(self) -> float:
        """Mean acceptance length of the rounds, over all rows; nan if there was none."""
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
