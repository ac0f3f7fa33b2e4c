"""Tiny EAGLE-3 heads: random ones, ones that know their target, and the folders that three stacks write."""

import json
import math
from pathlib import Path

import torch
from dflash_hub.benchmark.baselines.eagle3_model import Eagle3DraftModel, Eagle3Options
from dflash_hub.drafter_heads import Candidates
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel

from helpers.tiny import VOCAB, tiny_target

FIELDS = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


class WatchedHead(Eagle3DraftModel):
    """Keeps the logits of each step that it scored."""

    def candidates(self, hidden_states: torch.Tensor) -> Candidates:
        found = super().candidates(hidden_states)
        self.__dict__.setdefault("scored", []).append(found.logits.clone())
        return found


def tiny_head(seed: int = 1, listed: list[int] | None = None, fields: dict | None = None, **options) -> WatchedHead:
    """A random head for the tiny targets.

    Args:
        listed: token ids of its draft vocabulary; None for the whole one.
        fields: of its layer, beside `FIELDS`.
    """
    fields = FIELDS | (fields or {})
    options = {"target_layer_ids": [0, 1, 2], "target_hidden_size": 32} | options
    count = fields["vocab_size"] if listed is None else len(listed)
    torch.manual_seed(seed)
    head = WatchedHead(
        LlamaConfig(**fields), Eagle3Options(draft_vocab_size=count, listed=listed is not None, **options)
    )
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.3)
        if listed is not None:
            head.d2t.copy_(torch.tensor(listed) - torch.arange(len(listed)))
    return head.requires_grad_(False).eval()


def bigram_target(vocab: int = 32, seed: int = 0):
    """A target whose next token depends on the last one alone: its hidden states are one-hot embeddings, in every layer."""
    target = tiny_target("llama", seed, vocab_size=vocab, hidden_size=vocab)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.embed_tokens.weight.copy_(torch.eye(vocab))
        target.lm_head.weight.normal_(std=0.4, generator=torch.Generator().manual_seed(seed))
    return target


def knowing_head(target, kind: str, listed: list[int] | None = None) -> WatchedHead:
    """A head of the bigram target that repeats it (oracle), misses tokens of odd ids (half-right), or is random.

    Its attention takes the pair's own token, less the one of the hidden state; with the residual the output is the token's
    embedding. So it is right only where features, tokens and its own outputs are fed in their right places.
    """
    vocab = target.config.vocab_size
    fields = {"vocab_size": vocab, "hidden_size": vocab, "num_key_value_heads": 4}
    head = tiny_head(listed=listed, fields=fields, target_hidden_size=vocab)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.zero_()
        layer, one = (
            head.midlayer,
            torch.eye(vocab) / math.sqrt(vocab),
        )  # the norm of a one-hot vector is longer than it
        head.fc.weight.copy_(torch.cat([torch.zeros(vocab, vocab), torch.eye(vocab), torch.zeros(vocab, vocab)], dim=1))
        layer.self_attn.q_proj.weight[:, :vocab] = layer.self_attn.k_proj.weight[:, :vocab] = (
            8.0  # the same everywhere: the
        )
        layer.self_attn.v_proj.weight.copy_(torch.cat([one, -one], dim=1))  # nearest key wins, the pair's own
        layer.self_attn.o_proj.weight.copy_(torch.eye(vocab))
        rows = target.lm_head.weight if listed is None else target.lm_head.weight[listed]
        head.lm_head.weight.copy_(rows)
        if kind == "random":
            head.lm_head.weight.normal_(generator=torch.Generator().manual_seed(9))
        elif kind == "half-right":
            odd = [i for i in range(len(rows)) if (i if listed is None else listed[i]) % 2]
            head.lm_head.weight[odd] = rows[[*odd[1:], odd[0]]]
    return head


# ------------------------------------------------------------------------------------------------------------------
# The definition, without caches: one pair after the other, in plain loops.


