"""Chains or trees by measured times: against a fake clock, and inside `generate`."""

import time
from statistics import mean

import pytest
import torch
from dflash_hub.decode_schedule import DraftSchedule
from dflash_hub.decode_tree_schedule import TreeSchedule
from dflash_hub.experiments.schedule_simulation import DRAFTERS, TABLES, simulate, steady
from helpers.families import tiny_family
from helpers.scripted import scripted
from helpers.tiny import prompt_of, tiny_drafter, tiny_target

# ------------------------------------------------------------------------------------------------------------------
# The fake clock.


@pytest.mark.parametrize("table", ("GPU, light drafter", "GPU, usual drafter"))
@pytest.mark.parametrize("acceptance", (0.5, 0.7))
def test_trees_where_long_passes_cost_little_more(table, acceptance):
    """Of 400 tokens most rounds draft trees, and the text is a tenth faster than with chains."""
    trees, chains, shares = [], [], []
    for seed in range(12):
        seconds, _, drafts = simulate(table, steady(acceptance), TreeSchedule(8), seed, tokens=400)
        trees.append(seconds)
        chains.append(simulate(table, steady(acceptance), DraftSchedule(8), seed, tokens=400)[0])
        shares.append(sum(n < 0 for n in drafts) / len(drafts))
    assert mean(trees) < 0.9 * mean(chains) and mean(shares) > 0.5, (mean(trees) / mean(chains), mean(shares))


@pytest.mark.parametrize("acceptance", (0.4, 0.6))
def test_trees_are_found_within_a_short_text(acceptance):
    """The first 64 tokens with a drafter and a target that were never timed."""
    trees, chains, shares = [], [], []
    for seed in range(12):
        table = "CPU, bfloat16"
        seconds, _, drafts = simulate(table, steady(acceptance), TreeSchedule(8), seed, tokens=64)
        trees.append(seconds)
        chains.append(simulate(table, steady(acceptance), DraftSchedule(8), seed, tokens=64)[0])
        shares.append(sum(n < 0 for n in drafts) / len(drafts))
    assert mean(trees) < 0.85 * mean(chains) and mean(shares) > 0.6, (mean(trees) / mean(chains), mean(shares))


@pytest.mark.parametrize("acceptance", (0.3, 0.6, 0.8))
@pytest.mark.parametrize("table", ("half a token", "linear, light drafter", "linear, heavy drafter"))
def test_chains_where_passes_cost_in_proportion(table, acceptance):
    """Of 200 tokens hardly any round drafts a tree, and the text takes as long as with chains alone."""
    trees, chains, shares = [], [], []
    for seed in range(12):
        seconds, _, drafts = simulate(table, steady(acceptance), TreeSchedule(8), seed)
        trees.append(seconds)
        chains.append(simulate(table, steady(acceptance), DraftSchedule(8), seed)[0])
        shares.append(sum(n < 0 for n in drafts) / len(drafts))
    assert mean(trees) <= 1.03 * mean(chains) and mean(shares) < 0.1, (mean(trees) / mean(chains), mean(shares))


@pytest.mark.parametrize("table", TABLES)
def test_never_three_per_cent_above_the_baseline(table):
    """Over 200 tokens, in every run, as with chains."""
    for name, acceptance in DRAFTERS.items():
        for seed, noise in ((0, 0.0), (1, 0.03), (2, 0.03)):
            seconds, plain, drafts = simulate(table, acceptance, TreeSchedule(8), seed, noise=noise)
            assert seconds <= 1.03 * plain, (name, seed, noise, seconds / plain)
            assert any(drafts)


# ------------------------------------------------------------------------------------------------------------------
# In `generate`. By the clock of these tests a forward pass of the target takes one second, and the rest no time.


def timed(target, monkeypatch):
    now = [0.0]
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    target.register_forward_hook(lambda *args: now.append(now.pop() + 1.0))
    return target


def greedy(target, ids, drafter=None, **call):
    return target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=60, **call)


@pytest.mark.parametrize("where", ("config", "call"))
@pytest.mark.parametrize("kind", ("half-right", "oracle", "random"))
def test_the_text_is_that_of_generate(where, kind, monkeypatch):
    """With trees where the config or the call says "auto", which the statistics show."""
    target, ids = timed(tiny_target("llama"), monkeypatch), prompt_of(10)
    plain = greedy(target, ids)
    drafter = scripted(
        tiny_drafter(block_size=8, num_draft_tokens="auto", num_tree_nodes="auto" if where == "config" else None),
        kind,
        plain,
    )
    call = {"num_tree_nodes": "auto"} if where == "call" else {}
    calls = []
    for _ in range(2):
        assert torch.equal(greedy(target, ids, drafter, **call), plain)
        calls.append(drafter.last_speculation)
        assert not [note for note in calls[-1].notes if "tree" in note]
    rounds = [sizes for call in calls for sizes in zip(call.nodes[0], call.drafted[0])]
    if kind != "random":  # which expects nothing of trees either
        assert any(nodes > depth for nodes, depth in rounds)


def test_a_number_limits_the_depth(monkeypatch):
    target, ids = timed(tiny_target("llama"), monkeypatch), prompt_of(10)
    plain = greedy(target, ids)
    drafter = scripted(tiny_drafter(), "half-right", plain)
    for most in (2, 0):
        text = greedy(target, ids, drafter, num_tree_nodes="auto", num_assistant_tokens=most)
        assert torch.equal(text, plain) and max([0, *drafter.last_speculation.drafted[0]]) == most
    of_config = scripted(tiny_drafter(num_tree_nodes="auto"), "half-right", plain)
    assert torch.equal(greedy(target, ids, of_config, num_assistant_tokens=2), plain)
    assert of_config.last_speculation.nodes == of_config.last_speculation.drafted, (
        "beside a number the config's trees are off"
    )


def test_chains_where_trees_are_not_supported(monkeypatch):
    """A batch, and a target with a recurrent state; the statistics say why."""
    llama = tiny_target("llama")
    for target, drafter, ids, reason in (
        (llama, tiny_drafter(), prompt_of(9).repeat(2, 1), "a batch of 2"),
        (*tiny_family("qwen3_5"), prompt_of(9), "LinearAttention"),
    ):
        plain = greedy(timed(target, monkeypatch), ids)
        drafter = scripted(drafter, "oracle", plain)
        assert torch.equal(greedy(target, ids, drafter, num_tree_nodes="auto"), plain)
        speculation = drafter.last_speculation
        (note,) = [note for note in speculation.notes if "no draft trees" in note]
        assert reason in note and note in speculation.summary()
        assert speculation.num_drafted > 0 and speculation.nodes == speculation.drafted
