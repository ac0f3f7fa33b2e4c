"""DFlashConfig: checked when it is made, complete when it is saved, and every release of z-lab is read or refused."""

import json

import pytest
import torch
from dflash_hub import DFlashConfig
from dflash_hub.configuration_dflash import read_config_dict, spread_target_layer_ids
from dflash_hub.modeling_dflash import DFlashRotaryEmbedding
from helpers.formats import QWEN35, READ, release, sliding
from helpers.tiny import FIXTURE, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    (
        ({"target_layer_ids": [0, 1, 1]}, "must not repeat"),
        ({"target_layer_ids": [0, 4]}, "target with 4 layers; 4 is none"),
        ({"target_layer_ids": [-1]}, "-1 is none"),
        ({"target_layer_ids": [0, 3]}, r"must not hold the target's last layer \(3\)"),
        ({"target_layer_ids": []}, "list of decoder layer indices"),
        ({"target_layer_ids": [0.5]}, "list of decoder layer indices"),
        ({"mask_token_id": 97}, r"in \[0, 97\), got 97"),
        ({"mask_token_id": None}, "got None"),
        ({"block_size": 1}, "at least 2"),
        ({"block_size": 0}, "positive integer|at least 2"),
        ({"block_size": True}, "positive integer"),
        ({"layer_types": [FULL]}, "each of the 2 layers"),
        ({"layer_types": [FULL, "linear_attention"]}, "each of the 2 layers"),
        ({"layer_types": [FULL, SLIDING]}, "`sliding_window` of at least 2, got None"),
        ({"layer_types": [FULL, SLIDING], "sliding_window": 1}, "at least 2, got 1"),
        ({"block_causal": [True]}, "one bool for each of the 2 layers"),
        ({"block_causal": [0, 1]}, "one bool for each of the 2 layers"),
        ({"rope_parameters": {}}, "must state the RoPE base"),
        ({"rope_parameters": {"rope_type": "default"}}, "must state the RoPE base"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"num_draft_tokens": 5}, r"in \[1, 4\]"),
        ({"num_draft_tokens": "all"}, "got 'all'"),
        ({"acceptance_prior": []}, r"list of numbers from 0 to 1, .* got \[\]"),
        ({"acceptance_prior": 0.5}, "got 0.5"),
        ({"acceptance_prior": [0.5, 1.5]}, r"got \[0.5, 1.5\]"),
        ({"acceptance_prior": [True]}, r"got \[True\]"),
        ({"head_dim": 7}, "must be even"),
        ({"num_attention_heads": 3}, "multiple of `num_key_value_heads`"),
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer"),
        ({"hidden_size": "32"}, "`hidden_size` must be a positive integer"),
        ({"final_logit_softcapping": -1.0}, "positive number, got -1.0"),
        ({"final_logit_softcapping": float("inf")}, "positive number, got inf"),
        ({"output_multiplier": None}, "positive number, got None"),
        ({"input_embedding_scale": 0}, "positive number, got 0"),
        ({"rms_norm_eps": -1e-6}, "positive number, got -1e-06"),
        ({"attention_dropout": 2.0}, r"in \[0, 1\), got 2.0"),
        ({"hidden_act": "mystery"}, "no activation of transformers"),
        ({"tie_word_embeddings": True}, "no embeddings to tie"),
        ({"mask_token_id": 7, "eos_token_id": [3, 7]}, "ends a text"),
        ({"rope_parameters": {"rope_theta": -5}}, "positive number, got -5"),
        ({"rope_parameters": {"rope_theta": "10000"}}, "positive number, got '10000'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, "`factor` of `rope_parameters`"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}},
            "original_max_position_embeddings",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "has no `rope_type`"),
        ({"rope_parameters": {"rope_theta": 1e4, "type": "linear"}}, "`factor` of `rope_parameters`"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "`rope_scaling` belongs into `rope_parameters`"),
        ({"rope_theta": 5e5}, "`rope_theta` belongs into `rope_parameters`"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` belongs into"),
        ({"num_draft_token": 3}, r"did you mean \['num_draft_tokens'\]"),
        ({"projector_type": "domino"}, "a Domino or DSpark head"),
        ({"attention_sink_bias": True}, "attention sinks"),
        ({"selector_rank": 256}, r"`selector_rank` and `selector_top_k` belong together.* got \[256, None\]"),
        ({"selector_rank": 4, "selector_top_k": 98}, r"`selector_top_k` \(98\) must not exceed `vocab_size` \(97\)"),
        ({"conv_group_size": 16}, r"`conv_kernel_size` and `conv_group_size` belong together.* got \[None, 16\]"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, r"`conv_group_size` \(5\) must divide `hidden_size` \(32\)"),
        ({"conv_kernel_size": 0, "conv_group_size": 8}, "`conv_kernel_size` must be a positive integer, got 0"),
        (
            {"draft_vocab_size": 32000},
            r"`draft_vocab_size` must be in \[1, 97\], the target's tokens, or None; got 32000",
        ),
        ({"draft_vocab_size": 0}, r"`draft_vocab_size` must be in \[1, 97\]"),
        ({"target_name_or_path": 5}, "`target_name_or_path` must be a name in one line"),
        ({"target_name_or_path": [1]}, "`target_name_or_path` must be a name in one line"),
        ({"target_name_or_path": {}}, "`target_name_or_path` must be a name in one line"),
        ({"target_name_or_path": "org/a\nb"}, "`target_name_or_path` must be a name in one line"),
        ({"target_name_or_path": 'org/"); evil("'}, "`target_name_or_path` must be a name in one line, without quotes"),
        ({"target_revision": 7}, "`target_revision` must be a name in one line"),
        ({"target_revision": "`x`"}, "`target_revision` must be a name in one line, without quotes"),
    ),
)
def test_impossible_values_are_refused_when_the_config_is_made(overrides, sentence):
    """Pitfalls 51, 53, 58, 60, 61, 63."""
    with pytest.raises(ValueError, match=sentence):
        tiny_config(**overrides)


def test_what_depends_on_the_target_has_no_default():
    fields = tiny_config().to_dict()
    for name in ("hidden_size", "block_size", "mask_token_id", "target_layer_ids", "rope_parameters"):
        with pytest.raises(TypeError, match=f"Missing required field - '{name}'"):
            DFlashConfig(**{key: value for key, value in fields.items() if key != name})


def test_defaults_follow_the_layers():
    config = tiny_config(layer_types=[SLIDING, FULL], sliding_window=8)
    assert config.block_causal == [True, False]
    assert config.windows == [8, None]
    assert tiny_config(num_draft_tokens=None).num_draft_tokens == "auto"
    assert tiny_config(num_draft_tokens="auto").num_draft_tokens == "auto"
    assert tiny_config(draft_vocab_size=97).draft_vocab_size is None  # nothing is left out
    assert tiny_config(sample_from_anchor=False).block_size == 5


@pytest.mark.parametrize(
    "overrides",
    (
        {},
        {"layer_types": [SLIDING, FULL], "sliding_window": 8, "block_causal": [False, True]},
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
            }
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
        {"target_name_or_path": "org/target", "target_thinking": False, "eos_token_id": [1, 2], "num_draft_tokens": 2},
        {"acceptance_prior": [0.5, 1, 0.25]},
    ),
)  # fmt: skip
def test_saved_whole_and_read_back_the_same(overrides, tmp_path):
    """Pitfalls 53, 59: nothing is left at a default that could change, and RoPE keeps its frequencies."""
    config = tiny_config(**overrides)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert set(DFlashConfig.__annotations__) <= set(saved)
    again = DFlashConfig.from_pretrained(tmp_path)
    for name in DFlashConfig.__annotations__:
        assert getattr(again, name) == getattr(config, name), name
    assert again.rope_parameters["rope_theta"] == overrides.get("rope_parameters", {"rope_theta": 1e4})["rope_theta"]
    before, after = DFlashRotaryEmbedding(config), DFlashRotaryEmbedding(again)
    assert torch.equal(before.inv_freq, after.inv_freq) and before.attention_scaling == after.attention_scaling


# ------------------------------------------------------------------------------------------------- z-lab's releases


REFUSED = {
    "MiMo-V2.5-Pro": (
        release(
            5, 8, 151669, [0, 15, 31, 47, 69], 70, 6144, 128, 8, 128, 16384, layer_types="absent", use_swa=True,
            swa_window_size=1024, attention_sink_bias=True, attention_value_scale=0.612, partial_rotary_factor=0.5,
        ),
        "attention sinks",
    ),
}  # fmt: skip


def test_a_release_of_dflash_2_is_read():
    parts = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    source = release(
        5, 8, 248070, [5, 19, 33, 47, 61], 64, 5120, 32, 8, 128, 17408, nested_block=True,
        **QWEN35 | {"rope_theta": "absent"}, **sliding(5, 2048), architectures=["DFlash2DraftModel"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000000}, is_causal=False, nested=parts,
    )  # fmt: skip
    config = DFlashConfig.from_dict(json.loads(json.dumps(source)))
    assert {name: getattr(config, name) for name in parts} == parts
    assert (config.block_size, config.block_causal, config.sliding_window) == (8, [False] * 5, 2048)
    with pytest.raises(ValueError, match="this drafter has LiLiCorr's head"):
        DFlashConfig.from_dict(source | {"dflash_config": source["dflash_config"] | {"lilicorr_num_layers": 2}})
    with pytest.raises(ValueError, match="a Domino or DSpark head"):
        DFlashConfig.from_dict(source | {"dflash_config": source["dflash_config"] | {"projector_type": "domino"}})
    with pytest.raises(ValueError, match=r"`selector_rank` and `selector_top_k` belong together"):
        DFlashConfig.from_dict(source | {"dflash_config": source["dflash_config"] | {"selector_top_k": None}})


@pytest.mark.parametrize("name", READ)
def test_a_release_is_read(name):
    """Pitfalls 53, 57: every spelling, and what it means."""
    source = READ[name]
    config = DFlashConfig.from_dict(json.loads(json.dumps(source)))
    nested = source["dflash_config"]
    assert config.model_type == "dflash"
    assert config.block_size == source.get("block_size", nested.get("block_size"))
    assert (config.mask_token_id, config.target_layer_ids) == (nested["mask_token_id"], nested["target_layer_ids"])
    assert config.rope_parameters["rope_theta"] == source["rope_theta"]
    assert config.layer_types == source["layer_types"]
    # Without a flag, sliding layers are causal in the block and full ones are not.
    assert config.block_causal == [layer_type == SLIDING for layer_type in source["layer_types"]]
    assert config.sliding_window == source["sliding_window"]
    for same in ("hidden_size", "head_dim", "num_key_value_heads", "attention_bias", "rms_norm_eps", "vocab_size"):
        assert getattr(config, same) == source[same]
    if source["rope_scaling"]:
        assert config.rope_parameters["rope_type"] == "yarn"
        assert config.rope_parameters["factor"] == source["rope_scaling"]["factor"]
    if name.startswith("gemma"):
        assert (config.input_embedding_scale, config.final_logit_softcapping) == (53.066, 30.0)
    assert config.tie_word_embeddings is False


@pytest.mark.parametrize("name", REFUSED)
def test_a_release_with_parts_of_other_methods_is_refused_by_name(name):
    """Pitfall 94."""
    source, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        DFlashConfig.from_dict(source)
    source = dict(source, architectures=["DFlashDraftModel"])  # also where only its parts give it away
    with pytest.raises(ValueError, match="not supported"):
        DFlashConfig.from_dict(source)


BASE = READ["Qwen3-8B"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    (
        ({"dflash_config": BASE["dflash_config"] | {"block_size": 8}}, r"`block_size` is stated twice and differs: \[16, 8\]"),
        ({"target_layer_ids": [1, 2]}, "`target_layer_ids` is stated twice and differs"),
        ({"mask_token_id": 5}, "`mask_token_id` is stated twice"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "`rope_theta` is stated twice"),
        ({"rope_theta": None}, "the RoPE base is not stated"),
        ({"block_size": None}, "`block_size` is stated neither"),
        ({"num_target_layers": None}, "`num_target_layers` is stated neither"),
        ({"dflash_config": {"mask_token_id": 151669}}, "`target_layer_ids` is stated neither .* would load, and draft badly"),
        ({"rms_norm_eps": None}, r"does not state \['rms_norm_eps'\]"),
        ({"layer_types": None, "use_sliding_window": None}, "which layers slide is not stated"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 64}, "which layers slide is not stated"),
        ({"is_causal": True, "dflash_config": BASE["dflash_config"] | {"causal": False}}, "in-block causality"),
        ({"dflash_config": BASE["dflash_config"] | {"use_swa": True, "swa_window_size": 64}}, "State it"),
        ({"dflash_config": BASE["dflash_config"] | {"mystery": 1}}, r"holds \['mystery'\]"),
        ({"layer_types": [SLIDING] * 5, "sliding_window": 64}, "`use_sliding_window` is false"),
        ({"architectures": ["DSparkDraftModel"]}, "found .*DSparkDraftModel"),
        ({"is_causal": "false"}, "true or false for all layers, got 'false'"),
        ({"is_causal": [True, False]}, "true or false for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings are not supported"),
        ({"rope_scaling": {"factor": 4.0}}, "has no `rope_type`"),
        ({"num_hidden_layers": None}, r"does not state \['num_hidden_layers'\]"),
        ({"vocab_size": None}, r"does not state \['vocab_size'\]"),
    ),
)  # fmt: skip
def test_conflicts_and_gaps_are_errors(change, sentence):
    """Pitfall 57."""
    with pytest.raises(ValueError, match=sentence):
        DFlashConfig.from_dict(BASE | change)


def test_another_model_is_not_taken_for_a_drafter():
    with pytest.raises(ValueError, match="not the configuration of a DFlash drafter: model_type 'llama'"):
        DFlashConfig.from_dict({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("flags", ({"is_causal": True}, {"is_causal": False}))
def test_one_flag_is_for_all_layers(flags):
    config = DFlashConfig.from_dict(READ["Qwen3.6-27B"] | flags)
    assert config.block_causal == [flags["is_causal"]] * 5
    nested = READ["Qwen3.6-27B"]["dflash_config"] | {"causal": flags["is_causal"]}
    assert DFlashConfig.from_dict(READ["Qwen3.6-27B"] | {"dflash_config": nested}).block_causal == config.block_causal


def test_model_optimizers_windows():
    nested = BASE["dflash_config"] | {"use_swa": True, "swa_window_size": 2048, "causal": False}
    config = DFlashConfig.from_dict(BASE | {"dflash_config": nested})
    assert (config.layer_types, config.sliding_window, config.block_causal) == ([SLIDING] * 5, 2048, [False] * 5)


def test_layers_are_full_where_a_switch_says_that_none_slides():
    source = {k: v for k, v in BASE.items() if k != "layer_types"}
    assert source["use_sliding_window"] is False
    assert DFlashConfig.from_dict(source).layer_types == [FULL] * 5


def test_target_layers_are_spread_by_the_papers_rule():
    """Pitfall 60; for a fresh drafter. A file must state its own: the rule is wrong for half of those above."""
    assert spread_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert spread_target_layer_ids(30, 5) == [1, 8, 14, 20, 27]
    assert spread_target_layer_ids(32, 5) == [1, 8, 15, 22, 29]
    assert spread_target_layer_ids(36, 1) == [18]
    with pytest.raises(ValueError, match="6 layers is too shallow for 5 target layers"):
        spread_target_layer_ids(6, 5)
    by_rule = [
        name for name, source in READ.items()
        if spread_target_layer_ids(source["num_target_layers"], source["num_hidden_layers"])
        == source["dflash_config"]["target_layer_ids"]
    ]  # fmt: skip
    assert len(by_rule) <= len(READ) / 2


def test_our_own_word_for_causality_is_kept_beside_z_labs_spelling():
    assert DFlashConfig.from_dict(BASE | {"block_causal": [True] * 5}).block_causal == [True] * 5


@pytest.mark.parametrize(
    ("override", "sentence"),
    (
        ({"target_layer_ids": [0, 1, 3]}, "last layer"),
        ({"mask_token_id": 500}, "row of the target's embedding"),
        ({"block_causal": ["x", "y"]}, "one bool"),
        ({"block_size": 3}, r"in \[1, 2\]"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "needs a static one"),
    ),
)
def test_overrides_while_loading_are_checked_too(override, sentence, tmp_path):
    from dflash_hub import DFlashDraftModel
    from helpers.tiny import tiny_drafter

    tiny_drafter().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        DFlashDraftModel.from_pretrained(tmp_path, **override)
    assert DFlashDraftModel.from_pretrained(tmp_path, block_size=3, num_draft_tokens=2).config.block_size == 3


def test_a_file_of_ours_that_lost_a_field_is_refused(tmp_path):
    """`save_pretrained` writes every field, so one that is missing had a value, which may not be the default."""
    tiny_config(layer_types=[SLIDING, FULL], sliding_window=8).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    harmless = {
        "attention_bias", "attention_dropout", "initializer_range", "num_draft_tokens", "acceptance_prior", "draft_vocab_size", "num_tree_nodes", "target_name_or_path", "target_revision", "target_rows",
        "target_chat", "target_thinking", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "format_version",
        # The tensors tell: a drafter with a part that its config does not state is refused. And files of earlier versions lack them.
        "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "markov_rank", "markov_head_type",
        "confidence_head",
    }  # fmt: skip
    for name in DFlashConfig.__annotations__:
        path.write_text(json.dumps({key: value for key, value in saved.items() if key != name}))
        if name in harmless:
            DFlashConfig.from_pretrained(tmp_path)
            continue
        with pytest.raises((ValueError, TypeError), match=f"['`]{name}['`]"):
            DFlashConfig.from_pretrained(tmp_path)


def test_our_own_spelling_is_left_alone():
    config = tiny_config().to_dict()
    assert read_config_dict(config) is config


def test_the_fixtures_config(fixture_folder):
    config = DFlashConfig.from_pretrained(FIXTURE)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 16, [1, 8, 14, 20, 27])
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.dtype is torch.bfloat16
