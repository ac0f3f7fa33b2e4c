"""Every ecosystem in and out: recognized, carried bit for bit, or refused by name."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.convert.exporting import GOALS, export_drafter
from dflash_hub.convert.importing import import_drafter
from dflash_hub.convert.names import RENAMED, renamed, spelled
from dflash_hub.convert.reading import LAYOUTS, Target, read_drafter
from helpers.families import with_some_tokens
from helpers.formats import FULL, KINDS, SLIDING, YARN, drafter_of
from helpers.tiny import LAYERS, VOCAB, tiny_config, tiny_drafter, tiny_target
from huggingface_hub import constants
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_target("llama").to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def rewrite(folder, change):
    """Change a folder's config.json as one would by hand."""
    config = json.loads((folder / "config.json").read_text())
    changed = change(config)
    (folder / "config.json").write_text(json.dumps(config if changed is None else changed))


def rename_tensors(folder, rename):
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): t for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def tensors_of(folder) -> dict:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(folder, drafter, apart_from=()):
    """A folder of ours is `drafter`: every tensor bit for bit, every field of its config."""
    there, here = tensors_of(folder), drafter.state_dict()
    assert set(there) == set(here)
    assert all(torch.equal(there[name], here[name]) and there[name].dtype == here[name].dtype for name in here)
    config = DFlashConfig.from_pretrained(folder)
    for name in DFlashConfig.__annotations__:
        if name not in apart_from:
            assert getattr(config, name) == getattr(drafter.config, name), name


# ------------------------------------------------------------------------------------------------------------------
# Round trips.


@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_through_every_pair_of_formats(kind, tmp_path, target_folder):
    """ours -> first -> ours -> second -> ours, bit for bit, or refused with the reason."""
    drafter = drafter_of(tmp_path / "ours", kind)
    sayable = KINDS[kind][1]
    apart = {name for layout in LAYOUTS.values() for name in layout.not_carried}
    ours_again = {}
    for to in ("zlab", "dspark", "speculators", "transformers"):
        if to not in sayable:
            with pytest.raises(ValueError, match="cannot take this drafter: `"):
                export_drafter(str(tmp_path / "ours"), tmp_path / to, to, target=target_folder)
            assert not (tmp_path / to).exists()
            continue
        export_drafter(str(tmp_path / "ours"), tmp_path / to, to, target=target_folder)
        import_drafter(str(tmp_path / to), tmp_path / f"from-{to}", target=target_folder)
        ours_again[to] = tmp_path / f"from-{to}"
        assert_same(ours_again[to], drafter, apart)
        # The code that was written is complete: the folder works.
        assert DFlashDraftModel.from_pretrained(ours_again[to]).dtype is torch.bfloat16
    for first, folder in ours_again.items():
        for second in ours_again:
            export_drafter(str(folder), tmp_path / f"{first}-{second}", second, target=target_folder)
            assert (tmp_path / f"{first}-{second}" / "model.safetensors").read_bytes() == (
                tmp_path / second / "model.safetensors"
            ).read_bytes()
            assert stated(tmp_path / f"{first}-{second}", first) == stated(tmp_path / second, first)
            shutil.rmtree(tmp_path / f"{first}-{second}")


def stated(folder, first: str) -> dict:
    """All of a config.json but what the format that it came through has no place for."""
    config = json.loads((folder / "config.json").read_text())
    decoder = config.get("transformer_layer_config", config)
    for name in set(LAYOUTS[first].not_carried) - {"vocab_size", "num_target_layers"}:  # these come from the target
        decoder.pop(name, None)
    return config


def test_the_table_of_names_has_an_inverse():
    names = {name: None for name in drafter_names()}
    for layout in RENAMED:
        there = renamed(layout, names)
        back = {spelled(layout, name): name for name in names}
        assert {back[name] for name in there} == set(names) and len(there) == len(names)


def drafter_names():
    return tiny_drafter().state_dict()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.float64))
