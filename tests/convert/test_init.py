"""`dflash-hub init`: a fresh drafter for a target, derived and explained."""

import json

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.convert.init import choose_mask_token, derive_config, init_drafter, target_skeleton
from helpers.folders import TEMPLATE, dflash_hub, save_target, tiny_tokenizer
from helpers.tiny import prompt_of, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig


@pytest.mark.parametrize("family", ("llama", "qwen3", "qwen2", "qwen3_moe", "mistral"))
def test_the_pair_works(family, tmp_path):
    target = save_target(tmp_path / "target", family)
    plan = init_drafter(str(tmp_path / "target"), tmp_path / "drafter", layers=2, block_size=4)
    config = plan.config
    assert config.target_layer_ids == [1, 2, 3, 4, 5] and config.num_target_layers == 8
    assert config.mask_token_id in (90, 91) and config.vocab_size == 97  # Qwen2's tokenizer adds one
    assert config.target_name_or_path == "target" and config.target_chat is True
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    assert plan.parameters == sum(p.numel() for p in drafter.parameters())
    ids = prompt_of(8)
    text = target.generate(ids, assistant_model=drafter, max_new_tokens=12, do_sample=False, num_assistant_tokens=1)
    assert torch.equal(text, target.generate(ids, max_new_tokens=12, do_sample=False))
    assert drafter.last_speculation.drafter_passes > 2


def test_a_target_without_a_tokenizer(tmp_path):
    """It needs the mask token's id; the tokenizer's own sentence about missing packages comes last."""
    tiny_target("llama").save_pretrained(tmp_path / "target")
    for wanted in (None, "<mask>"):
        with pytest.raises(
            ValueError, match=r"target has no tokenizer .* pass --mask-token ID: one of the target's 97 "
        ):
            init_drafter(str(tmp_path / "target"), None, mask_token=wanted)
    plan = init_drafter(str(tmp_path / "target"), None, layers=1, target_layers=[0, 1], mask_token="96")
    assert plan.config.mask_token_id == 96 and plan.config.target_chat is None
    assert plan.reasons[0] == "mask token 96 (no tokenizer to look it up): as given"
    with pytest.raises(ValueError, match="beyond the target's embedding of 97 rows"):
        init_drafter(str(tmp_path / "target"), None, mask_token="97")


def test_command_line(tmp_path):
    save_target(tmp_path / "target")
    dry = dflash_hub("init", "--target", "target", "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert "mask token 90: the first of 7 free embedding rows past the tokenizer" in dry.stdout
    assert '"block_size": 16' in dry.stdout and "M parameters" in dry.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]

    made = dflash_hub(
        "init",
        "--target",
        "target",
        "--output",
        "d",
        "--layers",
        2,
        "--target-layers",
        "1,5",
        "--window",
        8,
        cwd=tmp_path,
    )
    assert made.returncode == 0 and "next:" in made.stdout, made.stderr
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["target_layer_ids"] == [1, 5] and config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["block_causal"] == [True, False] and config["sliding_window"] == 8

    for arguments, sentence in (
        (("--output", "d"), "pass --force"),
        ((), "--output FOLDER, or --dry-run"),
        (("--dry-run", "--target-layers", "1;2"), "--target-layers '1;2'"),
        (("--dry-run", "--target-layers", "7"), "must not hold the target's last layer"),
        (("--dry-run", "--mask-token", "500"), "beyond the target's embedding of 97 rows"),
    ):
        failed = dflash_hub("init", "--target", "target", *arguments, cwd=tmp_path)
        assert failed.returncode == 2 and sentence in failed.stderr and "Traceback" not in failed.stderr, failed.stderr


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    (
        ({"layers": 100_000}, "a drafter of 100000 layers for a target of 8 .*pass --layers 1 to 32"),
        ({"block_size": 1_000_000}, "a block of 1000000 positions; pass --block-size 2 to 256"),
    ),
)
def test_sizes_that_cannot_pay_are_refused_at_once(sizes, sentence, tmp_path):
    save_target(tmp_path / "target")
    with pytest.raises(ValueError, match=sentence):
        init_drafter(str(tmp_path / "target"), None, **sizes)


