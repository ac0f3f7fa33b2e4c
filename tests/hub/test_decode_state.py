"""Several rows: each is that row of plain `generate` on the same batch, whatever the others accept and wherever they end."""

import pytest
import torch
import transformers
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.target_model import CACHE
from helpers.families import tiny_family
from helpers.scripted import ScriptedDrafter, scripted, without_hooks
from helpers.tiny import DRAFTERS, VOCAB, prompt_of, tiny_drafter, tiny_target
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

PADS = (0, 5, 2)


def batch(length: int = 11, pads=PADS) -> dict:
    """Left-padded rows of different lengths."""
    ids = torch.cat([prompt_of(length, seed) for seed in range(len(pads))])
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def greedy(target, inputs, **kwargs):
    return target.generate(**inputs, do_sample=False, **kwargs)


def alone(inputs: dict, row: int) -> dict:
    kept = inputs["attention_mask"][row] == 1
    return {"input_ids": inputs["input_ids"][row : row + 1, kept]}


SLIDING_DRAFTER = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("family", ("llama", "mistral", "qwen3_5", "gpt_oss", "gpt2", "lfm2"))
def test_pitfall_29_rows_equal_plain(family, kind):
    """Pitfall 29: rows that accept different counts and end at different times; past every window."""
    if family in ("llama", "mistral"):
        target, drafter = tiny_target(family), tiny_drafter(**SLIDING_DRAFTER)
    else:
        target, drafter = tiny_family(family)
    inputs = batch()
    longest = greedy(target, inputs, max_new_tokens=24, eos_token_id=None)
    ends = [int(longest[0, 11 + 6]), int(longest[1, 11 + 13])]
    plain = greedy(target, inputs, max_new_tokens=24, eos_token_id=ends, pad_token_id=0)
    drafter = scripted(drafter, kind, plain)
    assert torch.equal(
        greedy(target, inputs, max_new_tokens=24, eos_token_id=ends, pad_token_id=0, assistant_model=drafter), plain
    )
    speculation = drafter.last_speculation
    written = [int((row[11:] != 0).sum()) for row in plain]
    assert [sum(lengths) + 1 for lengths in speculation.acceptance_lengths] == written
    if kind == "oracle":
        assert all(a[:-1] == d[:-1] for a, d in zip(speculation.accepted, speculation.drafted))
    if kind == "half-right":
        assert len({tuple(a) for a in speculation.accepted}) > 1  # they do advance by different counts


@pytest.mark.parametrize("kwargs", ({}, SLIDING_DRAFTER))
def test_a_rows_drafts_are_those_of_its_own_run(kwargs):
    """Pitfall 30: left padding, and what other rows accept, change no row's text nor what is drafted for it."""
    target, inputs = tiny_target("llama"), batch()
    plain = greedy(target, inputs, max_new_tokens=30)
    seen = {}

    class Noted(DFlashProposer):
        def candidates(self, anchor, context, num_draft, attention_mask=None, counts=None):
            width = context[0].shape[1]
            before = [0 if self.seen is None else self.seen[row] for row in range(len(anchor))]
            scored = super().candidates(anchor, context, num_draft, attention_mask, counts)
            logits = scored.logits
            for row, count in enumerate(counts or [width] * len(anchor)):
                known = self.cache.get_seq_length() if self.seen is None else before[row] + count
                seen.setdefault(key if len(anchor) == 1 else row, {}).setdefault(known, logits[row, 0].clone())
            # Sequences advance by different counts although the drafter is random: some of its draft tokens are made right.
            for row in range(len(anchor)):
                known = self.cache.get_seq_length() if self.seen is None else self.seen[row]
                for position in range(num_draft):
                    index = known + 1 + position
                    if index < len(text[row]) and (index + 3 * text[row][1]) % 3:
                        logits[row, position, text[row][index]] = 1e4
            return scored

    drafter = ScriptedDrafter(tiny_drafter(**kwargs), Noted)
    texts = [
        [t for t, m in zip(row.tolist(), mask.tolist() + [1] * 30) if m]
        for row, mask in zip(plain, inputs["attention_mask"])
    ]
    text = texts
    assert torch.equal(greedy(target, inputs, max_new_tokens=30, assistant_model=drafter), plain)
    assert len({tuple(lengths) for lengths in drafter.last_speculation.acceptance_lengths}) > 1
    for row in range(3):
        key = "alone"
        seen.pop(key, None)
        text = [texts[row]]
        found = greedy(target, alone(inputs, row), max_new_tokens=30, assistant_model=drafter)
        assert found[0].tolist() == texts[row]
        common = seen[row].keys() & seen[key].keys()
        assert len(common) > 5
        for known in common:
            torch.testing.assert_close(seen[row][known], seen[key][known], atol=1e-4, rtol=1e-4)


class Stateful(LogitsProcessor):
    """Depends on how often it was called, and on the batch it sees."""

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append(tuple(input_ids.shape))
        scores = scores.clone()
        scores[:, len(self.shapes) % VOCAB] += 5.0 * (input_ids[0, -1] % 3)
        return scores


