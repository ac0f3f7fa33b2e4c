"""`upgrade` and `init --method dflash2`: parts that change nothing until they are trained."""

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.convert.card import parts_in_words
from dflash_hub.convert.init import init_drafter
from dflash_hub.convert.upgrading import upgrade_drafter
from helpers.tiny import CONVOLUTION, SELECTOR, prompt_of, tiny_drafter, tiny_target
from typer.testing import CliRunner


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_an_upgraded_drafter_drafts_bit_for_bit_the_same(dtype, tmp_path):
    plain, target = tiny_drafter(dtype=dtype), tiny_target("llama")
    plain.save_pretrained(tmp_path / "plain")
    config = upgrade_drafter(tmp_path / "plain", tmp_path / "upgraded")
    assert (config.conv_kernel_size, config.conv_group_size, config.selector_rank, config.selector_top_k) == (
        2,
        16,
        256,
        16,
    )
    upgraded = DFlashDraftModel.from_pretrained(tmp_path / "upgraded", dtype="auto")
    assert upgraded.dtype is dtype and upgraded.candidate_selector.predecessor_codebook.std() > 0.1
    noise, context = torch.randn(1, 5, 32), torch.randn(1, 9, 96)
    assert upgraded(noise, context).last_hidden_state.equal(plain(noise, context).last_hidden_state)
    accepted = []
    for drafter in (plain, upgraded):
        torch.manual_seed(0)
        target.generate(
            prompt_of(8), assistant_model=drafter, max_new_tokens=24, do_sample=True, num_assistant_tokens=4
        )
        accepted.append(drafter.last_speculation.accepted)
    assert accepted[0] == accepted[1]


def test_parts_that_are_there_stay_as_they_are(tmp_path):
    drafter = tiny_drafter(**SELECTOR)
    drafter.save_pretrained(tmp_path / "selector")
    upgrade_drafter(tmp_path / "selector", tmp_path / "both")
    both = DFlashDraftModel.from_pretrained(tmp_path / "both")
    assert both.config.selector_rank == 4 and both.config.conv_kernel_size == 2
    for name, tensor in drafter.state_dict().items():
        assert both.state_dict()[name].equal(tensor)
    with pytest.raises(ValueError, match="there is no part to add"):
        upgrade_drafter(tmp_path / "both", tmp_path / "again")
    upgrade_drafter(tmp_path / "selector", tmp_path / "selector again", convolution=True, selector=False)


def test_a_fresh_drafter_of_dflash_2_by_the_command(tmp_path):
    from dflash_hub.cli.app import app

    tiny_target("llama").save_pretrained(tmp_path / "target")
    plan = init_drafter(
        str(tmp_path / "target"),
        tmp_path / "drafter",
        layers=1,
        mask_token="96",
        target_layers=[0, 1],
        method="dflash2",
    )
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    assert parts_in_words(drafter.config).startswith("convolutions of 2 taps") and plan.config.selector_top_k == 16
    assert not drafter.candidate_selector.successor_codebook.any()
    with pytest.raises(ValueError, match="'dflash3' is none of dflash, dflash2"):
        init_drafter(str(tmp_path / "target"), None, layers=1, mask_token="96", target_layers=[0, 1], method="dflash3")
    tiny_drafter(**CONVOLUTION).save_pretrained(tmp_path / "one")
    done = CliRunner().invoke(app, ["upgrade", str(tmp_path / "one"), str(tmp_path / "two"), "--rank", "8"])
    assert done.exit_code == 0 and "selector of rank 8 over 16 candidates" in done.output
