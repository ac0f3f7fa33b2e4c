"""Our exported folders under the rules by which vLLM and SGLang read them (see `engine_rules`)."""

import dataclasses
import json
import shlex

import pytest
import torch
from dflash_hub import DFlashConfig
from dflash_hub.convert import zlab
from dflash_hub.convert.engines import TITLES, blockers, serve_command, warnings_of
from dflash_hub.convert.exporting import export_drafter
from helpers import engine_rules
from helpers.formats import FULL, KINDS, READ, SERVED, SLIDING, YARN, drafter_of
from helpers.tiny import tiny_drafter, tiny_target
from safetensors import safe_open


def expected(config, **engine) -> engine_rules.Reading:
    return engine_rules.Reading(
        architecture="DFlashDraftModel",
        taps=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        windows=config.windows,
        causal=config.block_causal,
        rope=config.rope_parameters,
        positions=config.max_position_embeddings,
        **engine,
    )


@pytest.mark.parametrize("kind", SERVED)
def test_vllm_takes_the_folder_for_what_it_is(kind, tmp_path):
    config = drafter_of(tmp_path / "ours", kind).config
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "vllm")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert engine_rules.vllm(written) == expected(config)
    assert "auto_map" not in written and "eagle_aux_hidden_state_layer_ids" not in written
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        filled = {engine_rules.vllm_tensor(name) for name in file.keys()}
        fc_columns = file.get_slice("fc.weight").get_shape()[1]
    # Embedding and head are not in the file: the target's are shared.
    assert filled == engine_rules.parameters(config.num_hidden_layers, config.attention_bias, "model.")
    assert fc_columns == len(config.target_layer_ids) * config.hidden_size


@pytest.mark.parametrize("kind", SERVED)
def test_sglang_takes_the_folder_for_what_it_is(kind, tmp_path):
    config = drafter_of(tmp_path / "ours", kind).config
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "sglang")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert engine_rules.sglang(written) == expected(
        config, block_size=config.block_size, num_target_layers=config.num_target_layers
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        filled = {engine_rules.sglang_tensor(name) for name in file.keys()}
    assert filled == engine_rules.parameters(config.num_hidden_layers, config.attention_bias, "")


@pytest.mark.parametrize("kind", [kind for kind in SERVED if "speculators" in KINDS[kind][1]])
def test_vllm_and_a_speculators_folder(kind, tmp_path):
    """One flag speaks for all layers there: a mixed layout is served wrongly, and the export says so."""
    tiny_target("llama").to(torch.bfloat16).save_pretrained(tmp_path / "target")
    config = drafter_of(tmp_path / "ours", kind).config
    done = export_drafter(str(tmp_path / "ours"), tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    read = engine_rules.vllm(json.loads((tmp_path / "out" / "config.json").read_text()))
    if len(set(config.block_causal)) > 1:
        assert read.causal != config.block_causal and "export with --to vllm" in done.warnings[0]
    else:
        assert read == expected(config) and done.warnings == []
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        filled = {engine_rules.vllm_tensor(name) for name in file.keys()}
    own = {"model.embed_tokens.weight", "lm_head.weight"}
    assert filled == engine_rules.parameters(config.num_hidden_layers, config.attention_bias, "model.") | own
    assert done.usage == f"vllm serve {tmp_path / 'out'}"


@pytest.mark.parametrize("name", READ)
def test_the_configs_of_releases_go_out_as_they_came_in(name):
    source = json.loads(json.dumps(READ[name]))
    config = DFlashConfig.from_dict(source)
    written = json.loads(json.dumps(zlab.write(config, None)))
    assert engine_rules.vllm(written) == expected(config)
    assert dataclasses.replace(engine_rules.vllm(source), rope=config.rope_parameters) == expected(config)
    assert engine_rules.sglang(written) == expected(
        config, block_size=config.block_size, num_target_layers=config.num_target_layers
    )
    read_back = DFlashConfig.from_dict(written)
    for field in DFlashConfig.__annotations__:
        assert getattr(read_back, field) == getattr(config, field), field


def test_the_rules_would_notice(tmp_path):
    drafter_of(tmp_path / "ours", "mixed")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "vllm")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert engine_rules.vllm(written | {"is_causal": False}).causal == [False, False]
    assert engine_rules.vllm(written | {"use_sliding_window": True, "layer_types": [FULL, FULL]}).windows == [
        None,
        None,
    ]
    with pytest.raises(AssertionError):
        engine_rules.sglang(written | {"hidden_act": "gelu"})


def test_serve_commands():
    mixed = tiny_drafter(layer_types=[SLIDING, FULL], sliding_window=8, target_name_or_path="org/t").config
    command = serve_command("vllm", mixed, "out dir")
    assert command.startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve org/t")
    speculation = json.loads(command.split("'")[1])
    assert speculation == {"method": "dflash", "model": "out dir", "num_speculative_tokens": 4}
    assert "--attention-backend flash_attn" in command
    causal = tiny_drafter(block_causal=[True, True]).config
    assert "attention-backend" not in serve_command("vllm", causal, "out") and "TARGET" in serve_command(
        "vllm", causal, "out"
    )
    assert "--speculative-num-draft-tokens 5" in serve_command("sglang", mixed, "out")
    assert shlex.split(serve_command("sglang", mixed, "it's here").replace("\\\n", ""))[-3] == "it's here"
    with pytest.raises(ValueError, match="none of the engines"):
        serve_command("ollama", mixed, "out")


def test_one_part_of_dflash_2_alone_is_served_by_sglang_only(tmp_path):
    selector = drafter_of(tmp_path / "ours", "selector").config
    assert blockers("sglang", selector) == []
    for engine in ("vllm", "zlab"):
        assert blockers(engine, selector)[0].startswith("`selector_rank` is 4 without the other part")
    export_drafter(str(tmp_path / "ours"), tmp_path / "out", "sglang")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["DFlash2DraftModel"] and "conv_kernel_size" not in written["dflash_config"]
    assert written["dflash_config"]["selector_rank"] == 4 and written["dflash_config"]["selector_top_k"] == 6


def test_scales_are_an_obstacle_or_a_remark():
    scaled = tiny_drafter(output_multiplier=0.5, final_logit_softcapping=30.0, rope_parameters=YARN).config
    for engine in TITLES:
        assert blockers(engine, scaled) == []
    assert ["greedy drafts are the same" in " ".join(warnings_of(engine, scaled)) for engine in ("vllm", "sglang", "zlab")] == [
        True, True, False,
    ]  # fmt: skip
    assert blockers("zlab", tiny_drafter(input_embedding_scale=2.0).config) == []
