"""Targets of every kind: the text is plain's, with random, half-right and oracle drafters, and accepted counts fit."""

import re
import threading

import pytest
import torch
import transformers
from dflash_hub.target_model import CACHE
from helpers.families import VERDICTS, VOCAB, drafter_for, equal_texts, tiny_family, trial
from helpers.ropes import DYNAMIC, LONG
from helpers.scripted import scripted
from helpers.tiny import DRAFTERS, ROOT, prompt_of, tiny_drafter, tiny_target
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LLAMA31 = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}  # fmt: skip
FAMILIES = {
    "llama": {}, "llama 3.1": LLAMA31, "qwen2": {}, "qwen2_moe": {}, "qwen3": {}, "qwen3_moe": {}, "mistral": {},
    "mixtral": {}, "gemma2": {}, "gemma3_text": {}, "gpt_oss": {}, "phi3": {}, "olmo2": {}, "granite": {}, "smollm3": {},
    "cohere2": {}, "glm4": {}, "qwen3_5_moe": {}, "granitemoehybrid": {},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    target, drafter = tiny_family(family.split(" ")[0], **FAMILIES[family])
    assert equal_texts(target, drafter) is None


@pytest.mark.parametrize("family", ("gemma2", "gpt_oss", "mistral", "smollm3"))
def test_pitfall_19_30_family_with_a_long_prompt_and_left_padding(family):
    """Past every window, and with padding (pitfalls 19, 30)."""
    target, drafter = tiny_family(family)
    ids = prompt_of(45)
    assert equal_texts(target, drafter, input_ids=ids) is None
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(50) >= 5).long()[None]
    assert equal_texts(target, drafter, input_ids=padded, attention_mask=mask) is None


def test_raw_embeddings_bypass_the_targets_scale():
    """Pitfall 68: a Gemma embeds times sqrt(hidden); a drafter is trained on the stored rows."""
    from dflash_hub.target_model import raw_embeddings

    target, drafter = tiny_family("gemma3_text")
    embedding, ids = target.get_input_embeddings(), torch.tensor([[5, 6]])
    assert torch.equal(raw_embeddings(embedding, ids), embedding.weight[ids])
    torch.testing.assert_close(embedding(ids), embedding.weight[ids] * 32**0.5)
    assert drafter.config.input_embedding_scale == pytest.approx(32**0.5)


# ------------------------------------------------------------------------------------------------- RoPE by length


@pytest.mark.parametrize("prompt_length", (12, 30, 38, 39, 40, 41, 50))
@pytest.mark.parametrize(
    ("family", "overrides"),
    (("llama", DYNAMIC), ("phi3", LONG), ("phi3", LONG | {"sliding_window": 8}), ("llama", LONG)),
)
def test_no_pass_straddles_a_rope_boundary(family, overrides, prompt_length):
    """On both sides, on it, and across: the crossing goes token by token, as in plain decoding."""
    target, drafter = tiny_family(family, **overrides)
    # Dynamic NTK keeps the base of the longest text so far until a short pass: plain's own text depends on that history.
    inputs = {"input_ids": prompt_of(prompt_length), "before": lambda: target(torch.tensor([[5]]))}
    if family == "phi3" and 20 < prompt_length <= 40 and transformers.__version__ < "5.24":
        with pytest.raises(ValueError, match="dropped its cache in the middle of a text"):
            equal_texts(target, drafter, new_tokens=20, **inputs)
        return
    seen = {}
    assert equal_texts(target, drafter, new_tokens=20, seen=seen, **inputs) is None
    drafted = seen["oracle"].drafted[0]
    if prompt_length == 12:
        assert max(drafted) == 4
    if prompt_length == 50:
        assert max(drafted) == (0 if overrides is DYNAMIC else 4)


