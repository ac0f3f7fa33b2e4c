"""DSpark's own layouts: DeepSpec's and NeMo's flat fields, SpecForge's and LiquidAI's in `dflash_config`; ours states both.

The tensors are those of `DFlashDraftModel`. Which position drafts first is stated by hardly any writer: all of these draft from
the anchor's position (`sample_from_anchor`), also where there is no Markov head, as in deepseek-ai's `dflash_*_block7`.
"""

import torch

from ..configuration_checks import DSPARK_SPELLINGS, PARTS, SLIDING, require, require_stated
from ..configuration_dflash import DFlashConfig, read_config_dict
from .checkpoint import HeadsReordered, InMemory, Stored
from .zlab import DRAFTING, decoder_config, dspark_parts, scales
from .zlab import NOT_CARRIED as ZLAB_NOT_CARRIED

NOT_CARRIED = ZLAB_NOT_CARRIED
# Classes of a Qwen3-style backbone, by who has them; the others of this method have backbones of their own.
FLAT, NESTED, LIQUID = "Qwen3DSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel"
FIELDS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
)
NEOX = ("rope_is_neox_style", "is_neox_style")
# What some writer puts into `dflash_config`, beside what the method needs.
WITHOUT_EFFECT = ("projector_type", "attention_mode", "confidence_head_alpha", "num_anchors", *NEOX)
UNSUPPORTED = (*PARTS, "causal", "causal_head", "gru_hidden_dim", "shift_label", "pure_draft_prefix_len")


def recognizes(config: dict) -> bool:
    # Also the class names of backbones that are refused: by their name.
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    return (
        "speculators_model_type" not in config
        and config.get("model_type") != "dflash"
        and (
            "DSpark" in str(config.get("architectures"))
            or nested.get("projector_type") == "dspark"
            or any(place.get(name) for place in (config, nested) for name in DSPARK_SPELLINGS)
            or any(name.startswith("dspark_") for name in config)
        )
    )


def read(config: dict, facts) -> dict:
    """The fields of `DFlashConfig`.

    Raises:
        ValueError: another backbone, two places that differ, or something that is not supported or not stated.
    """
    architectures, nested = config.get("architectures") or [], config.get("dflash_config") or {}
    known = (FLAT, NESTED, LIQUID, "DFlashDraftModel")
    require(
        len(architectures) == 1 and architectures[0] in known,
        f"expected one of the architectures {list(known)}, found {architectures}. DSpark drafters of other backbones are not "
        "supported.",
    )
    require(isinstance(nested, dict), f"`dflash_config` must be a dictionary, it is {type(nested).__name__}.")
    for place in (config, nested):
        found = [name for name in UNSUPPORTED if place.get(name)] + [
            name for name in place if name.startswith("dspark_")
        ]
        require(not found, f"the config states {found}, which a DSpark drafter of this backbone does not have.")
    kind = _one(config, nested, "projector_type")
    require(
        kind in (None, "dspark"), f"`projector_type` is {kind!r}: a Domino or another head, which is not supported."
    )
    require(
        config.get("is_causal") is not None or SLIDING not in (config.get("layer_types") or []),
        "`is_causal` must say whether sliding layers are causal in the block; readers of DSpark disagree without it.",
    )
    dropped = (*FIELDS, *WITHOUT_EFFECT)
    base = {name: value for name, value in config.items() if name not in dropped} | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {name: value for name, value in nested.items() if name not in dropped},
    }
    stated = {name: _one(config, nested, name) for name in FIELDS}
    return read_config_dict(base) | heads(
        stated | _defaults(architectures[0], stated, _one(config, nested, "confidence_head_alpha"))
    )


def _one(config: dict, nested: dict, *names: str):
    """The single value that is stated under some names in either place, or None; two different ones are an error."""
    values = [place[name] for place in (config, nested) for name in names if place.get(name) is not None]
    require(all(value == values[0] for value in values), f"`{names[0]}` is stated twice and differs: {values}.")
    return values[0] if values else None


def _defaults(architecture: str, stated: dict, alpha: float | None) -> dict:
    """What a writer leaves out, and its own reader takes for it."""
    if architecture == FLAT:
        needed = ["markov_rank", "enable_confidence_head"]
        needed += ["markov_head_type"] * bool(stated["markov_rank"])
        needed += ["confidence_head_with_markov"] * bool(stated["enable_confidence_head"])
        require_stated(stated, needed)
    usual = {
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": architecture == LIQUID or bool(alpha),
        "confidence_head_with_markov": architecture == LIQUID,
        "sample_from_anchor": True,
    }
    return {name: value for name, value in usual.items() if stated[name] is None}


def heads(stated: dict) -> dict:
    """Our fields for the five that all writers share; each must have a value."""
    for name in ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"):
        require(isinstance(stated[name], bool), f"`{name}` must be true or false, got {stated[name]!r}.")
    sure = (
        ("hidden+markov" if stated["confidence_head_with_markov"] else "hidden")
        if stated["enable_confidence_head"]
        else None
    )
    fields = {"confidence_head": sure, "sample_from_anchor": stated["sample_from_anchor"]}
    if stated["markov_rank"] != 0:
        fields |= {"markov_rank": stated["markov_rank"], "markov_head_type": stated["markov_head_type"]}
    return fields


def stated_heads(config: DFlashConfig) -> dict:
    """The same five of a drafter of ours, none left to a reader's default."""
    return {
        "markov_rank": config.markov_rank or 0,
        "markov_head_type": config.markov_head_type or "vanilla",
        "enable_confidence_head": config.confidence_head is not None,
        "confidence_head_with_markov": config.confidence_head == "hidden+markov",
        "sample_from_anchor": config.sample_from_anchor,
    }


def unsupported_fields(config: DFlashConfig) -> list[str]:
    """What this layout has no way to say, a sentence each."""
    found = [f"`{name}` is {value}; there is no place for it" for name, value in scales(config).items()]
    if not dspark_parts(config):
        found.append(
            "`markov_rank`, `confidence_head` and `sample_from_anchor` are not set: it is a plain drafter (--to zlab)"
        )
    if any(config.block_causal):
        found.append(f"`block_causal` is {config.block_causal}; every layer is bidirectional there")
    return found


def write(config: DFlashConfig, facts) -> dict:
    """config.json with every field where some reader looks for it, and nothing left to a default."""
    stated = {name: getattr(config, name) for name in DRAFTING} | stated_heads(config) | {"rope_is_neox_style": True}
    stated["num_target_layers"] = config.num_target_layers
    return {
        "architectures": [FLAT],
        **decoder_config(config),
        **stated,
        "is_causal": False,
        "num_anchors": 512,  # of training: NeMo's class does not load without it
        "dflash_config": stated | {"projector_type": "dspark"},
    }


def is_interleaved(config: dict) -> bool:
    """Whether RoPE turns neighboring pairs of a head's channels (LiquidAI), and not those half a head apart."""
    return _one(config, config.get("dflash_config") or {}, *NEOX) is False


def with_halves(tensors: dict[str, Stored | InMemory], config: DFlashConfig) -> dict[str, Stored | InMemory]:
    """Reorder the channels of queries and keys, so that the pairs that RoPE turns lie half a head apart."""
    order = torch.cat([torch.arange(0, config.head_dim, 2), torch.arange(1, config.head_dim, 2)])
    turned = tuple(f".self_attn.{part}." for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
    return {
        name: HeadsReordered(tensor, order) if any(part in name for part in turned) else tensor
        for name, tensor in tensors.items()
    }