def test_a_drafter_is_no_target_and_nothing_is_asked(tmp_path, monkeypatch):
    """Its folder carries code, and transformers would ask whether to run it."""
    save_target(tmp_path / "target")
    init_drafter(str(tmp_path / "target"), tmp_path / "drafter", layers=1)
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    with pytest.raises(ValueError, match="drafter is a DFlash drafter itself"):
        init_drafter(str(tmp_path / "drafter"), None)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "zlab").mkdir()
    (tmp_path / "zlab" / "config.json").write_text(json.dumps(config | {"dflash_config": {"mask_token_id": 3}}))
    with pytest.raises(ValueError, match="zlab is a DFlash drafter itself"):
        init_drafter(str(tmp_path / "zlab"), None)


# ------------------------------------------------------------------------------------------------- mask token


def test_mask_token_past_the_tokenizer():
    assert choose_mask_token(tiny_tokenizer(90), 97, None, set())[0] == 90
    assert choose_mask_token(tiny_tokenizer(90), 97, None, {90, 91})[0] == 92


def test_mask_token_reserved_before_other_special_tokens():
    specials = ("<pad>", "<start>", "<end>", "<tool>", "<reserved_0>", "<reserved_1>")
    mask_id, reason = choose_mask_token(tiny_tokenizer(97, specials), 97, None, set())
    assert mask_id == 4 and "<reserved_0>" in reason
    assert choose_mask_token(tiny_tokenizer(97, specials), 97, None, {4})[0] == 5


def test_mask_token_unused_special_token():
    """Pitfall 61: never one that the template, the ends or the configuration use."""
    specials = ("<pad>", "<start>", "<end>", "<repo>", "<file>")
    assert choose_mask_token(tiny_tokenizer(97, specials), 97, None, set())[0] == 4
    assert choose_mask_token(tiny_tokenizer(97, specials), 97, None, {4})[0] == 3
    template = TEMPLATE + "<file><repo>"
    with pytest.raises(ValueError, match=r"`--mask-token` is required.*w91"):
        choose_mask_token(tiny_tokenizer(97, specials, template), 97, None, set())


@pytest.mark.parametrize(
    ("wanted", "found"), (("5", 5), ("w2", 5), ("<nothing>", "no token"), ("97", "beyond"), ("1", "already means"))
)
def test_mask_token_as_given(wanted, found):
    if isinstance(found, int):
        assert choose_mask_token(tiny_tokenizer(97), 97, wanted, {1})[0] == found
    else:
        with pytest.raises(ValueError, match=found):
            choose_mask_token(tiny_tokenizer(97), 97, wanted, {1})


def test_ends_of_the_generation_config_are_taken(tmp_path):
    specials = ("<pad>", "<start>", "<end>", "<stop>", "<spare>")
    target = save_target(tmp_path / "t", tokenizer=tiny_tokenizer(97, specials))
    target.generation_config.eos_token_id = [2, 4]
    target.save_pretrained(tmp_path / "t")
    assert init_drafter(str(tmp_path / "t"), None).config.mask_token_id == 3


# ------------------------------------------------------------------------------------------------- shapes and quirks


