"""transformers' own drafter class, `MuseGlimmerAssistantModel`: two tensors renamed, everything bidirectional.

Its config states neither the vocabulary nor the depth of the target: both come from the target's config.
"""

from ..configuration_dflash import DFlashConfig, read_config_dict
from .zlab import NOT_CARRIED as ZLAB_NOT_CARRIED
from .zlab import dspark_parts, parts, scales

MODEL_TYPE = "muse_glimmer_assistant"
NOT_CARRIED = (*ZLAB_NOT_CARRIED, "vocab_size", "num_target_layers", "attention_dropout", "initializer_range")
CARRIED = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "rope_parameters max_position_embeddings sliding_window layer_types hidden_act bos_token_id eos_token_id pad_token_id "
    "block_size mask_token_id target_layer_ids"
).split()


def recognizes(config: dict) -> bool:
    return config.get("model_type") == MODEL_TYPE


def read(config: dict, facts) -> dict:
    if not isinstance(config.get("layer_types"), list):
        raise ValueError(f"`layer_types` must be a list, got {config.get('layer_types')!r}.")
    return read_config_dict(
        config
        | {
            "architectures": ["DFlashDraftModel"],
            "vocab_size": facts.vocabulary,
            "num_target_layers": facts.layers,
            "target_name_or_path": facts.name,
            "block_causal": [False] * len(config["layer_types"]),
            "dflash_config": {},
        }
    )


def unsupported_fields(config: DFlashConfig) -> list[str]:
    found = []
    if any(config.block_causal):
        found.append(f"`block_causal` is {config.block_causal}; every layer is bidirectional there")
    if isinstance(config.eos_token_id, list):
        found.append(f"`eos_token_id` is the list {config.eos_token_id}; there it is one token")
    biases = {"attention_bias": True} if config.attention_bias else {}
    return found + [
        f"`{name}` is {value}; there is no place for it"
        for name, value in (biases | scales(config) | parts(config) | dspark_parts(config)).items()
    ]


def write(config: DFlashConfig, facts) -> dict:
    written = {name: getattr(config, name) for name in CARRIED}
    # The class wants a number, also where no layer slides.
    written["sliding_window"] = config.sliding_window or config.max_position_embeddings
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": MODEL_TYPE,
        **written,
        "dtype": str(config.dtype).removeprefix("torch."),
    }
