"""Reads EAGLE-3 checkpoints in the layouts that are published: SafeAILab's (SpecForge, NeMo, ModelOpt), speculators', DeepSpec's.

They agree on the layer and differ in names, in where the target layers stand and how these are counted, and in a few options. What is
not read is refused by name: a head that is computed in another way than it was trained drafts badly, and nothing fails.
"""

from dataclasses import dataclass

import torch
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedModel

from ...convert.checkpoint import open_checkpoint
from ...drafter_vocabulary import token_ids_of
from ...hub_files import check_finite
from .eagle3_model import Eagle3DraftModel, Eagle3Options

SAFEAILAB = (
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaEagle3DraftModel",
    "Eagle3DraftModel",
)
DEEPSPEC = ("Qwen3Eagle3Model",)
# Fields with the values under which they change nothing here. Absent or null is one of them.
IDLE = {
    "parallel_drafting": (False,), "mask_hidden": (False,), "use_mrope": (False,), "partial_rotary_factor": (1.0,),
    "quantization_config": (), "num_hidden_layers": (1,), "bias": (False,), "final_logit_softcapping": (), "use_sliding_window": (False,),
}  # fmt: skip
# Of `eagle_config`: what ModelOpt writes there.
IDLE_EAGLE_CONFIG = {
    "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,), "next_layer_regular": (True,), "parallel_draft_step": (1,), "head_num_layers": (1,),
    "parallel_draft_heads_num_layers": (0,), "has_lm_head": (True,), "parallel_drafting": (False,),
}  # fmt: skip
LAYER_LISTS = ("eagle_aux_hidden_state_layer_ids", "layer_ids")
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# What a layer takes from a config of Llama's or Qwen3's kind.
LAYER_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What tells layouts apart.

    Args:
        kind: "safeailab", "speculators" or "deepspec".
        layer: the fields of the decoder layer, as stated.
    """

    kind: str
    layer: dict


def load_eagle3(
    source: str, target: PreTrainedModel, dtype: torch.dtype, revision: str | None = None
) -> Eagle3DraftModel:
    """Load an EAGLE-3 draft model for `target`, onto its device.

    Args:
        source: a folder or a repository on the Hub; `pytorch_model.bin` is read with torch's `weights_only`.

    Raises:
        OSError: nothing is there, or it cannot be read.
        ValueError: a layout or an option that is not supported, a tensor that is missing, unknown, misshaped or not finite; names it.
    """
    checkpoint = open_checkpoint(source, revision, allow_pickle=True)
    tensors = _renamed(checkpoint.tensors, source)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    by_midlayer = any(name.startswith("midlayer.") for name in checkpoint.tensors)
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    config, options = read_config(checkpoint.config, shapes, layers, source, by_midlayer)
    model = Eagle3DraftModel(config, options, name=source)
    _check_names(model, tensors, source)
    state = {name: tensors[name].whole() for name in model.state_dict()}
    if options.listed:
        _check_vocabulary(state["d2t"], tensors["t2d"].whole() if "t2d" in tensors else None, config.vocab_size, source)
    model.load_state_dict(state)
    check_finite(dict(model.named_parameters()), source)
    return model.placed(target.device, dtype).requires_grad_(False).eval()


def _renamed(tensors: dict, source: str) -> dict:
    """Give tensors SafeAILab's names."""
    found = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("model.")
        own = "midlayer." + own.removeprefix("layers.0.") if own.startswith("layers.0.") else own
        if own in found:
            raise ValueError(f"{source!r} has {own} twice, under {found[own].name} and {name}.")
        found[own] = tensor
    return found


