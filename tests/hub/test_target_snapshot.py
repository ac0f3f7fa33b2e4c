"""An interrupted call leaves the caller's cache valid: the next turn is that of a cold start, wherever the interrupt came."""

import copy
import inspect
import random
import sys
from pathlib import Path

import dflash_hub
import pytest
import torch
from dflash_hub.target_check import checks_of
from dflash_hub.target_model import CACHE
from dflash_hub.target_snapshot import CacheSnapshot, _LayerSnapshot
from helpers.families import caches, tiny_family
from helpers.scripted import scripted, without_hooks
from helpers.tiny import prompt_of, tiny_drafter, tiny_target
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    cache_utils,
)
from transformers.cache_utils import Cache, DynamicLayer

ROOT = str(Path(dflash_hub.__file__).resolve().parent)
NEW = 7


class LineInterrupt:
    """Raise a KeyboardInterrupt at the `at`-th line run in our modules, the target's and the cache's; count lines otherwise."""

    def __init__(self, target, at: int | None = None):
        self.files = {inspect.getfile(type(target)), cache_utils.__file__}
        self.at, self.lines = at, 0

    def __enter__(self):
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter_frame(self, frame, event, arg):
        path = frame.f_code.co_filename
        ours = path.startswith(ROOT) and "/tests/" not in path and "/.venv/" not in path
        return self._line if ours or path in self.files else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line


def greedy(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, **kwargs)


def pair_and_cache(name: str):
    """(target, drafter, what makes an empty cache of a kind)."""
    if name in ("passed dynamic", "passed without a config", "passed static", "quantized", "fp8"):
        if name == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
            pytest.skip("this transformers has no fp8 cache")
        target = tiny_target("llama")
        return target, tiny_drafter(), lambda: caches(name, target)[CACHE]
    kind, _, family = name.partition(" ")
    target, drafter = (tiny_target(family), tiny_drafter()) if family == "mistral" else tiny_family(family)
    made = {"dynamic": lambda: DynamicCache(config=target.config), "static": lambda: StaticCache(target.config, 64)}
    return target, drafter, made[kind]


KINDS = (
    "passed dynamic", "passed without a config", "passed static", "quantized", "fp8", "dynamic mistral", "static mistral",
    "dynamic qwen3_5", "dynamic lfm2", "dynamic falcon_h1", "static falcon_h1",
)  # fmt: skip


class Turns:
    """A chat of two turns, the second of which can be interrupted, and what a third writes after it."""

    def __init__(self, name: str, first_turn: bool, rows: int = 1, **kwargs):
        self.target, self.drafter, self.empty = pair_and_cache(name)
        self.kwargs, self.expected = {"max_new_tokens": NEW} | kwargs, {}
        cache, self.ids = self.empty(), torch.cat([prompt_of(10, seed) for seed in range(rows)])
        if first_turn:
            text = greedy(self.target, self.ids, max_new_tokens=4, **{CACHE: cache})
            self.ids = torch.cat([text, prompt_of(3, seed=4).expand(rows, -1)], dim=1)
        self.cache = cache if first_turn else None
        self.text = greedy(self.target, self.ids, **self.kwargs, **{CACHE: self.start()})
        self.drafter = scripted(self.drafter, "half-right", self.text)

    def start(self):
        return copy.deepcopy(self.cache) if self.cache is not None else self.empty()

    def second(self, at: int | None = None):
        """The cache after the second turn, and the lines it ran."""
        cache = self.start()
        checks_of(self.target).clear()  # so that the check of a target is interrupted too
        with LineInterrupt(self.target, at) as interrupt:
            try:
                greedy(self.target, self.ids, assistant_model=self.drafter, **self.kwargs, **{CACHE: cache})
            except KeyboardInterrupt:
                pass
        return cache, interrupt.lines

    def third_is_right(self, cache, **assistant) -> bool:
        """Whether the third turn is what follows on a cache that plain `generate` left with as many tokens."""
        held, length = int(cache.get_seq_length()), self.ids.shape[1]
        turn = torch.cat([self.text[:, :held], prompt_of(3, seed=5).expand(len(self.text), -1)], dim=1)
        if held not in self.expected:
            plain = self.start()
            if held >= length:
                greedy(self.target, self.ids, **self.kwargs | {"max_new_tokens": held - length + 1, CACHE: plain})
            assert plain.get_seq_length() == held
            self.expected[held] = greedy(self.target, turn, max_new_tokens=4, **{CACHE: plain})
        return torch.equal(
            greedy(self.target, turn, max_new_tokens=4, **{CACHE: cache}, **assistant), self.expected[held]
        )