@pytest.mark.parametrize(("family", "overrides"), (("llama", DYNAMIC), ("llama", LONG)))
def test_a_boundary_is_met_by_position_not_by_length(family, overrides):
    """The caller may count positions from anywhere."""
    target, drafter = tiny_family(family, **overrides)
    inputs = {"input_ids": prompt_of(20), "position_ids": torch.arange(11, 31)[None]}
    inputs["before"] = lambda: target(torch.tensor([[5]]))
    assert equal_texts(target, drafter, new_tokens=20, **inputs) is None


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(
    ("family", "overrides", "longest"),
    (("llama", DYNAMIC, 38), ("llama", LONG, 34), ("phi3", LONG, 34), ("gpt2", {"max_position_embeddings": 40}, 34)),
)
def test_a_finished_sequence_still_counts_for_the_boundary(family, overrides, longest, kind):
    """In lockstep the longest sequence is fed on after its end: across the boundary, and to the end of a position table."""
    if family == "phi3" and transformers.__version__ < "5.24":
        pytest.skip("this transformers drops Phi-3's cache at the boundary, which is refused")
    target, drafter = tiny_family(family, **overrides)
    reset = torch.tensor([[5]])  # see above
    ids = torch.cat([prompt_of(longest, 3), prompt_of(longest, 8)])
    ids[1, : longest - 8] = 0
    inputs = {"inputs": ids, "attention_mask": (ids != 0).long(), "do_sample": False, "pad_token_id": 0}
    target(reset)
    free = target.generate(**inputs, max_new_tokens=40 - longest if family == "gpt2" else 16)[:, longest:]
    # The longest sequence ends with a token that the other one never writes; gpt2's batch ends just within its table.
    ends = [next(int(token) for token in free[0, 1:] if token not in free[1])]
    inputs |= {"eos_token_id": ends + [int(free[1, -1])] * (family == "gpt2"), "max_new_tokens": 16}
    target(reset)
    plain = target.generate(**inputs)
    assert plain[0, -1] == 0 and not (plain[1, longest:] == 0).any()
    drafter = scripted(drafter, kind, plain)
    target(reset)
    found = target.generate(**inputs, return_dict_in_generate=True, assistant_model=drafter)  # hence in lockstep
    assert torch.equal(found.sequences, plain)
    drafted, accepted = found.speculation.drafted[1], found.speculation.accepted[1]
    assert max(drafted) > 0 or overrides is DYNAMIC
    if kind == "oracle":
        assert accepted == drafted
    if kind == "half-right" and overrides is LONG:
        assert 0 < sum(accepted) < sum(drafted)


@pytest.mark.parametrize("family", ("gpt2", "opt", "gptj"))
def test_a_draft_does_not_reach_past_the_position_table(family):
    """The text ends inside the table although more was allowed: so it does with a drafter."""
    target, drafter = tiny_family(family)
    ids = prompt_of(250)
    plain = target.generate(ids, max_new_tokens=6, do_sample=False)
    end = int(plain[0, -2])
    assert equal_texts(target, drafter, input_ids=ids, new_tokens=60, eos_token_id=end) is None


# ------------------------------------------------------------------------------------------------- multimodal


def tiny_qwen_vl():
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 64, "vocab_size": VOCAB, "initializer_range": 0.3, "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [1], "window_size": 16,
        },
        image_token_id=95, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92,
    )  # fmt: skip
    torch.manual_seed(0)
    target = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    target.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    return target, drafter_for(target)


@pytest.mark.parametrize("image", (False, True))
def test_a_vision_language_target(image):
    """Given text, and given an image; the drafter's positions are the text token's indices."""
    target, drafter = tiny_qwen_vl()
    ids = prompt_of(10) % 90
    inputs = {"input_ids": ids}
    if image:
        inputs = image_inputs(ids)
        ids = inputs["input_ids"]
    positions = []
    drafter.rotary_emb.register_forward_pre_hook(lambda module, args: positions.append(args[1]))
    assert equal_texts(target, drafter, tokens_to_avoid=6, **inputs) is None
    length = ids.shape[1]
    assert positions[0].tolist() == [list(range(length + 5))]
    if image:  # the image is looked at: another one gives another text
        plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
        inputs["pixel_values"] = -inputs["pixel_values"]
        assert not torch.equal(plain, target.generate(**inputs, max_new_tokens=24, do_sample=False))


@pytest.mark.parametrize("image", (False, True))
def test_a_vision_language_target_in_a_batch(image):
    """Sequences of different lengths, each with positions of its own, advance by different counts."""
    target, drafter = tiny_qwen_vl()
    rows = [prompt_of(length, seed=length) % 87 + 3 for length in (12, 7, 10)]
    inputs = [image_inputs(ids) if image else {"input_ids": ids} for ids in rows]
    longest = max(row["input_ids"].shape[1] for row in inputs)
    for row in inputs:
        for name in {"input_ids", "mm_token_type_ids"} & row.keys():
            row[name] = torch.nn.functional.pad(row[name], (longest - row[name].shape[1], 0))
    inputs = {name: torch.cat([row[name] for row in inputs]) for name in inputs[0]}
    inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
    seen = {}
    assert equal_texts(target, drafter, 16, tokens_to_avoid=6, seen=seen, **inputs) is None
    assert len({tuple(lengths) for lengths in seen["half-right"].acceptance_lengths}) > 1


def image_inputs(ids: torch.Tensor) -> dict:
    """A prompt with an image of 8 x 8 patches, merged two by two, after its third token."""
    ids = torch.cat([ids[:, :3], torch.tensor([[93] + [95] * 16 + [92]]), ids[:, 3:]], dim=1)
    pixels = torch.randn(64, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 8]])}
    return inputs | {"mm_token_type_ids": (ids == 95).long()}


