"""Greedy decoding through `target.generate(assistant_model=drafter)`: the text is the target's, token for token."""

import functools
import inspect
import itertools
import logging
import re
import time
import types

import pytest
import torch
import transformers
from dflash_hub import DFlashDraftModel
from dflash_hub.decode_memory import ScheduleMemory
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.target_cache import cached_length
from dflash_hub.target_model import CACHE, COUNTS_EMBEDDING
from helpers.families import tiny_family
from helpers.scripted import ScriptedDrafter, ScriptedProposer, ScriptedSchedule, generate_with, scripted
from helpers.tiny import DRAFTERS, FAMILIES, VOCAB, expected_cut, prompt_of, tiny_drafter, tiny_target
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)


def greedy(target, ids, **kwargs):
    return target.generate(ids, do_sample=False, **kwargs)


# ------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("prompt_length", (1, 40))
@pytest.mark.parametrize("block_size", (2, 5, 16))
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pitfall_4_6_7_16_19_greedy_equals_plain(family, kind, block_size, prompt_length):
    """Every length from 1 to two blocks, and an end token at every offset (pitfalls 4, 6, 7, 16, 19)."""
    target, drafter = tiny_target(family), tiny_drafter(num_hidden_layers=1, block_size=block_size)
    ids = prompt_of(prompt_length)
    longest = 2 * block_size
    plain = greedy(target, ids, max_new_tokens=longest)
    drafter = scripted(drafter, kind, plain)

    accepted = 0
    for new in range(1, longest + 1):
        text = greedy(target, ids, assistant_model=drafter, max_new_tokens=new)
        assert text[0].tolist() == expected_cut(plain, prompt_length, new)
        speculation = drafter.last_speculation
        accepted += speculation.num_accepted
        assert sum(speculation.acceptance_lengths[0]) == new - 1  # the first token is the prompt pass's
        if kind == "oracle":
            assert speculation.num_accepted == speculation.num_drafted
            assert len(speculation.drafted[0]) == -(-(new - 1) // block_size)

    for offset in range(longest):
        eos = {int(plain[0, prompt_length + offset])}
        text = greedy(target, ids, assistant_model=drafter, max_new_tokens=longest, eos_token_id=list(eos))
        assert text[0].tolist() == expected_cut(plain, prompt_length, longest, eos)
    if kind != "random":
        assert accepted > 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_pitfall_12_half_precision_stays_within_the_targets_own_ties(dtype):
    """Pitfall 12: other kernels verify a block than write a token; each token must still be a near best one."""
    target, drafter = tiny_target("qwen3").to(dtype), tiny_drafter(dtype=dtype)
    ids = prompt_of(20)
    plain = greedy(target, ids, max_new_tokens=40)
    drafter = scripted(drafter, "half-right", plain)
    text = greedy(target, ids, assistant_model=drafter, max_new_tokens=40)
    scores = target(text).logits[0, 19:-1].float()
    gap = scores.max(-1).values - scores.gather(-1, text[0, 20:, None])[:, 0]
    resolution = torch.finfo(dtype).eps * scores.abs().max()
    assert gap.max() <= 4 * resolution
    assert drafter.last_speculation.num_accepted > 0


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"), ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))
)
def test_pitfall_38_drafter_and_target_may_differ_in_dtype(target_dtype, drafter_dtype):
    """Pitfall 38."""
    target, drafter = tiny_target("llama").to(target_dtype), tiny_drafter(dtype=drafter_dtype)
    ids = prompt_of(9)
    text = greedy(target, ids, assistant_model=drafter, max_new_tokens=8)
    assert text.shape == (1, 17)
    if target_dtype is torch.float32:
        assert torch.equal(text, greedy(target, ids, max_new_tokens=8))


def test_pitfall_30_left_padding_changes_neither_text_nor_acceptance():
    """Pitfall 30: also what the drafter proposes is the same."""
    target, drafter = (
        tiny_target("llama"),
        tiny_drafter(layer_types=["full_attention", "sliding_attention"], sliding_window=6),
    )
    ids = prompt_of(12)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 7, dtype=torch.long), torch.ones_like(ids)], dim=1)
    logits = []

    class Noted(DFlashProposer):
        def candidates(self, *args, **kwargs):
            candidates = super().candidates(*args, **kwargs)
            logits.append(candidates.logits[0].clone())
            return candidates

    drafter = ScriptedDrafter(drafter, Noted)
    alone = greedy(target, ids, assistant_model=drafter, max_new_tokens=20)
    first = len(logits)
    text = greedy(target, padded, attention_mask=mask, assistant_model=drafter, max_new_tokens=20)
    assert torch.equal(text[:, 7:], alone)
    assert torch.equal(alone, greedy(target, ids, max_new_tokens=20))
    torch.testing.assert_close(torch.cat(logits[:first]), torch.cat(logits[first:]), atol=1e-4, rtol=1e-4)


def test_a_grown_vocabulary_is_fine():
    target, drafter = tiny_target("llama"), tiny_drafter()
    target.resize_token_embeddings(VOCAB + 7)
    ids = prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(greedy(target, ids, assistant_model=drafter, max_new_tokens=20), plain)
    assert drafter.last_speculation.num_accepted > 0


