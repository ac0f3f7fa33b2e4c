"""Every argument of generate and every field of GenerationConfig is supported, raises by name, or is ignored, and says so."""

import inspect
import re

import pytest
import torch
import transformers
from dflash_hub import decode_settings
from dflash_hub.decode_settings import (
    IGNORED_FIELDS,
    SUPPORTED_ARGUMENTS,
    SUPPORTED_FIELDS,
    UNSUPPORTED_ARGUMENTS,
    UNSUPPORTED_FIELDS,
)
from helpers.scripted import scripted
from helpers.tiny import DRAFTERS, ROOT, VOCAB, prompt_of, tiny_drafter, tiny_target
from transformers import GenerationConfig, GenerationMixin


def rows(heading: str) -> dict[str, str]:
    text = (ROOT / "docs/generate.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.M))


def fields() -> set[str]:
    """Of the installed transformers."""
    return {name for name in GenerationConfig().to_dict() if not name.startswith("_")} - {"transformers_version"}


def test_every_field_is_classified():
    """Fails when a new transformers adds a field: decide what it does beside a drafter, and add it to code and table."""
    assert fields() <= SUPPORTED_FIELDS | IGNORED_FIELDS | set(UNSUPPORTED_FIELDS)
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    assert arguments <= SUPPORTED_ARGUMENTS | set(UNSUPPORTED_ARGUMENTS)


def test_the_table_is_the_code():
    groups = {"supported": SUPPORTED_FIELDS, "raises": set(UNSUPPORTED_FIELDS), "ignored": IGNORED_FIELDS}
    assert rows("Fields of GenerationConfig") == {name: group for group, names in groups.items() for name in names}
    groups = {"supported": SUPPORTED_ARGUMENTS, "raises": set(UNSUPPORTED_ARGUMENTS)}
    assert rows("Arguments") == {name: group for group, names in groups.items() for name in names}


def test_an_unknown_setting_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(decode_settings, "SUPPORTED_FIELDS", SUPPORTED_FIELDS - {"top_h"})
    with pytest.raises(ValueError, match="does not know the setting `top_h=0.5`"):
        tiny_target("llama").generate(prompt_of(5), assistant_model=tiny_drafter(), do_sample=True, top_h=0.5)


# A value that does something, for every supported field that has a test of its own nowhere else. Greedy, one row.
VALUES = {
    "max_length": 25, "max_new_tokens": 15, "min_length": 20, "min_new_tokens": 9, "max_time": 600.0,
    "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "top_h": 0.5, "typical_p": 0.5, "epsilon_cutoff": 1e-3,
    "eta_cutoff": 1e-3, "repetition_penalty": 1.7, "encoder_repetition_penalty": 1.5, "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[30], [31, 32]], "renormalize_logits": True,
    "forced_bos_token_id": 4, "forced_eos_token_id": 5, "remove_invalid_values": True,
    "exponential_decay_length_penalty": (4, 1.5), "suppress_tokens": [7, 8], "begin_suppress_tokens": [9, 10],
    "sequence_bias": [[[20], 4.0], [[20, 21], 6.0]], "guidance_scale": 1.5,
    "watermarking_config": {"greenlist_ratio": 0.3, "bias": 3.0}, "pad_token_id": 3, "bos_token_id": 4,
    "eos_token_id": [5, 6], "disable_compile": True, "compile_config": transformers.CompileConfig(), "cache_implementation": "dynamic",
    "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.0, "low_memory": True,
    "decoder_start_token_id": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.9,
    "max_matching_ngram_size": 3, "assistant_lookbehind": 5, "target_lookbehind": 5,
}  # fmt: skip
# Tested in: rows, what is returned, caches, stop strings and healing, how many to draft.
ELSEWHERE = {
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "cache_config", "max_cache_len", "prefill_chunk_size", "stop_strings", "token_healing",
    "num_assistant_tokens", "do_sample", "continuous_batching_config",
}  # fmt: skip


def test_every_honoured_and_idle_field_has_a_value_to_try():
    assert VALUES.keys() | ELSEWHERE == SUPPORTED_FIELDS | IGNORED_FIELDS


@pytest.mark.parametrize("name", VALUES)
def test_field(name, request):
    """Greedy text as plain's, with a half-right drafter; the fields of sampling do nothing then, in both."""
    target, drafter, ids = tiny_target("qwen3"), tiny_drafter(), prompt_of(10)
    kwargs = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 5} | {name: VALUES[name]}
    if name == "max_length":
        del kwargs["max_new_tokens"]
    plain = target.generate(ids, **kwargs)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(target.generate(ids, **kwargs, assistant_model=drafter), plain)
    assert drafter.last_speculation.num_accepted > 0