def _rms(values: torch.Tensor, norm) -> torch.Tensor:
    return values / (values.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def _turned(vector: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = vector.shape[-1] // 2
    angles = position / theta ** (torch.arange(half) * 2 / vector.shape[-1])
    left, right = vector[..., :half], vector[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def _outputs(head, hidden: list[torch.Tensor], embeds: list[torch.Tensor]) -> torch.Tensor:
    """Output of the layer at the last pair."""
    layer, options, config = head.midlayer, head.options, head.config
    attention, theta = layer.self_attn, config.rope_parameters["rope_theta"]
    size, keys, values = config.head_dim, [], []
    for position, (state, embed) in enumerate(zip(hidden, embeds)):
        pair = torch.cat([_rms(embed, layer.input_layernorm), _rms(state, layer.hidden_norm)])
        query, key = attention.q_proj(pair).view(-1, size), attention.k_proj(pair).view(-1, size)
        if options.qk_norm:
            query, key = _rms(query, attention.q_norm), _rms(key, attention.k_norm)
        keys.append(_turned(key, position, theta))
        values.append(attention.v_proj(pair).view(-1, size))
    query = _turned(query, len(hidden) - 1, theta)
    heads = []
    for index in range(len(query)):
        group = index * config.num_key_value_heads // config.num_attention_heads
        weights = torch.stack([key[group] @ query[index] / math.sqrt(size) for key in keys]).softmax(0)
        heads.append(sum(weight * value[group] for weight, value in zip(weights, values)))
    residual = _rms(hidden[-1], layer.hidden_norm) if options.norm_before_residual else hidden[-1]
    between = residual + attention.o_proj(torch.cat(heads))
    normed = _rms(between, layer.post_attention_layernorm)
    mlp = layer.mlp
    return between + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def steps_of(head, embedding, states: list[torch.Tensor], tokens: list[int], drafted: list[int]) -> list[torch.Tensor]:
    """Logits (L) of a chain's steps by the definition.

    Args:
        states: target hidden states by target layer, each (length, Ht), of all tokens but the last.
        tokens: (length + 1) of the text.
        drafted: tokens that were drafted behind it, which the steps after the first read.
    """
    options, parts = head.options, [*states]
    if options.fc_norm:
        parts = [_rms(part, norm) for part, norm in zip(parts, head.fc_norm)]
    joined = torch.cat(parts, dim=-1)
    joined = _rms(joined, head.input_norm) if options.norm_before_fc else joined
    hidden, embeds = [*head.fc(joined)], [embedding.weight[token] for token in tokens[1:]]
    logits = []
    for token in [*drafted, None]:
        output = _outputs(head, hidden, embeds)
        normed = _rms(output, head.norm)
        logits.append(head.lm_head(normed))
        if token is not None:
            hidden.append(normed if options.norm_output else output)
            embeds.append(embedding.weight[token])
    return logits


def features_of(target: PreTrainedModel, ids: torch.LongTensor, layers: list[int]) -> list[torch.Tensor]:
    """Target hidden states (length, Ht) of one text (1, length), by target layer."""
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    return [states[layer + 1][0] for layer in layers]


# ------------------------------------------------------------------------------------------------------------------
# Folders.

LAYOUTS = ("safeailab", "specforge", "nemo", "modelopt", "speculators", "deepspec")


def stated_by(layout: str, head: Eagle3DraftModel) -> dict:
    """config.json of a head as a stack writes it."""
    options, fields = (
        head.options,
        FIELDS | {"vocab_size": head.config.vocab_size, "hidden_size": head.config.hidden_size},
    )
    flags = {
        name: True
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if getattr(options, name)
    }
    vocabulary = {"draft_vocab_size": options.draft_vocab_size}
    if layout == "speculators":
        layer = fields | {"model_type": "qwen3" if options.qk_norm else "llama"}
        indices = [layer_id + 1 for layer_id in options.target_layer_ids]
        return {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
            "eagle_aux_hidden_state_layer_ids": indices, "norm_before_residual": False, **vocabulary, **flags,
        }  # fmt: skip
    if layout == "deepspec":
        own = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "ttt_length": 7, "step_loss_decay": 0.8}
        return (
            fields
            | own
            | {"target_layer_ids": options.target_layer_ids, "num_target_layers": 4, "layer_types": ["full_attention"]}
        )
    names = {"safeailab": "LlamaForCausalLM", "nemo": "LlamaEagle3DraftModel"}
    stated = (
        fields
        | {"architectures": [names.get(layout, "LlamaForCausalLMEagle3")], "model_type": "llama"}
        | vocabulary
        | flags
    )
    if layout == "modelopt":
        stated["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": options.target_layer_ids, "use_aux_hidden_state": True, "use_last_layernorm": True,
            "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        }  # fmt: skip
    else:
        stated["eagle_aux_hidden_state_layer_ids"] = [layer_id + 1 for layer_id in options.target_layer_ids]
    return stated | ({"norm_output": True} if layout == "specforge" else {})


def write_head(folder: Path, layout: str, head: Eagle3DraftModel, **stated) -> Path:
    """Write a head as a stack does; `stated` replaces fields of its config.json, None takes them away."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in (stated_by(layout, head) | stated).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone().contiguous() for name, tensor in head.state_dict().items()}
    if head.d2t is not None:
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][head.token_ids] = True
    if layout not in ("safeailab", "specforge"):
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if layout == "nemo":
        kept = ("lm_head.", "d2t", "t2d")
        tensors = {name if name.startswith(kept) else f"model.{name}": tensor for name, tensor in tensors.items()}
    if layout == "safeailab":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder
