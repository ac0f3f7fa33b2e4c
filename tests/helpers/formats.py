"""Drafters of every kind that checkpoint formats tell apart, and configs as other stacks write them."""

import torch

from helpers.tiny import CONVOLUTION, DSPARK, SELECTOR, tiny_drafter

FULL, SLIDING = "full_attention", "sliding_attention"


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


# Drafters by what is special about them, and the formats that can say it.
KINDS = {
    "plain": ({}, {"zlab", "speculators", "transformers", "gguf"}),
    "bias, yarn": ({"attention_bias": True, "rope_parameters": YARN}, {"zlab", "speculators"}),
    "mixed": ({"layer_types": [SLIDING, FULL], "sliding_window": 8}, {"zlab", "speculators"}),
    "sliding, bidirectional": (
        {"layer_types": [SLIDING] * 2, "sliding_window": 8, "block_causal": [False] * 2},
        {"zlab", "speculators", "transformers", "gguf"},
    ),
    "sliding, causal": ({"layer_types": [SLIDING] * 2, "sliding_window": 8}, {"zlab", "speculators", "gguf"}),
    "mixed, bidirectional": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 8, "block_causal": [False] * 2, "rope_parameters": YARN},
        {"zlab", "speculators", "transformers", "gguf"},
    ),
    "full, causal": ({"block_causal": [True, True]}, {"zlab", "gguf"}),
    "scaled": (
        {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0},
        {"zlab", "gguf"},
    ),
    # Five candidates: llama.cpp keeps their scores in a row of hidden states.
    "DFlash 2": (CONVOLUTION | SELECTOR | {"selector_top_k": 5}, {"zlab", "speculators", "gguf"}),
    "selector": (SELECTOR, set()),
    **{f"DSpark, {kind}": (fields, {"dspark", "speculators"}) for kind, fields in DSPARK.items()},
    "DSpark, fill-in, sliding": (
        DSPARK["gated"]
        | {"sample_from_anchor": False, "confidence_head": "hidden"}
        | {"layer_types": [SLIDING] * 2, "sliding_window": 8, "block_causal": [False] * 2},
        {"dspark", "speculators"},
    ),
    "anchor-first": ({"sample_from_anchor": True}, {"dspark", "speculators"}),
    "other heads, deeper": (
        {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "block_size": 7},
        {"zlab", "speculators", "transformers", "gguf"},
    ),
}


# Those that engines read as plain DFlash.
SERVED = [
    kind
    for kind in KINDS
    if kind not in ("scaled", "selector") and "DFlash 2" not in kind and KINDS[kind][1] & {"zlab"}
]


def drafter_of(folder, kind: str = "plain", dtype=torch.bfloat16, **overrides):
    # "auto" is the default, and what a format that has no place for it comes back with.
    drafter = tiny_drafter(dtype=dtype, **{"num_draft_tokens": "auto"} | KINDS[kind][0] | overrides)
    drafter.save_pretrained(folder)
    return drafter


def release(layers, block, mask, taps, target_layers, hidden, heads, kv, head_dim, ffn, nested_block=False, **more):
    """config.json of a release, from the published table; unnamed values are z-lab's usual ones."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "layer_types": [FULL] * layers,
        "max_window_layers": layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "num_target_layers": target_layers,
        "vocab_size": 151936,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }
    (config["dflash_config"] if nested_block else config)["block_size"] = block
    nested = more.pop("nested", {})
    config["dflash_config"] |= nested
    config |= more
    return {key: value for key, value in config.items() if value != "absent"}


def sliding(layers, window, full=()):
    types = [FULL if layer in full else SLIDING for layer in range(layers)]
    return {"layer_types": types, "sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


QWEN35 = {"rope_theta": 10000000, "max_position_embeddings": 262144, "vocab_size": 248320}


GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "vocab_size": 201088, "rope_theta": 150000,
    "max_position_embeddings": 131072, "initial_context_length": 4096,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip


KIMI_YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


TAPS_64 = [1, 16, 31, 46, 61]


READ = {
    "Qwen3-4B": release(5, 16, 151669, [1, 9, 17, 25, 33], 36, 2560, 32, 8, 128, 9728, tie_word_embeddings=True),
    "Qwen3-8B": release(5, 16, 151669, [1, 9, 17, 25, 33], 36, 4096, 32, 8, 128, 12288),
    "Qwen3-Coder-30B-A3B": release(
        8, 16, 151669, [1, 12, 23, 34, 45], 48, 2048, 32, 4, 128, 6144, max_position_embeddings=262144
    ),
    "LLaMA3.1-8B-Instruct-UltraChat": release(
        5, 10, 128002, [1, 8, 15, 22, 29], 32, 4096, 32, 8, 128, 14336, vocab_size=128256, rope_theta=500000
    ),
    "gpt-oss-20b": release(8, 8, 200000, [1, 6, 11, 16, 21], 24, 2880, 64, 8, 64, 7680, **GPT_OSS),
    "gpt-oss-120b": release(8, 10, 200000, [1, 9, 17, 25, 33], 36, 2880, 64, 8, 64, 7680, **GPT_OSS),
    "Qwen3.5-4B": release(5, 16, 248070, [1, 8, 15, 22, 29], 32, 2560, 32, 8, 128, 9728, **QWEN35),
    "Qwen3.5-9B": release(5, 16, 248070, [1, 8, 15, 22, 29], 32, 4096, 32, 8, 128, 12288, **QWEN35),
    "Qwen3.5-27B": release(
        6, 16, 248070, TAPS_64, 64, 5120, 32, 8, 128, 17408, **QWEN35, **sliding(6, 4096, full=[5])
    ),
    "Qwen3.5-35B-A3B, older": release(8, 16, 248070, [1, 10, 19, 28, 37], 40, 2048, 32, 4, 128, 6144, **QWEN35),
    "Qwen3.5-35B-A3B, newer": release(
        6, 16, 248077, [1, 6, 11, 16, 22, 27, 32, 37], 40, 2048, 32, 8, 128, 6144, nested_block=True, **QWEN35,
        **sliding(6, 4096, full=[5]),
    ),
    "Qwen3.6-27B": release(
        5, 16, 248070, TAPS_64, 64, 5120, 32, 8, 128, 17408, **QWEN35, **sliding(5, 2048, full=[4])
    ),
    "Kimi-K2.5": release(
        6, 8, 163838, [1, 12, 24, 35, 47, 58], 61, 7168, 64, 8, 128, 18432, vocab_size=163840, rope_theta=50000,
        max_position_embeddings=262144, rope_scaling=KIMI_YARN, bos_token_id=163584, eos_token_id=163585,
    ),
    "gemma-4-26B": release(
        5, 16, 4, [1, 6, 11, 17, 22, 27], 30, 2816, 16, 8, 128, 8192, vocab_size=262144, bos_token_id=2,
        eos_token_id=1, **sliding(5, 2048, full=[4]),
        nested={"input_embedding_scale": 53.066, "final_logit_softcapping": 30.0},
    ),
}  # fmt: skip
