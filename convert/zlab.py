"""z-lab's layout: the checkpoints that z-lab, SpecForge and Model-Optimizer write, and that vLLM and SGLang read.

The tensors are those of `DFlashDraftModel`, name by name; only config.json differs.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from ..configuration_dflash import SLIDING, DFlashConfig
from ..hub_dflash import write_text
from ..modeling_dflash import DFlashDraftModel
from .folders import new_folder


def import_zlab(
    source: str,
    destination: str,
    force: bool = False,
    target: str | None = None,
    chat: bool | None = None,
    thinking: bool | None = None,
) -> DFlashConfig:
    """Turn a z-lab checkpoint (folder or Hub repository) into a complete folder of ours.

    Args:
        target, chat, thinking: what the drafter was made for, recorded in the config; z-lab's has no place for it.

    Raises:
        ValueError: the checkpoint is of another kind, incomplete, or holds what is not supported; names it.
        FileExistsError: see `new_folder`.
    """
    with new_folder(destination, force) as folder:
        drafter = _load(source)
        for name, value in (("target_name_or_path", target), ("target_chat", chat), ("target_thinking", thinking)):
            if value is not None:
                setattr(drafter.config, name, value)
        drafter.save_pretrained(folder)
    return drafter.config


def export_zlab(source: str, destination: str, force: bool = False) -> DFlashConfig:
    """Write a drafter in z-lab's layout, for z-lab's own package, vLLM and SGLang. It holds no code.

    Raises:
        ValueError: the layout cannot say what this drafter is.
        FileExistsError: see `new_folder`.
    """
    with new_folder(destination, force) as folder:
        drafter = _load(source)
        config = zlab_config_dict(drafter.config)
        read_back = DFlashConfig.from_dict(json.loads(json.dumps(config)))
        _check_equal(drafter.config, read_back)
        save_torch_state_dict({name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}, folder)
        write_text(Path(folder) / "config.json", json.dumps(config, indent=2) + "\n")
    return drafter.config


def _load(source: str) -> DFlashDraftModel:
    try:
        return DFlashDraftModel.from_pretrained(source, use_safetensors=True, dtype="auto")
    except OSError as error:
        raise OSError(f"cannot read {source!r}: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"the weights in {source!r} are unreadable, truncated perhaps: {error}") from error


# Fields of ours that z-lab's config.json has no place for. They say how to use a drafter, not what it computes.
NOT_IN_ZLAB = ("num_draft_tokens", "target_name_or_path", "target_revision", "target_chat", "target_thinking")


def zlab_config_dict(config: DFlashConfig) -> dict:
    """config.json in z-lab's spelling; block size and RoPE in every place where some reader looks for them."""
    same = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
        "rms_norm_eps max_position_embeddings vocab_size attention_bias attention_dropout initializer_range layer_types "
        "sliding_window bos_token_id eos_token_id pad_token_id num_target_layers block_size mask_token_id target_layer_ids"
    ).split()
    nested = {name: getattr(config, name) for name in ("block_size", "mask_token_id", "target_layer_ids")}
    for name, neutral in (
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", None),
    ):
        if getattr(config, name) != neutral:
            nested[name] = getattr(config, name)
    sliding = SLIDING in config.layer_types
    scaling = {name: value for name, value in config.rope_parameters.items() if name != "rope_theta"}
    written = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in same},
        "use_sliding_window": sliding,
        "max_window_layers": config.layer_types.index(SLIDING) if sliding else config.num_hidden_layers,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if config.rope_parameters["rope_type"] == "default" else scaling,
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
        "dflash_config": nested,
    }
    # Two flags say the same for all layers; a mixed layout is what readers assume without either.
    if len(set(config.block_causal)) == 1:
        written["is_causal"] = nested["causal"] = config.block_causal[0]
    if stopped := inexpressible(config):
        raise ValueError(f"z-lab's layout cannot express this drafter: {'; '.join(stopped)}.")
    return written


def inexpressible(config: DFlashConfig) -> list[str]:
    """What z-lab's layout has no way to say, a sentence each."""
    default = [layer_type == SLIDING for layer_type in config.layer_types]
    if len(set(config.block_causal)) > 1 and config.block_causal != default:
        return [
            f"`block_causal` is {config.block_causal} for `layer_types` {config.layer_types}; it knows one value for all "
            "layers, or causal sliding layers beside bidirectional full ones"
        ]
    return []


def _check_equal(config: DFlashConfig, read_back: DFlashConfig):
    for name in type(config).__annotations__:
        if name not in NOT_IN_ZLAB and getattr(config, name) != getattr(read_back, name):
            raise ValueError(
                f"z-lab's layout does not carry `{name}`: {getattr(config, name)!r} would be read back as "
                f"{getattr(read_back, name)!r}."
            )