def derived(family: str, **overrides):
    reasons = []
    config = AutoConfig.for_model(family, **{"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 8, **overrides})
    return derive_config(target_skeleton(config), 96, 2, 4, None, None, reasons), " ".join(reasons)


def test_llama_31_scaling_is_kept():
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config, reasons = derived("llama", num_attention_heads=4, intermediate_size=128, rope_parameters=rope)
    assert config.rope_parameters == rope and "'llama3' scaling" in reasons


def test_scaling_that_depends_on_the_pass_is_left_out():
    rope = {"rope_type": "dynamic", "rope_theta": 20000.0, "factor": 2.0}
    config, reasons = derived("llama", num_attention_heads=4, intermediate_size=128, rope_parameters=rope)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 20000.0}
    assert "depends on the length of a pass, and is left out" in reasons


def test_gemma_scales_and_caps():
    """Pitfall 68."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
    config, _ = derived("gemma2", **sizes, final_logit_softcapping=30.0)
    assert (config.input_embedding_scale, config.final_logit_softcapping) == (8.0, 30.0)
    config, _ = derived("gemma3_text", **sizes, final_logit_softcapping=None)
    assert (config.input_embedding_scale, config.final_logit_softcapping) == (8.0, None)
    assert config.rope_parameters["rope_theta"] == 1000000.0  # full attention's, not the sliding layers'


def test_granite_and_cohere_scale_their_logits():
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config, _ = derived("granite", **sizes, embedding_multiplier=12.0, logits_scaling=8.0)
    assert (config.input_embedding_scale, config.output_multiplier) == (12.0, 0.125)
    config, _ = derived("cohere2", **sizes, logit_scale=0.25)
    assert config.output_multiplier == 0.25


def test_latent_attention_and_experts_get_a_usual_shape():
    config, reasons = derived(
        "deepseek_v3", hidden_size=128, intermediate_size=256, moe_intermediate_size=32, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    assert config.num_attention_heads * config.head_dim == 128 and "a usual shape" in reasons
    config, reasons = derived(
        "gpt_oss", intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        layer_types=["full_attention"] * 8,
    )  # fmt: skip
    assert config.intermediate_size == 192 and "an expert's" in reasons


def test_the_text_model_inside_a_multimodal_wrapper():
    """Pitfall 69."""
    config = AutoConfig.for_model("qwen2_5_vl")
    config.text_config.update(
        {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "vocab_size": 120, "layer_types": ["full_attention"] * 8}
    )  # fmt: skip
    config.vision_config.update(
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    )
    drafter = derive_config(target_skeleton(config), 119, 2, 4, None, None, [])
    assert (drafter.hidden_size, drafter.vocab_size, drafter.num_target_layers) == (64, 120, 8)


@pytest.mark.parametrize(
    ("config", "sentence"),
    (
        (AutoConfig.for_model("t5"), "t5 is an encoder-decoder"),
        (AutoConfig.for_model("vit"), "no causal language model"),
        (
            AutoConfig.for_model("llama", num_hidden_layers=6, hidden_size=32, num_attention_heads=4),
            "6 layers is too shallow",
        ),
    ),
)
def test_targets_without_a_drafter_are_refused_by_name(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        derive_config(target_skeleton(config), 5, 2, 4, None, None, [])


def test_a_drafter_is_no_target(tmp_path):
    from helpers.tiny import tiny_config

    with pytest.raises(ValueError, match="is a DFlash drafter itself"):
        target_skeleton(tiny_config())


# ------------------------------------------------------------------------------------------------- the target's weights


@pytest.mark.parametrize("family", ("llama", "qwen3"))
def test_from_target_layers(family, tmp_path):
    target = save_target(tmp_path / "t", family)
    target.save_pretrained(tmp_path / "t", max_shard_size="30KB")
    plan = init_drafter(str(tmp_path / "t"), tmp_path / "d", layers=2, block_size=4, from_target_layers=True)
    drafter, theirs = DFlashDraftModel.from_pretrained(tmp_path / "d").state_dict(), target.model.state_dict()
    for name, tensor in drafter.items():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source = f"layers.{6 + int(index)}.{rest}"
            if source in theirs:
                assert torch.equal(tensor, theirs[source]), name
            else:
                assert name.endswith(("q_norm.weight", "k_norm.weight")) and torch.equal(tensor, torch.ones(8))
    assert torch.equal(drafter["norm.weight"], theirs["norm.weight"])
    assert ("fresh: q_norm, k_norm" in " ".join(plan.reasons)) == (family == "llama")


def test_tensors_are_found_by_their_whole_name(tmp_path):
    """Behind another prefix the drafter gets the same tensors, or nothing: never another layer's norm."""
    target = save_target(tmp_path / "t", "qwen3")
    tensors = load_file(tmp_path / "t" / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "t" / "model.safetensors", metadata={"format": "pt"})
    init_drafter(str(tmp_path / "t"), tmp_path / "d", layers=2, block_size=4, from_target_layers=True)
    drafter = load_file(tmp_path / "d" / "model.safetensors")
    assert torch.equal(drafter["norm.weight"], target.model.norm.weight)
    assert torch.equal(drafter["layers.0.mlp.up_proj.weight"], target.model.layers[6].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("family", "sentence"),
    (("gemma2", "a Gemma norm multiplies by 1"), ("qwen2", "k_proj.bias, which a drafter has no place")),
)
def test_layers_of_another_kind_are_not_copied(family, sentence, tmp_path):
    save_target(tmp_path / "t", family, **({"head_dim": 8} if family == "gemma2" else {}))
    with pytest.raises(ValueError, match=sentence):
        init_drafter(str(tmp_path / "t"), tmp_path / "d", layers=2, from_target_layers=True)
    assert not (tmp_path / "d").exists()


def test_layers_of_another_shape_are_not_copied(tmp_path):
    save_target(tmp_path / "t", "qwen3_moe")
    with pytest.raises(ValueError, match="layers hold model.layers.6.mlp.[a-z_]+.*, which a drafter has no place for"):
        init_drafter(str(tmp_path / "t"), tmp_path / "d", layers=2, from_target_layers=True)
    assert not (tmp_path / "d").exists()


def test_the_borrowed_head_is_verified(tmp_path):
    """Pitfall 64."""
    save_target(tmp_path / "t", tie_word_embeddings=True)
    assert "tied head: model.embed_tokens.weight" in init_drafter(str(tmp_path / "t"), None).reasons
    tensors = load_file(tmp_path / "t" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "t" / "model.safetensors", metadata={"format": "pt"})
    assert (
        "tied head lm_head.weight: equal to model.embed_tokens.weight"
        in init_drafter(str(tmp_path / "t"), None).reasons
    )
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "t" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        init_drafter(str(tmp_path / "t"), None)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "t" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "t" / "config.json").read_text())
    (tmp_path / "t" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="hold no head beside"):
        init_drafter(str(tmp_path / "t"), None)


