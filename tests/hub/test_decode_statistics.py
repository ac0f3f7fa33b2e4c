"""The statistics of a call as people and logs read them."""

import json

import pytest
import torch
from dflash_hub.decode_statistics import Speculation
from helpers.scripted import scripted
from helpers.tiny import prompt_of, tiny_drafter, tiny_target


def test_summary_and_log_of_a_call():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = target.generate(ids, max_new_tokens=32, do_sample=False)
    drafter = scripted(drafter, "oracle", plain)
    output = target.generate(
        ids, max_new_tokens=32, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    # The first token, six rounds of five, and one token that no draft token has room beside.
    assert output.speculation.summary().splitlines() == [
        "32 new tokens of 1 sequence: 11 forward passes of the target (3 to check the target), 6 of the drafter",
        "rounds: 6 with draft tokens, 1 without",
        "  no draft tokens in 1 round: the text may grow by one token only",
        "acceptance length: 5.00 over rounds with draft tokens, 4.43 over all",
        "draft tokens: 24 of 24 accepted (100%)",
        "accepted up to position 1, 2, ...: 1.00 1.00 1.00 1.00",
    ]
    assert str(drafter.last_speculation) == output.speculation.summary()
    logged = json.loads(json.dumps(output.speculation.to_dict(), allow_nan=False))
    assert logged["rounds"] == 7 and logged["rounds_with_draft"] == 6
    assert logged["acceptance_length"] == pytest.approx(31 / 7) and logged["acceptance_length_with_draft"] == 5
    assert logged["acceptance_position_4"] == 1
    # The output is plain `generate`'s, and its repr ends with the figures.
    assert torch.equal(output.sequences, plain) and "speculation" not in output
    assert "target_passes=11" in repr(output) and "acceptance_length=4.43" in repr(output) and len(repr(output)) > 500


@pytest.mark.parametrize(
    "call, spoil, reason",
    (
        ({"num_assistant_tokens": 0}, False, "`num_assistant_tokens` is 0"),
        ({}, True, "the drafter's logits are not finite"),
    ),
)
def test_why_nothing_was_drafted(call, spoil, reason):
    target, drafter = tiny_target("llama"), tiny_drafter()
    if spoil:
        with torch.no_grad():
            drafter.norm.weight.fill_(torch.nan)
    target.generate(prompt_of(10), max_new_tokens=9, do_sample=False, assistant_model=drafter, **call)
    assert set(drafter.last_speculation.undrafted) == {reason}
    assert f"{drafter.last_speculation.undrafted[reason]} rounds: {reason}" in str(drafter.last_speculation)


def test_where_the_target_has_no_room_and_where_drafting_does_not_pay():
    drafter = tiny_drafter()
    tiny_target("llama", max_position_embeddings=20).generate(
        prompt_of(10), max_new_tokens=12, do_sample=False, assistant_model=drafter
    )
    assert any("have no room" in reason for reason in drafter.last_speculation.undrafted)
    tiny_target("llama").generate(
        prompt_of(10), max_new_tokens=30, do_sample=False, assistant_model=drafter, num_assistant_tokens="auto"
    )
    assert any("adaptive draft length" in reason for reason in drafter.last_speculation.undrafted)


def test_statistics_of_nothing_are_said_without_a_mean():
    speculation = Speculation([], [], [])
    assert "acceptance" not in speculation.summary()
    assert json.dumps(speculation.to_dict(), allow_nan=False) and "acceptance_length" not in repr(speculation)
