"""The layout of the `speculators` package (0.9.0): a Qwen3 configuration inside, target layers counted from the embeddings.

Its drafters may carry copies of the target's embedding and head. Those are the target's: import compares them and drops
them, export writes them from the target's files.
"""

from ..configuration_checks import FULL, PARTS, SLIDING
from ..configuration_dflash import DFlashConfig, read_config_dict
from .dspark import FIELDS, heads, stated_heads
from .zlab import NOT_CARRIED as ZLAB_NOT_CARRIED
from .zlab import architecture, decoder_config, dspark_parts, parts, scales

VERSION = "0.9.0"
KINDS = ("dflash", "dflash2", "dspark")
# The package's own defaults for what a file of 'dspark' leaves out.
DSPARK_DEFAULTS = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
# It names the target, but no revision and no mode.
NOT_CARRIED = tuple(name for name in ZLAB_NOT_CARRIED if name not in ("target_name_or_path", "draft_vocab_size"))
KNOWN = {
    *PARTS,
    *FIELDS,
    "architectures", "auto_map", "speculators_model_type", "speculators_version", "speculators_config",
    "transformer_layer_config", "draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids",
    "mask_token_id", "sliding_window_non_causal", "dtype", "torch_dtype", "transformers_version",
    "tie_word_embeddings", "has_no_defaults_at_init", "model_type",
}  # fmt: skip


def recognizes(config: dict) -> bool:
    return "speculators_model_type" in config


def verifier(config: dict) -> str | None:
    """The name of the target that the file states."""
    method = config.get("speculators_config")
    named = method.get("verifier") if isinstance(method, dict) else None
    return named.get("name_or_path") if isinstance(named, dict) else None


def read(config: dict, facts) -> dict:
    """The fields of `DFlashConfig`; how many layers the target has comes from its own config.

    Raises:
        ValueError: another kind of speculator, or something that is not supported or not stated.
    """
    kind = config.get("speculators_model_type")
    if kind not in KINDS:
        raise ValueError(f"`speculators_model_type` is {kind!r}; supported are {', '.join(KINDS)}.")
    if kind != "dspark" and (found := [name for name in FIELDS[:4] if config.get(name)]):
        raise ValueError(f"`speculators_model_type` is {kind!r}, and config.json states {found} of 'dspark'.")
    stated = [name for name in PARTS if config.get(name) is not None]
    if stated != (list(PARTS) if kind == "dflash2" else []):
        raise ValueError(
            f"`speculators_model_type` is {kind!r} and config.json states {stated}; expected {list(PARTS)} of 'dflash2', and none "
            "of them of 'dflash'."
        )
    unknown = sorted(
        name for name in set(config) - KNOWN if config[name] not in (None, False, [], {}) and not name.startswith("_")
    )
    if unknown:
        raise ValueError(f"config.json holds {unknown}, which this version does not know how to honor.")
    decoder = config.get("transformer_layer_config")
    if not isinstance(decoder, dict):
        raise ValueError("config.json has no `transformer_layer_config`.")
    hidden = config.get("target_hidden_size")
    if hidden not in (None, decoder.get("hidden_size")):
        raise ValueError(
            f"`target_hidden_size` is {hidden}, the drafter's hidden size {decoder.get('hidden_size')}: a drafter that borrows no "
            "embedding of its own width is not supported."
        )
    layer_ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(layer_ids, list) or not all(isinstance(index, int) and index >= 1 for index in layer_ids):
        raise ValueError(
            f"`aux_hidden_state_layer_ids` must be a list of 1 (the first layer's output) and up, got {layer_ids!r}. 0, the "
            "embeddings, is not supported."
        )
    non_causal = config.get("sliding_window_non_causal")
    if not isinstance(non_causal, bool):
        raise ValueError(
            f"`sliding_window_non_causal` must be true or false, got {non_causal!r}. Its readers disagree on what a file without "
            "it means."
        )
    layer_types = decoder.get("layer_types")
    if not isinstance(layer_types, list):
        raise ValueError(f"`transformer_layer_config` must state `layer_types`, a list, got {layer_types!r}.")
    return read_config_dict(
        decoder
        | {name: config[name] for name in ("dtype", *PARTS) if config.get(name)}
        | {
            "architectures": ["DFlashDraftModel"],
            "draft_vocab_size": config.get("draft_vocab_size", 32000),  # the package's own default
            "block_size": config.get("block_size"),
            "num_target_layers": facts.layers,
            "target_name_or_path": facts.name,
            # Full layers are always bidirectional there.
            "block_causal": [kind == SLIDING and not non_causal for kind in layer_types],
            "dflash_config": {
                "mask_token_id": config.get("mask_token_id"),
                "target_layer_ids": [index - 1 for index in layer_ids],
            },
        }
    ) | _heads(kind, config)