def test_any_float_type_is_carried(dtype, tmp_path):
    drafter = drafter_of(tmp_path / "ours", dtype=dtype)
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    import_drafter(str(tmp_path / "zlab"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)
    assert json.loads((tmp_path / "zlab" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_tensors_of_several_types_stay_as_they_are(tmp_path):
    drafter_of(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    tensors = load_file(tmp_path / "zlab" / "model.safetensors")
    tensors = {name: t.float() if "norm" in name else t for name, t in tensors.items()}
    save_file(tensors, tmp_path / "zlab" / "model.safetensors", metadata={"format": "pt"})
    done = import_drafter(str(tmp_path / "zlab"), tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert all(torch.equal(back[name], t) and back[name].dtype == t.dtype for name, t in tensors.items())
    assert done.config.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------------------
# In: how each stack writes.


@pytest.mark.parametrize("home", ("model/consolidated", "model"))
def test_nemo_automodel(home, tmp_path):
    """Its class name, `is_causal: false`, shards in an inner folder."""
    drafter = drafter_of(tmp_path / "ours", "sliding, bidirectional")
    export_drafter(str(tmp_path / "ours"), tmp_path / "nemo")
    inner = tmp_path / "nemo" / home
    inner.mkdir(parents=True)
    rewrite(tmp_path / "nemo", lambda c: c.update(architectures=["Qwen3DFlashDraftModel"]))
    tensors = load_file(tmp_path / "nemo" / "model.safetensors")
    names = sorted(tensors)
    index = {"metadata": {}, "weight_map": {}}
    for number, part in enumerate((names[:10], names[10:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, inner / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, file)
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "nemo" / "model.safetensors").unlink()
    done = import_drafter(str(tmp_path / "nemo"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)
    assert done.title == "z-lab's layout"


def test_model_optimizer(tmp_path):
    """Prefixes of the training wrapper, windows as `use_swa`, flat RoPE, `torch_dtype`."""
    drafter = drafter_of(tmp_path / "ours", "sliding, bidirectional")
    export_drafter(str(tmp_path / "ours"), tmp_path / "modelopt")

    def spell(config):
        for name in ("is_causal", "rope_parameters", "sliding_window", "use_sliding_window", "target_layer_ids"):
            del config[name]
        config["torch_dtype"] = config.pop("dtype")
        config["layer_types"] = [FULL] * 2
        config["dflash_config"] |= {"use_swa": True, "swa_window_size": 8, "causal": False}

    rewrite(tmp_path / "modelopt", spell)
    rename_tensors(tmp_path / "modelopt", lambda name: f"module.dflash_module.{name}")
    import_drafter(str(tmp_path / "modelopt"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)


def test_specforge(tmp_path):
    """What its exporter writes: taps and mask token nested, the block at the top, RoPE in both spellings, no causality."""
    drafter = drafter_of(tmp_path / "ours", "mixed")
    export_drafter(str(tmp_path / "ours"), tmp_path / "specforge")

    def spell(config):
        for name in ("mask_token_id", "target_layer_ids", "use_cache"):
            del config[name]
        del config["dflash_config"]["block_size"]
        config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "torch_dtype": config.pop("dtype")}
        return config

    rewrite(tmp_path / "specforge", spell)
    import_drafter(str(tmp_path / "specforge"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)


@pytest.mark.parametrize(("left_out", "theta"), ((("rope_theta", "rope_scaling"), 1e6), (("rope_parameters",), 1e6)))
def test_rope_in_one_spelling_only(left_out, theta, tmp_path):
    drafter = drafter_of(tmp_path / "ours", "bias, yarn")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    rewrite(tmp_path / "zlab", lambda c: {name: value for name, value in c.items() if name not in left_out})
    done = import_drafter(str(tmp_path / "zlab"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)
    assert done.config.rope_parameters["rope_theta"] == theta


def test_an_ordinary_pickle(tmp_path):
    drafter = drafter_of(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    torch.save(drafter.state_dict(), tmp_path / "zlab" / "pytorch_model.bin")
    (tmp_path / "zlab" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle, .* pass --allow-pickle"):
        import_drafter(str(tmp_path / "zlab"), tmp_path / "back")
    import_drafter(str(tmp_path / "zlab"), tmp_path / "back", allow_pickle=True)
    assert_same(tmp_path / "back", drafter)


def test_a_specforge_training_state_needs_a_config_and_a_word(tmp_path):
    drafter = drafter_of(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    state = tmp_path / "run-step10"
    state.mkdir()
    torch.save({"draft_state_dict": drafter.state_dict(), "step": 10}, state / "training_state.pt")
    config = str(tmp_path / "zlab" / "config.json")
    with pytest.raises(OSError, match=r"no config.json in .*; pass --config FILE"):
        import_drafter(str(state), tmp_path / "back")
    with pytest.raises(ValueError, match="is a pickle, .* pass --allow-pickle"):
        import_drafter(str(state), tmp_path / "back", config_file=config)
    import_drafter(str(state), tmp_path / "back", config_file=config, allow_pickle=True)
    assert_same(tmp_path / "back", drafter)


def test_lagunas_fused_projections_are_split(tmp_path):
    drafter = drafter_of(tmp_path / "ours", attention_bias=True)
    export_drafter(str(tmp_path / "ours"), tmp_path / "laguna")
    tensors = load_file(tmp_path / "laguna" / "model.safetensors")
    for layer in range(2):
        for kind in ("weight", "bias"):
            names = [f"layers.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            tensors[f"layers.{layer}.self_attn.qkv_proj.{kind}"] = torch.cat([tensors.pop(name) for name in names])
    save_file(tensors, tmp_path / "laguna" / "model.safetensors", metadata={"format": "pt"})
    rewrite(tmp_path / "laguna", lambda c: c.update(architectures=["DFlashLagunaForCausalLM"]))
    done = import_drafter(str(tmp_path / "laguna"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)
    assert any("self_attn.q_proj.bias, " in becomes for _, becomes in done.lines)

    tensors["layers.0.self_attn.qkv_proj.weight"] = tensors["layers.0.self_attn.qkv_proj.weight"][:-1].contiguous()
    save_file(tensors, tmp_path / "laguna" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="unexpected: layers.0.self_attn.qkv_proj.weight"):
        import_drafter(str(tmp_path / "laguna"), tmp_path / "again")


def test_transformers_own_drafter_class(tmp_path, target_folder):
    """Saved by that class itself, which states every field. The same forward pass."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    torch.manual_seed(3)
    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=8, layer_types=[SLIDING, FULL], block_size=5, mask_token_id=96, target_layer_ids=[0, 1, 2],
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    native = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    native.save_pretrained(tmp_path / "native")
    with pytest.raises(ValueError, match="does not say how many layers its target has; pass --target"):
        import_drafter(str(tmp_path / "native"), tmp_path / "back")
    done = import_drafter(str(tmp_path / "native"), tmp_path / "back", target=target_folder)
    assert (done.config.rms_norm_eps, done.config.num_target_layers, done.config.vocab_size) == (1e-5, LAYERS, VOCAB)
    ours = DFlashDraftModel.from_pretrained(tmp_path / "back").eval()
    block, context = torch.randn(1, 5, 32), torch.randn(1, 3, 96)  # 8 keys: their masks see one key more than a window
    with torch.no_grad():
        theirs = native(noise_embeds=block, context_hidden_states=context).last_hidden_state
        torch.testing.assert_close(ours(block, context).last_hidden_state, theirs)

    export_drafter(str(tmp_path / "back"), tmp_path / "out", "transformers")
    again = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(again[1][kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again[0].eval()(noise_embeds=block, context_hidden_states=context).last_hidden_state, theirs)


def test_speculators(tmp_path, target_folder):
    """Ids + 1, the nested decoder config, and copies of the target's tensors that are compared and dropped."""
    drafter = drafter_of(tmp_path / "ours", "mixed", target_name_or_path=target_folder)
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [tap + 1 for tap in drafter.config.target_layer_ids]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == target_folder
    assert config["sliding_window_non_causal"] is False
    theirs, target = tensors_of(tmp_path / "out"), tensors_of(Path(target_folder))
    assert torch.equal(theirs["embed_tokens.weight"], target["model.embed_tokens.weight"])
    assert torch.equal(theirs["lm_head.weight"], target["lm_head.weight"])

    done = import_drafter(str(tmp_path / "out"), tmp_path / "back")  # the target is named in the file
    assert_same(tmp_path / "back", drafter)
    assert done.notes == [f"embed_tokens.weight, lm_head.weight: equal to those of {target_folder}, dropped"]


def test_speculators_with_a_tied_target_and_without_copies(tmp_path):
    target = tiny_target("qwen2", tie_word_embeddings=True)
    target.save_pretrained(tmp_path / "target")
    drafter = drafter_of(tmp_path / "ours", target_name_or_path=str(tmp_path / "target"))
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators")
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(theirs["lm_head.weight"], target.get_input_embeddings().weight)
    for name in ("lm_head.weight", "embed_tokens.weight"):
        del theirs[name]  # newer versions of the package do not save what is the target's
    save_file(theirs, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert import_drafter(str(tmp_path / "out"), tmp_path / "back").notes == []
    assert_same(tmp_path / "back", drafter)


# A drafter in which every value that changes a draft is another one than any reader's default.
UNUSUAL = {
    "hidden_act": "gelu", "rms_norm_eps": 3e-5, "max_position_embeddings": 96, "block_size": 7, "mask_token_id": 90,
    "target_layer_ids": [0, 2], "num_target_layers": 9, "layer_types": [SLIDING, FULL], "sliding_window": 8,
    "block_causal": [False, False], "rope_parameters": YARN | {"beta_fast": 16.0},
}  # fmt: skip
SCALED = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
SHAPES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
).split()  # fmt: skip
# By format, what is left out in every place where it stands, and what is said of it.
GUESSES = {
    "zlab": {
        **{(name,): name for name in (*SHAPES, "vocab_size", "max_position_embeddings", "hidden_act", "rms_norm_eps")},
        **{(name,): name for name in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")},
        ("rope_theta",): "the RoPE base",
        ("rope_scaling", "rope_parameters"): "how RoPE is scaled",
        ("rope_type",): "`rope_type`",
        ("factor",): "`factor` of `rope_parameters`",
        ("original_max_position_embeddings",): "`original_max_position_embeddings` of",
        ("layer_types",): "which layers slide",
        ("sliding_window",): "needs a `sliding_window`",
    },
    "speculators": {
        **{(name,): name for name in (*SHAPES, "vocab_size", "max_position_embeddings", "hidden_act", "rms_norm_eps")},
        **{(name,): name for name in ("block_size", "mask_token_id", "layer_types", "sliding_window_non_causal")},
        ("aux_hidden_state_layer_ids",): "aux_hidden_state_layer_ids",
        ("rope_theta",): "the RoPE base",
        ("rope_scaling", "rope_parameters"): "how RoPE is scaled",
        ("sliding_window",): "needs a `sliding_window`",
        ("draft_vocab_size",): "`draft_vocab_size` must be in [1, 97]",
    },
    "transformers": {
        **{(name,): name for name in (*SHAPES, "max_position_embeddings", "hidden_act", "rms_norm_eps", "layer_types")},
        **{(name,): name for name in ("block_size", "mask_token_id", "target_layer_ids")},
        ("rope_theta",): "the RoPE base",
        ("rope_parameters",): "the RoPE base",
        ("sliding_window",): "needs a `sliding_window`",
    },
}
# What may be left out, since that itself says something, to all of a format's readers: no scale, the paper's YaRN, causal
# sliding layers beside bidirectional full ones. Biases are seen in the tensors; the rest computes nothing.
UNSTATED = {
    *SCALED, "use_sliding_window", "max_window_layers", "beta_fast", "is_causal", "causal", "attention_bias", "attention_dropout", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache", "dtype", "transformers_version",
    "architectures", "auto_map", "model_type", "dflash_config", "speculators_config", "speculators_version",
    "speculators_model_type", "target_hidden_size", "sample_from_anchor", "transformer_layer_config", "algorithm",
    "proposal_methods", "default_proposal_method", "verifier", "name_or_path",
}  # fmt: skip
# RoPE in two spellings, of which one is enough; both together are tried above.
TWICE = {"rope_scaling", "rope_parameters", "rope_type", "factor", "original_max_position_embeddings"}


def without_names(value, names):
    """A config without `names`, in every place."""
    if not isinstance(value, dict):
        return value
    return {name: without_names(inner, names) for name, inner in value.items() if name not in names}


def names_in(value) -> set[str]:
    return {n for name, inner in value.items() for n in (name, *names_in(inner))} if isinstance(value, dict) else set()


@pytest.mark.parametrize("layout", GUESSES)
def test_nothing_that_changes_a_draft_is_guessed(layout):
    """Each entry of a format's config is refused by name where it is missing, or is in a list with the reason why not."""
    fields = UNUSUAL | (SCALED if layout == "zlab" else {})
    config = tiny_config(**fields, target_name_or_path="org/target", dtype=torch.bfloat16)
    facts = Target("org/target", config.num_target_layers, config.vocab_size, ["LlamaForCausalLM"])
    stated = json.loads(json.dumps(LAYOUTS[layout].write(config, facts)))
    read = DFlashConfig.from_dict(LAYOUTS[layout].read(stated, facts))
    for name in fields:
        assert getattr(read, name) == getattr(config, name), name
    for names, sentence in GUESSES[layout].items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            DFlashConfig.from_dict(LAYOUTS[layout].read(without_names(stated, names), facts))
    listed = {name for names in GUESSES[layout] for name in names} | UNSTATED | TWICE
    assert names_in(stated) <= listed, names_in(stated) - listed
    for name in ("rope_scaling", "rope_parameters", "use_sliding_window", "max_window_layers"):
        if (name,) not in GUESSES[layout]:
            again = DFlashConfig.from_dict(LAYOUTS[layout].read(without_names(stated, (name,)), facts))
            assert all(getattr(again, field) == getattr(config, field) for field in fields), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda c: c.update(draft_vocab_size=32), r"lm_head.weight has shape \[97, 32\]; the config says \[32, 32\]"),
        (lambda c: c.update(draft_vocab_size=32), "missing: d2t"),
        (lambda c: c.pop("draft_vocab_size"), "got 32000"),
        (lambda c: c.update(sliding_window_non_causal=1), "must be true or false"),
        (lambda c: c.update(speculators_model_type="eagle3"), "`speculators_model_type` is 'eagle3'"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 1, 2]), "0, the embeddings, is not supported"),
        (lambda c: c.update(aux_hidden_state_layer_ids=None), "`aux_hidden_state_layer_ids` must be a list"),
        (lambda c: c.update(target_hidden_size=64), "`target_hidden_size` is 64"),
        (lambda c: c.update(mask_token_id=None), "`mask_token_id` is stated neither"),
        (lambda c: c.update(speculators_model_type="dflash2"), r"is 'dflash2' and config.json states \[\]"),
        (lambda c: c.update(selector_rank=8), r"is 'dflash' and config.json states \['selector_rank'\]"),
        (lambda c: c.update(markov_rank=8), r"states \['markov_rank'\] of 'dspark'"),
        (lambda c: c.update(transformer_layer_config=[]), "no `transformer_layer_config`"),
        (lambda c: c["speculators_config"]["verifier"].update(name_or_path="no/such"), "pass --target"),
        (lambda c: c["transformer_layer_config"].update(rope_theta=1.0), "`rope_theta` is stated twice"),
    ),
)
def test_what_is_refused_of_speculators(change, sentence, tmp_path, target_folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    drafter_of(tmp_path / "ours", target_name_or_path=target_folder)
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators")
    rewrite(tmp_path / "out", lambda c: change(c) and None)
    with pytest.raises((ValueError, OSError), match=sentence):
        import_drafter(str(tmp_path / "out"), tmp_path / "back")
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".back*"))


def test_copies_of_another_target_are_refused(tmp_path, target_folder):
    drafter_of(tmp_path / "ours", target_name_or_path=target_folder)
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from that of the target"):
        import_drafter(str(tmp_path / "out"), tmp_path / "back")
    done = import_drafter(str(tmp_path / "out"), tmp_path / "back", check_target=False)
    assert "not compared" in done.notes[0]
    with pytest.raises(ValueError, match="`dflash-hub import` it first"):
        export_drafter(str(tmp_path / "out"), tmp_path / "zlab")


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_a_reduced_vocabulary_is_carried_by_speculators_and_left_out_by_the_others(dtype, tmp_path, target_folder):
    drafter = with_some_tokens(drafter_of(tmp_path / "ours", draft_vocab_size=40, dtype=dtype))
    drafter.config.target_name_or_path = target_folder
    drafter.save_pretrained(tmp_path / "ours")
    done = export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators")
    assert any("40 tokens" in warning and "accept less" in warning for warning in done.warnings)
    theirs, head = tensors_of(tmp_path / "out"), tensors_of(Path(target_folder))["lm_head.weight"]
    tokens = theirs["d2t"] + torch.arange(40)
    assert tokens.equal(theirs["t2d"].nonzero()[:, 0]) and theirs["lm_head.weight"].equal(head[tokens])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["draft_vocab_size"] == 40
    save_file(theirs, tmp_path / "saved.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "saved.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
    import_drafter(str(tmp_path / "out"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)
    for to in ("zlab", "transformers"):
        done = export_drafter(str(tmp_path / "ours"), tmp_path / to, to)
        assert any("list of 40 tokens to draft from is left out" in warning for warning in done.warnings)
        import_drafter(str(tmp_path / to), tmp_path / f"from-{to}", target=target_folder)
        assert DFlashDraftModel.from_pretrained(tmp_path / f"from-{to}").d2t is None


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda t: t["lm_head.weight"][7, 7].add_(1), "lm_head.weight differs from that of the target"),
        (lambda t: t.pop("d2t"), "missing: d2t"),
        (lambda t: t.update(d2t=t["d2t"].float()), "d2t is F32; expected one of I64, offsets"),
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(40)), "`d2t` of .*: the token ids of a draft vocabulary must be in"),
        (lambda t: t["d2t"][0].add_(90), "`d2t` must hold offsets"),
        (lambda t: t["t2d"].logical_not_(), "`t2d` is no mask of the tokens that `d2t` lists"),
        (lambda t: t.update(d2t=t["d2t"][1:].clone()), r"d2t has shape \[39\]; the config says \[40\]"),
    ),
)  # fmt: skip
def test_a_reduced_vocabulary_that_does_not_agree_with_itself_is_refused(change, sentence, tmp_path, target_folder):
    with_some_tokens(drafter_of(tmp_path / "ours", draft_vocab_size=40)).save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators", target=target_folder)
    change_tensors(tmp_path / "out", change)
    with pytest.raises(ValueError, match=sentence):
        import_drafter(str(tmp_path / "out"), tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    (
        ("layers.0.self_attn.attention_sink_bias", (4,), "attention sinks"),
        ("mask_embedding", (32,), "a learned mask embedding"),
        ("layers.0.attention_conv.base_kernel", (2, 2, 32), "the convolutions of DFlash 2, but the config"),
        ("candidate_selector.hidden_projection.weight", (8, 32), "the path selector of DFlash 2, but the config"),
        ("prefix_gru.weight_ih_l0", (8, 32), "Domino's GRU head"),
        ("markov_head.weight", (8, 32), "DSpark's Markov head"),
        ("confidence_head.weight", (1, 32), "DSpark's confidence head"),
        ("layers.0.self_attn.g_proj.weight", (4, 32), "Laguna's gates on the attention"),
        ("aux_hidden_norms.0.weight", (32,), "Laguna's norms on the target hidden states"),
        ("d2t", (16,), "d2t is the list of a reduced draft vocabulary whose size the config does not state"),
        ("t2d", (97,), "t2d is the list of a reduced draft vocabulary"),
        ("embed_proj.weight", (8, 32), "Domino's GRU head"),
        ("logit_head.weight", (8, 32), "an older Domino or DSpark head"),
        ("layers.0.mlp.up_proj.weight_scale", (1,), "quantized weights"),
        ("midlayer.mlp.up_proj.weight", (8, 32), "a layer of EAGLE"),
        ("fc.bias", (32,), "a bias on the context projection"),
        ("something.weight", (2,), "unexpected: something.weight"),
    ),
)
def test_parts_of_other_networks_are_refused_by_name(name, shape, part, tmp_path):
    drafter_of(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    tensors = load_file(tmp_path / "zlab" / "model.safetensors") | {name: torch.ones(shape)}
    save_file(tensors, tmp_path / "zlab" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=part):
        import_drafter(str(tmp_path / "zlab"), tmp_path / "back")


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        (lambda c: c.update(is_neox_style=False), "interleaved rotary embeddings"),
        (lambda c: c.update(quantization_config={"quant_algo": "FP8"}), "quantized weights"),
        (lambda c: c.update(partial_rotary_factor=0.5), "partial rotary"),
        (lambda c: c["dflash_config"].update(attention_value_scale=0.612), "a scale on attention values"),
        (lambda c: c.update(use_gemma_norm=True), "multiply by 1"),
        (lambda c: c["dflash_config"].update(projector_type="domino"), "a Domino or DSpark head"),
        (lambda c: c["dflash_config"].update(gru_hidden_dim=64), "Domino's GRU head"),
        (lambda c: c["dflash_config"].update(markov_rank=8), "missing: markov_head"),
        (lambda c: c["dflash_config"].update(enable_confidence_head=True), "missing: confidence_head"),
        (lambda c: c["dflash_config"].update(shift_label=True), "shifted labels"),
        (lambda c: c.update(dflash_config=[1]), "`dflash_config` must be a dictionary"),
    ),
)
def test_switches_of_other_networks_are_refused_by_name(change, sentence, tmp_path):
    drafter_of(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    rewrite(tmp_path / "zlab", lambda c: change(c) and None)
    with pytest.raises(ValueError, match=sentence):
        import_drafter(str(tmp_path / "zlab"), tmp_path / "back")


def test_a_mask_embedding_file_is_refused(tmp_path):
    drafter_of(tmp_path / "ours")
    torch.save(torch.zeros(32), tmp_path / "ours" / "mask_embedding.pt")
    with pytest.raises(ValueError, match="a learned mask embedding"):
        import_drafter(str(tmp_path / "ours"), tmp_path / "back")


def test_a_rope_table_in_the_file_is_checked(tmp_path):
    drafter = drafter_of(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    tensors = load_file(tmp_path / "zlab" / "model.safetensors")
    tensors["rotary_emb.inv_freq"] = drafter.rotary_emb.inv_freq.bfloat16()
    save_file(tensors, tmp_path / "zlab" / "model.safetensors", metadata={"format": "pt"})
    import_drafter(str(tmp_path / "zlab"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)
    rewrite(tmp_path / "zlab", lambda c: c.update(rope_theta=5e5, rope_parameters=None))
    with pytest.raises(ValueError, match="other RoPE frequencies than the config states"):
        import_drafter(str(tmp_path / "zlab"), tmp_path / "again")


def test_a_folder_of_ours_is_written_anew(tmp_path):
    drafter = drafter_of(tmp_path / "ours", target_name_or_path="org/target", num_draft_tokens="auto")
    rewrite(tmp_path / "ours", lambda c: c.pop("format_version") and None)  # from before files had a version
    (tmp_path / "ours" / "modeling_dflash.py").write_text("old = True\n")
    import_drafter(str(tmp_path / "ours"), tmp_path / "new")
    assert_same(tmp_path / "new", drafter)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["format_version"] == 1
    assert "class DFlashDraftModel" in (tmp_path / "new" / "modeling_dflash.py").read_text()


def test_a_newer_format_is_refused_with_what_to_do(tmp_path):
    drafter_of(tmp_path / "ours")
    rewrite(tmp_path / "ours", lambda c: c.update(format_version=2))
    for read in (DFlashDraftModel.from_pretrained, lambda f: import_drafter(str(f), tmp_path / "new")):
        with pytest.raises(
            ValueError, match=r"`format_version` is 2, this code reads 1. .* newer dflash-hub"
        ) as refused:
            read(tmp_path / "ours")
        assert "dflash-hub import" not in str(refused.value)  # it would fail in the same way


def test_other_files_beside_the_weights_are_none_of_a_drafters(tmp_path):
    """As for transformers: what is named model.safetensors is the model. Without it, all files together are."""
    drafter = drafter_of(tmp_path / "ours")
    save_file({"prompts": torch.zeros(2)}, tmp_path / "ours" / "reference.safetensors")
    import_drafter(str(tmp_path / "ours"), tmp_path / "back")
    assert_same(tmp_path / "back", drafter)
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    for number, part in enumerate((sorted(tensors)[:9], sorted(tensors)[9:])):
        save_file({name: tensors[name] for name in part}, tmp_path / "ours" / f"part-{number}.safetensors")
    (tmp_path / "ours" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="unexpected: prompts"):
        import_drafter(str(tmp_path / "ours"), tmp_path / "again")
    (tmp_path / "ours" / "reference.safetensors").unlink()
    import_drafter(str(tmp_path / "ours"), tmp_path / "again")
    assert_same(tmp_path / "again", drafter)


def test_a_dry_run_writes_nothing(tmp_path):
    drafter_of(tmp_path / "ours")
    done = import_drafter(str(tmp_path / "ours"), None, dry_run=True)
    assert len(done.lines) == 25 and ("fc.weight", "fc.weight") in done.lines
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_repository_on_the_hub_at_a_pinned_revision(tmp_path, monkeypatch):
    """From the cache, offline, where every file is a link; the code that lies in the repository is not even downloaded."""
    drafter = drafter_of(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--z-lab--Tiny.v1-DFlash"
    (cached / "blobs").mkdir(parents=True)
    (cached / "snapshots" / commit).mkdir(parents=True)
    for path in (tmp_path / "zlab").iterdir():
        shutil.copy(path, cached / "blobs" / path.name)
        (cached / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{path.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    import_drafter("z-lab/Tiny.v1-DFlash", tmp_path / "back", revision=commit)
    assert_same(tmp_path / "back", drafter)
    with pytest.raises(OSError, match="cannot read 'z-lab/Tiny.v1-DFlash'"):
        import_drafter("z-lab/Tiny.v1-DFlash", tmp_path / "other", revision="f" * 40)


# ------------------------------------------------------------------------------------------------------------------
# Out: what the loaders of the engines require.


@pytest.mark.parametrize("to", ("vllm", "sglang"))
def test_longer_context_is_set_at_export(to, tmp_path):
    drafter_of(tmp_path / "ours", target_name_or_path="org/target")
    done = export_drafter(str(tmp_path / "ours"), tmp_path / "out", to, yarn=4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config["rope_parameters"] == config["rope_scaling"] | {"rope_theta": 10000.0}
    assert done.usage in (tmp_path / "out" / "README.md").read_text()
    export_drafter(str(tmp_path / "ours"), tmp_path / "longer", to, context_length=4096)
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["max_position_embeddings"] == 4096
    for wrong, sentence in (({"yarn": 0.5}, "above 1"), ({"context_length": 100}, "below the 512")):
        with pytest.raises(ValueError, match=sentence):
            export_drafter(str(tmp_path / "ours"), tmp_path / "x", to, **wrong)
    with pytest.raises(ValueError, match="scaled already"):
        export_drafter(str(tmp_path / "out"), tmp_path / "x", to, yarn=2)


@pytest.mark.parametrize("to", ("vllm", "sglang"))
@pytest.mark.parametrize(
    ("fields", "sentence"),
    (
        ({"input_embedding_scale": 2.0}, "unscaled embeddings"),
        ({"hidden_act": "gelu"}, "has only 'silu'"),
        (
            {"layer_types": [SLIDING, FULL], "sliding_window": 8, "block_causal": [False, True]},
            "one value for all layers",
        ),
    ),
)
def test_what_an_engine_would_compute_in_another_way_stops_the_export(to, fields, sentence, tmp_path):
    drafter_of(tmp_path / "ours", **fields)
    with pytest.raises(ValueError, match=sentence):
        export_drafter(str(tmp_path / "ours"), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_several_end_tokens_are_one_too_many_for_transformers(tmp_path):
    drafter_of(tmp_path / "ours", eos_token_id=[1, 2])
    with pytest.raises(ValueError, match=r"`eos_token_id` is the list \[1, 2\]; there it is one token"):
        export_drafter(str(tmp_path / "ours"), tmp_path / "out", "transformers")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", [goal for goal in GOALS if goal != "gguf"])
def test_the_folder_says_how_it_is_used(to, tmp_path, target_folder):
    """Also where its name needs quotes."""
    drafter_of(tmp_path / "ours", "DSpark, vanilla" if to == "dspark" else "plain", target_name_or_path=target_folder)
    out = tmp_path / "it's out"
    done = export_drafter(str(tmp_path / "ours"), out, to)
    assert done.usage in (out / "README.md").read_text()
    if to == "transformers":
        assert f'AutoModel.from_pretrained("{out}", dtype="auto")' in done.usage
        compile(done.usage, "usage", "exec")
    else:
        words = shlex.split(done.usage.replace("\\\n", ""))
        assert any(str(out) in word for word in words) and (to == "speculators" or target_folder in words)
    if to == "speculators":
        assert words == ["vllm", "serve", str(out)]


def test_the_speculators_layout_needs_the_right_target(tmp_path, target_folder):
    drafter_of(tmp_path / "ours")
    with pytest.raises(ValueError, match="pass --target"):
        export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators")
    drafter_of(tmp_path / "other", vocab_size=VOCAB + 3)
    with pytest.raises(ValueError, match=f"has {LAYERS} layers and {VOCAB} tokens"):
        export_drafter(str(tmp_path / "other"), tmp_path / "out", "speculators", target=target_folder)


def test_what_transformers_saves_is_read_with_read_drafter(tmp_path):
    """`read_drafter` and `from_pretrained` agree on a folder that training saved."""
    drafter = drafter_of(tmp_path / "ours")
    found = read_drafter(str(tmp_path / "ours"))
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == {
        name: tuple(t.shape) for name, t in found.match.drafter.items()
    }
