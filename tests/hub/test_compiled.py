"""Beside a static KV cache target and drafter run at few shapes: they are compiled once, and say what they say elsewhere."""

import shutil

import pytest
import torch
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.drafter_draft import AcceptedTokens, Plan
from dflash_hub.drafter_fixed import FixedContext
from dflash_hub.target_compiled import FixedShapes
from helpers.scripted import ScriptedProposer, ScriptedSchedule, generate_with, scripted
from helpers.tiny import VOCAB, prompt_of, tiny_drafter, tiny_target
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

SMALL = {"num_hidden_layers": 1, "target_layer_ids": [0], "num_target_layers": 2}


class Keeps:
    """Stands for a sampler: keeps the logits that it is asked to choose from."""

    def propose(self, candidates):
        self.logits = candidates.over_vocabulary(VOCAB)
        return candidates.best(), None


@pytest.mark.parametrize("kind", ["full", "sliding", "causal", "eager", "an uneven batch", "behind a prefix"])
def test_a_drafter_at_one_shape_gives_the_logits_of_one_that_grows(kind):
    """Over several rounds, with the window full, more new tokens at once than a block has, and in a later call."""
    sliding = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
    overrides = {"sliding": sliding, "causal": sliding | {"block_causal": [False, True]}}.get(kind, {})
    target, drafter = tiny_target("llama"), tiny_drafter(**overrides)
    if kind == "eager":
        drafter.set_attn_implementation("eager")
    batch = 2 if kind == "an uneven batch" else 1
    generator = torch.Generator().manual_seed(0)
    fixed, said = FixedShapes(40, target), []
    proposers = [DFlashProposer(drafter, target), DFlashProposer(drafter, target)]
    if kind == "behind a prefix":
        for proposer in proposers:
            proposer.skip(6, None)
    for round_, new in enumerate((11, 3, 1, 5, 12, 2)):
        states = [torch.randn(batch, new, 32, generator=generator) for _ in drafter.config.target_layer_ids]
        anchor = torch.randint(3, VOCAB, (batch, 1), generator=generator)
        counts = [11, 8] if batch == 2 and round_ == 0 else None
        for proposer, shapes in zip(proposers, (None, fixed)):
            proposer.read(AcceptedTokens(torch.ones(batch, new, dtype=torch.long), states, counts))
            if round_ == 5:  # the last one is a later call, with the target's cache of this one
                cache, ids = Cache(layers=[DynamicLayer()]), torch.ones(batch, 40, dtype=torch.long)
                proposer.keep(cache, ids)
                proposer = DFlashProposer(drafter, target)
                assert proposer.resume(cache, None, batch, 40) is ids
            proposer.propose(anchor, Plan(4, fixed=shapes), sampler := Keeps())
            said.append(sampler.logits)
        torch.testing.assert_close(said[-1], said[-2], atol=2e-5, rtol=1e-4)
    assert isinstance(proposers[1].cache, FixedContext) and isinstance(proposers[0].cache, DynamicCache)


def options(backend: str) -> CompileConfig:
    """Return what a user passes to compile on any device."""
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def pair():
    torch._dynamo.reset()
    counters.clear()
    return tiny_target("llama", num_hidden_layers=2), tiny_drafter(**SMALL)


def same_text(target, drafter, length: int, **kwargs) -> int:
    """Compare a text with plain `generate`'s: how many graphs there are so far."""
    ids = prompt_of(length, length)
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    drafter = scripted(drafter, "half-right", plain)
    text = target.generate(
        ids, max_new_tokens=24, do_sample=False, assistant_model=drafter, cache_implementation="static", **kwargs
    )
    assert text.equal(plain) and 0 < drafter.last_speculation.num_accepted < drafter.last_speculation.num_drafted
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def test_target_and_drafter_are_compiled_once():
    """The target at n + 1 tokens and at one, the drafter, a tree: one graph each, in whatever call, prompt and round."""
    (target, drafter), chains = pair(), {"compile_config": options("eager"), "max_cache_len": 48}
    assert same_text(target, drafter, 12, **chains, disable_compile=True) == 0
    assert same_text(target, drafter, 12, **chains) == 3
    assert same_text(target, drafter, 19, **chains) == 3
    assert same_text(target, drafter, 12, **chains, num_tree_nodes=7) == 4
    assert same_text(target, drafter, 15, **chains, num_tree_nodes=7) == 4
    # Passes that compile, or record a CUDA graph, say nothing of what a round costs.
    schedule, ids = ScriptedSchedule([4] * 30), prompt_of(12)
    proposer = ScriptedProposer(drafter, target, "random", None)
    settings = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"} | chains
    _, speculation = generate_with(target, proposer, schedule, ids, **settings)
    lengths = speculation.drafted[0]
    assert len(schedule.told) == len(lengths) - sum(min(lengths.count(n), 2) for n in set(lengths)) > 0


@pytest.mark.slow
def test_models_that_the_user_compiled_are_compiled_once():
    target, drafter = pair()
    for model in (target, drafter):
        model.forward = torch.compile(model.forward, backend="eager", dynamic=False)
    graphs = same_text(target, drafter, 12)
    assert same_text(target, drafter, 12) == graphs


@pytest.mark.slow
def test_text_of_passes_that_inductor_compiled():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler")
    target, drafter = pair()
    assert same_text(target, drafter, 12, compile_config=options("inductor")) == 3