STATEFUL = {
    "guidance": {"guidance_scale": 1.7},
    "guidance with a negative prompt": {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[9, 8, 7]])},
    "constrained": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + int(ids[-1]) % 7, 11, 12 + len(ids) % 3]},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig(seeding_scheme="selfhash", context_width=2)},
    "synthid": {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", STATEFUL)
def test_pitfall_14_15_processors_with_state(name, kind):
    """Pitfalls 14, 15: guidance keeps a cache of its own; a forced token is forced on the drafted path too."""
    target, drafter, ids = tiny_target("qwen3"), tiny_drafter(), prompt_of(10)
    kwargs = {"max_new_tokens": 20, "do_sample": False, **STATEFUL[name]}
    plain = target.generate(ids, **kwargs)
    assert not torch.equal(plain, target.generate(ids, max_new_tokens=20, do_sample=False)) or name == "synthid"
    drafter = scripted(drafter, kind, plain)
    assert torch.equal(target.generate(ids, **kwargs, assistant_model=drafter), plain)
    speculation = drafter.last_speculation
    assert speculation.processor_passes == (20 if "guidance" in name else 0)
    assert speculation.target_passes == 1 + speculation.check_passes + len(speculation.drafted[0])
    if kind == "oracle":
        assert speculation.num_accepted > 10


@pytest.mark.parametrize("kind", DRAFTERS)
def test_inputs_embeds(kind):
    """The text is then only what was generated; the drafter reads the features of what was embedded."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    embeds = target.get_input_embeddings()(ids).detach()
    plain = target.generate(inputs_embeds=embeds, max_new_tokens=20, do_sample=False)
    drafter = scripted(drafter, kind, torch.cat([ids, plain], dim=1))
    assert torch.equal(
        target.generate(inputs_embeds=embeds, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain
    )
    if kind == "oracle":
        assert drafter.last_speculation.num_accepted == drafter.last_speculation.num_drafted > 0


def test_token_healing(smollm2_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    tokenizer.pad_token, tokenizer.bos_token = tokenizer.eos_token, tokenizer.eos_token
    target, drafter = tiny_target("llama", vocab_size=49152), tiny_drafter(vocab_size=49152)
    ids = tokenizer("The link is http:", return_tensors="pt").input_ids
    kwargs = {"max_new_tokens": 12, "do_sample": False, "token_healing": True, "tokenizer": tokenizer}
    plain = target.generate(ids, **kwargs)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(target.generate(ids, **kwargs, assistant_model=drafter), plain)
    with pytest.raises(ValueError, match="`token_healing` needs the target's tokenizer"):
        target.generate(ids, token_healing=True, assistant_model=drafter)


@pytest.mark.parametrize("value", (0, VOCAB - 1))
def test_max_cache_len(value):
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    kwargs = {
        "max_new_tokens": 16,
        "do_sample": False,
        "cache_implementation": "static",
        "max_cache_len": value or None,
    }
    plain = target.generate(ids, **kwargs)
    drafter = scripted(drafter, "oracle", plain)
    assert torch.equal(target.generate(ids, **kwargs, assistant_model=drafter), plain)
