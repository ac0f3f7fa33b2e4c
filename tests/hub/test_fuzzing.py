"""Random calls equal plain `generate`, and the search would notice if they did not."""

from collections import Counter

import hypothesis
import pytest
from dflash_hub.decode_outputs import OutputRecorder
from dflash_hub.target_cache import CacheRollback
from dflash_hub.target_runner import TargetRunner
from helpers import fuzzing
from helpers.fuzzing import Case, Fault, Turn, cases, check, search, smallest

pytestmark = pytest.mark.filterwarnings("ignore")


def test_random_calls_equal_plain_generate():
    """The same cases in every run. What was accepted follows the kind of drafts, so that all ends of a round occur."""
    verdicts, counts = Counter(), Counter()

    @fuzzing.settings(120, derandomize=True, database=None)
    @hypothesis.given(cases())
    def holds(case):
        verdicts[check(case, counts)] += 1

    holds()
    assert verdicts["equal"] > 0.6 * verdicts.total()
    rates = {kind: counts[kind, "accepted"] / counts[kind, "drafted"] for kind in ("random", "half-right", "oracle")}
    assert rates["random"] < 0.2 < rates["half-right"] < 0.7 < rates["oracle"], rates


def test_a_case_prints_as_it_is_made():
    case = Case(family="gpt2", prompts=(3, 5), options={"top_k": 5}, turns=(Turn(new=1),), raises=("head", 2))
    assert eval(repr(case)) == case
    assert repr(Case()) == "Case()"


# ------------------------------------------------------------------------------------------------- planted faults


def position_of_running(self, lengths, finished):
    """Finished sequences of a lockstep batch do not count, although they are fed on."""
    running = [row for row in range(self.batch) if not finished[row]]
    return max(self.inputs.position(lengths[row], row) for row in running)


def keep_one_more(self, fed, added, commit=CacheRollback.commit):
    """A rejected draft token stays in the KV cache."""
    commit(self, fed, [min(count + 1, fed) for count in added])


def every_row(self, scores, logits, add=OutputRecorder.add):
    """Scores are handed back as a view, which an in-place processor or the next round may change."""
    self.scores = None if self.scores is None else self.scores + (scores.flip(-1),)
    self.logits = None if self.logits is None else self.logits + (logits,)


PLANTED = {
    "finished sequences do not count": (("llama",), TargetRunner, "longest_position", position_of_running),
    "a rejected token stays": (("qwen3",), CacheRollback, "commit", keep_one_more),
    "other scores": (("llama",), OutputRecorder, "add", every_row),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, monkeypatch):
    """Its smallest case fails with the fault and holds without it."""
    families, owner, attribute, faulty = PLANTED[name]

    def checked(case):
        check(case)

    with monkeypatch.context() as planted:
        planted.setattr(owner, attribute, faulty)
        with pytest.raises(Fault) as found:
            search(families, checked, 3000, derandomize=True)
        case = eval(repr(smallest(found.value).case))
        with pytest.raises(Fault):
            check(case)
    assert check(case) in ("equal", "raises")