def read_config(
    stated: dict, shapes: dict[str, tuple], num_target_layers: int, source: str, by_midlayer: bool
) -> tuple[LlamaConfig, Eagle3Options]:
    """Return the layer's config and the options that a config.json states.

    Args:
        shapes: of the tensors, by SafeAILab's names; they tell what some layouts do not state.
        num_target_layers: N, for the layouts that read target layers by rule.
        by_midlayer: whether the file calls the layer `midlayer`, as SafeAILab and SpecForge do, and not `layers.0`.

    Raises:
        ValueError: see `load_eagle3`.
    """
    layout = _layout_of(stated, source)
    _refuse_options(stated, layout, source)
    config = _layer_config(layout, source)
    ids = target_layers(stated, layout.kind, num_target_layers, source)
    if not shapes.get("fc.weight"):
        raise ValueError(f"{source!r} has no fc.weight: it fuses no target hidden states, so it is no EAGLE-3 head.")
    width = stated.get("target_hidden_size") or config.hidden_size
    if shapes["fc.weight"][1] != len(ids) * width:
        raise ValueError(
            f"{source!r} fuses {shapes['fc.weight'][1]} values a token (fc.weight), but reads target layers {ids} of width {width}, "
            f"which are {len(ids) * width}. A head with 2 x {config.hidden_size} is one of EAGLE-1 or 2."
        )
    draft_vocab_size = stated.get("draft_vocab_size") or config.vocab_size
    if draft_vocab_size < config.vocab_size and "d2t" not in shapes:
        raise ValueError(
            f"{source!r} drafts {draft_vocab_size} of {config.vocab_size} tokens and has no d2t that says which; expected it among "
            "the tensors."
        )
    options = Eagle3Options(
        target_layer_ids=ids,
        target_hidden_size=width,
        draft_vocab_size=draft_vocab_size,
        listed="d2t" in shapes,
        own_embedding="embed_tokens.weight" in shapes,
        qk_norm=layout.kind == "deepspec" or (layout.kind == "speculators" and layout.layer["model_type"] == "qwen3"),
        norm_before_residual=bool(stated.get("norm_before_residual")),
        norm_before_fc=bool(stated.get("norm_before_fc")),
        fc_norm=bool(stated.get("fc_norm")),
        norm_output=_norms_output(stated, by_midlayer, source),
    )
    return config, options