def test_pitfall_39_a_head_without_dense_weight_is_called_not_read():
    """Pitfall 39."""

    class Packed(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.register_buffer("packed", linear.weight.detach().clone())

        def forward(self, hidden):
            return hidden @ self.packed.T

    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    target.lm_head = Packed(target.lm_head)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(greedy(target, ids, assistant_model=drafter, max_new_tokens=20), plain)


@pytest.mark.parametrize("kwargs", ({}, {"do_sample": True, "top_k": 1}, {"sequence_bias": [[[20], 4.0]]}))
def test_a_head_wider_than_the_embedding_proposes_embeddable_tokens_only(kwargs):
    target, drafter, ids = tiny_target("llama", tie_word_embeddings=False), tiny_drafter(), prompt_of(10)
    with torch.no_grad():
        wide = torch.nn.Linear(32, VOCAB + 3, bias=False)
        wide.weight[:VOCAB] = target.lm_head.weight
        wide.weight[VOCAB:] = 0
        target.lm_head = wide
    text = target.generate(ids, assistant_model=drafter, max_new_tokens=20, **kwargs)
    assert torch.equal(text, target.generate(ids, max_new_tokens=20, **kwargs))


@pytest.mark.parametrize("kwargs", ({}, {"do_sample": True}, {"sequence_bias": [[[20], 4.0]]}))
def test_a_target_that_cuts_its_logits_is_drafted_for_as_wide(kwargs):
    """Some targets cut off what pads their head; the drafter borrows the head alone."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10) % (VOCAB - 7)

    def cut(module, args, outputs):
        outputs.logits = outputs.logits[..., : VOCAB - 7]

    target.register_forward_hook(cut)
    texts = []
    for number in (1, 4):
        torch.manual_seed(3)
        text = target.generate(ids, assistant_model=drafter, max_new_tokens=20, num_assistant_tokens=number, **kwargs)
        texts.append(text)
    assert torch.equal(*texts) and texts[0].max() < VOCAB - 7
    if not kwargs.get("do_sample"):
        assert torch.equal(texts[0], target.generate(ids, max_new_tokens=20, **kwargs))


# ------------------------------------------------------------------------------------------------- stops and lengths


@pytest.mark.parametrize("form", ("int", "list", "tensor", "target's config", "passed config"))
def test_end_tokens_in_every_form(form):
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "oracle", plain)
    first, second = int(plain[0, 17]), int(plain[0, 14])
    kwargs = {"max_new_tokens": 20}
    ends = {first} if form == "int" else {first, second}
    if form == "int":
        kwargs["eos_token_id"] = first
    elif form == "list":
        kwargs["eos_token_id"] = [first, second]
    elif form == "tensor":
        kwargs["eos_token_id"] = torch.tensor([first, second])
    elif form == "target's config":
        target.generation_config.eos_token_id = [first, second]
    else:
        kwargs = {
            "generation_config": GenerationConfig(max_new_tokens=20, eos_token_id=[first, second], do_sample=False)
        }
    text = target.generate(ids, assistant_model=drafter, **kwargs)
    assert text[0].tolist() == expected_cut(plain, 10, 20, ends)
    assert torch.equal(text, target.generate(ids, **kwargs))


class StopsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("offset", range(1, 12))
@pytest.mark.parametrize("how", ("criterion", "stop string"))
def test_pitfall_2_3_a_stop_inside_a_block(how, offset, pair_folders):
    """Pitfalls 2, 3: at every token of two blocks; nothing after it is streamed or cached, and a criterion is asked once
    per token and in order."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "oracle", plain)
    criterion, streamer = StopsAt(10 + offset), Collects()
    if how == "criterion":
        stop = {"stopping_criteria": StoppingCriteriaList([criterion])}
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(pair_folders[0])
        stop = {"stop_strings": [tokenizer.decode(plain[0, 6 + offset : 10 + offset])], "tokenizer": tokenizer}
    expected = greedy(target, ids, max_new_tokens=20, **stop)
    assert expected[0].tolist() == plain[0, : 10 + offset].tolist()
    criterion.seen.clear()
    kwargs = {"max_new_tokens": 20, "streamer": streamer, "return_dict_in_generate": True}
    output = greedy(target, ids, assistant_model=drafter, **kwargs, **stop)
    assert torch.equal(output.sequences, expected)
    assert [token for piece in streamer.pieces for token in piece] == expected[0].tolist() and streamer.ended
    assert output[CACHE].get_seq_length() == 10 + offset - 1
    assert how == "stop string" or criterion.seen == list(range(11, 11 + offset))
    assert output.speculation.num_accepted > 0 or offset == 1


@pytest.mark.parametrize("kind", DRAFTERS)
def test_max_time_stops_where_plain_does(kind, monkeypatch):
    """With a clock that goes on by a second whenever the criterion looks at it."""
    from transformers.generation import stopping_criteria

    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    drafter = scripted(drafter, kind, greedy(target, ids, max_new_tokens=20))
    clock = itertools.count()
    monkeypatch.setattr(stopping_criteria, "time", types.SimpleNamespace(time=lambda: float(next(clock))))
    plain = greedy(target, ids, max_new_tokens=20, max_time=7.5)
    text = greedy(target, ids, max_new_tokens=20, max_time=7.5, assistant_model=drafter)
    assert torch.equal(text, plain) and text.shape[1] == 18
    assert drafter.last_speculation.num_accepted > 0 or kind == "random"


def test_pitfall_2_3_stop_strings(smollm2_path, caplog, monkeypatch):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    target = tiny_target("llama", vocab_size=49152)
    drafter, ids = tiny_drafter(vocab_size=49152), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "oracle", plain)
    stop = tokenizer.decode(plain[0, 16])
    expected = greedy(target, ids, max_new_tokens=20, stop_strings=[stop], tokenizer=tokenizer)
    text = greedy(target, ids, assistant_model=drafter, max_new_tokens=20, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(text, expected) and text.shape[1] < 30
    with pytest.raises(ValueError, match="pass `tokenizer=`"):
        greedy(target, ids, assistant_model=drafter, stop_strings=[stop])

    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=20, stop_strings=[stop], pad_token_id=0)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING", "transformers"):  # of keywords beside a config, which the caller did not pass
        text = target.generate(ids, generation_config=config, tokenizer=tokenizer, assistant_model=drafter)
        config.stop_strings, config.token_healing = None, True
        target.generate(ids, generation_config=config, tokenizer=tokenizer, assistant_model=drafter)
    assert torch.equal(text, expected) and config.token_healing and not caplog.records
    config.stop_strings, config.token_healing = [stop], None
    target.generation_config.stop_strings = [stop]  # the target's own too
    assert torch.equal(
        target.generate(ids, generation_config=config, tokenizer=tokenizer, assistant_model=drafter), expected
    )


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_smallest_of_several_length_limits_counts(kind):
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    criteria = StoppingCriteriaList([transformers.MaxLengthCriteria(30), transformers.MaxLengthCriteria(15)])
    plain = greedy(target, ids, max_new_tokens=25, stopping_criteria=criteria)
    drafter = scripted(drafter, kind, plain)
    text = greedy(target, ids, max_new_tokens=25, stopping_criteria=criteria, assistant_model=drafter)
    assert torch.equal(text, plain) and text.shape[1] == 15