def test_an_image_in_a_prompt_that_is_read_in_chunks():
    """As plain does it: each chunk is fed the features of its own placeholders; refused where plain refuses."""
    target, drafter = tiny_qwen_vl()
    kwargs = {"max_new_tokens": 16, "do_sample": False, "suppress_tokens": list(range(92, 97))}
    inputs = image_inputs(prompt_of(10) % 90)
    whole = target.generate(**inputs, **kwargs)
    try:
        plain = target.generate(**inputs, **kwargs, prefill_chunk_size=8)
    except (ValueError, RuntimeError) as refused:  # older versions stop in the model
        with pytest.raises(ValueError, match="cannot split"):
            target.generate(**inputs, **kwargs, prefill_chunk_size=8, assistant_model=drafter)
        pytest.skip(f"this transformers does not read images in chunks: {refused}")
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(plain, whole)
    assert torch.equal(target.generate(**inputs, **kwargs, prefill_chunk_size=8, assistant_model=drafter), plain)
    assert drafter.last_speculation.num_accepted > 0


def test_a_chat_turn_after_an_image_that_was_read_without_the_drafter():
    """The pixels are gone: the drafter starts from the new tokens instead of reading placeholders."""
    target, drafter = tiny_qwen_vl()
    kwargs = {"do_sample": False, "suppress_tokens": list(range(92, 97))}
    inputs = image_inputs(prompt_of(10) % 90)
    texts = []
    for assisted in (False, True):
        drafter = scripted(drafter, "half-right", texts[0]) if assisted else drafter
        assistant = {"assistant_model": drafter} if assisted else {}
        turn = target.generate(**inputs, **kwargs, max_new_tokens=8, return_dict_in_generate=True)
        more = torch.cat([turn.sequences, prompt_of(5, seed=4) % 90], dim=1)
        kwargs |= {"mm_token_type_ids": (more == 95).long(), "attention_mask": torch.ones_like(more)}
        texts.append(target.generate(more, **kwargs, max_new_tokens=12, **{CACHE: turn[CACHE]}, **assistant))
        kwargs = {name: kwargs[name] for name in ("do_sample", "suppress_tokens")}
    assert torch.equal(*texts) and drafter.last_speculation.prefix_passes == 0
    assert drafter.last_speculation.num_accepted > 0


# ------------------------------------------------------------------------------------------------- the table


def table() -> dict[str, tuple[str, str, str, str]]:
    """By family: the verdicts on one sequence, a batch in lockstep, a ragged batch and draft trees."""
    one = "(" + "|".join(VERDICTS) + ")"
    lines = re.findall(
        rf"^\| ([\w.-]+) \| {one} \| {one} \| {one} \| {one} \| .* \|$", (ROOT / "docs/families.md").read_text(), re.M
    )
    return {name: tuple(verdicts) for name, *verdicts in lines}


def test_the_table_names_every_family_and_none_is_wrong():
    rows = table()
    assert "wrong" not in {verdict for verdicts in rows.values() for verdict in verdicts}
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if transformers.__version__ in (ROOT / "docs/families.md").read_text():
        assert set(rows) == known
    for family in FAMILIES:
        assert rows[family.split(" ")[0]][0] == "exact"