class LastTokenIs(StoppingCriteria):
    def __init__(self, tokens):
        self.tokens, self.seen = torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(tuple(input_ids.shape))
        return torch.isin(input_ids[:, -1], self.tokens)


def allowed(row, ids):
    return [3 + (row + len(ids)) % 5, 20, 30 + row]


TOGETHER = {
    "stateful processor": lambda: {"logits_processor": LogitsProcessorList([Stateful()])},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": allowed},
    "guidance": lambda: {"guidance_scale": 1.5},
    "watermark": lambda: {"watermarking_config": transformers.WatermarkingConfig(context_width=2)},
    "prompt penalty": lambda: {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "max_time": lambda: {"max_time": 600.0},
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", TOGETHER)
def test_rows_in_lockstep_where_something_needs_the_batch(name, kind):
    """Pitfalls 14, 15: processors and criteria see the batch of plain generate, in order."""
    target, drafter, inputs = tiny_target("qwen3"), tiny_drafter(), batch()
    ends = {"eos_token_id": [7], "pad_token_id": 0, "max_new_tokens": 20}
    made, again = TOGETHER[name](), TOGETHER[name]()
    plain = greedy(target, inputs, **ends, **made)
    drafter = scripted(drafter, kind, plain)
    assert torch.equal(greedy(target, inputs, **ends, **again, assistant_model=drafter), plain)
    speculation = drafter.last_speculation
    if name == "stateful processor":
        assert again["logits_processor"][0].shapes == made["logits_processor"][0].shapes
    if kind == "oracle":
        assert speculation.num_accepted > 0 and speculation.acceptance_lengths[0][0] == 5
    assert speculation.processor_passes == (plain.shape[1] - 11 if name == "guidance" else 0)


@pytest.mark.parametrize("eos", (None, [7]))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_custom_criterion_for_rows(eos, kind):
    """Without end tokens plain generate goes on writing in a row that ended, until all have."""
    target, drafter, inputs = tiny_target("llama"), tiny_drafter(), batch()
    longest = greedy(target, inputs, max_new_tokens=24)
    tokens = [int(longest[0, 17]), int(longest[1, 23]), int(longest[2, 20])]

    def run(**kwargs):
        criterion = LastTokenIs(tokens)
        text = greedy(
            target, inputs, max_new_tokens=24, eos_token_id=eos, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([criterion]), **kwargs,
        )  # fmt: skip
        return text, criterion.seen

    plain, seen = run()
    drafter = scripted(drafter, kind, plain)
    text, mine = run(assistant_model=drafter)
    assert torch.equal(text, plain) and mine == seen


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_is_returned_for_rows(kind):
    """Scores, logits, hidden states and the cache; a finished row's scores are those of its padding."""
    target, drafter, inputs = tiny_target("mistral"), tiny_drafter(), batch()
    longest = greedy(target, inputs, max_new_tokens=16)
    kwargs = {
        "eos_token_id": [int(longest[0, 16])],
        "pad_token_id": 0,
        "max_new_tokens": 16,
        "return_dict_in_generate": True,
    }
    kwargs |= {"output_scores": True, "output_logits": True, "output_hidden_states": True, "repetition_penalty": 1.2}
    plain = greedy(target, inputs, **kwargs)
    drafter = scripted(drafter, kind, plain.sequences)
    output = greedy(target, inputs, **kwargs, assistant_model=drafter)
    assert torch.equal(output.sequences, plain.sequences) and list(output.keys()) == list(plain.keys())
    for mine, theirs in zip(output.scores + output.logits, plain.scores + plain.logits, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(output.hidden_states, plain.hidden_states, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a[:, -1], b[:, -1], atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(output[CACHE].layers, plain[CACHE].layers):
        torch.testing.assert_close(mine.keys[:, :, -5:], theirs.keys[:, :, -5:], atol=1e-4, rtol=1e-4)


def test_attentions_of_rows_are_refused_by_name():
    with pytest.raises(ValueError, match="`output_attentions` is supported for one sequence, got 3"):
        greedy(
            tiny_target("llama", attn_implementation="eager"), batch(), assistant_model=tiny_drafter(), max_new_tokens=4,
            output_attentions=True, return_dict_in_generate=True,
        )  # fmt: skip


class Pieces:
    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.pieces.append("end")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_pitfall_36_rows_are_streamed_step_by_step(kind):
    """Pitfall 36: a streamer that takes batches gets the pieces of plain generate, padding of finished rows included."""
    target, drafter, inputs = tiny_target("llama"), tiny_drafter(), batch()
    longest = greedy(target, inputs, max_new_tokens=16)
    kwargs = {"eos_token_id": [int(longest[0, 16])], "pad_token_id": 0, "max_new_tokens": 16}
    theirs, mine = Pieces(), Pieces()
    plain = greedy(target, inputs, **kwargs, streamer=theirs)
    drafter = scripted(drafter, kind, plain)
    assert torch.equal(greedy(target, inputs, **kwargs, streamer=mine, assistant_model=drafter), plain)
    assert mine.pieces == theirs.pieces


def test_rows_with_stop_strings(smollm2_path):
    """Rows end at their own stop strings and go on by counts of their own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    target, drafter, inputs = tiny_target("llama", vocab_size=49152), tiny_drafter(vocab_size=49152), batch()
    longest = greedy(target, inputs, max_new_tokens=20)
    stops = [tokenizer.decode(longest[0, 16]), tokenizer.decode(longest[1, 24])]
    kwargs = {
        "max_new_tokens": 20,
        "stop_strings": stops,
        "tokenizer": tokenizer,
        "eos_token_id": [2],
        "pad_token_id": 0,
    }
    plain = greedy(target, inputs, **kwargs)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(greedy(target, inputs, **kwargs, assistant_model=drafter), plain)
    assert len({len(lengths) for lengths in drafter.last_speculation.acceptance_lengths}) > 1


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 20}


def test_num_return_sequences_have_noise_of_their_own():
    """Each row's text is reproduced by the seed, does not depend on the drafter, and differs from the others."""
    target, drafter, ids = tiny_target("qwen3", initializer_range=0.15), tiny_drafter(), prompt_of(10)
    texts = []
    for kind, drafted in (("random", 4), ("half-right", 4), ("oracle", 2), ("oracle", 4)):
        drafter = scripted(drafter, kind, texts[0] if texts else None)
        torch.manual_seed(5)
        texts.append(
            target.generate(
                ids, num_return_sequences=3, **SAMPLING, assistant_model=drafter, num_assistant_tokens=drafted
            )
        )
        assert torch.equal(texts[-1], texts[0])
        if kind == "oracle":
            assert drafter.last_speculation.num_accepted == drafter.last_speculation.num_drafted
    assert len({tuple(row.tolist()) for row in texts[0]}) == 3


def test_sampled_rows_with_padding_and_ends():
    target, drafter, inputs = tiny_target("llama", initializer_range=0.15), tiny_drafter(), batch()
    texts = []
    for kind in DRAFTERS:
        drafter = scripted(drafter, kind, texts[0] if texts else None)
        torch.manual_seed(2)
        kwargs = SAMPLING | {"eos_token_id": list(range(40, 50)), "pad_token_id": 0, "repetition_penalty": 1.3}
        texts.append(target.generate(**inputs, **kwargs, assistant_model=drafter))
        assert torch.equal(texts[-1], texts[0])


def test_sampled_rows_have_the_targets_distribution():
    """The law of the first token, of every row of a batch."""
    target = tiny_target("llama", vocab_size=7, initializer_range=0.3, pad_token_id=0, bos_token_id=1)
    drafter, ids = tiny_drafter(vocab_size=7, mask_token_id=6), torch.tensor([[3, 4, 5]])
    exact = target(ids).logits[0, -1].double().softmax(-1)
    torch.manual_seed(0)
    rows = 600
    text = target.generate(
        ids,
        do_sample=True,
        top_k=0,
        max_new_tokens=3,
        num_return_sequences=rows,
        assistant_model=drafter,
        eos_token_id=None,
    )
    drawn = torch.bincount(text[:, 3], minlength=7) / rows
    assert 0.5 * (drawn - exact).abs().sum() < 0.06


@pytest.mark.parametrize("where", ("processor's ids", "processor's scores", "criterion's ids"))
def test_somebodys_own_code_may_view_what_it_gets(where):
    """As in plain `generate`, tensors are contiguous."""
    target, drafter, inputs = tiny_target("llama"), tiny_drafter(), batch()

    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            (scores if where == "processor's scores" else input_ids).view(-1)
            return scores

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            input_ids.view(-1)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    own = {"stopping_criteria": [Criterion()]} if where == "criterion's ids" else {"logits_processor": [Processor()]}
    kwargs = {"max_new_tokens": 12, **own}
    plain = greedy(target, inputs, **kwargs)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(greedy(target, inputs, **kwargs, assistant_model=drafter), plain)
    assert drafter.last_speculation.num_accepted > 0


def test_rows_of_a_hybrid_whose_mixers_can_no_longer_be_seen():
    """Rows would need a replay of different lengths: a sentence, and the next call goes in lockstep."""
    from helpers.families import tiny_family

    target, drafter = tiny_family("qwen3_next")
    inputs = batch()
    plain = greedy(target, inputs, max_new_tokens=16)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(greedy(target, inputs, max_new_tokens=16, assistant_model=drafter), plain)
    without_hooks(target)
    with pytest.raises(ValueError, match="can no longer be seen at work"):
        greedy(target, inputs, max_new_tokens=16, assistant_model=drafter)
    assert torch.equal(greedy(target, inputs, max_new_tokens=16, assistant_model=drafter), plain)
    assert drafter.last_speculation.replay_passes > 0