def test_a_callers_own_stop_string_criterion_replaces_ours(smollm2_path):
    from transformers.generation import StopStringCriteria

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    target = tiny_target("llama", vocab_size=49152)
    drafter, ids = tiny_drafter(vocab_size=49152), prompt_of(10)
    longest = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "oracle", longest)
    early, late = tokenizer.decode(longest[0, 13]), tokenizer.decode(longest[0, 18])
    kwargs = {"max_new_tokens": 20, "stop_strings": [early], "tokenizer": tokenizer}
    kwargs["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, [late])])
    plain = greedy(target, ids, **kwargs)
    assert torch.equal(greedy(target, ids, assistant_model=drafter, **kwargs), plain) and plain.shape[1] > 14


# ------------------------------------------------------------------------------------------------- processors and results


class CountsCalls(LogitsProcessor):
    """Keeps state: its penalty depends on how often it was called, and it remembers the lengths it saw."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, len(self.lengths) % VOCAB] += 5.0 * (len(self.lengths) % 3)
        return scores


PROCESSORS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated bigrams": {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": 5},
    "suppressed": {"suppress_tokens": [7, 8, 9], "begin_suppress_tokens": [11, 12]},
    "sequence bias": {"sequence_bias": [[[20], 4.0], [[20, 21], 6.0]]},
    "forced end": {"forced_eos_token_id": 3},
    "length decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 5},
    "bad words": {"bad_words_ids": [[30], [31, 32]]},
    "stateful": {},
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(name, kind):
    """Pitfalls 14, 15: stateful ones too see each emitted token once, in order."""
    target, drafter, ids = tiny_target("qwen3"), tiny_drafter(), prompt_of(10)

    def run(**kwargs):
        counter = CountsCalls()
        if name == "stateful":
            kwargs["logits_processor"] = LogitsProcessorList([counter])
        return greedy(target, ids, max_new_tokens=24, **PROCESSORS[name], **kwargs), counter.lengths

    plain, lengths = run()
    drafter = scripted(drafter, kind, plain)
    text, drafted_lengths = run(assistant_model=drafter)
    assert torch.equal(text, plain)
    assert drafted_lengths == lengths
    if kind == "oracle":  # all of every round; the last one may end inside
        speculation = drafter.last_speculation
        assert speculation.accepted[0][:-1] == speculation.drafted[0][:-1]
        assert speculation.accepted[0][-1] >= speculation.acceptance_lengths[0][-1] - 1
        assert speculation.num_accepted > 0


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("stateful", (False, True))
def test_scores_and_logits(kind, stateful):
    target, drafter, ids = tiny_target("qwen3"), tiny_drafter(), prompt_of(10)
    kwargs = {"max_new_tokens": 16, "repetition_penalty": 1.3, "return_dict_in_generate": True}
    kwargs |= {"output_scores": True, "output_logits": True}

    def run(**more):
        processors = LogitsProcessorList([CountsCalls()] if stateful else [])
        return greedy(target, ids, logits_processor=processors, **kwargs, **more)

    plain = run()
    drafter = scripted(drafter, kind, plain.sequences)
    output = run(assistant_model=drafter)
    assert torch.equal(output.sequences, plain.sequences)
    assert len(output.scores) == len(output.logits) == 16
    for mine, theirs in zip(output.scores + output.logits, plain.scores + plain.logits):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert output[CACHE].get_seq_length() == plain[CACHE].get_seq_length() == 25
    assert output.speculation is drafter.last_speculation
    assert list(output.keys()) == list(plain.keys())


class Collects:
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.flatten().tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("kind", DRAFTERS)
def test_pitfall_36_streamer(kind):
    """Pitfall 36: the prompt once, then pieces of 1 to block_size tokens, nothing after the stop."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, kind, plain)
    streamer, eos = Collects(), int(plain[0, 23])
    text = greedy(target, ids, assistant_model=drafter, max_new_tokens=20, streamer=streamer, eos_token_id=eos)
    assert streamer.pieces[0] == ids[0].tolist() and streamer.ended
    assert [token for piece in streamer.pieces for token in piece] == text[0].tolist()
    assert all(1 <= len(piece) <= 5 for piece in streamer.pieces[1:])
    assert text[0].tolist() == expected_cut(plain, 10, 20, {eos})


def test_statistics():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=31)
    drafter = scripted(drafter, "half-right", plain)
    greedy(target, ids, assistant_model=drafter, max_new_tokens=31)
    s = drafter.last_speculation
    assert s.target_passes == 1 + s.check_passes + len(s.acceptance_lengths[0]) and s.check_passes == 3
    assert s.drafter_passes == sum(drafted > 0 for drafted in s.drafted[0])
    assert s.tau == 30 / len(s.acceptance_lengths[0])
    assert [a + 1 for a in s.accepted[0]] == s.acceptance_lengths[0]
    shares = s.position_acceptance
    assert len(shares) == 4 and 0 < shares[0] < 1
    drafter = scripted(drafter, "oracle", plain)
    greedy(target, ids, assistant_model=drafter, max_new_tokens=31)
    assert drafter.last_speculation.acceptance_lengths == [[5] * 6]
    assert drafter.last_speculation.position_acceptance == [1.0] * 4


