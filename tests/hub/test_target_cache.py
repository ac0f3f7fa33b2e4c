"""What was rejected leaves the target's cache, whatever kind of cache it is: text and counts as with the plain one."""

import logging
import warnings

import pytest
import torch
import transformers
from dflash_hub import target_check
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.target_model import CACHE
from helpers.families import caches, equal_texts, tiny_family
from helpers.scripted import ScriptedDrafter, scripted, without_hooks
from helpers.tiny import DRAFTERS, prompt_of, tiny_drafter, tiny_target
from transformers import DynamicCache, LogitsProcessor, StaticCache, StoppingCriteria
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

HYBRIDS = ("qwen3_next", "qwen3_5", "bamba", "lfm2")


def greedy(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, **kwargs)


# ------------------------------------------------------------------------------------------------- recurrent states


@pytest.mark.parametrize("family", HYBRIDS)
def test_pitfall_17_18_hybrid_targets(family):
    """Pitfalls 17, 18: rejected drafts leave no trace in a recurrent state, with random, half-right and oracle drafters."""
    target, drafter = tiny_family(family)
    seen = {}
    assert equal_texts(target, drafter, seen=seen) is None
    speculation = seen["oracle"]
    assert speculation.replay_passes == 0  # mixers ran again, not the target
    assert speculation.target_passes - speculation.check_passes == len(speculation.drafted[0]) + 1


@pytest.mark.parametrize("family", ("qwen3_next", "gpt_oss"))
def test_pitfall_21_the_cache_is_that_of_single_tokens(family):
    """Pitfall 21: two patterns of rejection leave the same cache, which is plain generate's, past recording off again."""
    target, drafter = tiny_family(family)
    ids = prompt_of(12)
    plain = greedy(target, ids, max_new_tokens=24, return_dict_in_generate=True)
    for kind in ("random", "half-right", "oracle"):
        drafter = scripted(drafter, kind, plain.sequences)
        output = greedy(target, ids, max_new_tokens=24, return_dict_in_generate=True, assistant_model=drafter)
        for mine, theirs in zip(output[CACHE].layers, plain[CACHE].layers):
            assert type(mine) is type(theirs) and mine.__dict__.keys() == theirs.__dict__.keys()
            if hasattr(theirs, "recurrent_states"):
                torch.testing.assert_close(mine.recurrent_states[0], theirs.recurrent_states[0], atol=1e-4, rtol=1e-3)
                torch.testing.assert_close(mine.conv_states[0], theirs.conv_states[0], atol=1e-4, rtol=1e-3)
            else:
                torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_replay_pass_where_mixers_cannot_run_again(kind):
    """A compiled target, for one, calls no hooks: then accepted tokens are read once more, and counted."""
    target, drafter = tiny_family("qwen3_5")
    ids = prompt_of(12)
    plain = greedy(target, ids, max_new_tokens=24)
    drafter = scripted(drafter, kind, plain)
    without_hooks(target)
    assert torch.equal(greedy(target, ids, max_new_tokens=24, assistant_model=drafter), plain)
    speculation = drafter.last_speculation
    rejected = sum(a < d for a, d in zip(speculation.accepted[0], speculation.drafted[0]))
    assert speculation.replay_passes == rejected
    assert speculation.target_passes == 1 + speculation.check_passes + len(speculation.drafted[0]) + rejected


def test_a_target_is_checked_once():
    target, drafter = tiny_family("olmo_hybrid")
    for checks in (3, 0):
        greedy(target, prompt_of(9), max_new_tokens=6, assistant_model=drafter)
        assert drafter.last_speculation.check_passes == checks
    assert [check.can_rerun for check in target_check.checks_of(target).values()] == [True]


def test_a_target_that_starts_anew_in_every_block_is_refused_by_name():
    """Mamba's pass of several tokens does not go on from its state, whatever its cache says."""
    target, drafter = tiny_family("jamba")
    with pytest.raises(ValueError, match="recurrent layers of JambaForCausalLM do not go on from their state"):
        greedy(target, prompt_of(9), max_new_tokens=6, assistant_model=drafter)


@pytest.mark.parametrize("family", ("mamba", "falcon_mamba"))
def test_a_prompt_of_one_token_hides_no_fault(family):
    """The shorter the prompt, the less its state matters to the logits; and what a short one shows holds for its call only."""
    target, drafter = tiny_family(family)
    for length in (1, 9):
        with pytest.raises(ValueError, match="do not go on from their state"):
            greedy(target, prompt_of(length) % 90, max_new_tokens=6, assistant_model=drafter, num_assistant_tokens=1)
    target, drafter = tiny_family("qwen3_5")
    for length, checks in ((1, 3), (9, 3), (1, 0)):
        greedy(target, prompt_of(length), max_new_tokens=6, assistant_model=drafter)
        assert drafter.last_speculation.check_passes == checks


def test_a_cache_with_more_than_layers_is_refused_by_name():
    target, drafter = tiny_family("minimax")
    with pytest.raises(ValueError, match="MiniMaxForCausalLM cannot be rolled back .* MiniMaxCache"):
        greedy(target, prompt_of(9), max_new_tokens=6, assistant_model=drafter)


