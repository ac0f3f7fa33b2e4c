"""Tiny random targets of every family that transformers has a causal language model for, and a trial of each.

python tests/helpers/families.py docs/families.md            # all families: writes the table
python tests/helpers/families.py docs/families.md llama ...   # some of them, printed only
"""

import re
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path

import dflash_hub
import torch
import transformers
from dflash_hub import DFlashConfig, DFlashDraftModel, speculative_generate
from dflash_hub.convert.init import _first, derive_config, target_skeleton
from dflash_hub.target_model import CACHE
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it runs as a script
from helpers.scripted import scripted
from helpers.trees import TREES, ScriptedTrees

VOCAB, LAYERS = 97, 6
VERDICTS = ("exact", "lockstep", "chain", "refused", "wrong", "not tried")
TAPS = [1, 2, 3]
ROOT = Path(dflash_hub.__file__).resolve().parent

# Sizes by the names that families give to them; a family takes those that its configuration has.
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "n_embd": 32, "d_model": 32, "embed_dim": 32, "dim": 32,
    "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64, "d_ff": 64, "ffn_hidden_size": 64, "hidden_dim": 64,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24, "intermediate_size_mlp": 64, "shared_intermediate_size": 24,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "num_layers": LAYERS, "n_layers": LAYERS,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256, "n_ctx": 256, "sliding_window": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "num_experts_per_token": 2, "top_k_experts": 2, "n_shared_experts": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "word_embed_proj_dim": 32,
    "rotary_dim": 8, "attention_hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "lru_width": 32,
    "attention_window_size": 8, "state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
    "num_global_key_value_heads": 2, "global_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
    "initializer_range": 0.3, "init_std": 0.3, "emb_pdrop": 0.0, "embedding_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma2": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma3_text": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "smollm3": {"no_rope_layers": [1, 0] * 3},
    "dory": {"n_input_layers": 4, "n_output_layers": 4, "n_recurrent_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_chunk_size": 8},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 8,
    },
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [64] * 6,
    },
    "mamba2": {"expand": 2, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": {"n_groups": 1, "chunk_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "ministral": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
}  # fmt: skip