def try_lines(turns: Turns, count: int):
    """Interrupt the second turn at `count` lines, one in each of as many equal parts of it."""
    cache, lines = turns.second()
    assert cache.get_seq_length() == turns.text.shape[1] - 1 and turns.third_is_right(cache)
    anywhere = random.Random(count)
    for part in range(count):
        at = anywhere.randint(lines * part // count + 1, lines * (part + 1) // count)
        cache, run = turns.second(at)
        assert run >= at, "nothing was interrupted"
        assistant = {"assistant_model": turns.drafter} if part % 2 else {}
        assert turns.third_is_right(cache, **assistant), f"another text after an interrupt at line {at} of {lines}"


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupt_at_any_line(name):
    """In the prefill, the check of the target, a round's drafter, target and rollback, or between them."""
    try_lines(Turns(name, KINDS.index(name) % 3 > 0), count=3)


def test_an_interrupt_at_any_line_of_a_batch():
    try_lines(Turns("dynamic mistral", True, rows=2), count=3)


def test_an_interrupt_at_any_line_where_mixers_cannot_run_again():
    turns = Turns("dynamic qwen3_5", True)
    without_hooks(turns.target)
    try_lines(turns, count=3)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", (None, 4))
@pytest.mark.parametrize("first_turn", (False, True))
@pytest.mark.parametrize("name", KINDS)
def test_an_interrupt_at_many_lines(name, first_turn, chunk):
    try_lines(Turns(name, first_turn, prefill_chunk_size=chunk), count=60)


# ------------------------------------------------------------------------------------------------- hooks


class Raises:
    """Raise at the `at`-th call, as a hook of a module, a processor, a criterion or a streamer."""

    def __init__(self, at: int):
        self.at, self.calls = at, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at:
            raise OSError("somebody's own")


class RaisingProcessor(Raises, LogitsProcessor):
    def __call__(self, input_ids, scores):
        super().__call__()
        return scores


class RaisingCriterion(Raises, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RaisingStreamer(Raises):
    def put(self, value):
        self()

    def end(self):
        self()


SOMEBODYS = {
    "processor": lambda at: {"logits_processor": LogitsProcessorList([RaisingProcessor(at)])},
    "criterion": lambda at: {"stopping_criteria": StoppingCriteriaList([RaisingCriterion(at)])},
}


@pytest.mark.parametrize(
    ("name", "place"),
    (
        ("passed dynamic", "processor"), ("passed dynamic", "criterion"), ("static mistral", "processor"),
        ("dynamic qwen3_5", "criterion"), ("dynamic lfm2", "processor"),
    ),
)  # fmt: skip
def test_what_raises_between_passes_leaves_as_many_tokens_as_plain(name, place):
    """At every offset in a block."""
    turns = Turns(name, True)
    for at in range(1, 6):
        held = []
        for assistant in ({}, {"assistant_model": turns.drafter}):
            cache = turns.start()
            with pytest.raises(OSError, match="somebody's own"):
                greedy(turns.target, turns.ids, **turns.kwargs, **SOMEBODYS[place](at), **{CACHE: cache}, **assistant)
            held.append(int(cache.get_seq_length()))
        assert held[0] == held[1] == turns.ids.shape[1] + at - 1
        assert turns.third_is_right(cache)


@pytest.mark.parametrize(
    ("place", "when"),
    (
        ("first layer", "register_forward_pre_hook"), ("last layer", "register_forward_hook"),
        ("head", "register_forward_pre_hook"), ("head", "register_forward_hook"),
        ("drafter", "register_forward_pre_hook"), ("drafter's layer", "register_forward_hook"), ("streamer", ""),
    ),
)  # fmt: skip
def test_what_raises_in_a_pass_leaves_a_valid_cache(place, when):
    turns = Turns("passed dynamic", True, max_new_tokens=16)
    modules = {
        "first layer": turns.target.model.layers[0].mlp, "last layer": turns.target.model.layers[-1].self_attn,
        "head": turns.target.lm_head, "drafter": turns.drafter, "drafter's layer": turns.drafter.layers[-1],
    }  # fmt: skip
    for at in range(1, 5):
        cache, raises, streamer = turns.start(), RaisingStreamer(at), {}
        if place == "streamer":
            streamer = {"streamer": raises}
        else:
            hook = getattr(modules[place], when)(raises)
        with pytest.raises(OSError, match="somebody's own"):
            greedy(turns.target, turns.ids, **turns.kwargs, **{CACHE: cache}, **streamer, assistant_model=turns.drafter)
        if not streamer:
            hook.remove()
        assert turns.third_is_right(cache)


# ------------------------------------------------------------------------------------------------- what cannot be put back


@pytest.mark.parametrize("assistant", (False, True))
def test_a_cache_that_could_not_be_put_back_says_so(assistant):
    """An interrupt of the pass, and another while the layers are put back."""
    turns = Turns("dynamic qwen3_5", True)
    cache, second = turns.start(), Raises(3)

    def trace(frame, event, arg):
        if frame.f_code is _LayerSnapshot.restore.__code__:
            second()

    hook = turns.target.lm_head.register_forward_pre_hook(Raises(4))
    sys.settrace(trace)
    try:
        with pytest.raises(OSError):
            greedy(turns.target, turns.ids, **turns.kwargs, **{CACHE: cache}, assistant_model=turns.drafter)
    finally:
        sys.settrace(None)
        hook.remove()
    third = {"assistant_model": turns.drafter} if assistant else {}
    with pytest.raises(
        RuntimeError, match="this cache is not valid any more.*Start from a new cache and the whole text"
    ):
        greedy(turns.target, torch.cat([turns.text, prompt_of(3)], dim=1), max_new_tokens=4, **{CACHE: cache}, **third)


def test_a_refused_call_leaves_a_passed_cache_as_it_was():
    """So the same call without a drafter writes its text."""
    target, drafter = tiny_family("jamba")
    cache = DynamicCache(config=target.config)
    first = greedy(target, prompt_of(9), max_new_tokens=4, **{CACHE: cache})
    turn = torch.cat([first, prompt_of(3, seed=4)], dim=1)
    expected = greedy(target, turn, max_new_tokens=6, **{CACHE: copy.deepcopy(cache)})
    with pytest.raises(ValueError, match="JambaForCausalLM"):
        greedy(target, turn, max_new_tokens=6, assistant_model=drafter, **{CACHE: cache})
    assert torch.equal(greedy(target, turn, max_new_tokens=6, **{CACHE: cache}), expected)


class OddLayer(DynamicLayer):
    """A layer of somebody's own that changes what it holds in place."""

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states, value_states)
        keys[..., :1, :] += 1
        return keys, values


def test_a_layer_of_unknown_class_is_copied_whole():
    cache = Cache(layers=[OddLayer()])
    cache.update(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), 0)
    snapshot = CacheSnapshot(cache)
    cache.layers[0].keys += 1
    cache.layers[0].more = 1
    snapshot.restore()
    assert cache.layers[0].keys.sum() == 3 and not hasattr(cache.layers[0], "more")