# ------------------------------------------------------------------------------------------------- kinds of caches


KINDS = ("dynamic", "static", "passed dynamic", "passed without a config", "passed static", "quantized", "fp8")


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", ("llama", "mistral"))
@pytest.mark.parametrize("name", KINDS)
def test_pitfall_22_23_kinds_of_caches(name, family, kind):
    """Pitfalls 22, 23: static (never overrun), quantized (quantized when plain quantizes), and passed objects."""
    if name == "fp8" and not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no fp8 cache")
    if family == "mistral" and name in ("quantized", "fp8"):
        pytest.skip("a sliding target has no quantized cache")
    target, drafter, ids = tiny_target(family), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=24, **caches(name, target))
    drafter = scripted(drafter, kind, plain)
    for new in (24, 13):
        expected = greedy(target, ids, max_new_tokens=new, **caches(name, target))
        text = greedy(target, ids, max_new_tokens=new, assistant_model=drafter, **caches(name, target))
        assert torch.equal(text, expected)
        speculation = drafter.last_speculation
        if kind == "oracle":
            assert speculation.num_accepted == speculation.num_drafted > 0
    if "static" in name:
        assert set(speculation.drafted[0]) == {0, 4}  # one length that verifies, and single tokens at the tail
    if kind == "half-right":
        assert 0 < speculation.num_accepted < speculation.num_drafted


def test_the_quantised_cache_matters():
    """The cache of the test above is coarse enough to change the text."""
    target, ids = tiny_target("llama"), prompt_of(10)
    assert not torch.equal(
        greedy(target, ids, max_new_tokens=24, **caches("quantized", target)), greedy(target, ids, max_new_tokens=24)
    )


def test_pitfall_43_a_static_cache_sees_two_lengths(monkeypatch):
    """Pitfall 43: beside the prompt only a whole block and a single token, so a compiled target compiles twice."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    drafter = scripted(drafter, "half-right", greedy(target, ids, max_new_tokens=30))
    lengths, run = [], type(target).forward
    monkeypatch.setattr(
        type(target), "forward", lambda self, *a, **k: lengths.append(k["input_ids"].shape[1]) or run(self, *a, **k)
    )
    greedy(target, ids, max_new_tokens=23, assistant_model=drafter, cache_implementation="static")
    assert lengths[0] == 10 and set(lengths[1:]) == {5, 1}


def test_pitfall_24_25_nothing_deprecated_is_used(monkeypatch):
    """Pitfalls 24, 25: caches are named and read as the installed transformers does it, without a warning."""
    said = []
    for level in ("warning", "warning_once"):
        monkeypatch.setattr(logging.Logger, level, lambda self, message, *args, **kwargs: said.append(message))
    target, drafter, ids = tiny_target("mistral"), tiny_drafter(), prompt_of(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = greedy(target, ids, max_new_tokens=20, assistant_model=drafter, return_dict_in_generate=True)
        whole = torch.cat([output.sequences, ids], dim=1)
        greedy(target, whole, max_new_tokens=8, assistant_model=drafter, **{CACHE: output[CACHE]})
    assert said == []


def test_a_passed_static_cache_without_room_for_a_block():
    """Plain generate would fit exactly, so it fits with a drafter too."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "oracle", plain)
    cache = StaticCache(config=target.config, max_cache_len=29)
    assert torch.equal(greedy(target, ids, max_new_tokens=20, assistant_model=drafter, **{CACHE: cache}), plain)
    assert int(cache.get_seq_length()) == 29


def test_a_cache_layer_of_the_users_own_is_refused_by_name():
    class Odd(DynamicLayer):
        is_croppable = False

    target = tiny_target("llama")
    cache = Cache(layers=[DynamicSlidingWindowLayer(sliding_window=8), *(Odd() for _ in target.model.layers[1:])])
    with pytest.raises(ValueError, match="a Odd cannot be put back"):
        greedy(target, prompt_of(9), max_new_tokens=6, assistant_model=tiny_drafter(), **{CACHE: cache})
    assert not cache.layers[0].record_past  # the refused call leaves no trace in the others


class Interrupts:
    """Raises at its fifth call, as a streamer, a criterion or a processor."""

    calls = 0

    def put(self, value):
        self.calls += 1
        if self.calls == 5:
            raise KeyboardInterrupt

    def end(self):
        pass