def _heads(kind: str, config: dict) -> dict:
    """Our fields of DSpark, which a drafter of another kind has none of but the position that drafts first."""
    from_anchor = _from_anchor(kind, config)
    if kind != "dspark":
        return {"sample_from_anchor": from_anchor}
    stated = {name: config[name] for name in DSPARK_DEFAULTS if config.get(name) is not None}
    return heads(DSPARK_DEFAULTS | stated | {"sample_from_anchor": from_anchor})


def _from_anchor(kind: str, config: dict) -> bool:
    """Tell whether the anchor's position drafts: as stated, or as many tokens as the writer says that a block drafts.

    Raises:
        ValueError: neither is there, or the two differ. Readers disagree on what a file without them means.
    """
    stated, block = config.get("sample_from_anchor"), config.get("block_size")
    method = config.get("speculators_config") or {}
    proposals = method.get("proposal_methods") if isinstance(method, dict) else None
    drafted = proposals[0].get("speculative_tokens") if proposals and isinstance(proposals[0], dict) else None
    counted = {block: True, block - 1: False}.get(drafted) if isinstance(block, int) else None
    if kind != "dspark":
        return bool(stated)
    if stated is None and counted is None:
        raise ValueError(
            "`sample_from_anchor` is not stated, and `speculative_tokens` does not tell: whether the anchor's position drafts is not "
            "known, and the drafter would be one token off. State it in config.json."
        )
    if None not in (stated, counted) and stated != counted:
        raise ValueError(
            f"`sample_from_anchor` is {stated}, but a block of {block} drafts {drafted} tokens (`speculative_tokens`)."
        )
    return counted if stated is None else stated


def unsupported_fields(config: DFlashConfig) -> list[str]:
    found, has = [], parts(config)
    if has and len(has) < len(PARTS):
        found.append(f"`{next(iter(has))}` is {has[next(iter(has))]} without the other part; 'dflash2' has both there")
    if has and config.draft_vocab_size is not None:
        found.append(
            f"`draft_vocab_size` is {config.draft_vocab_size}; 'dflash2' drafts from the whole vocabulary there"
        )
    full = [causal for kind, causal in zip(config.layer_types, config.block_causal) if kind == FULL]
    sliding = [causal for kind, causal in zip(config.layer_types, config.block_causal) if kind == SLIDING]
    if any(full):
        found.append(f"`block_causal` is {config.block_causal}; full layers are always bidirectional there")
    if len(set(sliding)) > 1:
        found.append(f"`block_causal` is {config.block_causal}; all sliding layers share one value there")
    return found + [f"`{name}` is {value}; there is no place for it" for name, value in scales(config).items()]


def write(config: DFlashConfig, facts) -> dict:
    """config.json of the `speculators` package.

    vLLM takes `sliding_window_non_causal` for all layers, also full ones, so a drafter without sliding layers says true.
    """
    decoder, kind = (
        decoder_config(config),
        "dflash2" if parts(config) else "dspark" if dspark_parts(config) else "dflash",
    )
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": config.drafts_per_block,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [
            {"dflash": "DFlashSpeculator", "dflash2": architecture(config), "dspark": "DSparkSpeculator"}[kind]
        ],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": facts.name, "architectures": facts.architectures},
        },
        "transformer_layer_config": decoder,
        **parts(config),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not any(config.block_causal),
        **(stated_heads(config) if kind == "dspark" else {"sample_from_anchor": False}),
        "dtype": decoder["dtype"],
    }
