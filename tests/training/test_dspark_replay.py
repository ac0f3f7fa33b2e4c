"""Rounds of DSpark's drafters, replayed; training refuses them by name."""

import pytest
from dflash_hub.training import evaluation
from dflash_hub.training.check import layouts_agree
from helpers.tiny import DSPARK, tiny_drafter, tiny_target
from helpers.training import answers_of, trainer_of

LAYOUTS = {kind: fields for kind, fields in DSPARK.items()} | {
    "fill-in": DSPARK["rnn"] | {"sample_from_anchor": False},
    "anchor-first": {"sample_from_anchor": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_rounds_are_those_of_generation(layout):
    """A recurrent head carries its state along the text; the anchor's position may draft."""
    target = tiny_target("llama", eos_token_id=7)
    answers = answers_of(target, 8)
    drafter = tiny_drafter(**LAYOUTS[layout])
    replayed, _, _ = evaluation.replay(target, drafter, answers)
    prompts = [row["prompt_ids"] for row in answers]
    real = evaluation.generate(target, drafter, prompts, max(len(row["response_ids"]) for row in answers))
    assert replayed.accepted == real.accepted and replayed.drafted == real.drafted
    assert max(map(max, real.drafted)) == drafter.config.drafts_per_block
    assert all(finding.ok for finding in layouts_agree(drafter, target, answers[0]))


def test_training_is_refused(tmp_path):
    target = tiny_target("llama")
    answers = answers_of(target, 4)
    with pytest.raises(ValueError, match=r"a drafter of DSpark \(markov_rank, markov_head_type"):
        trainer_of(tmp_path, target, tiny_drafter(**DSPARK["vanilla"]), answers[:2], answers[2:])
