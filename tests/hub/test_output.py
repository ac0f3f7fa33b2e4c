"""Every field of the output object is plain `generate`'s, and so is the cache, layer by layer and attribute by attribute."""

import pytest
import torch
from dflash_hub.target_model import CACHE, COUNTS_EMBEDDING
from helpers.families import tiny_family
from helpers.scripted import scripted
from helpers.tiny import DRAFTERS, prompt_of
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

PADS = (0, 4, 2)
PROMPT, NEW = 11, 8


class InPlace(LogitsProcessor):
    """Changes the scores that it is given, so that the recorded logits change with them."""

    def __call__(self, input_ids, scores):
        scores[:, 5] -= 3
        return scores.mul_(1.5)


MODES = {
    "all": {},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "in place": {"logits_processor": LogitsProcessorList([InPlace()])},
    "chosen": {"output_hidden_states": [1, -1]},
    "attentions": {"output_attentions": True, "output_hidden_states": 2},
    "static": {"cache_implementation": "static", "output_attentions": True},
    "chunks": {"prefill_chunk_size": 4},
}
FIELDS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}


def assert_equal(mine, theirs, path: str):
    """The same tuples of tensors, with None in the same places."""
    assert type(mine) is type(theirs), path
    if isinstance(theirs, (tuple, list)):
        assert len(mine) == len(theirs), path
        for i, (a, b) in enumerate(zip(mine, theirs)):
            assert_equal(a, b, f"{path}[{i}]")
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), path
        for key in theirs:
            assert_equal(mine[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-3, msg=lambda message: f"{path}: {message}")
    elif isinstance(theirs, (bool, int)):
        assert mine == theirs, path


def assert_equal_caches(mine, theirs):
    for i, (a, b) in enumerate(zip(mine.layers, theirs.layers, strict=True)):
        assert type(a) is type(b)
        fields = [dict(vars(layer)) for layer in (a, b)]
        if isinstance(b, StaticLayer) and not isinstance(b, StaticSlidingWindowLayer):
            for own in fields:  # what is behind the length is no content
                own |= {name: own[name][:, :, : int(b.get_seq_length())] for name in ("keys", "values")}
        assert_equal(*fields, f"layer {i}")


FAMILIES = ("llama", "mistral", "bloom", "gpt_neox_japanese", "qwen3_5", "lfm2")
CASES = [
    # Bloom and GPT-NeoX-Japanese ignore a choice of hidden states; Qwen 3.5 and LFM2 keep states of fixed size.
    pytest.param(family, kind, marks=() if kind == "half-right" or family == "llama" else pytest.mark.slow)
    for family in FAMILIES
    for kind in DRAFTERS
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_field_is_plains(family, kind):
    target, drafter = tiny_family(family)
    target.set_attn_implementation("eager")
    accepted = drafted = 0
    for rows in (1, 3):
        ids = torch.cat([prompt_of(PROMPT, seed) for seed in range(rows)])
        mask = (torch.arange(PROMPT) >= torch.tensor(PADS[:rows])[:, None]).long()
        inputs = {"input_ids": ids * mask, "attention_mask": mask, "do_sample": False, "pad_token_id": 0}
        end = int(target.generate(**inputs, max_new_tokens=NEW)[-1, PROMPT + 3])
        for name, mode in MODES.items():
            if "output_attentions" in mode and rows > 1:
                continue  # refused
            kwargs = inputs | {"max_new_tokens": NEW, "eos_token_id": end} | FIELDS | mode
            plain = target.generate(**kwargs)
            drafter = scripted(drafter, kind, plain.sequences)
            mine = target.generate(**kwargs, assistant_model=drafter)
            accepted, drafted = accepted + mine.speculation.num_accepted, drafted + mine.speculation.num_drafted
            assert list(mine) == list(plain)
            for field in plain:
                if field != CACHE:
                    assert_equal(mine[field], plain[field], f"{rows} sequences, {name}: {field}")
            assert_equal_caches(mine[CACHE], plain[CACHE])
    assert {"random": accepted < drafted / 4, "half-right": 0 < accepted < drafted, "oracle": accepted > drafted / 2}[
        kind
    ]


@pytest.mark.parametrize("returned", (False, True))
def test_a_target_without_a_causal_mask_where_attentions_are_asked_for(returned):
    """Falcon, whether they are returned or not: the text of plain `generate` is another one then."""
    target, drafter = tiny_family("falcon")
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "output_attentions": True, "return_dict_in_generate": returned}
    with pytest.raises(
        ValueError, match="with `output_attentions`, FalconForCausalLM reads several tokens in another way"
    ):
        target.generate(prompt_of(6), **kwargs, assistant_model=drafter)
    plain, mine = (
        target.generate(prompt_of(6), **kwargs, **assistant)
        for assistant in ({}, {"assistant_model": drafter, "num_assistant_tokens": 0})
    )
    assert torch.equal(mine.sequences, plain.sequences) if returned else torch.equal(mine, plain)
    if returned:
        assert_equal(mine.attentions, plain.attentions, "attentions")


@pytest.mark.skipif(not COUNTS_EMBEDDING, reason="this transformers takes no choice of hidden states in `generate`")
def test_a_target_that_skips_a_layer_is_refused_whatever_states_are_chosen():
    """Mllama's cross attention has no image here; the chosen states stand where those of the target layers would."""
    target, drafter = tiny_family("mllama")
    for chosen in ({}, {"output_hidden_states": [1, -2], "return_dict_in_generate": True}):
        with pytest.raises(ValueError, match="MllamaForCausalLM did not run all of the layers"):
            target.generate(prompt_of(6), max_new_tokens=4, do_sample=False, assistant_model=drafter, **chosen)
