"""transformers' own loops: its DFlash route with our model, and our candidate generator inside its assisted decoding."""

import pytest
import torch
from dflash_hub import DFlashCandidateGenerator
from dflash_hub.drafter_candidates import DFlashProposer
from helpers.tiny import DRAFTERS, FAMILIES, prompt_of, tiny_drafter, tiny_target
from transformers import GenerationConfig, GenerationMixin

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "block_causal": [False, False]}


def count_passes(target, monkeypatch):
    passes = []
    run = type(target).forward
    monkeypatch.setattr(type(target), "forward", lambda self, *a, **k: passes.append(1) or run(self, *a, **k))
    return passes


@pytest.mark.parametrize("overrides", ({}, SLIDING, {"attention_bias": True}))
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_route_runs_our_model(family, overrides):
    target, drafter, ids = tiny_target(family), tiny_drafter(**overrides), prompt_of(10)
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafter.last_speculation = "untouched"
    text = target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter, speculation_type="dflash")
    assert torch.equal(text, plain)
    assert drafter.last_speculation == "untouched"  # their loop, not ours


@pytest.mark.parametrize("overrides", ({}, SLIDING))
def test_both_routes_draft_the_same(overrides):
    """Their cache handling and masks around our model propose what our loop proposes: the rounds are the same."""
    target, drafter = tiny_target("llama"), tiny_drafter(**overrides)
    ids = prompt_of(30)
    fed = []
    drafter.register_forward_hook(lambda module, args, output: fed.append(output.last_hidden_state))
    target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter)
    ours = len(fed)
    target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter, speculation_type="dflash")
    for mine, theirs in zip(fed[:ours], fed[ours:]):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert ours >= 5


def test_the_route_can_be_stated_in_a_config():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, speculation_type="dflash")
    drafter.last_speculation = "untouched"
    target.generate(ids, generation_config=config, assistant_model=drafter)
    target.generation_config.speculation_type = "dflash"
    target.generate(ids, max_new_tokens=8, assistant_model=drafter)
    assert drafter.last_speculation == "untouched"


def anchor_index(proposer) -> int:
    """Index of the first draft token: all tokens before the anchor are in the drafter's cache."""
    return proposer.cache.get_seq_length() + 1


@pytest.mark.parametrize("do_sample", (False, True))
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", ("llama", "mistral"))
def test_our_generator_inside_transformers_assisted_decoding(family, kind, do_sample, monkeypatch):
    target, drafter, ids = tiny_target(family), tiny_drafter(), prompt_of(10)
    plain = target.generate(ids, do_sample=False, max_new_tokens=24)

    class Known(DFlashProposer):
        def candidates(self, anchor, context, num_draft, *args):
            candidates, start = super().candidates(anchor, context, num_draft, *args), anchor_index(self)
            logits = candidates.logits
            for index in range(start, start + num_draft) if kind != "random" else ():
                right = int(plain[0, index]) if index < plain.shape[1] else 0
                logits[0, index - start, (right + (kind == "half-right" and index % 2)) % logits.shape[-1]] = 1e4
            return candidates

    class Generator(DFlashCandidateGenerator):
        def __init__(self, *args):
            super().__init__(*args)
            self.proposer = Known(drafter, target)

    hooked = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", hooked.__wrapped__)  # their loop, not ours
    monkeypatch.setattr(
        type(target),
        "_get_candidate_generator",
        lambda self, generation_config, **kwargs: Generator(drafter, self, 4, generation_config.max_length),
    )
    passes = count_passes(target, monkeypatch)
    torch.manual_seed(0)
    kwargs = {"do_sample": True, "top_k": 1} if do_sample else {"do_sample": False}
    text = target.generate(ids, max_new_tokens=24, assistant_model=drafter, **kwargs)
    assert torch.equal(text, plain)
    if kind == "oracle":
        assert len(passes) == 1 + 5  # 23 tokens after the first, five a pass
    if kind == "half-right":
        assert len(passes) < 20


def test_pitfall_3_an_ordinary_assistant_still_needs_to_be_ordinary():
    """Pitfall 3: a drafter that is called without its route is not sent to the ordinary one."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    target.generate(prompt_of(5), assistant_model=drafter, max_new_tokens=4)
    assert drafter.last_speculation.drafter_passes > 0
