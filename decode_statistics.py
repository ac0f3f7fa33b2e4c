"""What a call of `generate` with a drafter did, round by round."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass(repr=False)
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
        undrafted: rounds of the batch without draft tokens, counted by the reason.
        notes: what the proposer says of the call, a sentence each.
        nodes: by row, then by round: tokens that were verified beside the anchor, which in a tree are more than `drafted`.
        branched_rounds: rounds whose path was not made of the first nodes of the tree.
        tree_tokens, predicted_tokens: tokens that rounds with trees added, and that the scores of their nodes predicted.
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
    undrafted: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=lambda: [[]])
    branched_rounds: int = 0
    tree_tokens: int = 0
    predicted_tokens: float = 0.0

    @classmethod
    def of_rows(cls, rows: int) -> "Speculation":
        speculation = cls(*([[] for _ in range(rows)] for _ in range(3)))
        speculation.nodes = [[] for _ in range(rows)]
        return speculation

    def add_tree(self, predicted: float, added: int):
        """Count what a tree was expected to add, the target's own token included, and what it added."""
        self.predicted_tokens += predicted
        self.tree_tokens += added

    def add_round(self, row: int, drafted: int, accepted: int, added: int, nodes: int, branched: bool):
        """Count a round of one sequence.

        Args:
            drafted: draft positions: the tokens of a chain, the depth of a tree.
            accepted: draft tokens that became text.
            added: tokens that became text, the target's own included.
            nodes: draft tokens that were verified.
            branched: whether the path left out some of them between others, as in a tree.
        """
        self.drafted[row].append(drafted)
        self.accepted[row].append(accepted)
        self.acceptance_lengths[row].append(added)
        self.nodes[row].append(nodes)
        self.branched_rounds += branched

    def count_undrafted(self, asked: int, left: int, room: int):
        """Count a round of the batch without draft tokens, by its reason.

        Args:
            asked: draft tokens of a round, at most, as the call asks for them.
            left: that the text has room for.
            room: that the target has room for.
        """
        if asked == 0:
            reason = "`num_assistant_tokens` is 0"
        elif self.stopped_drafting:
            reason = "the drafter's logits are not finite"
        elif left <= 0:
            reason = "the text may grow by one token only"
        elif room == 0:
            reason = "the target's positions or KV cache have no room for them"
        else:
            reason = "the adaptive draft length chose none: drafting does not pay, or a pass without drafts is measured"
        self.undrafted[reason] += 1

    @property
    def new_tokens(self) -> int:
        """Tokens that the call added, over all sequences: one of the prefill, and those of the rounds."""
        return sum(1 + sum(lengths) for lengths in self.acceptance_lengths)

    @property
    def tau(self) -> float:
        """Mean acceptance length of the rounds, over all rows; nan if there was none."""
        return _mean([*itertools.chain(*self.acceptance_lengths)])

    @property
    def drafted_acceptance_length(self) -> float:
        """Mean acceptance length of the rounds with draft tokens, over all sequences; nan if there was none."""
        return _mean([length for length, drafted, _ in self._rounds() if drafted > 0])

    @property
    def num_drafted(self) -> int:
        return sum(map(sum, self.drafted))

    @property
    def num_accepted(self) -> int:
        return sum(map(sum, self.accepted))

    @property
    def position_acceptance(self) -> list[float]:
        """For draft position k = 1, 2, ...: of the rounds that drafted it, the share whose positions 1 to k were all accepted."""
        rounds, shares = self._rounds(), []
        for position in range(1, max((drafted for _, drafted, _ in rounds), default=0) + 1):
            shares.append(_mean([accepted >= position for _, drafted, accepted in rounds if drafted >= position]))
        return shares

    def _rounds(self) -> list[tuple[int, int, int]]:
        """(acceptance length, draft tokens, accepted ones) of every round of every sequence."""
        return [*zip(*(itertools.chain(*rows) for rows in (self.acceptance_lengths, self.drafted, self.accepted)))]

    # ---- for people and logs

    def to_dict(self) -> dict[str, int | float]:
        """Return the figures of the call under names for a log: counts, means and shares. A mean of nothing is left out."""
        rounds = self._rounds()
        figures = {
            "sequences": len(self.acceptance_lengths),
            "new_tokens": self.new_tokens,
            "target_passes": self.target_passes,
            "drafter_passes": self.drafter_passes,
            "rounds": len(rounds),
            "rounds_with_draft": sum(drafted > 0 for _, drafted, _ in rounds),
            "draft_tokens": self.num_drafted,
            "accepted_draft_tokens": self.num_accepted,
        }
        if rounds:
            figures["acceptance_length"] = self.tau
        if self.num_drafted:
            figures["acceptance_length_with_draft"] = self.drafted_acceptance_length
            figures["acceptance_rate"] = self.num_accepted / self.num_drafted
        if self.tree_tokens:
            figures["tree_nodes"] = sum(map(sum, self.nodes))
            figures["tree_rounds_with_branch"] = self.branched_rounds
            figures["tree_tokens"], figures["tree_tokens_predicted"] = self.tree_tokens, self.predicted_tokens
        return figures | {
            f"acceptance_position_{k}": share for k, share in enumerate(self.position_acceptance, start=1)
        }

    def summary(self) -> str:
        """Say in a few lines what the call did: tokens, forward passes, rounds, acceptance, and why nothing was drafted."""
        figures, of = self.to_dict(), _count(len(self.acceptance_lengths), "sequence")
        extra = {"check": "to check the target", "prefix": "over a cached prefix", "replay": "to roll back"}
        extra = [f"{n} {why}" for kind, why in extra.items() if (n := getattr(self, f"{kind}_passes"))]
        if self.processor_passes:
            extra.append(f"{self.processor_passes} more by logits processors")
        passes = f"{_count(self.target_passes, 'forward pass')} of the target" + (
            f" ({', '.join(extra)})" if extra else ""
        )
        drafted = figures["rounds_with_draft"]
        lines = [
            f"{_count(self.new_tokens, 'new token')} of {of}: {passes}, {self.drafter_passes} of the drafter",
            f"rounds: {drafted} with draft tokens, {figures['rounds'] - drafted} without",
        ]
        lines += [f"  no draft tokens in {_count(n, 'round')}: {reason}" for reason, n in self.undrafted.most_common()]
        if drafted:
            lines += [
                f"acceptance length: {self.drafted_acceptance_length:.2f} over rounds with draft tokens, {self.tau:.2f} over all",
                f"draft tokens: {self.num_accepted} of {self.num_drafted} accepted ({figures['acceptance_rate']:.0%})",
                "accepted up to position 1, 2, ...: " + " ".join(f"{share:.2f}" for share in self.position_acceptance),
            ]
        if self.tree_tokens:
            lines.append(
                f"trees: {figures['tree_nodes']} nodes verified, a branch kept in {_count(self.branched_rounds, 'round')}, "
                f"{self.tree_tokens} tokens of {self.predicted_tokens:.0f} predicted"
            )
        return "\n".join(lines + self.notes)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.to_dict().items() if not name.startswith("acceptance_position")}
        return f"Speculation({', '.join(f'{name}={round(value, 2)}' for name, value in shown.items())})"


@dataclass(repr=False)
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What plain `generate` returns, with the statistics of the call beside its fields."""

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, speculation={self.speculation!r})"


def _mean(values: list) -> float:
    return sum(values) / len(values) if values else float("nan")


def _count(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"
