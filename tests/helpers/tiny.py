"""Tiny random targets and drafters, seeded and made in place, and where the repository's files are."""

from pathlib import Path

import torch
import transformers
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.hub_files import code_files

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
# The code that every drafter's folder carries.
CODE = [path.name for path in code_files(ROOT)]
FIXTURE = SHARED / "fixtures" / "smollm2-dflash"
VOCAB = 97
LAYERS = 4
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral")
DRAFTERS = ("random", "half-right", "oracle")
# DFlash 2's parts, at the size of a tiny drafter.
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 8}
SELECTOR = {"selector_rank": 4, "selector_top_k": 6}
# DSpark's, by the kind of its Markov head: with a confidence head that looks at all there is.
DSPARK = {
    kind: {"markov_rank": 4, "markov_head_type": kind, "confidence_head": "hidden+markov", "sample_from_anchor": True}
    for kind in ("vanilla", "gated", "rnn")
}


def tiny_target(family: str, seed: int = 0, **overrides):
    """A random causal LM in float32; initialized widely, so that its greedy text varies and has no near ties."""
    size = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    own = {
        "qwen3": {"head_dim": 8},
        "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "mistral": {"head_dim": 8, "sliding_window": 8},
    }
    config = transformers.CONFIG_MAPPING[family](**size | own.get(family, {}) | overrides)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_config(**overrides) -> DFlashConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0},
        "block_size": 5,
        "mask_token_id": 96,
        "target_layer_ids": [0, 1, 2],
        "num_target_layers": LAYERS,
        "initializer_range": 0.3,
    }
    fields |= overrides
    # Tests count rounds and drafts: a fixed number, unless a test is about the choice.
    most = fields["block_size"] - (not fields.get("sample_from_anchor", False))
    return DFlashConfig(**{"num_draft_tokens": most} | fields)


def tiny_drafter(seed: int = 1, dtype=torch.float32, **overrides) -> DFlashDraftModel:
    torch.manual_seed(seed)
    model = DFlashDraftModel(tiny_config(**overrides)).eval()
    with torch.no_grad():  # norms of one hide a norm that is not applied
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif "_conv." in name or name.startswith("candidate_selector."):  # fresh ones change nothing
                parameter.normal_(std=0.3 if "_conv." in name else 1.0)
            elif name.startswith(("markov_head.", "confidence_head.")):
                parameter.normal_(std=1.0 if "_w" in name else 0.5)
    return model.to(dtype)


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def expected_cut(
    plain: torch.Tensor, prompt_length: int, max_new_tokens: int, eos: set[int] = frozenset()
) -> list[int]:
    """What plain greedy decoding gives with a smaller limit or with end tokens, from its longest text without any."""
    text = plain[0, : prompt_length + max_new_tokens].tolist()
    for index in range(prompt_length, len(text)):
        if text[index] in eos:
            return text[: index + 1]
    return text