def test_pitfall_44_only_tapped_states_are_kept(monkeypatch):
    """Pitfall 44: of a long prompt's hidden states only those of the target layers are returned by the target."""
    target, drafter = tiny_target("llama"), tiny_drafter(target_layer_ids=[1])
    kept = []
    run = type(target).forward

    def forward(self, *args, **kwargs):
        outputs = run(self, *args, **kwargs)
        kept.append(sum(state is not None for state in outputs.hidden_states))
        return outputs

    monkeypatch.setattr(type(target), "forward", forward)
    greedy(target, prompt_of(30), assistant_model=drafter, max_new_tokens=6)
    assert set(kept) == {1}


def test_taps_are_what_forward_hooks_see():
    """Pitfall 50: target_layer_ids are outputs of 0-based decoder layers."""
    from dflash_hub.target_model import hidden_states_request, target_hidden_states

    seen = {}

    def see(index):
        def hook(module, args, output):
            seen[index] = output[0] if isinstance(output, tuple) else output

        return hook

    for family in FAMILIES:
        target = tiny_target(family)
        for index, layer in enumerate(target.model.layers):
            layer.register_forward_hook(see(index))
        outputs = target(prompt_of(6), output_hidden_states=hidden_states_request([0, 2]))
        for mine, index in zip(target_hidden_states(outputs.hidden_states, target, [0, 2]), (0, 2)):
            assert torch.equal(mine, seen[index])


def test_the_first_round_sees_the_whole_prompt_and_later_ones_what_was_accepted():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    fed = []
    drafter.register_forward_pre_hook(lambda module, args: fed.append(args[1]))
    drafter = scripted(drafter, "half-right", plain)
    greedy(target, ids, assistant_model=drafter, max_new_tokens=20)
    lengths = drafter.last_speculation.acceptance_lengths[0]
    assert [states.shape[1] for states in fed] == [10, *lengths[: len(fed) - 1]]
    # Row by row they are the states of one plain pass over the text.
    states = target(plain, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    fed = torch.cat(fed, dim=1)
    torch.testing.assert_close(fed, expected[:, : fed.shape[1]], atol=1e-4, rtol=1e-4)


class HostReads(TorchFunctionMode):
    """Counts what waits for the device, and ops that make token ids as long as the text; none of the target's own."""

    READ = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy)
    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")

    def __init__(self, long: int):
        super().__init__()
        self.long, self.elsewhere, self.reads, self.copies = long, 0, 0, 0
        self.ops = self.Ops(self)

    def __enter__(self):
        self.ops.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.ops.__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.reads += not self.elsewhere and function in self.READ
        return function(*args, **kwargs or {})

    class Ops(TorchDispatchMode):
        def __init__(self, counts):
            super().__init__()
            self.counts = counts

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            made, counts = op(*args, **kwargs or {}), self.counts
            if not counts.elsewhere:
                counts.reads += op.overloadpacket.__name__ in counts.WAITING
                given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
                counts.copies += any(
                    t.dtype == torch.int64 and t.numel() >= counts.long and t.untyped_storage().data_ptr() not in given
                    for t in tree_leaves(made)
                    if torch.is_tensor(t)
                )
            return made

    def leave_out(self, run):
        """The same function; what it does is not counted."""

        @functools.wraps(run)
        def uncounted(*args, **kwargs):
            self.elsewhere += 1
            try:
                return run(*args, **kwargs)
            finally:
                self.elsewhere -= 1

        return uncounted


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_round_waits_for_the_device_once_and_copies_no_text(kind, monkeypatch):
    """What a call adds for further rounds; the drafter's own work is counted where it is not a stand-in."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(400)
    greedy(target, ids, assistant_model=drafter, max_new_tokens=5)  # checks the target, once
    plain = greedy(target, ids, max_new_tokens=40)
    figures = []
    for new in (12, 40):
        counts = HostReads(long=400)

        class Uncounted(ScriptedProposer):
            propose = counts.leave_out(ScriptedProposer.propose)

        scripts = {"random": scripted(drafter, kind)}  # whose drafts are the drafter's own
        script = scripts.get(kind) or ScriptedDrafter(
            drafter, lambda drafter, target, proposer=Uncounted: proposer(drafter, target, kind, plain)
        )
        with monkeypatch.context() as patched, counts:
            patched.setattr(type(target), "forward", counts.leave_out(type(target).forward))
            greedy(target, ids, assistant_model=script, max_new_tokens=new, num_assistant_tokens=4)
        drafter.last_speculation = script.last_speculation
        figures.append((len(drafter.last_speculation.accepted[0]), counts.reads, counts.copies))
    (few, few_reads, few_copies), (many, many_reads, many_copies) = figures
    assert many - few >= 5 and many_reads - few_reads == many - few
    assert many_copies == few_copies > 0  # those of the call's preparation are seen
    assert drafter.last_speculation.num_accepted > 0 or kind == "random"


# ------------------------------------------------------------------------------------------------- how many to draft


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize(
    "call", ({}, {"do_sample": True}, {"rows": 3}, {"rows": 3, "return_dict_in_generate": True}, {"stateful": True})
)
def test_logits_that_are_not_finite_end_drafting_in_a_call_and_change_no_text(value, call, caplog):
    """From the third draft on, one sequence's second position is spoiled: what is before it is still accepted."""
    target, drafter, call = tiny_target("llama"), tiny_drafter(), dict(call)
    ids = torch.cat([prompt_of(9, seed) for seed in range(call.pop("rows", 1))])
    stateful, call = call.pop("stateful", False), {"max_new_tokens": 30, "do_sample": False} | call

    def text(num_draft: int) -> torch.Tensor:
        torch.manual_seed(5)
        processors = {"logits_processor": LogitsProcessorList([CountsCalls()])} if stateful else {}
        output = target.generate(ids, assistant_model=drafter, num_assistant_tokens=num_draft, **call, **processors)
        return output.sequences if "return_dict_in_generate" in call else output

    plain, rounds = text(0), []

    class Spoiled(DFlashProposer):
        def candidates(self, *args, **kwargs):
            scored = super().candidates(*args, **kwargs)
            logits = scored.logits
            rounds.append(logits.shape[1])
            for row, token_ids in enumerate(plain.tolist()):
                start = (self.cache.get_seq_length() if self.seen is None else self.seen[row]) + 1
                for position, token in enumerate(token_ids[start : start + logits.shape[1]]):
                    logits[row, position, token] = 1e4
            if len(rounds) >= 3:
                logits[-1, 1] = value
            return scored

    drafter = ScriptedDrafter(drafter, Spoiled)
    for _ in range(2):
        rounds.clear()
        assert text(4).equal(plain) and len(rounds) == 3
        speculation = drafter.last_speculation
        assert speculation.drafted[-1][:3] == [4, 4, 4] and set(speculation.drafted[-1][3:]) == {0}
        assert speculation.accepted[-1][:3] == [4, 4, 1] and sum(speculation.accepted[-1][3:]) == 0
    warnings = [record.message for record in caplog.records if "not finite" in record.message]
    assert len(warnings) == 1 and "leave the range of float32: load both in bfloat16 or float32" in warnings[0]


