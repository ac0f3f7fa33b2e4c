"""Random calls equal plain `generate`, and the search would notice if they did not."""

from collections import Counter
from dataclasses import replace

import hypothesis
import pytest
from dflash_hub import target_runner
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
    assert rates["random"] < 0.2 < rates["half-right"] < 0.85 < rates["oracle"], rates


def test_a_case_prints_as_it_is_made():
    case = Case(family="gpt2", prompts=(3, 5), options={"top_k": 5}, turns=(Turn(new=1),), raises=("head", 2))
    assert eval(repr(case)) == case
    assert repr(Case()) == "Case()"


# Smallest cases of faults that the search has found, since mended.
FOUND = {
    "healing left-padded prompts without a mask": Case(prompts=(9, 2), mask=False, options={"token_healing": True}),
    "dynamic NTK beside a processor that runs the target": Case(
        config={
            "max_position_embeddings": 4,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
        num_draft=2,
        prompts=(2,),
        max_new_tokens=6,
        options={"guidance_scale": 1.5, "negative_prompt": 5},
    ),
}


@pytest.mark.parametrize("drafts", ("random", "half-right", "oracle"))
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name, drafts):
    assert check(replace(FOUND[name], drafts=drafts)) == "equal"


# ------------------------------------------------------------------------------------------------- planted faults


def position_of_running(self, lengths, finished):
    """Finished sequences of a lockstep batch do not count, although they are fed on."""
    running = [row for row in range(self.batch) if not finished[row]]
    return max(self.inputs.position(lengths[row], row) for row in running)


def keep_one_more(self, fed, added, commit=CacheRollback.commit):
    """A rejected draft token stays in the KV cache."""
    commit(self, fed, [min(count + 1, fed) for count in added])


def nothing(*args):
    """What was mended does nothing."""


PLANTED = {
    "finished sequences do not count": (("llama",), TargetRunner, "longest_position", position_of_running),
    "an interrupted call leaves its drafts": (("llama",), TargetRunner, "guard", nothing),
    "attentions without a causal mask": (("falcon",), target_runner, "check_block", nothing),
    "a rejected token stays": (("qwen3",), CacheRollback, "commit", keep_one_more),
}


@pytest.fixture
def new_targets():
    """Targets that no other test has run, and none runs after this one: each remembers how it was checked."""
    fuzzing.forget_targets()
    yield
    fuzzing.forget_targets()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, monkeypatch, new_targets):
    """Its smallest case fails with the fault and holds without it."""
    families, owner, attribute, faulty = PLANTED[name]

    def holds(case):
        check(case)

    with monkeypatch.context() as planted:
        planted.setattr(owner, attribute, faulty)
        with pytest.raises(Fault) as found:
            search(families, holds, 3000, derandomize=True)
        case = eval(repr(smallest(found.value).case))
        with pytest.raises(Fault):
            check(case)
    fuzzing.forget_targets()
    assert check(case) in ("equal", "raises", "refused"), case