def test_config_and_tokenizer_suffice(tmp_path):
    save_target(tmp_path / "t")
    (tmp_path / "t" / "model.safetensors").unlink()
    plan = init_drafter(str(tmp_path / "t"), tmp_path / "d", layers=1)
    assert "not checked, the target has no safetensors files" in " ".join(plan.reasons)
    assert (tmp_path / "d" / "model.safetensors").exists()


def test_the_same_seed_gives_the_same_weights(tmp_path):
    save_target(tmp_path / "t")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init_drafter(str(tmp_path / "t"), tmp_path / name, layers=1, seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors")["fc.weight"] for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_of_a_repository_only_headers_are_read(tmp_path, monkeypatch):
    """No weights are downloaded to look at a target on the Hub."""
    from types import SimpleNamespace

    from dflash_hub.convert import init

    asked = []

    def metadata(repo, revision=None):
        asked.append((repo, revision))
        return SimpleNamespace(weight_map={"model.embed_tokens.weight": "a", "lm_head.weight": "b"})

    monkeypatch.setattr(init, "get_safetensors_metadata", metadata)
    skeleton = target_skeleton(
        AutoConfig.for_model("llama", hidden_size=32, num_attention_heads=4, num_hidden_layers=8)
    )
    found = init.check_borrowed("org/target", skeleton, "abc")
    assert found == ["embedding model.embed_tokens.weight and head lm_head.weight: in the target's files"]
    assert asked == [("org/target", "abc")]