@pytest.mark.parametrize("weights", (False, True))
def test_a_drafter_that_overflows_in_float16_says_why_it_drafts_nothing(weights, caplog):
    """Finite weights whose hidden states leave the range of float16; and weights that are not finite themselves."""
    target, drafter = tiny_target("llama").to(torch.float16), tiny_drafter(dtype=torch.float16)
    with torch.no_grad():
        drafter.layers[0].mlp.down_proj.weight.fill_(float("inf") if weights else 6e4)
    ids = prompt_of(9)
    assert greedy(target, ids, assistant_model=drafter, max_new_tokens=12).equal(greedy(target, ids, max_new_tokens=12))
    assert (drafter.last_speculation.drafter_passes, drafter.last_speculation.num_accepted) == (1, 0)
    cause = "holds values that are not finite .* in layers.0.mlp.down_proj.weight" if weights else "range of float16"
    assert re.search(cause, caplog.text)


def test_number_of_drafted_tokens():
    """Call argument, passed config, target's config, drafter's config: the first that states one."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(num_draft_tokens=3), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "oracle", plain)

    def drafted(**kwargs):
        text = target.generate(ids, assistant_model=drafter, **kwargs)
        assert torch.equal(text, plain)
        return max(drafter.last_speculation.drafted[0])

    config = GenerationConfig(max_new_tokens=20, num_assistant_tokens=2, do_sample=False)
    assert drafted(max_new_tokens=20) == 3
    assert drafted(max_new_tokens=20, num_assistant_tokens=1) == 1
    assert drafted(generation_config=config) == 2
    target.generation_config.num_assistant_tokens = 4
    assert drafted(max_new_tokens=20) == 4
    assert drafted(generation_config=config) == 2
    # transformers' own filler: not told from an unset one, see docs/generate.md.
    assert drafted(generation_config=GenerationConfig(max_new_tokens=20, num_assistant_tokens=20, do_sample=False)) == 4
    for bad in (-1, 5, 20, True, False, 2.0):
        with pytest.raises(ValueError, match="drafts 1 to 4, .* or none with 0"):
            target.generate(ids, assistant_model=drafter, num_assistant_tokens=bad)
    assert drafted(max_new_tokens=20, num_assistant_tokens=0) == 0
    config.num_assistant_tokens = 0
    assert drafted(generation_config=config) == 0
    target.generation_config.num_assistant_tokens = 0
    assert drafted(max_new_tokens=20) == 0


WITHOUT_DRAFTS = {
    "one sequence": {},
    "left-padded batch": {"rows": 3},
    "batch with end tokens": {"rows": 3, "eos_token_id": [*range(3, 30)]},
    "static cache": {"cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 4},
    "output object": {"rows": 2, "return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True},
    "processor with state": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("family", ("llama", "qwen3_5", "jamba"))
@pytest.mark.parametrize("name", WITHOUT_DRAFTS)
def test_without_drafts_the_loop_is_plain_generate(family, name):
    """`num_assistant_tokens=0`: no drafter pass, no hidden states that nobody asked for, one token a forward pass.

    Jamba's recurrent layers start anew in a pass of several tokens, which does not matter here.
    """
    target, drafter = tiny_family(family)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | WITHOUT_DRAFTS[name]
    ids = torch.cat([prompt_of(10, seed) for seed in range(kwargs.pop("rows", 1))])
    ids[1:, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    plain = target.generate(**inputs, **kwargs)

    asked = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    drafter.register_forward_pre_hook(lambda *args: pytest.fail("the drafter ran"))
    output = target.generate(**inputs, **kwargs, assistant_model=drafter, num_assistant_tokens=0)
    speculation = drafter.last_speculation
    assert speculation.drafter_passes == speculation.num_drafted == speculation.check_passes == 0
    assert set(asked) == ({True} if name == "output object" else {None})
    if torch.is_tensor(plain):
        assert output.equal(plain)
    else:
        assert output.sequences.equal(plain.sequences)
        torch.testing.assert_close(output.logits, plain.logits)
        torch.testing.assert_close(output.hidden_states, plain.hidden_states)
        assert cached_length(output[CACHE]) == cached_length(plain[CACHE])
    assert {length for row in speculation.acceptance_lengths for length in row} == {1}


def test_a_turn_without_drafts_between_turns_with_drafts():
    """It reads nothing for the drafter, which reads the prefix once more in the next turn."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    kwargs, cache, prefix_passes = {"max_new_tokens": 8, "return_dict_in_generate": True}, None, []
    for number in (None, 0, None):
        plain = greedy(target, ids, max_new_tokens=8)
        output = target.generate(ids, assistant_model=drafter, num_assistant_tokens=number, **kwargs, **{CACHE: cache})
        assert output.sequences.equal(plain)
        prefix_passes.append(output.speculation.prefix_passes)
        cache, ids = output[CACHE], torch.cat([plain, prompt_of(3, 7)], dim=1)
    assert prefix_passes == [0, 0, 1]