class InterruptingCriterion(Interrupts, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.put(input_ids)
        return torch.tensor([False])


class InterruptingProcessor(Interrupts, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.put(input_ids)
        return scores


@pytest.mark.parametrize(
    ("place", "family"),
    (("streamer", "mistral"), ("streamer", "qwen3_5"), ("stopping_criteria", "llama"), ("logits_processor", "llama")),
)
def test_pitfall_17_19_an_interrupted_call_leaves_no_draft_in_a_passed_cache(place, family):
    """Pitfalls 17, 19: what the caller goes on with is the text so far, whoever raised between two passes."""
    target, drafter = tiny_family(family)
    ids = prompt_of(12)
    text = greedy(target, ids, max_new_tokens=24)
    drafter = scripted(drafter, "half-right", text)
    interrupts = {
        "streamer": Interrupts(),
        "stopping_criteria": [InterruptingCriterion()],
        "logits_processor": [InterruptingProcessor()],
    }
    cache = DynamicCache(config=target.config)
    with pytest.raises(KeyboardInterrupt):
        greedy(
            target, ids, max_new_tokens=24, assistant_model=drafter,
            **{place: interrupts[place], CACHE: cache},
        )  # fmt: skip
    held = cache.get_seq_length()
    assert 12 < held < 36
    more = torch.cat([text[:, :held], prompt_of(3, seed=5)], dim=1)
    cold = greedy(target, more, max_new_tokens=8)
    assert torch.equal(greedy(target, more, max_new_tokens=8, **{CACHE: cache}), cold)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("chunk", (1, 4, 10, 64))
def test_pitfall_45_chunked_prefill(chunk, kind, monkeypatch):
    """Pitfall 45: the prompt goes in chunks as in plain generate, and the drafter gets the features of every chunk."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20, prefill_chunk_size=chunk)
    drafter = scripted(drafter, kind, plain)
    lengths, run = [], type(target).forward
    monkeypatch.setattr(
        type(target), "forward", lambda self, *a, **k: lengths.append(k["input_ids"].shape[1]) or run(self, *a, **k)
    )
    text = greedy(target, ids, max_new_tokens=20, prefill_chunk_size=chunk, assistant_model=drafter)
    assert torch.equal(text, plain)
    chunks = [len(part) for part in torch.arange(10).split(chunk)]
    assert lengths[: len(chunks)] == chunks
    if kind == "random":  # the same drafts as without chunks
        mine = drafter.last_speculation
        greedy(target, ids, max_new_tokens=20, assistant_model=drafter)
        assert drafter.last_speculation.accepted == mine.accepted


@pytest.mark.parametrize("padded", (False, True))
def test_chunks_give_the_drafter_the_same_context(padded, monkeypatch):
    target, drafter, ids = (
        tiny_target("llama"),
        tiny_drafter(layer_types=["full_attention", "sliding_attention"], sliding_window=6),
        prompt_of(12),
    )
    inputs = {"input_ids": ids}
    if padded:
        inputs = {"input_ids": torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)}
        inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
    logits = []

    class Noted(DFlashProposer):
        def candidates(self, *args, **kwargs):
            candidates = super().candidates(*args, **kwargs)
            logits.append(candidates.logits)
            return candidates

    drafter = ScriptedDrafter(drafter, Noted)
    for chunk in (None, 5):
        target.generate(**inputs, do_sample=False, max_new_tokens=16, assistant_model=drafter, prefill_chunk_size=chunk)
    half = len(logits) // 2
    torch.testing.assert_close(torch.cat(logits[:half], 1), torch.cat(logits[half:], 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", (None, 4))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_static_cache_whose_layers_hold_a_state_and_keys(kind, chunk):
    target, drafter = tiny_family("falcon_h1")
    ids = prompt_of(10)
    kwargs = {"max_new_tokens": 16, "cache_implementation": "static", "prefill_chunk_size": chunk}
    plain = greedy(target, ids, **kwargs)
    drafter = scripted(drafter, kind, plain)
    assert torch.equal(greedy(target, ids, **kwargs, assistant_model=drafter), plain)
    assert drafter.last_speculation.num_accepted > 0 or kind == "random"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_attentions_of_a_static_window(kind):
    """Before it is full, while it fills, and after."""
    target, drafter = tiny_target("mistral", attn_implementation="eager"), tiny_drafter()
    window = target.config.sliding_window
    ids = prompt_of(window - 4)
    kwargs = {
        "max_new_tokens": 16, "cache_implementation": "static", "return_dict_in_generate": True, "output_attentions": True,
    }  # fmt: skip
    plain = greedy(target, ids, **kwargs)
    drafter = scripted(drafter, kind, plain.sequences)
    mine = greedy(target, ids, **kwargs, assistant_model=drafter)
    assert torch.equal(mine.sequences, plain.sequences) and len(mine.attentions) == len(plain.attentions)
    for ours, theirs in zip(mine.attentions, plain.attentions):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_cache_whose_rows_were_repeated():
    """One prompt, three continuations: what the drafter kept is of one row, so it starts from the new tokens."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    new = torch.cat([prompt_of(4, seed) for seed in (1, 2, 3)])
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        turn = greedy(target, prompt_of(10), max_new_tokens=8, return_dict_in_generate=True, **assistant)
        cache = turn[CACHE]
        cache.batch_repeat_interleave(3)
        mask = torch.ones(3, cache.get_seq_length() + 4, dtype=torch.long)
        texts.append(greedy(target, new, max_new_tokens=12, attention_mask=mask, **{CACHE: cache}, **assistant))
    assert torch.equal(*texts)
