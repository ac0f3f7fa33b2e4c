"""Which engines serve a drafter: with what command, in which layout, and what stands in the way.

Read in the engines' own loaders: vLLM 0.33.0, SGLang 0.5.23, z-lab's package 0.1.0 (what they require is restated in `tests/helpers/engine_rules.py`).
"""

import json
import shlex

from ..configuration_dflash import DFlashConfig
from . import dspark
from .zlab import dspark_parts, parts, unsupported_fields

# Engines that read z-lab's layout, by the word that `dflash-hub export --to` takes.
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "zlab": "z-lab's package"}
TYPED = "An exported folder has the type of a plain Qwen3 model, and no code: it is for engines, not for AutoModel"


def serve_command(engine: str, config: DFlashConfig, folder: str) -> str:
    """The command that serves (or, for z-lab's package, runs) the drafter in `folder`, exported for that engine."""
    target, place = shlex.quote(config.target_name_or_path or "TARGET"), shlex.quote(folder)
    if engine == "vllm":
        method = "dspark" if dspark_parts(config) else "dflash"
        speculation = {"method": method, "model": folder, "num_speculative_tokens": config.drafts_per_block}
        mixed = len(set(config.layer_types)) > 1
        # Only these attention kernels of vLLM let a draft position see those after it.
        backend = "" if all(config.block_causal) else " \\\n  --attention-backend flash_attn"
        return (
            f"{'VLLM_USE_V2_MODEL_RUNNER=1 ' if mixed else ''}vllm serve {target} \\\n"
            f"  --speculative-config {shlex.quote(json.dumps(speculation))}{backend}"
        )
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm "
            f"{'DSPARK' if dspark_parts(config) else 'DFLASH'} \\\n"
            f"  --speculative-draft-model-path {place} --speculative-num-draft-tokens {config.drafts_per_block + 1}"
        )
    if engine == "zlab":
        return f'dflash generate transformers --model {target} --draft {place} "Why is the sky blue?"'
    raise ValueError(f"{engine!r} is none of the engines {list(TITLES)}.")


def export_and_serve(engine: str, config: DFlashConfig, source: str) -> str:
    """The two commands for a drafter in a layout that the engine does not read."""
    exported = f"drafter-{engine}"
    return (
        f"dflash-hub export {shlex.quote(source)} {exported} --to {engine}\n{serve_command(engine, config, exported)}"
    )


def blockers(engine: str, config: DFlashConfig) -> list[str]:
    """What the engine would compute in another way than the drafter was made for: a sentence each, empty if nothing.

    A drafter that is served in spite of one would run, and draft badly.
    """
    if dspark_parts(config):
        return _dspark_blockers(engine, config)
    found = unsupported_fields(config)
    if engine in ("vllm", "zlab") and len(has := parts(config)) == 2:
        name = next(iter(has))
        found.append(f"`{name}` is {has[name]} without the other part; {TITLES[engine]} reads DFlash 2 with both")
    if engine in ("vllm", "sglang"):
        if config.input_embedding_scale != 1.0:
            found.append(
                f"`input_embedding_scale` is {config.input_embedding_scale:g}; {TITLES[engine]} feeds a plain DFlash drafter "
                "unscaled embeddings"
            )
        if config.hidden_act != "silu":
            found.append(f"`hidden_act` is {config.hidden_act!r}; {TITLES[engine]} has only 'silu'")
    return found


def _dspark_blockers(engine: str, config: DFlashConfig) -> list[str]:
    """The same of a drafter with parts of DSpark."""
    found, title = dspark.unsupported_fields(config), TITLES[engine]
    if engine == "zlab":
        return [f"`{name}` is {value}; {title} has no class for DSpark" for name, value in dspark_parts(config).items()]
    if config.markov_rank is None:
        found.append(f"`markov_rank` is not set; {title} needs a Markov head for a drafter of this layout")
    if engine == "vllm" and config.markov_head_type in ("gated", "rnn"):
        found.append(
            f"`markov_head_type` is {config.markov_head_type!r}; {title} takes every Markov head for 'vanilla'"
        )
    if engine == "sglang" and not config.sample_from_anchor:
        found.append(f"`sample_from_anchor` is false; {title} counts the drafts of a block as if it were true")
    if config.hidden_act != "silu":
        found.append(f"`hidden_act` is {config.hidden_act!r}; {title} has only 'silu'")
    return found


def warnings_of(engine: str, config: DFlashConfig) -> list[str]:
    """What a user of the exported folder should know, a sentence each."""
    said = []
    if engine in ("vllm", "sglang") and (config.output_multiplier != 1.0 or config.final_logit_softcapping is not None):
        said.append(
            f"{TITLES[engine]} does not scale the draft logits of a plain DFlash drafter (`output_multiplier`, "
            "`final_logit_softcapping`): its greedy drafts are the same, its sampled drafts follow another distribution"
        )
    if config.draft_vocab_size is not None and engine in ("speculators", "gguf"):
        said.append(
            f"it drafts from {config.draft_vocab_size} tokens, and its readers do not add those of the text at hand, so they "
            "accept less than dflash-hub does"
        )
    elif config.draft_vocab_size is not None:
        said.append(
            f"the list of {config.draft_vocab_size} tokens to draft from is left out, for which there is no place: drafts come "
            "from the whole vocabulary, and cost more"
        )
    if engine == "speculators" and len(set(config.block_causal)) > 1:
        said.append(
            "vLLM 0.33 takes the causality of a speculators folder's sliding layers for all layers, and would serve the full "
            "layers of this drafter causal: for vLLM export with --to vllm"
        )
    return said


def llamacpp_command(config: DFlashConfig, file: str) -> str:
    """The command that serves the drafter in `file`, exported with `--to gguf`, beside the target's own GGUF file."""
    return (
        f"llama-server -m TARGET.gguf -md {shlex.quote(file)} --spec-type draft-dflash "
        f"--spec-draft-n-max {config.block_size - 1}"
    )


def export_for_llamacpp(config: DFlashConfig, source: str) -> str:
    """The two commands for a drafter that is no GGUF file yet."""
    target = shlex.quote(config.target_name_or_path or "TARGET")
    return (
        f"dflash-hub export {shlex.quote(source)} drafter.gguf --to gguf --target {target}\n"
        f"{llamacpp_command(config, 'drafter.gguf')}"
    )


def other_readers(config: DFlashConfig, folder: str) -> str:
    """Commands of engines that take z-lab's layout or convert it; from their documentation, not tried."""
    target = shlex.quote(config.target_name_or_path or "TARGET")
    return (
        f"MLX: dflash generate mlx --model {target} --draft REPOSITORY  (z-lab's package reads it from the Hub only)\n"
        f"TensorRT-LLM: LLM(..., speculative_config=DFlashDecodingConfig(max_draft_len={config.block_size - 1}, "
        f"speculative_model={json.dumps(folder, ensure_ascii=False)}))"
    )