def test_pitfall_35_49_the_block_is_fed_whole_whatever_is_drafted():
    """Pitfalls 35, 49."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    fed, verified = [], []
    drafter.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    target.register_forward_pre_hook(
        lambda module, args, kwargs: verified.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    greedy(target, prompt_of(10), assistant_model=drafter, max_new_tokens=6, num_assistant_tokens=2)
    assert set(fed) == {5}
    assert max(verified[1:]) == 3 and verified[-1] in (1, 2)  # never past what is left


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_pitfall_48_as_many_as_pay(kind, rows):
    """Pitfall 48: "auto" is the default; the text is the same whatever the times were, and what was learned is kept."""
    target, drafter = tiny_target("llama"), tiny_drafter(num_draft_tokens="auto")
    ids = torch.cat([prompt_of(10, seed) for seed in range(rows)])
    plain = greedy(target, ids, max_new_tokens=60)
    drafter = scripted(drafter, kind, plain)
    for _ in range(2):
        assert torch.equal(greedy(target, ids, max_new_tokens=60, assistant_model=drafter), plain)
        assert drafter.last_speculation.num_drafted > 0
    statistics = ScheduleMemory.of(drafter, target).statistics
    assert {1, "drafter, catching up"} <= statistics.times.median.keys() and statistics.first_tried > 0
    if kind == "oracle":
        assert drafter.last_speculation.num_accepted == drafter.last_speculation.num_drafted


def test_the_schedule_decides():
    """It is asked before every round and told what came of it; a text that ends drafts less."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(num_draft_tokens="auto"), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=16)
    schedule, proposer = ScriptedSchedule([0, 3, 0, 4, 2, 4]), ScriptedProposer(drafter, target, "oracle", plain)
    text, _ = generate_with(target, proposer, schedule, ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(text, plain)
    told = schedule.told
    assert [(drafted, accepted) for drafted, accepted, *_ in told] == [
        (0, [0]),
        (3, [3]),
        (0, [0]),
        (4, [4]),
        (2, [2]),
        (0, [0]),
    ]
    assert all(
        seconds > 0 and (drafter_seconds > 0) == (drafted > 0) for drafted, _, seconds, drafter_seconds, *_ in told
    )
    assert [(rows, context) for *_, rows, context in told] == [(1, 10), (1, 11), (1, 15), (1, 16), (1, 21), (1, 24)]


def test_a_slow_streamer_is_no_part_of_a_round(monkeypatch):
    """Else the schedule would take the target for slow, and draft more than pays."""
    target, drafter, now = tiny_target("llama"), tiny_drafter(), [0.0]
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])

    class Slow:
        def put(self, value):
            now[0] += 5

        def end(self):
            pass

    schedule = ScriptedSchedule(itertools.repeat(1))
    proposer = ScriptedProposer(drafter, target, "random", None)
    generate_with(target, proposer, schedule, prompt_of(10), Slow(), max_new_tokens=16, do_sample=False)
    assert (
        now[0] > 40
        and schedule.told
        and {seconds for _, _, *seconds, _, _ in map(list, schedule.told) for seconds in seconds} == {0.0}
    )


@pytest.mark.parametrize("number", (4, "auto"))
def test_pitfall_40_92_a_drafter_that_does_not_fit_is_named_once(number, caplog, monkeypatch):
    """Pitfalls 40, 92: with likely causes, and only where nearly nothing is accepted."""
    target, ids, now = tiny_target("llama"), prompt_of(10), [0.0]
    plain = greedy(target, ids, max_new_tokens=60)
    # By this clock only the target takes time, so that "auto" goes on trying.
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    target.register_forward_hook(lambda *args: now.append(now.pop() + 1.0))
    for kind, warnings in (("half-right", 0), ("random", 1)):
        drafter = scripted(tiny_drafter(), kind, plain)
        for _ in range(8):
            greedy(target, ids, max_new_tokens=60, assistant_model=drafter, num_assistant_tokens=number)
        assert len(caplog.messages) == warnings
    assert "thinking mode" in caplog.text and "target_layer_ids" in caplog.text


# ------------------------------------------------------------------------------------------------- the hook


def test_nothing_is_timed_for_a_fixed_number(monkeypatch):
    """Neither kept, round after round, nor waited for: only the schedule asks for times."""
    target, drafter, looks = tiny_target("llama"), tiny_drafter(), []
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: looks.append(1) or float(len(looks)))
    for number, most in ((3, 1), ("auto", 1000)):
        looks.clear()
        greedy(target, prompt_of(9), max_new_tokens=12, assistant_model=drafter, num_assistant_tokens=number)
        assert 1 <= len(looks) <= most
    assert len(looks) > len(drafter.last_speculation.drafted[0])


def test_every_other_call_is_untouched(monkeypatch):
    """The hook passes on the very same arguments."""
    hooked = GenerationMixin.generate
    assert hooked._dflash_hook and inspect.signature(hooked) == inspect.signature(hooked.__wrapped__)
    target, ids = tiny_target("llama"), prompt_of(10)
    small = tiny_target("llama", seed=5, num_hidden_layers=1)
    for kwargs in (
        {},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": small},
        {"do_sample": True, "num_return_sequences": 3},
    ):
        torch.manual_seed(3)
        mine = target.generate(ids, max_new_tokens=12, **kwargs)
        torch.manual_seed(3)
        theirs = hooked.__wrapped__(target, ids, max_new_tokens=12, **kwargs)
        assert torch.equal(mine, theirs)
    config = GenerationConfig(max_new_tokens=5)
    assert torch.equal(
        target.generate(ids, config, None, None, None, None, small), hooked.__wrapped__(target, ids, config)
    )


def test_the_drafter_is_found_wherever_it_stands():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    config = GenerationConfig(max_new_tokens=12, do_sample=False)
    plain = target.generate(ids, config)
    drafter = scripted(drafter, "oracle", plain)
    assert torch.equal(target.generate(ids, config, None, None, None, None, drafter), plain)
    assert drafter.last_speculation.num_accepted > 0
    assert torch.equal(target.generate(inputs=ids, generation_config=config, assistant_model=drafter), plain)
    assert torch.equal(target.generate(input_ids=ids, generation_config=config, assistant_model=drafter), plain)


