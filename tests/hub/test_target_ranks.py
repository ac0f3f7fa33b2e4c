"""Processes that share a target come to one text: two of them, with gloo on a CPU, run `two_ranks.py` once for all tests here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dflash_hub.target_ranks import TargetRanks
from helpers.families import tiny_family
from helpers.tiny import tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each rank found, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    # Older transformers cannot split an odd vocabulary in two.
    tiny_target("llama", vocab_size=98).save_pretrained(folder / "target")
    scaled = tiny_family("gemma3_text")[0].config
    scaled.vocab_size = 98
    AutoModelForCausalLM.from_config(scaled, dtype=torch.float32).save_pretrained(folder / "scaled")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    commands = [[sys.executable, str(TESTS / "helpers" / "two_ranks.py"), str(folder), str(rank)] for rank in (0, 1)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, env=environment, cwd=TESTS.parent, **streams) for command in commands]
    try:
        logs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(log[-3000:] for log in logs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def of_both(ranks: list[dict], name: str):
    """A result that is the same on both ranks."""
    first, second = (rank[name] for rank in ranks)
    assert first == second
    return first


@pytest.fixture(scope="module")
def plain(ranks) -> list:
    alone, together = of_both(ranks, "plain")
    assert alone == together
    return alone


def test_greedy_text_is_that_of_one_process_whatever_the_clocks_say(ranks, plain):
    accepted = {}
    for kind in ("random", "half-right", "oracle"):
        text, drafted, [accepted[kind]] = of_both(ranks, f"greedy {kind} auto")
        assert text == plain
        assert max(drafted[0]) == 4  # by the first rank's clock; the second's would draft nothing
    assert sum(accepted["random"]) < 4 < sum(accepted["half-right"]) < sum(accepted["oracle"])
    text, drafted, _ = of_both(ranks, "greedy half-right 4")
    assert text == plain and max(drafted[0]) == 4


@pytest.mark.parametrize("name", ["ragged", "lockstep", "static"])
def test_batches_are_those_of_one_process(ranks, name):
    plain, text, drafted = of_both(ranks, f"batch {name}")
    assert text == plain and max(map(max, drafted)) >= 2  # by the first rank's clock, as above


@pytest.mark.parametrize("number", ["auto", 4])
def test_ranks_with_different_seeds_sample_the_first_ones_text(ranks, number):
    """It is the text that one process samples with the first rank's seed, in each sequence its own."""
    alone, text = ranks[0][f"sampling {number}"]
    assert text == alone and text[0] != text[1]
    assert ranks[1][f"sampling {number}"][1] == text


@pytest.mark.parametrize("name", ["other drafts", "other logits", "other scores"])
def test_ranks_whose_numbers_differ_write_the_first_ones_text(ranks, plain, name):
    assert of_both(ranks, name) == plain


def test_the_first_ranks_drafts_are_accepted_on_all(ranks):
    assert of_both(ranks, "accepted of other drafts") == [[4, 4, 4]]


def test_stored_rows_of_a_sharded_embedding(ranks):
    assert of_both(ranks, "scaled embedding") is True


def test_ranks_stop_where_the_first_one_does(ranks, plain):
    assert of_both(ranks, "criterion") == [plain[0][:19]]
    assert of_both(ranks, "time") == plain


@pytest.mark.parametrize("at", [6, 16])  # in the middle, and at the last token
def test_an_error_on_one_rank_stops_the_other(ranks, at):
    for name, failed in ((f"streamer {at}", 0), (f"criterion raises {at}", 1)):
        assert ranks[failed][name] == "ConnectionError: the reader has gone"
        other = ranks[1 - failed][name]
        assert other.startswith("RankStopped:") and f"stopped on rank {failed} of the 2 that share this target" in other


def test_ranks_can_go_on_after_errors(ranks, plain):
    assert of_both(ranks, "after errors") == plain


def test_different_calls_are_refused_on_every_rank(ranks):
    for name, found in (
        ("prompts", "prompt tokens: 12, 11;"),
        ("tokens", "(checksum of the prompt:"),
        ("limits", "(length limit: 28, 27, by rank)"),
    ):
        error = of_both(ranks, name)
        assert error.startswith("ValueError: the 2 ranks that share this target were given different calls")
        assert found in error


def test_a_sharded_target_is_refused_by_name(ranks):
    for kind, name in (("FSDP", "FSDP"), ("ZeRO-3", "DeepSpeed ZeRO-3")):
        assert f"is sharded over 2 processes by {name}, which is not supported" in of_both(ranks, f"{kind} generates")
        assert f"sharded over processes by {name}, but training needs a whole" in of_both(ranks, f"{kind} trains")
    assert "sharded over processes by tensor parallelism, but training" in of_both(ranks, "TP trains")


def test_a_target_of_one_process_costs_nothing():
    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was called")

    values, target = torch.ones(2, 3), tiny_target("llama")
    with Counted():
        ranks = TargetRanks(target, 2)
        assert ranks.first and ranks.share(values) is values and ranks.agree([3, 4]) == [3, 4]
        ranks.check_call({"sequences": 2})
        with pytest.raises(KeyError), ranks.alone():
            raise KeyError
