"""What outlives a pass and a call: the returned states and cache, the next chat turn, and calls that share both models."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dflash_hub import drafter_candidates
from dflash_hub.target_model import CACHE
from helpers.families import tiny_family
from helpers.scripted import scripted
from helpers.tiny import DRAFTERS, prompt_of, tiny_drafter, tiny_target
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList


def greedy(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, **kwargs)


# ------------------------------------------------------------------------------------------------- returned things


@pytest.mark.parametrize("family", ("llama", "mistral", "gpt_oss", "qwen3_next"))
@pytest.mark.parametrize("kind", ("half-right", "oracle"))
def test_pitfall_32_states_and_attentions(family, kind):
    """Pitfall 32: of every layer, one entry a token, with the shapes and values of plain generate."""
    target, drafter = tiny_family(family)
    target.set_attn_implementation("eager")
    ids = prompt_of(12)
    kwargs = {
        "max_new_tokens": 14,
        "output_hidden_states": True,
        "output_attentions": True,
        "return_dict_in_generate": True,
    }
    plain = greedy(target, ids, **kwargs)
    drafter = scripted(drafter, kind, plain.sequences)
    output = greedy(target, ids, **kwargs, assistant_model=drafter)
    assert torch.equal(output.sequences, plain.sequences) and list(output.keys()) == list(plain.keys())
    assert drafter.last_speculation.num_accepted > 0
    for name in ("hidden_states", "attentions"):
        mine, theirs = output[name], plain[name]
        assert len(mine) == len(theirs) == 14
        for step, plain_step in zip(mine, theirs):
            for layer, plain_layer in zip(step, plain_step, strict=True):
                # A recurrent layer sums a block in another order than single tokens.
                atol = 2e-3 if family == "qwen3_next" else 2e-4
                torch.testing.assert_close(layer, plain_layer, atol=atol, rtol=1e-3)


# ------------------------------------------------------------------------------------------------- chat turns

TURNS = {
    "whole text": lambda ids, added: {"input_ids": torch.cat([ids, added], dim=1)},
    "new tokens": lambda ids, added: {
        "input_ids": torch.cat([ids[:, -1:], added], dim=1),
        "attention_mask": torch.ones(1, ids.shape[1] + added.shape[1], dtype=torch.long),
    },
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("form", TURNS)
@pytest.mark.parametrize("family", ("llama", "mistral", "qwen3_5"))
def test_pitfall_1_26_a_chat_turn_that_reuses_the_cache(family, form, kind):
    """Pitfalls 1, 26: the text and the accepted counts of a cold run, without reading the prefix again."""
    target, drafter = tiny_family(family)
    ids, added = prompt_of(12), prompt_of(5, seed=7)
    first = greedy(target, ids, max_new_tokens=10)
    whole = torch.cat([first, added], dim=1)
    cold = greedy(target, whole, max_new_tokens=16)
    drafter = scripted(drafter, kind, cold)
    greedy(target, whole, max_new_tokens=16, assistant_model=drafter)
    counts = drafter.last_speculation.accepted

    turn = greedy(target, ids, max_new_tokens=10, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(turn.sequences, first)
    inputs = TURNS[form](turn.sequences, added)
    text = target.generate(
        **inputs, **{CACHE: turn[CACHE]}, do_sample=False, max_new_tokens=16, assistant_model=drafter
    )
    assert text[0, -16:].tolist() == cold[0, -16:].tolist()
    speculation = drafter.last_speculation
    assert speculation.prefix_passes == 0
    assert speculation.accepted == counts
    assert turn[CACHE].get_seq_length() == whole.shape[1] + 15  # nothing after the end


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("read_prefix", (True, False))
def test_a_prefix_that_was_read_without_the_drafter(read_prefix, kind):
    """One counted pass gives the drafter its context; or it starts from the new tokens."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    ids, added = prompt_of(12), prompt_of(5, seed=7)
    turn = greedy(target, ids, max_new_tokens=10, return_dict_in_generate=True)
    whole = torch.cat([turn.sequences, added], dim=1)
    cold = greedy(target, whole, max_new_tokens=16)
    drafter = scripted(drafter, kind, cold)
    greedy(target, whole, max_new_tokens=16, assistant_model=drafter)
    counts = drafter.last_speculation.accepted
    text = greedy(
        target, whole, max_new_tokens=16, assistant_model=drafter, read_prefix=read_prefix, **{CACHE: turn[CACHE]}
    )
    assert torch.equal(text, cold)
    speculation = drafter.last_speculation
    assert speculation.prefix_passes == read_prefix
    assert speculation.target_passes == 1 + read_prefix + len(speculation.drafted[0])  # checked by the call before
    if read_prefix or kind != "random":
        assert speculation.accepted == counts


def test_a_chat_turn_in_chunks():
    """The kept context, then every chunk's, in order."""
    target, drafter = tiny_target("mistral"), tiny_drafter()
    first, added = greedy(target, prompt_of(12), max_new_tokens=10), prompt_of(7, seed=7)
    whole = torch.cat([first, added], dim=1)
    cold = greedy(target, whole, max_new_tokens=16)
    drafter = scripted(drafter, "random")
    greedy(target, whole, max_new_tokens=16, assistant_model=drafter)
    counts = drafter.last_speculation.accepted
    for earlier in ({"assistant_model": drafter}, {}):
        turn = greedy(target, prompt_of(12), max_new_tokens=10, return_dict_in_generate=True, **earlier)
        drafter = scripted(drafter, "half-right", cold)
        kwargs = {"prefill_chunk_size": 3, "assistant_model": drafter, CACHE: turn[CACHE]}
        assert torch.equal(greedy(target, whole, max_new_tokens=16, **kwargs), cold)
        assert 0 < drafter.last_speculation.num_accepted < drafter.last_speculation.num_drafted
        drafter = scripted(drafter, "random")
        turn = greedy(target, prompt_of(12), max_new_tokens=10, return_dict_in_generate=True, **earlier)
        greedy(target, whole, max_new_tokens=16, **kwargs | {CACHE: turn[CACHE], "assistant_model": drafter})
        assert drafter.last_speculation.accepted == counts


