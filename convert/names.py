"""Names of tensors, format by format: one table, read in both directions.

A drafter has `fc`, `hidden_norm`, `norm` and its layers, with Qwen3's names. Formats differ in two names, in prefixes, and in
what they keep beside the drafter. Everything else is an error: a tensor that is not used is a part that is not computed.
"""

from dataclasses import dataclass

import torch

from ..configuration_dflash import DFlashConfig
from ..drafter_vocabulary import check_token_ids, token_ids_of
from ..modeling_dflash import DFlashDraftModel, DFlashRotaryEmbedding
from .checkpoint import DTYPES, InMemory, SpreadRows, Stored

# By format, the drafter's names that it spells in another way. All others are the same everywhere.
RENAMED = {
    "dflash-hub": {},
    "zlab": {},
    "speculators": {},
    "dspark": {},
    "transformers": {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"},
    "gguf": {
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
        "embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    },
}
# By format, how it spells what stands behind `layers.N.`, and how it spells `layers` itself.
LAYERS_RENAMED = {
    "gguf": (
        "blk",
        {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "attention_conv.base_kernel": "attn_conv_base",
            "attention_conv.kernel_projection": "attn_conv_proj",
            "mlp_conv.base_kernel": "ffn_conv_base",
            "mlp_conv.kernel_projection": "ffn_conv_proj",
        },
    ),
}
# Wrappers that training stacks leave in front of a name, however deep.
PREFIXES = ("module.", "model.", "draft_model.", "dflash_module.", "_orig_mod.", "_fsdp_wrapped_module.")
# Projections that Laguna's layout keeps in one tensor: the rows of one after the other.
FUSED = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
# What is in a file beside the drafter, and computes nothing of it.
TRAINING_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")
# The target's own tensors, which a drafter borrows: compared with the target's, and not kept.
BORROWED = ("embed_tokens.weight", "lm_head.weight")
ROPE_TABLE = "rotary_emb.inv_freq"
# Names that some writer gives to one of ours: a bare module of z-lab's keeps its codebooks in embeddings.
ALIASES = {
    f"candidate_selector.{name}.weight": f"candidate_selector.{name}"
    for name in ("predecessor_codebook", "successor_codebook")
}
# Of DSpark's heads, in older files of SpecForge's.
HEADS = [f"markov_head.{name}.weight" for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")]
HEADS += [
    "markov_head.gate_proj.bias",
    "markov_head.joint_proj.bias",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
]
ALIASES |= {f"logit_head.{name}": name for name in HEADS}
# The one table of a Markov head whose rows are the tokens that can be drafted; the other's are those of the target.
DRAFTED_ROWS = "markov_head.markov_w2.weight"
# The tokens of a reduced vocabulary once more, as a mask over the target's.
LISTED_MASK = "t2d"
# Parts that a drafter has where its config states them.
STATED_PARTS = {
    "attention_conv": "the convolutions of DFlash 2, but the config states no `conv_kernel_size`",
    "mlp_conv": "the convolutions of DFlash 2, but the config states no `conv_kernel_size`",
    "candidate_selector": "the path selector of DFlash 2, but the config states no `selector_rank`",
    "markov_head": "DSpark's Markov head, of which the config states no such tensor (`markov_rank`, `markov_head_type`)",
    "confidence_head": "DSpark's confidence head, but the config states no `confidence_head`",
}

# Tensors that belong to another network, by a part of their name.
UNSUPPORTED_TENSORS = {
    "attention_sink_bias": "attention sinks",
    ".sinks": "attention sinks",
    "mask_embedding": "a learned mask embedding",
    "mask_hidden": "a learned mask embedding",
    "prefix_gru": "Domino's GRU head",
    "embed_proj": "Domino's GRU head",
    "logit_head": "an older Domino or DSpark head",
    "g_proj": "Laguna's gates on the attention",
    "aux_hidden_norms": "Laguna's norms on the target hidden states",
    "d2t": "the list of a reduced draft vocabulary whose size the config does not state (`draft_vocab_size`)",
    "t2d": "the list of a reduced draft vocabulary whose size the config does not state (`draft_vocab_size`)",
    "fc.bias": "a bias on the context projection",
    "weight_scale": "quantized weights",
    "input_scale": "quantized weights",
    "qweight": "quantized weights",
    "embed_norm": "a norm on the embeddings",
    "midlayer": "a layer of EAGLE",
}


@dataclass
class Match:
    """What becomes of each tensor of a file.

    Attributes:
        drafter: our name to the tensor, complete and of the right shapes.
        borrowed: copies of the target's tensors, to be compared with it.
        listed: token ids of a reduced draft vocabulary, whose rows of the head a file holds; None where there is none.
        lines: a line a tensor of the file, for people.
    """

    drafter: dict[str, Stored | InMemory]
    borrowed: dict[str, Stored | InMemory]
    lines: list[tuple[str, str]]
    listed: torch.LongTensor | None = None


def expected_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Our names and shapes of a drafter's tensors; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(config).state_dict().items()}


def match(
    layout: str, tensors: dict[str, Stored | InMemory], expected: dict[str, tuple], config: DFlashConfig, source: str
) -> Match:
    """Find a drafter's tensors among those of a file.

    Args:
        expected: what `expected_shapes` says for `config`.

    Raises:
        ValueError: one is missing, misshaped, of no float type, belongs to another network, or to nothing; all are named.
    """
    if reduced := layout in ("speculators", "dspark") and config.draft_vocab_size and DRAFTED_ROWS in expected:
        expected = expected | {DRAFTED_ROWS: (config.draft_vocab_size, config.markov_rank)}
    ours_of = {spelled(layout, ours): ours for ours in (*expected, *BORROWED)}
    found, borrowed, lines, faults, mask = {}, {}, [], [], None
    for full_name, tensor in sorted(tensors.items()):
        name = _without_prefixes(full_name)
        name = ours_of.get(name, ALIASES.get(name, name))
        parts = {name: tensor}
        for fused, names in FUSED.items():
            if f".{fused}." in name:
                parts = _split(name, tensor, fused, names, expected)
        rope_table = name.endswith(ROPE_TABLE)
        if name in TRAINING_ONLY:
            lines.append((full_name, "dropped: only training uses it"))
        elif name == LISTED_MASK and config.draft_vocab_size is not None:
            mask = tensor
            lines.append((full_name, "dropped: says the same as d2t"))
        elif not (rope_table or name in BORROWED or set(parts) <= set(expected)):
            faults.append(_fault(full_name, name))
        elif tensor.code not in (DTYPES if name != "d2t" else ("I64",)):
            expected_types = ", ".join(DTYPES) if name != "d2t" else "I64, offsets"
            faults.append(f"{full_name} is {tensor.code}; expected one of {expected_types}")
            found |= parts
        elif rope_table:
            faults += _check_rope(full_name, tensor, config)
            lines.append((full_name, "dropped: equal to what the config says"))
        elif name in BORROWED:
            rows = config.vocab_size if name != "lm_head.weight" else config.draft_vocab_size or config.vocab_size
            shape = [rows, config.hidden_size]
            if list(tensor.shape) != shape:
                faults.append(f"{full_name} has shape {list(tensor.shape)}; the config says {shape}")
            borrowed[name] = tensor
            lines.append((full_name, "dropped: the target's own, compared with it"))
        else:
            for ours, piece in parts.items():
                if ours in found:
                    faults.append(f"{full_name} is there a second time, as {found[ours].name}")
                elif tuple(piece.shape) != expected[ours]:
                    faults.append(f"{full_name} has shape {list(tensor.shape)}; the config says {list(expected[ours])}")
                found[ours] = piece
            lines.append((full_name, ", ".join(parts)))
    faults += [f"missing: {name}" for name in expected if name not in found]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise ValueError(
            f"the weights in {source!r} are not those of this drafter ({shown}). Expected exactly fc, hidden_norm, norm and "
            f"{config.num_hidden_layers} layers with Qwen3's names and the shapes that its config states."
        )
    listed = _listed(found["d2t"], mask, config, source) if "d2t" in found else None
    if reduced:  # tokens of the text, which are drafted too, have no row there
        found[DRAFTED_ROWS] = SpreadRows(found[DRAFTED_ROWS], listed, config.vocab_size)
    return Match({name: found[name] for name in expected}, borrowed, lines, listed)


def _listed(
    d2t: Stored | InMemory, mask: Stored | InMemory | None, config: DFlashConfig, source: str
) -> torch.LongTensor:
    """Return the token ids of a reduced draft vocabulary; raise a ValueError where they are none, or its mask has others."""
    token_ids = token_ids_of(d2t.whole()).cpu()
    try:
        check_token_ids(token_ids, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"`d2t` of {source!r}: {error}") from error
    if mask is not None:
        told = torch.zeros(config.vocab_size, dtype=torch.bool)
        told[token_ids] = True
        if mask.code != "BOOL" or not torch.equal(mask.whole().cpu(), told):
            raise ValueError(f"{source!r}: `t2d` is no mask of the tokens that `d2t` lists; one of the two is wrong.")
    return token_ids


def _fault(full_name: str, name: str) -> str:
    """Say what a tensor is that has no place in a drafter."""
    for piece, part in STATED_PARTS.items():
        if piece in name:
            return f"{full_name} is of {part}"
    part = next((part for piece, part in UNSUPPORTED_TENSORS.items() if piece in name), None)
    return f"{full_name} is {part}, which is not supported" if part else f"unexpected: {full_name}"


def renamed(layout: str, tensors: dict[str, Stored | InMemory]) -> dict[str, Stored | InMemory]:
    """Tensors by our names to tensors by the layout's."""
    return {spelled(layout, name): tensor for name, tensor in tensors.items()}


def spelled(layout: str, name: str) -> str:
    """Return how a layout spells one of our names."""
    if layout in LAYERS_RENAMED and name.startswith("layers."):
        layers, parts = LAYERS_RENAMED[layout]
        _, index, part = name.split(".", 2)
        if part in parts:
            return f"{layers}.{index}.{parts[part]}"
        part, kind = part.rsplit(".", 1)
        return f"{layers}.{index}.{parts.get(part, part)}.{kind}"
    return RENAMED[layout].get(name, name)


def _without_prefixes(name: str) -> str:
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _split(name: str, tensor, fused: str, names: tuple[str, ...], expected: dict) -> dict:
    """The rows of a fused projection as the projections that it holds; left whole where the rows do not add up."""
    parts = [name.replace(fused, single) for single in names]
    rows = [expected[part][0] for part in parts if part in expected]
    if len(rows) != len(parts) or not tensor.shape or sum(rows) != tensor.shape[0]:
        return {name: tensor}
    return {part: tensor.rows(sum(rows[:i]), rows[i]) for i, part in enumerate(parts)}


def _check_rope(name: str, tensor, config: DFlashConfig) -> list[str]:
    # Shapes first: either of the two may claim to be a giant.
    if tuple(tensor.shape) != (config.head_dim // 2,):
        return [f"{name} has shape {list(tensor.shape)}; the config says {[config.head_dim // 2]}"]
    if not torch.allclose(tensor.whole().float(), DFlashRotaryEmbedding(config).inv_freq.float(), rtol=0.02):
        return [f"{name} holds other RoPE frequencies than the config states; one of the two is wrong"]
    return []
