"""From a target to a fresh drafter: config and weights, derived and explained."""

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import get_safetensors_metadata
from huggingface_hub.errors import HTTPError, NotASafetensorsRepoError, SafetensorsParsingError
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import cached_file

from ..common.files import in_a_line, new_folder
from ..common.target_source import TargetSource
from ..configuration_checks import FULL, SLIDING, STATIC_ROPE_TYPES
from ..configuration_dflash import DFlashConfig, spread_target_layer_ids
from ..modeling_dflash import DFlashDraftModel
from ..target_model import embedding_rows, embedding_width
from .checkpoint import read_index, tensors_of
from .parts import parts_of

MOST_DEPTH = 4  # of a drafter, as a multiple of its target's: tiny targets are tried with the default depth
MOST_BLOCK = 256


@dataclass
class Plan:
    """What `init` decided, and why: a sentence a decision."""

    config: DFlashConfig
    reasons: list[str]
    parameters: int


def init_drafter(
    target: str | TargetSource,
    output: str | None,
    layers: int = 5,
    block_size: int = 16,
    target_layers: list[int] | None = None,
    window: int | None = None,
    mask_token: str | None = None,
    from_target_layers: bool = False,
    seed: int = 0,
    force: bool = False,
    method: str = "dflash",
) -> Plan:
    """Derive a drafter for `target` and write it to `output`, or nothing where `output` is None.

    Reads the target's config, tokenizer and safetensors index; of its weights only what is checked or copied.

    Args:
        target: where it comes from; a string is a repository or folder.
        layers: depth of the drafter (paper: 5; 8 for a wide mixture of experts).
        target_layers: whose hidden states the drafter reads; by default five, spread by the paper's rule.
        window: makes all layers but the last slide, as in z-lab's newer releases.
        mask_token: id or text of the token that stands for one to be drafted; by default chosen, see `choose_mask_token`.
        from_target_layers: start from the target's last layers and final norm instead of random weights.
        method: "dflash", or "dflash2" with its convolutions and selector.

    Raises:
        ValueError: the target cannot have such a drafter; says why and what to do.
        FileExistsError: see `new_folder`.
    """
    source = TargetSource.of(target)
    target, revision = source.path, source.revision
    target_config = read_target_config(source)
    skeleton = target_skeleton(target_config, source)
    tokenizer = read_tokenizer(source, embedding_rows(skeleton), mask_token)
    ends = _generation_ids(target, revision)
    text = target_config.get_text_config(decoder=True)

    reasons = []
    mask_id, reason = choose_mask_token(
        tokenizer, embedding_rows(skeleton), mask_token, _special_ids(target_config) | ends
    )
    reasons.append(reason)
    config = derive_config(skeleton, mask_id, layers, block_size, target_layers, window, reasons)
    config = DFlashConfig.from_dict(
        config.to_dict() | parts_of(method, config.hidden_size, config.vocab_size),
        target_name_or_path=source.recorded_name,
        target_revision=source.recorded_revision,
        target_chat=None if tokenizer is None else tokenizer.chat_template is not None,
    )
    reasons += check_borrowed(target, skeleton, revision)

    with torch.device("meta"):
        parameters = sum(p.numel() for p in DFlashDraftModel(config).parameters())
    if output is not None:
        torch.manual_seed(seed)
        with new_folder(output, force) as folder:
            drafter = DFlashDraftModel(config)
            if from_target_layers:
                reasons.append(copy_target_layers(drafter, target, skeleton, text.num_hidden_layers, revision))
            drafter.save_pretrained(folder)
    return Plan(config, reasons, parameters)


def read_target_config(target: str | TargetSource):
    """The config; a drafter is refused before the custom code of its folder is looked at."""
    source = TargetSource.of(target)
    stated, _ = PreTrainedConfig.get_config_dict(source.path, revision=source.revision)
    if stated.get("model_type") == "dflash" or "dflash_config" in stated:
        raise ValueError(f"{source.path} is a DFlash drafter itself; pass the model that writes the text.")
    return source.config()