def test_another_text_in_the_same_cache_is_noticed():
    """A cache that was emptied and filled again does not bring the old text's context."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    turn = greedy(target, prompt_of(12), max_new_tokens=10, assistant_model=drafter, return_dict_in_generate=True)
    cache = turn[CACHE]
    cache.reset()
    if cache.get_seq_length():
        pytest.skip("this transformers empties a cache without forgetting its length")
    other = greedy(target, prompt_of(12, seed=3), max_new_tokens=10, return_dict_in_generate=True, **{CACHE: cache})
    whole = torch.cat([other.sequences, prompt_of(4)], dim=1)
    text = greedy(target, whole, max_new_tokens=8, assistant_model=drafter, **{CACHE: cache})
    assert torch.equal(text, greedy(target, whole, max_new_tokens=8))
    assert drafter.last_speculation.prefix_passes == 1


def test_the_context_dies_with_the_cache():
    target, drafter = tiny_target("llama"), tiny_drafter()
    turn = greedy(target, prompt_of(12), max_new_tokens=6, assistant_model=drafter, return_dict_in_generate=True)
    kept = weakref.ref(drafter_candidates._KEPT[turn[CACHE]].cache)
    del turn
    gc.collect()
    assert kept() is None


def test_a_chat_turn_of_rows():
    target, drafter = tiny_target("llama"), tiny_drafter()
    ids = torch.cat([prompt_of(12, seed) for seed in range(2)])
    ids[1, :4] = 0
    mask = (ids != 0).long()
    kwargs = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=8, **kwargs, return_dict_in_generate=True)
    whole = torch.cat([plain.sequences, prompt_of(5, 7).repeat(2, 1)], dim=1)
    grown = torch.cat([mask, mask.new_ones(2, 13)], dim=1)
    cold = target.generate(whole, attention_mask=grown, max_new_tokens=12, **kwargs)
    drafter = scripted(drafter, "half-right", cold)
    for drafted in (False, True):
        more = {"assistant_model": drafter} if drafted else {}
        turn = target.generate(
            ids, attention_mask=mask, max_new_tokens=8, **kwargs, return_dict_in_generate=True, **more
        )
        text = target.generate(
            whole, attention_mask=grown, max_new_tokens=12, **kwargs, **{CACHE: turn[CACHE]}, assistant_model=drafter
        )
        assert torch.equal(text, cold)
        assert drafter.last_speculation.prefix_passes == (not drafted)
        assert drafter.last_speculation.num_accepted > 0


def test_a_cache_that_holds_the_whole_text_is_refused():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(12)
    cache = DynamicCache(config=target.config)
    target(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match="the cache holds 12 tokens, but the text has 12: nothing is left to read"):
        greedy(target, ids, max_new_tokens=4, assistant_model=drafter, **{CACHE: cache})


# ------------------------------------------------------------------------------------------------- shared use


@pytest.mark.parametrize("family", ("llama", "qwen3_next"))
def test_threads_with_one_target_and_one_drafter(family):
    """Hooks and counts of one call heed no other: the recorded inputs are those of its own cache."""
    target, drafter = tiny_family(family)
    prompts = [prompt_of(8 + seed, seed) for seed in range(4)]
    plain = [greedy(target, ids, max_new_tokens=10) for ids in prompts]

    def run(ids):
        return greedy(target, ids, assistant_model=drafter, max_new_tokens=10, guidance_scale=1.0)

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(run, prompts))
    assert all(torch.equal(a, b) for a, b in zip(texts, plain))
    assert not any(module._forward_pre_hooks for module in target.modules())


class Breaks(LogitsProcessor):
    def __init__(self, at):
        self.left = at

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("at", (1, 4))
@pytest.mark.parametrize("family", ("mistral", "qwen3_next"))
def test_an_exception_leaves_target_cache_and_drafter_usable(family, at):
    target, drafter = tiny_family(family)
    ids, cache = prompt_of(10), DynamicCache(config=target.config)
    plain = greedy(target, ids, max_new_tokens=12)
    with pytest.raises(KeyboardInterrupt):
        greedy(
            target, ids, max_new_tokens=12, assistant_model=drafter, logits_processor=LogitsProcessorList([Breaks(at)]),
            **{CACHE: cache},
        )  # fmt: skip
    assert not any(module._forward_pre_hooks for module in target.modules())
    assert not any(
        "update_recurrent_state" in layer.__dict__ or getattr(layer, "record_past", False) for layer in cache.layers
    )
    assert torch.equal(greedy(target, ids, max_new_tokens=12, assistant_model=drafter), plain)


def test_pitfall_44_46_nothing_outlives_its_round():
    """Pitfalls 44, 46: after a call no state of the target is alive but its cache, and the drafter's beside it."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    gc.collect()
    before = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    text = greedy(target, prompt_of(40), max_new_tokens=12, assistant_model=drafter)
    gc.collect()
    after = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    assert after - before <= 3 and text.shape == (1, 52)