def test_installing_twice_changes_nothing():
    from dflash_hub.generation_dflash import install_generate_hook

    before = GenerationMixin.generate
    install_generate_hook()
    assert GenerationMixin.generate is before


def test_two_threads_share_target_and_drafter():
    from concurrent.futures import ThreadPoolExecutor

    target, drafter = tiny_target("llama"), tiny_drafter()
    prompts = [prompt_of(8 + seed, seed) for seed in range(6)]
    plain = [greedy(target, ids, max_new_tokens=16) for ids in prompts]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda ids: greedy(target, ids, assistant_model=drafter, max_new_tokens=16), prompts))
    assert all(torch.equal(a, b) for a, b in zip(texts, plain))


def test_an_exception_in_the_middle_leaves_both_usable():
    class Breaks(Collects):
        def put(self, value):
            super().put(value)
            if len(self.pieces) == 4:
                raise KeyboardInterrupt

    target, drafter, ids = tiny_target("mistral"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    with pytest.raises(KeyboardInterrupt):
        greedy(target, ids, assistant_model=drafter, max_new_tokens=20, streamer=Breaks())
    assert torch.equal(greedy(target, ids, assistant_model=drafter, max_new_tokens=20), plain)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    (
        ({"num_beams": 2}, "`num_beams=2`"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "`penalty_alpha=0.6`"),
        ({"dola_layers": "high"}, "`dola_layers='high'`"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens=3`"),
        ({"assistant_early_exit": 2}, "`assistant_early_exit=2`"),
        ({"use_mtp": True}, "`use_mtp=True`"),
        ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight=0.5`"),
        ({"cache_implementation": "paged"}, "`cache_implementation='paged'`"),
        ({"use_cache": False}, "`use_cache=False`"),
        ({"custom_generate": lambda *a, **k: None}, "`custom_generate` is not supported"),
        ({"synced_gpus": True}, "`synced_gpus` is not supported"),
        ({"assistant_model": "org/drafter"}, r"is the string 'org/drafter', not a model. Load the drafter first"),
        ({"num_beam_groups": 2, "num_beams": 2}, "`num_beams=2`"),
        ({"constraints": [object()]}, "`constraints="),
        ({"force_words_ids": [[3]]}, r"`force_words_ids=\[\[3\]\]`"),
        ({"inputs_embeds": torch.zeros(1, 3, 32), "prefill_chunk_size": 2}, "`prefill_chunk_size` reads token ids"),
        ({"is_assistant": True}, "`is_assistant=True`"),
        ({"speculation_type": "eagle"}, "`speculation_type='eagle'`"),
        ({CACHE: ((torch.zeros(1),),)}, "a tuple passed as"),
        ({"token_healing": True}, "`token_healing` needs the target's tokenizer"),
    ),
)
def test_pitfall_28_33_unsupported_calls_are_refused_by_name_before_any_pass(kwargs, sentence, monkeypatch):
    target, drafter = tiny_target("llama"), tiny_drafter()
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("a pass was made"))
    with pytest.raises(ValueError, match=sentence):
        target.generate(prompt_of(5), **{"assistant_model": drafter} | kwargs)


def test_a_drafter_without_weights_is_refused():
    with torch.device("meta"):
        empty = DFlashDraftModel(tiny_drafter().config)
    with pytest.raises(ValueError, match=r"no weights: fc.weight and others are on the meta device. Load it with"):
        tiny_target("llama").generate(prompt_of(5), assistant_model=empty, max_new_tokens=4)


def test_an_offloaded_drafter_drafts_as_a_whole_one(tmp_path):
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(8)
    drafter.save_pretrained(tmp_path / "drafter")
    text = target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False)
    offloaded = DFlashDraftModel.from_pretrained(
        tmp_path / "drafter", device_map={"": "disk"}, offload_folder=tmp_path / "o"
    )
    assert all(weight.is_meta for weight in offloaded.parameters())
    logits = []
    for one in (drafter, offloaded):
        head = one.norm.register_forward_hook(lambda module, inputs, output: logits.append(output))
        assert torch.equal(target.generate(ids, assistant_model=one, max_new_tokens=20, do_sample=False), text)
        head.remove()
    half = len(logits) // 2
    assert half > 3 and all(torch.equal(*pair) for pair in zip(logits[:half], logits[half:]))


