"""z-lab's layout: what z-lab, SpecForge, Model-Optimizer and NeMo AutoModel write, and what vLLM and SGLang read.

The tensors are those of `DFlashDraftModel`, name by name; only config.json differs.
"""

import torch

from ..configuration_checks import DSPARK, PARTS, SLIDING
from ..configuration_dflash import DFlashConfig, read_config_dict

# Fields of ours that z-lab's config.json has no place for, or whose place no reader of it looks at. They say how to use a drafter, not what it computes.
NOT_CARRIED = (
    "format_version",
    "num_draft_tokens",
    "draft_vocab_size",
    "acceptance_prior",
    "num_tree_nodes",
    "target_name_or_path",
    "target_revision",
    "target_rows",
    "target_chat",
    "target_thinking",
)
SAME = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps max_position_embeddings vocab_size attention_bias attention_dropout initializer_range layer_types "
    "sliding_window bos_token_id eos_token_id pad_token_id"
).split()
# What is written only where it does something.
SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
DRAFTING = ("block_size", "mask_token_id", "target_layer_ids")


def recognizes(config: dict) -> bool:
    # Also the class names of drafters that are refused: their config says by which part.
    return "dflash_config" in config or "DFlash" in str(config.get("architectures"))


def read(config: dict, facts) -> dict:
    """The fields of `DFlashConfig`; the target's facts are all in the file."""
    return read_config_dict(config)


def unsupported_fields(config: DFlashConfig) -> list[str]:
    """What z-lab's layout has no way to say, a sentence each."""
    if found := dspark_parts(config):
        return [f"`{name}` is {value}; DSpark has a layout of its own (--to dspark)" for name, value in found.items()]
    default = [layer_type == SLIDING for layer_type in config.layer_types]
    if len(set(config.block_causal)) > 1 and config.block_causal != default:
        return [
            f"`block_causal` is {config.block_causal} for `layer_types` {config.layer_types}; it knows one value for all "
            "layers, or causal sliding layers beside bidirectional full ones"
        ]
    return []


def write(config: DFlashConfig, facts) -> dict:
    """config.json in z-lab's spelling; block size, target layers, mask token and RoPE in every place where some reader looks."""
    nested = {name: getattr(config, name) for name in DRAFTING} | scales(config) | parts(config)
    written = {
        "architectures": [architecture(config)],
        **decoder_config(config),
        **{name: getattr(config, name) for name in DRAFTING},
        "num_target_layers": config.num_target_layers,
        "dflash_config": nested,
    }
    # Two flags say the same for all layers; a mixed layout is what readers assume without either.
    if len(set(config.block_causal)) == 1:
        written["is_causal"] = nested["causal"] = config.block_causal[0]
    return written


def parts(config: DFlashConfig) -> dict:
    """The numbers of DFlash 2's parts that a drafter has."""
    return {name: getattr(config, name) for name in PARTS if getattr(config, name) is not None}


def dspark_parts(config: DFlashConfig) -> dict:
    """The fields of DSpark that say something of a drafter."""
    return {name: getattr(config, name) for name in DSPARK if getattr(config, name)}


def architecture(config: DFlashConfig) -> str:
    """The class that z-lab's package, vLLM and SGLang read a drafter with."""
    return "DFlash2DraftModel" if parts(config) else "DFlashDraftModel"


def scales(config: DFlashConfig) -> dict:
    """The scales of a drafter that do something."""
    return {name: getattr(config, name) for name, neutral in SCALES.items() if getattr(config, name) != neutral}


def decoder_config(config: DFlashConfig) -> dict:
    """The decoder layers as a Qwen3 configuration, RoPE in its older and its newer spelling."""
    sliding = SLIDING in config.layer_types
    scaling = {name: value for name, value in config.rope_parameters.items() if name != "rope_theta"}
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in SAME},
        "use_sliding_window": sliding,
        "max_window_layers": config.layer_types.index(SLIDING) if sliding else config.num_hidden_layers,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if config.rope_parameters["rope_type"] == "default" else scaling,
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
    }