def tiny_config(model_type: str, layers: int = LAYERS, **overrides):
    """The family's configuration at a tiny size, whatever it calls its sizes."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    if default.is_encoder_decoder:
        target_skeleton(default)  # refuses, with the package's sentence
    sizes = _cut(small_sizes(default) | OWN.get(model_type, {}), layers) | overrides
    while True:
        try:
            return config_class(**sizes)
        except AttributeError as error:  # a size that the family derives from others
            derived = re.search(r"property '(\w+)' of .* has no setter", str(error))
            name = derived and ("layer_types" if derived[1] == "layers_block_type" else derived[1])
            if name not in sizes:
                raise
            del sizes[name]


def _cut(sizes: dict, layers: int) -> dict:
    """The same sizes for fewer layers."""
    cut = {}
    for name, value in sizes.items():
        if isinstance(value, dict):
            value = _cut(value, layers)
        elif name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            value = layers
        elif isinstance(value, list) and len(value) == LAYERS:
            value = value[:layers]
        cut[name] = value
    return cut


def small_sizes(default) -> dict:
    """Keyword arguments that make a configuration like `default` tiny; its parts are made tiny the same way."""
    sizes = {name: value for name, value in SMALL.items() if _first(default, name, default=None) is not None}
    for name in default.sub_configs:
        if (part := getattr(default, name, None)) is not None and name != "backbone_config":
            more = {} if name.startswith("text") else {"depth": 2, "out_hidden_size": 32, "projection_dim": 32}
            kept = {key: value for key, value in more.items() if getattr(part, key, None) is not None}
            sizes[name] = small_sizes(part) | kept
    if getattr(default, "is_decoder", None) is False:
        sizes["is_decoder"] = True  # the BERT family can be set up as a decoder
    if hasattr(default, "kv_lora_rank"):  # latent attention derives its head size, and every head has keys of its own
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = 4
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        sizes[name] = SMALL[name]
    layer_types = getattr(default, "layer_types", None)
    if layer_types and "num_hidden_layers" in sizes:
        kinds = list(dict.fromkeys(layer_types))
        sizes["layer_types"] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    return sizes


def tiny_family(model_type: str, **overrides):
    """A random target of the family in float32, and the seeded drafter that `init` would derive for it."""
    config = tiny_config(model_type, **overrides)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > 5_000_000:
        raise NotImplementedError(f"{parameters / 1e6:.0f} M parameters with the sizes that this file knows")
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    target.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    return target, drafter_for(target)


def drafter_for(target, block_size: int = 5, **overrides) -> DFlashDraftModel:
    torch.manual_seed(1)
    taps = [tap for tap in TAPS if tap < target.config.get_text_config(decoder=True).num_hidden_layers - 1]
    config = derive_config(target, VOCAB - 1, 1, block_size, taps, None, [])
    fixed = {"num_draft_tokens": block_size - 1}  # counts are compared
    config = DFlashConfig.from_dict(config.to_dict(), **fixed | overrides)
    return with_random_parts(with_some_tokens(DFlashDraftModel(config).eval()))


def with_random_parts(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """Fill parts of DFlash 2 and DSpark that a fresh drafter leaves without effect."""
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "_conv." in name or name.startswith(("candidate_selector.", "markov_head.", "confidence_head.")):
                parameter.normal_(std=0.3)
    return drafter


def with_some_tokens(drafter: DFlashDraftModel) -> DFlashDraftModel:
    """Let a drafter that has a draft vocabulary list tokens from all over the vocabulary."""
    if count := drafter.config.draft_vocab_size:
        order = torch.randperm(drafter.config.vocab_size, generator=torch.Generator().manual_seed(4))
        drafter.set_draft_vocabulary(order[:count].sort().values)
    return drafter


class RoundedLayer(QuantizedLayer):
    """A quantized layer without a backend: coarse, so that what is quantized when shows in the text."""

    def __init__(self):
        super().__init__(residual_length=7)

    def _quantize(self, tensor, axis=0):
        return (tensor * 3).round() / 3

    def _dequantize(self, tensor):
        return tensor


def caches(name: str, target) -> dict:
    """Arguments of generate that ask for a kind of cache; a passed object is a new one each time."""
    if name in ("static", "dynamic"):
        return {"cache_implementation": name}
    config = target.config.get_text_config(decoder=True)
    made = {
        "passed dynamic": lambda: DynamicCache(config=config),
        "passed without a config": lambda: DynamicCache(),
        "passed static": lambda: StaticCache(config=config, max_cache_len=64),
        "quantized": lambda: Cache(layers=[RoundedLayer() for _ in range(config.num_hidden_layers)]),
        "fp8": lambda: Cache(
            layers=[transformers.cache_utils.Fp8QuantizedLayer() for _ in range(config.num_hidden_layers)]
        ),
    }
    return {CACHE: made[name]()}


def equal_texts(
    target, drafter, new_tokens=24, tokens_to_avoid=0, before=lambda: None, eos_token_id=None, seen=None, **inputs
):
    """None where random, half-right and oracle drafts all give plain greedy text with the right counts; else what is wrong.

    Args:
        seen: a dictionary that gets the statistics of each kind's call.
        inputs: of one sequence or a batch, and further arguments of `generate`.
    """
    inputs = inputs or ONE
    kwargs = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": eos_token_id}
    if tokens_to_avoid:  # placeholder tokens of other modalities
        kwargs["suppress_tokens"] = list(range(VOCAB - tokens_to_avoid, VOCAB))
    before()
    plain = _sequences(target.generate(**inputs, **kwargs))
    for kind in ("random", "half-right", "oracle"):
        assistant = scripted(drafter, kind, plain)
        before()
        text = _sequences(target.generate(**inputs, **kwargs, assistant_model=assistant))
        speculation = assistant.last_speculation
        if seen is not None:
            seen[kind] = speculation
        if not torch.equal(text, plain):
            return f"another text with a {kind} drafter"
        rounds = slice(None, -1 if eos_token_id else None)  # an end token may cut the last one
        if kind == "oracle" and [a[rounds] for a in speculation.accepted] != [d[rounds] for d in speculation.drafted]:
            return "an oracle's drafts were rejected"
        if kind != "random" and speculation.num_drafted > 8 and not speculation.num_accepted:
            return f"no draft of a {kind} drafter was accepted"
    return None


def _sequences(output) -> torch.LongTensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def padded_batch() -> dict:
    """Three prompts of different lengths, padded on the left."""
    mask = (torch.arange(12) >= torch.tensor([0, 5, 2])[:, None]).long()
    ids = torch.randint(3, VOCAB - 1, (3, 12), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids * mask, "attention_mask": mask}


ONE = {"input_ids": torch.randint(3, VOCAB - 1, (1, 12), generator=torch.Generator().manual_seed(2))}


def trial(model_type: str) -> tuple[str, str, str, str, str]:
    """Verdicts on one sequence, on a batch in lockstep, on a ragged batch and on draft trees, and a note.

    Exact; refused, with our sentence; wrong; or not tried, where no tiny target could be made or plain `generate` is no
    reference. A ragged batch can also be in lockstep: exact, but its sequences advance by the same counts all the same.
    """
    signal.setitimer(signal.ITIMER_PROF, 400)  # seconds of the processor: a family that hangs is not tried
    try:
        torch.manual_seed(0)
        target, drafter = tiny_family(model_type)
        target.generate(**ONE, max_new_tokens=4, do_sample=False)
    except Exception as error:  # a family whose tiny target needs care of its own; the table says so
        signal.setitimer(signal.ITIMER_PROF, 0)
        return (*["refused" if _ours(error) else "not tried"] * 4, _note(error))
    try:
        one = together = apart = tree = _verdict(target, drafter, 16, **ONE)
        if one[0] == "exact":  # what one sequence does not get, a batch does not
            # A returned cache is plain's, which keeps the sequences together.
            together = _verdict(target, drafter, 12, **padded_batch(), return_dict_in_generate=True)
            apart = _verdict(target, drafter, 12, **padded_batch())
            tree = _tree_verdict(target, drafter.config.target_layer_ids[:1])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    verdicts, notes = zip(one, ("exact", together[1]) if together[0] == "lockstep" else together, apart, tree)
    return (*verdicts, "; ".join(dict.fromkeys(filter(None, notes))))


def _tree_verdict(target, layer_ids: list[int]) -> tuple[str, str]:
    """A verdict on draft trees: exact; chain, where they are refused, with the reason; or wrong."""
    kwargs = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, **ONE}
    plain = _sequences(target.generate(**kwargs))
    for kind in TREES:
        proposer = ScriptedTrees(plain[0].tolist(), kind, VOCAB, target_layer_ids=layer_ids)
        try:
            text, speculation = speculative_generate(
                target, proposer, num_assistant_tokens=4, num_tree_nodes=9, **kwargs
            )
        except Exception as error:
            if "`num_tree_nodes=9`" in str(error):
                return "chain", "trees: " + re.search("not supported here: (.*). Leave", str(error))[1]
            return "wrong", _note(error)
        if not torch.equal(text, plain):
            return "wrong", f"another text with {kind} trees"
        full = [a for a, d in zip(speculation.accepted[0], speculation.drafted[0]) if a == d]
        if kind == "oracle" and len(full) < len(speculation.accepted[0]):
            return "wrong", "nodes of an oracle were rejected"
    return "exact", ""


def _verdict(target, drafter, new_tokens: int, **inputs) -> tuple[str, str]:
    """A verdict on one sequence or a batch, and a note."""
    kwargs = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, **inputs}
    seen = {}
    try:
        fault = equal_texts(target, drafter, new_tokens, seen=seen, **inputs)
    except Exception as error:
        if _ours(error):
            return "refused", _note(error)
        try:
            target.generate(**kwargs)
        except Exception as plains:
            return "not tried", f"plain generate itself raises {_note(plains)}"
        return "wrong", _note(error)
    if fault:
        plain, uncached = (_sequences(target.generate(**kwargs, use_cache=cached)) for cached in (True, False))
        if not torch.equal(uncached, plain):
            return "not tried", "plain generate itself writes another text without its cache, so no pass can be trusted"
        return "wrong", fault
    # Half-right drafts are right at another place in every sequence.
    lengths = {tuple(lengths) for lengths in seen["half-right"].acceptance_lengths}
    several = len(inputs["input_ids"]) > 1
    return ("lockstep" if several and len(lengths) == 1 else "exact"), ""


def _ours(error: Exception) -> bool:
    """Whether the package itself refused, with a sentence of its own."""
    frame = error.__traceback__
    while frame.tb_next:
        frame = frame.tb_next
    path = Path(frame.tb_frame.f_code.co_filename).resolve()
    return isinstance(error, ValueError) and (path.parent == ROOT or path.parent.name == "convert")


def _note(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return first if _ours(error) else f"{type(error).__name__}: {first[:100]}"


def _too_long(*args):
    raise TimeoutError("took more than 400 seconds of the processor")


def main():
    signal.signal(signal.SIGPROF, _too_long)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    path, *families = sys.argv[1:]
    rows = []
    for model_type in families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append((model_type, *trial(model_type)))
        print("{:28} {:10} {:10} {:10} {:10} {}".format(*rows[-1]), flush=True)
    if families:
        return
    counts = []
    for column, what in ((1, "one sequence"), (2, "a batch in lockstep"), (3, "a ragged batch"), (4, "trees")):
        found = Counter(row[column] for row in rows)
        counts.append(f"{what}: " + ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict]))
    lines = [
        "# Targets by family",
        "",
        "Every family of transformers' causal language models, as a tiny random target in float32: greedy text with a random, "
        "a half-right and an oracle drafter against plain `generate`, and accepted counts. Tried with one sequence, and with "
        "three prompts of different lengths, padded on the left: in lockstep, where all advance by the same count, and ragged, "
        "where each advances by its own. *lockstep* in the last column: such a batch is exact too, and its sequences advance "
        "together, because the target was seen to count positions by the columns of its cache, or its cache cannot be moved. Draft "
        "trees were tried with one sequence; *chain*: the family gets chains, and an error for a number of nodes.",
        "",
        f"`python tests/helpers/families.py docs/families.md`, transformers {transformers.__version__}, torch {torch.__version__}, CPU. "
        f"{'; '.join(counts)}.",
        "",
        "| family | one sequence | batch in lockstep | ragged batch | trees | why |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join((*row[:5], row[5].replace("|", "/"))) + " |" for row in rows),
    ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