def _layout_of(stated: dict, source: str) -> Layout:
    names = stated.get("architectures") or []
    if (kind := stated.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise ValueError(f"{source!r} is a speculator of kind {kind!r}; expected 'eagle3'.")
        layer = stated.get("transformer_layer_config")
        if not isinstance(layer, dict) or layer.get("model_type") not in ("llama", "qwen3"):
            raise ValueError(
                f"{source!r} has a `transformer_layer_config` of model_type {(layer or {}).get('model_type')!r}; expected llama or qwen3."
            )
        return Layout("speculators", layer)
    if any(name in DEEPSPEC for name in names):
        return Layout("deepspec", stated)
    if any(name in SAFEAILAB for name in names):
        return Layout("safeailab", stated)
    raise ValueError(
        f"{source!r} has `architectures` {names}, and is of no EAGLE-3 layout that is known. Known: {', '.join(SAFEAILAB + DEEPSPEC)}, "
        "and `speculators_model_type` eagle3."
    )


def _refuse_options(stated: dict, layout: Layout, source: str):
    eagle = stated.get("eagle_config") or {}
    known = {*IDLE_EAGLE_CONFIG, *LAYER_LISTS}
    found = [
        (f"eagle_config.{name}", value, IDLE_EAGLE_CONFIG.get(name, ()))
        for name, value in eagle.items()
        if name not in LAYER_LISTS
    ]
    for part in [stated] if layout.layer is stated else [stated, layout.layer]:
        found += [(name, part.get(name), idle) for name, idle in IDLE.items()]
    for name, value, idle in found:
        unknown = name.startswith("eagle_config.") and name.removeprefix("eagle_config.") not in known
        if unknown or (value is not None and value not in idle):
            expected = f"only {idle[0]!r} is" if idle else "it is not"
            raise ValueError(f"{source!r} states `{name}` {value!r}; {expected} supported. Measure another head.")
    if "sliding_attention" in (layout.layer.get("layer_types") or []):
        raise ValueError(f"{source!r} states a layer of type 'sliding_attention'; only full attention is supported.")
    if stated.get("norm_before_fc") and stated.get("fc_norm"):
        raise ValueError(f"{source!r} states both `norm_before_fc` and `fc_norm`; expected one of them at most.")
    if layout.kind == "speculators" and "norm_before_residual" not in stated:
        raise ValueError(
            f"{source!r} does not state `norm_before_residual`: speculators takes that for false, vLLM for true. Write the one that it was "
            "trained with into its config.json."
        )


def _layer_config(layout: Layout, source: str) -> LlamaConfig:
    """Return the fields of the layer, defaults filled in as the writer's own class does."""
    kind = "llama" if layout.kind == "safeailab" else layout.layer["model_type"]
    if layout.kind == "deepspec" and kind != "qwen3":
        raise ValueError(f"{source!r} is of DeepSpec's layout with model_type {kind!r}; expected qwen3.")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [name for name in needed if layout.layer.get(name) is None]:
        raise ValueError(f"{source!r} does not state {', '.join(missing)}, which a draft model is made of.")
    rope = layout.layer.get("rope_parameters") or layout.layer.get("rope_scaling") or {}
    if (rope_type := rope.get("rope_type", rope.get("type", "default"))) not in ROPES:
        raise ValueError(f"{source!r} states RoPE of type {rope_type!r}; expected one of {', '.join(ROPES)}.")
    fields = {name: value for name, value in layout.layer.items() if name not in ("model_type", "architectures")}
    fields |= {"num_hidden_layers": 1, "layer_types": None}
    read = CONFIG_MAPPING[kind](**fields)
    config = LlamaConfig(**{name: getattr(read, name) for name in LAYER_FIELDS}, num_hidden_layers=1)
    config.mlp_bias = bool(layout.layer.get("mlp_bias"))
    return config


def target_layers(stated: dict, kind: str, num_target_layers: int, source: str) -> list[int]:
    """Return the decoder layers of the target, from 0, whose outputs the head reads.

    The field's name alone does not say how layers are counted. At the top, and as `eagle_config.layer_ids`, it holds indices into the
    hidden states of transformers, where 0 is the embedding's output; as `eagle_config.eagle_aux_hidden_state_layer_ids` and in DeepSpec's
    `target_layer_ids` it holds layers. Without it three layers are read by a rule.

    Raises:
        ValueError: two places differ, or a list is none of ascending layers.
    """
    eagle = stated.get("eagle_config") or {}
    places = {
        "eagle_aux_hidden_state_layer_ids": (stated.get("eagle_aux_hidden_state_layer_ids"), 1),
        "eagle_config.layer_ids": (eagle.get("layer_ids"), 1),
        "eagle_config.eagle_aux_hidden_state_layer_ids": (eagle.get("eagle_aux_hidden_state_layer_ids"), 0),
        "target_layer_ids": (stated.get("target_layer_ids"), 0),
    }
    if kind == "deepspec":
        places = {"target_layer_ids": places["target_layer_ids"]}
        if not stated.get("target_layer_ids"):
            raise ValueError(f"{source!r} does not state `target_layer_ids`, which DeepSpec's layout needs.")
    lists = {place: [index - first for index in ids] for place, (ids, first) in places.items() if ids}
    if len({tuple(ids) for ids in lists.values()}) > 1:
        raise ValueError(f"{source!r} states different target layers, counted from 0: {lists}; expected the same.")
    by_rule = [index - 1 for index in (2, num_target_layers // 2, num_target_layers - 3)]
    place, ids = next(iter(lists.items()), ("the rule [2, N / 2, N - 3]", by_rule))
    if ids != sorted({*ids}) or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise ValueError(
            f"{source!r} reads target layers {ids}, counted from 0 ({place}); expected ascending ones of 0 to {num_target_layers - 1}."
        )
    return ids


def _norms_output(stated: dict, by_midlayer: bool, source: str) -> bool:
    """Tell whether the next step reads the normed output. The field has two meanings, by its writer, who is told by the layer's name."""
    value = stated.get("norm_output")
    if not by_midlayer:  # NeMo and speculators: EAGLE-3.1
        return bool(value)
    # SpecForge: the head norms what it scores, as every EAGLE-3 head does.
    if value is False:
        raise ValueError(
            f"{source!r} states `norm_output` false beside a `midlayer`: SpecForge's head without its final norm is not supported. "
            "Measure another head."
        )
    return False


def _check_names(model: Eagle3DraftModel, tensors: dict, source: str):
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items() if name != "t2d"}
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {list(found[name])}, expected {list(wanted[name])}"
            for name in sorted(wanted.keys() & found.keys())
            if wanted[name] != tuple(found[name])
        ],
    }
    if any(faults.values()):
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in faults.items() if names)
        raise ValueError(
            f"the tensors of {source!r} are not those of the EAGLE-3 head that its config.json states ({listed})."
        )


def _check_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, source: str):
    if d2t.dtype != torch.int64:
        raise ValueError(f"{source!r} has d2t of type {d2t.dtype}; expected int64 offsets.")
    ids = token_ids_of(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(
            f"{source!r} has a d2t that names tokens {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} different ones of "
            f"{len(ids)}; expected different tokens below {vocab_size} (the token at index i is i + d2t[i])."
        )
    if t2d is None:
        return
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[ids] = True
    if t2d.shape != marked.shape or not torch.equal(t2d.bool(), marked):
        raise ValueError(
            f"{source!r} has d2t and t2d that disagree: d2t names {len(ids)} tokens, t2d marks {int(t2d.bool().sum())} of {len(t2d)}."
        )
