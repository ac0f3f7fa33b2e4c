"""How vLLM 0.33.0 and SGLang 0.5.23 read a DFlash drafter's folder, restated rule by rule.

vLLM: `model_executor/models/qwen3_dflash.py`, `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`,
`v1/worker/gpu/spec_decode/utils.py`, `transformers_utils/configs/{eagle,speculators/algos}.py`.
SGLang: `srt/models/dflash.py`, `srt/speculative/dflash_utils.py`.
Both load config.json with transformers first. `make peers` runs the engines' own functions beside these.
"""

from dataclasses import dataclass

from transformers import Qwen3Config


@dataclass
class Reading:
    """What an engine takes a drafter for. Taps are 0-based; the window is the number of positions a query sees, itself included."""

    architecture: str
    taps: list[int]
    mask_token_id: int
    windows: list[int | None]
    causal: list[bool]
    rope: dict
    positions: int
    block_size: int | None = None
    num_target_layers: int | None = None


def hf_config(config: dict) -> Qwen3Config:
    return Qwen3Config(**config)


def vllm(config: dict) -> Reading:
    if "speculators_model_type" in config:
        config = vllm_from_speculators(config)
    hf, nested = hf_config(config), config.get("dflash_config") or {}
    for name in "rms_norm_eps hidden_act intermediate_size num_key_value_heads head_dim vocab_size".split():
        assert getattr(hf, name) is not None, name
    assert hf.hidden_act == "silu"  # its MLP has no other
    architecture = config["architectures"][0]
    architecture = architecture if architecture.startswith("DFlash") else f"DFlash{architecture}"
    taps = [tap - 1 for tap in getattr(hf, "eagle_aux_hidden_state_layer_ids", None) or []]
    taps = taps or nested.get("target_layer_ids") or getattr(hf, "target_layer_ids", None)
    mask = nested.get("mask_token_id", getattr(hf, "mask_token_id", None))
    windows, causal = [], []
    flags = (getattr(hf, "is_causal", None), nested.get("causal"))
    flag = next((flag for flag in flags if flag is not None), None)
    for layer in range(hf.num_hidden_layers):
        sliding = hf.layer_types[layer] == "sliding_attention"
        if nested.get("use_swa") and "sliding_attention" not in hf.layer_types:
            sliding = True
        window = nested.get("swa_window_size", hf.sliding_window)
        assert not sliding or window is not None
        windows.append(window if sliding else None)
        causal.append(bool(flag) if flag is not None else hf.layer_types[layer] == "sliding_attention")
    return Reading(architecture, taps, mask, windows, causal, hf.rope_parameters, hf.max_position_embeddings)


def vllm_from_speculators(config: dict) -> dict:
    taps = config["aux_hidden_state_layer_ids"]
    return config["transformer_layer_config"] | {
        "architectures": ["DFlashDraftModel"],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": taps,
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [tap - 1 for tap in taps],
            "sample_from_anchor": config.get("sample_from_anchor", False),
            "causal": not config.get("sliding_window_non_causal", True),  # for all layers
        },
    }


def vllm_tensor(name: str) -> str | None:
    """The parameter that a tensor of the file goes to; None where it is left out.

    Raises:
        AssertionError, KeyError: the loader stops, or knows no such parameter.
    """
    assert "mask_hidden" not in name
    if "t2d" in name:
        return None
    name = name.replace("d2t", "draft_id_to_target_id")
    if "lm_head" not in name and "draft_id" not in name:
        name = "model." + name
    return _fused(name)


def sglang(config: dict) -> Reading:
    hf, nested = hf_config(config), config.get("dflash_config") or {}
    architecture = config["architectures"][0]
    assert architecture == "DFlashDraftModel" and hf.hidden_act == "silu"
    depth = nested.get("num_target_layers", getattr(hf, "num_target_layers", None))
    taps = nested.get("target_layer_ids", getattr(hf, "target_layer_ids", None))
    assert depth is not None and all(0 <= tap < depth for tap in taps)
    mask = nested.get("mask_token_id", getattr(hf, "mask_token_id", None))
    assert isinstance(mask, int) and mask >= 0
    flag = getattr(hf, "is_causal", None)  # the nested flag is not read
    windows, causal = [], []
    for kind in hf.layer_types:
        sliding = kind == "sliding_attention"
        assert not sliding or hf.sliding_window is not None
        windows.append(hf.sliding_window if sliding else None)
        causal.append(sliding if flag is None else flag)
    block = nested.get("block_size", getattr(hf, "block_size", None))
    return Reading(
        architecture, taps, mask, windows, causal, hf.rope_parameters, hf.max_position_embeddings, block, depth
    )


def sglang_tensor(name: str) -> str:
    return _fused(name)


def _fused(name: str) -> str:
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for part in parts:
            name = name.replace(f".{part}.", f".{fused}.")
    return name


def parameters(layers: int, bias: bool, prefix: str) -> set[str]:
    """The parameters of both engines' DFlash model that a checkpoint must fill."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for layer in range(layers):
        names |= {
            f"layers.{layer}.{name}"
            for name in (
                "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.weight",
                "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate_up_proj.weight",
                "mlp.down_proj.weight", *(("self_attn.qkv_proj.bias", "self_attn.o_proj.bias") if bias else ()),
            )
        }  # fmt: skip
    return {prefix + name for name in names}