@pytest.mark.parametrize("family", ("gpt2", "opt", "bloom", "gpt_oss", "qwen3_5", "lfm2", "git", "mamba"))
def test_the_table_holds(family):
    """Learned positions, ALiBi, windows, mrope and states, and one that is kept in lockstep; `make test-slow` tries them all."""
    if transformers.__version__ not in (ROOT / "docs/families.md").read_text():
        pytest.skip("the table is of another transformers")
    assert trial(family)[:4] == table()[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_row_of_the_table(family):
    assert trial(family)[:4] == table()[family]


# ------------------------------------------------------------------------------------------------- furniture


def test_pipeline(smollm2_path):
    target = tiny_target("llama", vocab_size=49152, eos_token_id=2, pad_token_id=2)
    drafter = tiny_drafter(vocab_size=49152, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    prompt = "The sky is blue because"
    plain = target.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    drafter = scripted(drafter, "half-right", plain)
    pipe = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    text = pipe(prompt, max_new_tokens=12, do_sample=False)[0]["generated_text"]
    assert text == tokenizer.decode(plain[0], skip_special_tokens=True)
    assert drafter.last_speculation.num_accepted > 0


def test_text_iterator_streamer_in_a_thread(smollm2_path):
    target, drafter = tiny_target("llama", vocab_size=49152), tiny_drafter(vocab_size=49152)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    inputs = tokenizer("The sky", return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
    drafter = scripted(drafter, "half-right", plain)
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    kwargs = dict(**inputs, max_new_tokens=16, do_sample=False, assistant_model=drafter, streamer=streamer)
    thread = threading.Thread(target=target.generate, kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])


REAL_CONFIGS = {
    "Qwen3": {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [45, 43], "pad_token_id": 43},
    "Llama 3.1": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [81, 88, 89]},
    "Qwen2.5": {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05,
        "eos_token_id": [45, 43], "pad_token_id": 43,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_pitfall_6_13_generation_configs_of_real_instruct_models(name):
    """Pitfalls 6, 13: sampling defaults, several ends and the penalty of the target's own file apply to both."""
    target, drafter, ids = tiny_target("qwen3"), tiny_drafter(), prompt_of(10)
    target.generation_config = transformers.GenerationConfig(**REAL_CONFIGS[name])
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    for kind in ("random", "half-right"):
        drafter = scripted(drafter, kind, plain)
        assert torch.equal(target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=drafter), plain)
        torch.manual_seed(0)
        sampled = target.generate(ids, max_new_tokens=40, assistant_model=drafter)
        torch.manual_seed(0)
        assert torch.equal(
            target.generate(ids, max_new_tokens=40, assistant_model=drafter, num_assistant_tokens=2), sampled
        )
        ends = set(REAL_CONFIGS[name]["eos_token_id"])
        assert not ends & set(sampled[0, 10:-1].tolist())


# ------------------------------------------------------------------------------------------------- placement


def test_pitfall_37_a_target_spread_over_devices_by_accelerate(tmp_path):
    """What a CPU allows of a device map: layers on disk, brought in by accelerate's hooks (pitfall 37)."""
    import accelerate

    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    drafter = scripted(drafter, "half-right", plain)
    device_map = {
        "model.embed_tokens": "disk",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    }
    target = accelerate.dispatch_model(target, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert target.lm_head.weight.is_meta
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain)
    assert drafter.last_speculation.num_accepted > 0


@pytest.mark.slow
def test_pitfall_43_a_compiled_target():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    drafter = scripted(drafter, "half-right", plain)
    target.forward = torch.compile(target.forward)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain)


def test_lora_merged_and_switched():
    """The text is that of the adapter in force; a wrapped target hands its call on."""
    peft = pytest.importorskip("peft")
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), prompt_of(10)
    base = target.generate(ids, max_new_tokens=20, do_sample=False)
    torch.manual_seed(4)
    wrapped = peft.get_peft_model(
        target, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    wrapped.add_adapter("other", peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    texts = [base]

    def check(model):
        plain = model.generate(input_ids=ids, max_new_tokens=20, do_sample=False)
        assistant = scripted(drafter, "half-right", plain)
        text = model.generate(input_ids=ids, max_new_tokens=20, do_sample=False, assistant_model=assistant)
        assert torch.equal(text, plain) and assistant.last_speculation.num_accepted > 0
        texts.append(text)

    check(wrapped)
    wrapped.set_adapter("other")
    check(wrapped)
    with wrapped.disable_adapter():
        check(wrapped)
    assert torch.equal(texts[3], base) and not torch.equal(texts[1], base) and not torch.equal(texts[1], texts[2])
    wrapped.set_adapter("default")
    check(wrapped.merge_and_unload())
    assert torch.equal(texts[4], texts[1])


@pytest.mark.slow
@pytest.mark.parametrize("which", ("drafter", "target", "both"))
def test_pitfall_39_41_torchao_int8_weights(which):
    """Pitfalls 39, 41: the head included, which then has no dense weight."""
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is not installed: `make test-slow` installs it"
    )
    target, drafter, ids = (
        tiny_target("llama", hidden_size=64, head_dim=16),
        tiny_drafter(hidden_size=64),
        prompt_of(10),
    )
    for model, chosen in ((target, which != "drafter"), (drafter, which != "target")):
        if chosen:
            quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    drafter = scripted(drafter, "half-right", plain)
    assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter), plain)
    assert drafter.last_speculation.num_accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("which", ("drafter", "target", "both"))
def test_pitfall_41_bitsandbytes_4_bit_weights(which, tmp_path):
    """Each token stays within the quantized target's own ties: its kernels round a block and a token differently."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: `make test-slow` installs it")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}  # their CPU kernel wants multiples of 64
    target, drafter, ids = tiny_target("llama", **sizes), tiny_drafter(**sizes), prompt_of(10)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    if which != "drafter":
        target.save_pretrained(tmp_path / "target")
        target = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", quantization_config=config)
    if which != "target":
        drafter.save_pretrained(tmp_path / "drafter")
        drafter = type(drafter).from_pretrained(tmp_path / "drafter", quantization_config=config)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    drafter = scripted(drafter, "half-right", plain)
    text = target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter)
    with torch.no_grad():
        scores = target(text).logits[0, 9:-1].float()
    gap = scores.max(-1).values - scores.gather(-1, text[0, 10:, None])[:, 0]
    assert gap.max() <= 1e-3 * scores.abs().max()
    assert drafter.last_speculation.num_accepted > 0