def read_tokenizer(source: TargetSource, rows: int, mask_token: str | None):
    """The target's tokenizer; None where it has none and the mask token is given as an id.

    Raises:
        ValueError: there is none, and the mask token would have to be chosen or looked up.
    """
    try:
        return source.tokenizer()
    except (OSError, ValueError, ImportError) as error:
        if mask_token is not None and mask_token.isdigit():
            return None
        raise ValueError(
            f"{source.path} has no tokenizer that transformers can read, and a mask token is chosen with it. Put the tokenizer's files "
            f"into the folder, or pass --mask-token ID: one of the target's {rows} embedding rows that no text uses. The reason: "
            f"{in_a_line(error)}"
        ) from error


def target_skeleton(config, source: TargetSource | None = None):
    """The target without weights: which modules it has, and their shapes.

    Args:
        source: where the config is from; a class of its own is made only where its code is trusted.

    Raises:
        ValueError: there is nothing that a drafter could be tied to.
    """
    if config.model_type == "dflash":
        raise ValueError("the target is a DFlash drafter itself; pass the model that writes the text.")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} is an encoder-decoder; a DFlash drafter needs a decoder-only target.")
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        own = (
            source is not None
            and source.trust_remote_code
            and auto.__name__ in (getattr(config, "auto_map", None) or {})
        )
        if own or type(config) in auto._model_mapping:
            arguments = {"trust_remote_code": True, "code_revision": source.revision} if own else {}
            with torch.device("meta"):
                model = auto.from_config(config, **arguments)
            if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
                raise ValueError(f"{type(model).__name__} has no embedding or LM head that a drafter could borrow.")
            if embedding_width(model) != config.get_text_config(decoder=True).hidden_size:
                raise ValueError(
                    f"{type(model).__name__} embeds into width {embedding_width(model)}, not into its hidden size; a DFlash "
                    "drafter cannot borrow such an embedding."
                )
            return model
    raise ValueError(f"model type {config.model_type!r} has no causal language model in transformers to draft for.")