def test_a_pipeline_takes_a_drafter(pair_folders):
    """When it is made, where the drafter's special tokens are the target's or its tokenizer comes along, and when it is called."""
    folder, _ = pair_folders
    target = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    call = {"max_new_tokens": 12, "do_sample": False}
    alone = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    text = alone("hello", **call)
    known = target.generate(**tokenizer("hello", return_tensors="pt"), **call)
    special = {name: getattr(target.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    same, other = (scripted(drafter, "oracle", known) for drafter in (tiny_drafter(**special), tiny_drafter()))
    made = {"model": target, "tokenizer": tokenizer}
    pipelines = [
        (same, transformers.pipeline("text-generation", assistant_model=same, **made), {}),
        (
            other,
            transformers.pipeline("text-generation", assistant_model=other, assistant_tokenizer=tokenizer, **made),
            {},
        ),
        (other, alone, {"assistant_model": other}),
    ]
    for drafter, pipe, more in pipelines:
        drafter.last_speculation = None
        assert pipe("hello", **call, **more) == text
        assert drafter.last_speculation.num_accepted > 5
    strange = transformers.AutoTokenizer.from_pretrained(folder)
    strange.add_tokens("<strange>")
    with pytest.raises(ValueError, match="`assistant_tokenizer` came with a `tokenizer` with another vocabulary"):
        target.generate(prompt_of(5), assistant_model=other, tokenizer=tokenizer, assistant_tokenizer=strange)


def test_a_foreign_custom_generate_is_refused_beside_a_drafter(tmp_path):
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text("def generate(model, **kwargs):\n    return 'foreign'\n")
    with pytest.raises(ValueError, match="`custom_generate` is not supported"):
        tiny_target("llama").generate(
            prompt_of(5), assistant_model=tiny_drafter(), custom_generate=str(tmp_path), trust_remote_code=True
        )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    (
        ({"hidden_size": 48, "num_attention_heads": 6}, "hidden size of 32, the target's is 48"),
        ({"num_hidden_layers": 6}, "number of layers of 4, the target's is 6"),
        ({"vocab_size": 90}, "vocabulary of 97, the target embeds 90 tokens"),
    ),
)
def test_a_wrong_pair_is_refused_by_name(overrides, sentence):
    """Pitfall 70."""
    target, drafter = tiny_target("llama", **overrides), tiny_drafter()
    drafter.config.name_or_path = "org/drafter"
    target.config.name_or_path = "org/target"
    with pytest.raises(ValueError, match=f"'org/drafter' does not fit the target 'org/target'.*{sentence}"):
        target.generate(prompt_of(5), assistant_model=drafter)


def test_an_encoder_decoder_is_refused_by_name():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        transformers.T5ForConditionalGeneration(config).generate(prompt_of(5), assistant_model=tiny_drafter())


def test_a_drafter_is_no_target():
    drafter = tiny_drafter(target_name_or_path="org/target")
    assert not drafter.can_generate()
    with pytest.raises(AttributeError, match=r"writes no text of its own.*org/target"):
        drafter.generate(prompt_of(5))


def test_a_target_is_no_drafter(tmp_path):
    from dflash_hub import DFlashDraftModel

    tiny_target("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not the configuration of a DFlash drafter: model_type 'llama'"):
        DFlashDraftModel.from_pretrained(tmp_path)


# ------------------------------------------------------------------------------------------------- somebody's own code


class Breaks(StoppingCriteria):
    """Raises where the text reaches a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length:
            raise RuntimeError("somebody's own")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("length", range(11, 18))
def test_a_criterion_that_raises_leaves_the_streamed_text_and_its_cache(kind, length):
    """At every offset in a block: the next turn goes on from what was streamed, as after plain `generate`."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=30)
    drafter = scripted(drafter, kind, plain)
    streamed, held = [], []
    for assistant in ({}, {"assistant_model": drafter}):
        streamer, cache = Collects(), transformers.DynamicCache(config=target.config)
        with pytest.raises(RuntimeError, match="somebody's own"):
            greedy(
                target, ids, max_new_tokens=20, streamer=streamer, stopping_criteria=[Breaks(length)], **{CACHE: cache}, **assistant
            )  # fmt: skip
        streamed.append([token for piece in streamer.pieces for token in piece])
        held.append(cache.get_seq_length())
        more = torch.cat([torch.tensor([streamed[-1]]), prompt_of(4, seed=3)], dim=1)
        cold = greedy(target, more, max_new_tokens=12)
        assert torch.equal(greedy(target, more, max_new_tokens=12, **{CACHE: cache}, **assistant), cold)
    assert streamed[0] == streamed[1] == plain[0, : length - 1].tolist() and held[0] == held[1] == length - 1


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_criterion_that_looks_at_the_streamer(kind):
    """It sees each token when plain would show it."""

    class Ends(StoppingCriteria):
        def __init__(self, streamer):
            self.streamer = streamer

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), sum(map(len, self.streamer.pieces)) >= 13)

    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    drafter = scripted(drafter, kind, greedy(target, ids, max_new_tokens=20))
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        streamer = Collects()
        texts.append(
            greedy(target, ids, max_new_tokens=20, streamer=streamer, stopping_criteria=[Ends(streamer)], **assistant)
        )
    assert texts[0].shape[1] == 14 and torch.equal(*texts)


@pytest.mark.parametrize("shape", ((), (1,), (1, 1)))
@pytest.mark.parametrize("dtype", (torch.bool, torch.int))
def test_a_criterions_result_for_one_row_may_have_any_shape(shape, dtype):
    class At(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full(shape, input_ids.shape[1] >= 15, dtype=dtype)

    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    drafter = scripted(drafter, "oracle", greedy(target, ids, max_new_tokens=20))
    text = greedy(target, ids, max_new_tokens=20, stopping_criteria=[At()], assistant_model=drafter)
    assert text.shape[1] == 15


def test_a_criterion_with_another_number_of_results_is_named():
    class Three(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(3, dtype=torch.bool)

    target, drafter = tiny_target("llama"), tiny_drafter()
    with pytest.raises(ValueError, match=r"a result of shape \(3,\) for 1 rows"):
        greedy(target, prompt_of(10), max_new_tokens=8, stopping_criteria=[Three()], assistant_model=drafter)


def test_an_end_token_as_a_tensor_without_dimension():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = greedy(target, ids, max_new_tokens=20)
    drafter = scripted(drafter, "oracle", plain)
    criteria = [transformers.generation.EosTokenCriteria(plain[0, 17])]
    expected = greedy(target, ids, max_new_tokens=20, stopping_criteria=criteria)
    assert torch.equal(
        greedy(target, ids, max_new_tokens=20, stopping_criteria=criteria, assistant_model=drafter), expected
    )


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("chosen", ([1, 3], 2, -1, [0, -2], [], 0))
@pytest.mark.skipif(not COUNTS_EMBEDDING, reason="this transformers takes no choice of hidden states in `generate`")
def test_chosen_hidden_states(chosen, kind):
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    kwargs = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_hidden_states": chosen}
    plain = greedy(target, ids, **kwargs)
    drafter = scripted(drafter, kind, plain.sequences)
    mine = greedy(target, ids, **kwargs, assistant_model=drafter)
    assert torch.equal(mine.sequences, plain.sequences)
    assert (mine.hidden_states is None) == (plain.hidden_states is None)
    for ours, theirs in zip(mine.hidden_states or (), plain.hidden_states or (), strict=True):
        assert [layer is None for layer in ours] == [layer is None for layer in theirs]
        for a, b in zip(ours, theirs):
            if b is not None:
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
