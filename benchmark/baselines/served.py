"""A running server as a method of `dflash-hub bench`: what a user would start instead, on the same prompts in the same table."""

from ...common.server import Continuation, Server
from ..methods import Run
from ..server import COUNTERS

# Settings of a generation config that change greedy text, with the value under which they do nothing; a server is not told.
UNTOLD = {"repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0), "min_new_tokens": (None, 0)}


class Served:
    """Sends each prompt as tokens, one at a time, greedily. Target, drafter and weights are what the server runs.

    Raises:
        ValueError: the run samples, or the target's generation config has a setting that the server would not know.
    """

    def __init__(self, name: str, bench, server: Server):
        if bench.settings["do_sample"]:
            raise ValueError(
                f"{name} is measured greedily only: servers filter what they sample by rules of their own."
            )
        resolved = bench.resolved()
        for setting, idle in UNTOLD.items():
            if resolved.get(setting) not in idle:
                raise ValueError(
                    f"the target's generation config has `{setting}` {resolved[setting]}, which {name} would not apply: the texts would "
                    "differ. Measure a copy of the target without it."
                )
        self.name, self.server, self.tokenizer = name, server, bench.tokenizer

    def run(self, inputs: dict, settings: dict, seed: int, baseline_ids: list[int] | None) -> Run:
        before = {} if self.server.is_llamacpp else self.server.metrics()
        done = self.server.continue_ids(inputs["input_ids"][0].tolist(), settings["max_new_tokens"])
        totals = round_totals(done, before, {} if self.server.is_llamacpp else self.server.metrics())
        return Run(
            new_ids=self._tokens(done, baseline_ids),
            seconds=done.seconds,
            first_token=done.first_token,
            prompt_tokens_added=1,
            rounds=[],
            round_totals=totals,
            target_passes=totals[1] + 1 if totals else 0,
            drafter_passes=totals[1] if totals else 0,
        )

    def _tokens(self, done: Continuation, baseline_ids: list[int] | None) -> list[int]:
        """The new tokens. Of a text alone they are those of the baseline where it wrote the same text, else the text's own."""
        if done.ids is not None:
            return done.ids
        if baseline_ids is not None and self.tokenizer.decode(baseline_ids, skip_special_tokens=True) == done.text:
            return baseline_ids
        return self.tokenizer(done.text, add_special_tokens=False)["input_ids"]


def round_totals(done: Continuation, before: dict[str, float], after: dict[str, float]) -> list[int] | None:
    """[tokens that the rounds of a request added, rounds]; None where the server reports no drafts.

    Args:
        before, after: the server's metrics around the request, which must have been its only one.
    """
    if done.timings.get("draft_n"):
        # The prefill gives one token; each round gives those of its draft that were accepted, and one more.
        added = done.timings["predicted_n"] - 1
        return [added, added - done.timings["draft_n_accepted"]]
    for accepted, drafts in COUNTERS.values():
        rounds = round(after.get(drafts, 0) - before.get(drafts, 0))
        if rounds > 0:
            return [rounds + round(after.get(accepted, 0) - before.get(accepted, 0)), rounds]
    return None