def derive_config(
    skeleton,
    mask_id: int,
    layers: int,
    block_size: int,
    layer_ids: list[int] | None,
    window: int | None,
    reasons: list[str],
) -> DFlashConfig:
    """The drafter's config for a target without weights; adds a sentence a choice to `reasons`."""
    text = skeleton.config.get_text_config(decoder=True)
    depth, hidden = text.num_hidden_layers, text.hidden_size
    if layers > MOST_DEPTH * depth:
        raise ValueError(
            f"a drafter of {layers} layers for a target of {depth} costs more than it can save; pass --layers 1 to "
            f"{MOST_DEPTH * depth}."
        )
    if block_size > MOST_BLOCK:
        raise ValueError(f"a block of {block_size} positions; pass --block-size 2 to {MOST_BLOCK} (paper: 16).")
    if layer_ids is None:
        layer_ids = spread_target_layer_ids(depth, 5)
        reasons.append(
            f"target layers {layer_ids} of {depth}: five, from the second to the third-last, evenly (the paper's rule)"
        )
    else:
        reasons.append(f"target layers {layer_ids} of {depth}: as given")
    shape = head_shape(text, reasons)
    rope = drafter_rope(text, reasons)
    scale, multiplier, cap = output_quirks(text)
    if (scale, multiplier, cap) != (1.0, 1.0, None):
        reasons.append(f"embeddings x {scale:g}, logits x {multiplier:g}, soft-cap {cap}: as the target's own")
    if window is not None:
        reasons.append(
            f"all layers but the last slide with window {window}, causal in the block (z-lab's newer layout)"
        )
    return DFlashConfig(
        vocab_size=embedding_rows(skeleton),
        hidden_size=hidden,
        num_hidden_layers=layers,
        **shape,
        rms_norm_eps=_first(text, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-6),
        initializer_range=_first(text, "initializer_range", default=0.02),
        max_position_embeddings=_first(text, "max_position_embeddings", "n_positions", default=4096),
        rope_parameters=rope,
        layer_types=[SLIDING] * (layers - 1) + [FULL] if window else [FULL] * layers,
        sliding_window=window,
        block_size=block_size,
        mask_token_id=mask_id,
        target_layer_ids=layer_ids,
        num_target_layers=depth,
        input_embedding_scale=scale,
        output_multiplier=multiplier,
        final_logit_softcapping=cap,
        **{name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def _first(config, *names: str, default):
    """The first of the names that families give to one thing; what differs by layer counts as not stated."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers raises for a value of a heterogeneous configuration
            continue
        if value is not None:
            return value
    return default


def head_shape(text, reasons: list[str]) -> dict:
    """Heads and MLP width: the target's where they suit a Qwen3-style layer, else a usual shape of the same width."""
    hidden = text.hidden_size
    heads = _first(text, "num_attention_heads", "n_head", default=None)
    kv_heads = _first(text, "num_key_value_heads", default=heads)
    size = _first(text, "head_dim", default=hidden // heads if heads and hidden % heads == 0 else None)
    usual = not (
        isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(size, int)
        and heads % kv_heads == 0 and size % 2 == 0 and size >= 8
    )  # fmt: skip
    if usual or hasattr(text, "kv_lora_rank"):
        size = next(size for size in (128, 64, 32, 16, 8) if hidden >= 4 * size or size == 8)
        heads = max(hidden // size, 1)
        kv_heads = next(kv for kv in (8, 4, 2, 1) if heads % kv == 0)
        reasons.append(
            f"{heads} heads of {size}, {kv_heads} for keys: a usual shape, as the target's attention has another"
        )
    mlp = _first(text, "intermediate_size", "ffn_dim", "n_inner", default=0)
    mlp = max(mlp) if isinstance(mlp, (list, tuple)) else mlp
    experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
    if not isinstance(mlp, int) or mlp == 0 or (experts and mlp < 2 * hidden):
        found, mlp = mlp, -(-3 * hidden // 64) * 64
        reasons.append(
            f"MLP width {mlp}, three times the hidden size: the target's own ({found}) is an expert's, or none"
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "intermediate_size": mlp,
    }


def drafter_rope(text, reasons: list[str]) -> dict:
    """The target's RoPE base, and its scaling where that is static: a drafter's keys stay in its cache for good."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if nested:  # by layer type: full attention reaches farthest
        rope = rope.get(FULL) or nested[0]
    theta, rope_type = rope.get("rope_theta"), rope.get("rope_type", "default")
    if theta is None:
        reasons.append("RoPE base 10000: the target has no RoPE to take one from")
        return {"rope_type": "default", "rope_theta": 10000.0}
    if rope_type == "default" or rope_type not in STATIC_ROPE_TYPES:
        note = (
            ""
            if rope_type == "default"
            else f"; its {rope_type!r} scaling depends on the length of a pass, and is left out"
        )
        reasons.append(f"RoPE base {theta:g}: the target's{note}")
        return {"rope_type": "default", "rope_theta": theta}
    reasons.append(f"RoPE base {theta:g} with {rope_type!r} scaling: the target's")
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}


def output_quirks(text) -> tuple[float, float, float | None]:
    """(input_embedding_scale, output_multiplier, final_logit_softcapping) that make raw lookups and bare logits the target's."""
    scale = _first(text, "embedding_multiplier", default=1.0)
    if text.model_type.startswith(("gemma", "recurrent_gemma", "t5gemma")):
        scale = text.hidden_size**0.5
    multiplier = float(_first(text, "logit_scale", "lm_head_multiplier", default=1.0))
    multiplier /= float(_first(text, "logits_scaling", default=1.0))
    return float(scale), multiplier, _first(text, "final_logit_softcapping", default=None)


# ------------------------------------------------------------------------------------------------------------------
# The mask token.


def choose_mask_token(tokenizer, rows: int, wanted: str | None, taken: set[int]) -> tuple[int, str]:
    """(id, reason) of the token that stands for one to be drafted: a row of the embedding that no text uses.

    In this order: what the caller wants; a row past the tokenizer; a reserved or unused special token; another special
    token that neither the chat template nor the target's configuration uses.

    Args:
        tokenizer: None where there is none, and `wanted` is an id.
        rows: of the target's embedding.
        taken: ids that mean something to the target.

    Raises:
        ValueError: the wanted token does not fit, or there is none to choose; lists candidates then.
    """
    known = {} if tokenizer is None else {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    if wanted is not None:
        mask_id = int(wanted) if wanted.isdigit() else tokenizer.get_vocab().get(wanted)
        if mask_id is None:
            raise ValueError(f"--mask-token {wanted!r} is no token of the target's tokenizer; pass an id or a token.")
        if mask_id >= rows:
            raise ValueError(f"--mask-token {wanted} is beyond the target's embedding of {rows} rows.")
        if mask_id in taken:
            raise ValueError(f"--mask-token {wanted} ({known.get(mask_id)!r}) already means something to the target.")
        found = "no tokenizer to look it up" if tokenizer is None else known.get(mask_id, "no token")
        return mask_id, f"mask token {mask_id} ({found}): as given"
    past = [row for row in range(max(known) + 1, rows) if row not in taken]
    if past:
        return past[0], f"mask token {past[0]}: the first of {len(past)} free embedding rows past the tokenizer"

    template = (
        tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else str(tokenizer.chat_template or "")
    )
    taken = taken | {
        token_id for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id,
                                  tokenizer.unk_token_id) if token_id is not None
    }  # fmt: skip
    free = {
        token_id: str(token.content)
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in taken and token_id < rows and token.content not in template
    }
    reserved = sorted(i for i, token in free.items() if "reserved" in token.lower() or "unused" in token.lower())
    if reserved:
        return reserved[0], f"mask token {reserved[0]} ({free[reserved[0]]}): reserved, and used by nothing"
    if free:
        last = max(free)
        return last, f"mask token {last} ({free[last]}): a special token that neither template nor configuration uses"
    candidates = {i: known[i] for i in sorted(known)[-8:] if i not in taken and i < rows}
    raise ValueError(
        "no embedding row past the tokenizer, and every special token is in use, so `--mask-token` is required. The last "
        f"tokens of the vocabulary are rare ones: {candidates}."
    )


def _special_ids(config) -> set[int]:
    """Every `..._token_id` of a configuration and its parts: ends, padding, image placeholders and so on."""
    found = set()
    for name, value in config.to_dict().items():
        values = value if isinstance(value, list) else [value]
        if name.endswith(("_token_id", "_token_ids")):
            found |= {v for v in values if isinstance(v, int)}
        if isinstance(value, dict):
            found |= {v for n, v in value.items() if str(n).endswith("_token_id") and isinstance(v, int)}
    return found


def _generation_ids(target: str, revision: str | None) -> set[int]:
    try:
        config = GenerationConfig.from_pretrained(target, revision=revision)
    except OSError:
        return set()  # a target without generation_config.json has no further ids
    ids = [config.bos_token_id, config.eos_token_id, config.pad_token_id]
    return {i for value in ids for i in (value if isinstance(value, list) else [value]) if i is not None}


# ------------------------------------------------------------------------------------------------------------------
# The target's weights: checked, and copied where asked.


def weight_files(target: str, revision: str | None = None) -> dict[str, str]:
    """Tensor name to file, from the safetensors index or a file's header; empty where neither can be had.

    Of a repository on the Hub only headers are read: no weights are downloaded for it.

    Raises:
        ValueError: index or header are damaged; names the file.
    """
    folder = Path(target)
    if not folder.is_dir():
        try:
            return dict(get_safetensors_metadata(target, revision=revision).weight_map)
        except (NotASafetensorsRepoError, SafetensorsParsingError, HTTPError, OSError):
            return {}
    if (folder / "model.safetensors").is_file():  # in the order of transformers
        return dict.fromkeys(tensors_of({folder / "model.safetensors": None}), "model.safetensors")
    if (folder / "model.safetensors.index.json").is_file():
        return read_index(folder / "model.safetensors.index.json")
    return {}


def read_tensor(target: str, revision: str | None, files: dict[str, str], name: str) -> torch.Tensor:
    with safe_open(cached_file(target, files[name], revision=revision), "pt") as file:
        return file.get_tensor(name)


def check_borrowed(target: str, skeleton, revision: str | None) -> list[str]:
    """Verify in the target's files the embedding and head that the drafter will borrow; a sentence on what was found.

    A tied head is the embedding: a file that holds another one would be read as such by some loaders (and was).
    """
    files = weight_files(target, revision)
    if not files:
        return ["embedding and head: not checked, the target has no safetensors files"]
    embedding, head = borrowed_names(skeleton, files)
    if embedding is None:
        return ["embedding and head: not checked, the target's files name its tensors in another way"]
    if not skeleton.config.get_text_config(decoder=True).tie_word_embeddings:
        if head is None:
            raise ValueError(
                f"the config says that the head is not tied, but the target's files hold no head beside {embedding}."
            )
        return [f"embedding {embedding} and head {head}: in the target's files"]
    if head is not None:
        if not torch.equal(read_tensor(target, revision, files, head), read_tensor(target, revision, files, embedding)):
            raise ValueError(
                f"the config says that the head is tied, but {head} differs from {embedding} in the target's files. Which of "
                "them is used depends on the loader; save the target again."
            )
        return [f"tied head {head}: equal to {embedding}"]
    return [f"tied head: {embedding}"]


def borrowed_names(skeleton, files: dict[str, str]) -> tuple[str | None, str | None]:
    """The names of embedding and head in the target's files, None where they are not there."""
    names = {id(module): name for name, module in skeleton.named_modules()}
    borrowed = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    return tuple(_in_files(f"{names[id(module)]}.weight", files) for module in borrowed)


def _in_files(name: str, files: dict[str, str]) -> str | None:
    """The file's name of a tensor: prefixes differ between a model's modules and older checkpoints of it."""
    tail = "." + ".".join(name.split(".")[-2:])
    found = [entry for entry in files if entry == name] or [entry for entry in files if f".{entry}".endswith(tail)]
    return found[0] if len(found) == 1 else None


def copy_target_layers(drafter: DFlashDraftModel, target: str, skeleton, depth: int, revision: str | None) -> str:
    """Start the drafter's layers from the target's last ones, and its final norm from the target's.

    Raises:
        ValueError: the target's layers are not Qwen3-style layers of the drafter's shapes.
    """
    count = len(drafter.layers)
    if count > depth:
        raise ValueError(f"--from-target-layers: the target has {depth} layers, the drafter wants {count}.")
    if skeleton.config.get_text_config(decoder=True).model_type.startswith("gemma"):
        raise ValueError("--from-target-layers: a Gemma norm multiplies by 1 + weight, a drafter's by its weight.")
    files = weight_files(target, revision)
    embedding = {id(m): n for n, m in skeleton.named_modules()}[id(skeleton.get_input_embeddings())]
    embedding = _in_files(f"{embedding}.weight", files)
    if embedding is None:
        raise ValueError("--from-target-layers: the target has no safetensors files with its embedding in them.")
    prefix = embedding.removesuffix("weight").rstrip(".").rpartition(".")[0]  # "model" of "model.embed_tokens.weight"
    wanted = {}
    for name in drafter.state_dict():
        if name == "norm.weight":
            wanted[name] = f"{prefix}.norm.weight"
        elif name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            wanted[name] = f"{prefix}.layers.{depth - count + int(index)}.{rest}"
    if strange := sorted(
        name
        for layer in range(depth - count, depth)
        for name in files
        if name.startswith(f"{prefix}.layers.{layer}.") and name not in wanted.values() and "rotary" not in name
    ):
        raise ValueError(
            f"--from-target-layers: the target's layers hold {strange[0]}, which a drafter has no place for."
        )
    kept = [name for name, source in wanted.items() if source not in files]
    if missing := [name for name in kept if not name.endswith(("q_norm.weight", "k_norm.weight"))]:
        raise ValueError(f"--from-target-layers: the target's files hold no {wanted[missing[0]]}.")
    state = drafter.state_dict()
    for name in wanted.keys() - set(kept):
        value = read_tensor(target, revision, files, wanted[name])
        if value.shape != state[name].shape:
            raise ValueError(
                f"--from-target-layers: {wanted[name]} is {tuple(value.shape)}, the drafter's {name} "
                f"{tuple(state[name].shape)}."
            )
        state[name].copy_(value)
    fresh = "; fresh: q_norm, k_norm" if kept else ""  # ones: the target has none
    return f"{len(wanted) - len(kept)} tensors from the target's last {count} layers and final norm{fresh}"
