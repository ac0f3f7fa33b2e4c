"""What a call of `generate` may ask for beside a DFlash drafter: supported as in plain `generate`, or refused by name.

`docs/generate.md` lists every argument and every field with its reason; a test holds the two together, and fails when a
new transformers adds one that is in neither list.
"""

import copy
import inspect
from pathlib import Path

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import StoppingCriteriaList, StopStringCriteria
from transformers.utils import cached_file

from .hub_files import CUSTOM_GENERATE_MARK
from .target_cache import cached_length
from .target_model import CACHE
from .target_ranks import TENSOR_PARALLELISM, sharding

# Fields of GenerationConfig that ask for another way of decoding, with the values that ask for nothing.
UNSUPPORTED_FIELDS = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "use_mtp": (None, False),
    "use_cache": (None, True),
    "is_assistant": (None, False),
    "speculation_type": (None,),
}
UNSUPPORTED_VALUES = {"cache_implementation": ("paged",)}
UNSUPPORTED_ARGUMENTS = ("custom_generate", "synced_gpus")

SUPPORTED_ARGUMENTS = {
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "assistant_model", "assistant_tokenizer", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "kwargs",
}  # fmt: skip
SUPPORTED_FIELDS = {
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample",
    "cache_implementation", "cache_config", "max_cache_len", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", "token_healing", "guidance_scale", "watermarking_config", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "eos_token_id", "num_assistant_tokens", "prefill_chunk_size", "compile_config",
    "disable_compile",
}  # fmt: skip
# Of other ways of decoding, which are refused or not asked for: without effect, as in plain `generate`.
IGNORED_FIELDS = {
    "early_stopping", "length_penalty", "diversity_penalty", "low_memory", "decoder_start_token_id",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind",
    "target_lookbehind", "continuous_batching_config",
}  # fmt: skip
# Our own arguments of `generate`; only the first is a field of GenerationConfig.
OWN_ARGUMENTS = ("num_assistant_tokens", "num_tree_nodes", "read_prefix")
MOST_TREE_NODES = 1024


def without(call: dict, *names: str) -> dict:
    return {name: value for name, value in call.items() if name not in names}


def resolve_generation_config(target, generate, call: dict) -> tuple[GenerationConfig, dict]:
    """The generation config that this call will run with, and what is left for the model's forward."""
    named = set(inspect.signature(generate).parameters) | {"trust_remote_code", "tokenizer", "assistant_tokenizer"}
    return target._prepare_generation_config(call.get("generation_config"), **without(call, *named, *OWN_ARGUMENTS))


def refuse_unsupported(target: PreTrainedModel, resolved: GenerationConfig, model_kwargs: dict, call: dict):
    """Raise a ValueError that names what cannot be supported, before anything is generated."""
    for name in UNSUPPORTED_ARGUMENTS:
        if call.get(name) is not None and call[name] is not False:
            raise ValueError(f"`{name}` is not supported together with a DFlash drafter as `assistant_model`.")
    theirs, own = call.get("assistant_tokenizer"), call.get("tokenizer")
    if theirs is not None and (own is None or theirs.get_vocab() != own.get_vocab()):
        found = "no `tokenizer`" if own is None else "a `tokenizer` with another vocabulary"
        raise ValueError(
            f"`assistant_tokenizer` came with {found}. A DFlash drafter has the tokens of its target: leave it unset, or pass "
            "the target's tokenizer as both."
        )
    kind = sharding(target)
    if kind not in (None, TENSOR_PARALLELISM):
        raise ValueError(
            f"{type(target).__name__} is sharded over {torch.distributed.get_world_size()} processes by {kind}, which is not "
            "supported together with a DFlash drafter. Load the target whole in each process, or with tensor parallelism "
            "(`tp_plan`); or call `generate` without `assistant_model`."
        )
    for name, value in resolved.to_dict().items():
        neutral = UNSUPPORTED_FIELDS.get(name)
        if (neutral is not None and value not in neutral) or value in UNSUPPORTED_VALUES.get(name, ()):
            raise ValueError(
                f"`{name}={value!r}` is not supported together with a DFlash drafter. Leave it unset, or call "
                "`generate` without `assistant_model`."
            )
        known = neutral is not None or name in SUPPORTED_FIELDS or name in IGNORED_FIELDS
        if not known and not name.startswith("_") and name != "transformers_version" and value is not None:
            raise ValueError(
                f"this drafter's code does not know the setting `{name}={value!r}` of a newer transformers, and cannot say "
                "whether it would hold. Update the code, leave the setting unset, or call `generate` without `assistant_model`."
            )
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder; a DFlash drafter needs a decoder-only target."
        )
    if getattr(target.config, "is_decoder", True) is False:
        raise ValueError(f"{type(target).__name__} is not set up as a decoder: its config says `is_decoder=False`.")
    if type(target)._update_model_kwargs_for_generation is not GenerationMixin._update_model_kwargs_for_generation:
        raise ValueError(
            f"{type(target).__name__} updates its inputs between tokens in its own way, which the block pass of a DFlash "
            "drafter does not follow."
        )
    if resolved.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "`prefill_chunk_size` reads token ids in chunks, but `inputs_embeds` were passed; use one of the two together with "
            "a DFlash drafter."
        )
    _refuse_cache(model_kwargs, call)


def passed_cache(model_kwargs: dict):
    """The cache object that the caller passed, under whatever name."""
    names = ("cache", "past_key_values", "cache_params")
    return next((model_kwargs[name] for name in names if model_kwargs.get(name) is not None), None)


def _refuse_cache(model_kwargs: dict, call: dict):
    cache = passed_cache(model_kwargs)
    if cache is None:
        return
    if isinstance(cache, (tuple, list, EncoderDecoderCache)):
        raise ValueError(
            f"a {type(cache).__name__} passed as `{CACHE}` is not supported together with a DFlash drafter; pass a Cache of "
            "the target's own layers, such as DynamicCache."
        )
    if call.get("negative_prompt_ids") is not None:
        return
    ids = call.get("inputs") if call.get("inputs") is not None else model_kwargs.get("input_ids")
    mask, length = model_kwargs.get("attention_mask"), cached_length(cache)
    if ids is not None and (mask is None or mask.shape[1] == ids.shape[1]) and 0 < ids.shape[1] <= length:
        raise ValueError(
            f"the cache holds {length} tokens, but the text has {ids.shape[1]}: nothing is left to read. Pass the whole text, "
            "what is cached included and at least one token more; or only the new tokens with an attention mask for all."
        )


def resolve_num_draft_tokens(default: int | str, most: int, target, call: dict) -> int | str:
    """Return the number of draft tokens, "auto", or 0 for a call that drafts nothing.

    It is the first that is stated in: call argument, passed config, target's config, `default` (the drafter's config).

    Args:
        most: draft tokens that a round can have.

    Raises:
        ValueError: what is stated is none of these; names the place.
    """
    # transformers fills an unset value with its own default, so this cannot be read from the resolved config; `pipeline`
    # does so even with the config that it passes on.
    passed, filled = call.get("generation_config"), GenerationConfig._get_default_generation_params()
    own = passed and passed.num_assistant_tokens
    stated = {
        "the argument `num_assistant_tokens`": call.get("num_assistant_tokens"),
        "the passed `generation_config`": None if own == filled["num_assistant_tokens"] else own,
        "the target's generation config": target.generation_config.num_assistant_tokens,
        "the drafter's config": default,
    }
    place, number = next((place, number) for place, number in stated.items() if number is not None)
    if number == "auto":
        return number
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most:
        raise ValueError(
            f"{place} asks for {number!r} draft tokens; a block of {most + 1} tokens drafts 1 to {most}, as "
            "many as pay with 'auto', or none with 0."
        )
    return number


def resolve_num_tree_nodes(default: int | str | None, num_draft_tokens: int | str, call: dict) -> int | str | None:
    """Return the number of nodes of a draft tree, "auto", or None for chains: the call's argument, else `default` (the drafter's config).

    A config's "auto" is part of the adaptive draft length: beside a fixed `num_draft_tokens` it stands for chains.

    Raises:
        ValueError: what is stated is neither.
    """
    if default == "auto" and num_draft_tokens != "auto":
        default = None
    number = call.get("num_tree_nodes", default)
    if number is None or number == "auto":
        return number
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_TREE_NODES:
        raise ValueError(
            f"`num_tree_nodes` must be a number of nodes in [1, {MOST_TREE_NODES}], 'auto', or None for chains; got {number!r}."
        )
    return number


def with_stop_strings(target: PreTrainedModel, resolved: GenerationConfig, call: dict) -> dict:
    """The call with its stop strings as a criterion: given a callable, `generate` drops the tokenizer before it builds one."""
    if resolved.stop_strings is None:
        return call
    own = call.get("stopping_criteria") or []
    call = _with_field(target, call, "stop_strings", None)
    if any(type(criterion) is StopStringCriteria for criterion in own):
        return call
    if call.get("tokenizer") is None:
        raise ValueError("`stop_strings` needs the target's tokenizer: pass `tokenizer=` to `generate` as well.")
    criterion = StopStringCriteria(stop_strings=resolved.stop_strings, tokenizer=call["tokenizer"])
    return call | {"stopping_criteria": StoppingCriteriaList([*own, criterion])}


def with_healed_tokens(target: PreTrainedModel, resolved: GenerationConfig, call: dict) -> dict:
    """The call with its prompt healed: given a callable, `generate` drops the tokenizer that healing needs."""
    if not resolved.token_healing:
        return call
    if call.get("tokenizer") is None:
        raise ValueError("`token_healing` needs the target's tokenizer: pass `tokenizer=` to `generate` as well.")
    name = "inputs" if call.get("inputs") is not None else "input_ids"
    ids = call.get(name)
    if ids is None:
        raise ValueError("`token_healing` needs a prompt of token ids.")
    healed = target.heal_tokens(ids, call["tokenizer"])
    mask = call.get("attention_mask")
    passed = mask is not None
    if not passed:
        mask = _implied_mask(ids, resolved)  # `generate` infers it before it heals
    if healed.shape == ids.shape:
        call = call | {"attention_mask": mask}
    elif passed or not bool(mask.all()):
        raise ValueError(
            f"`token_healing` made the prompt {healed.shape[1]} tokens long, and its attention mask has {mask.shape[1]}. Pass "
            "the prompt without spaces at its ends, or heal it beforehand with `target.heal_tokens`."
        )
    return _with_field(target, call | {name: healed}, "token_healing", False)


def _implied_mask(ids: torch.LongTensor, resolved: GenerationConfig) -> torch.LongTensor:
    """The attention mask (B, length) that `generate` infers where none is passed: padding is told by its token."""
    pad, ends = resolved.pad_token_id, resolved.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return torch.ones_like(ids) if pad is None or pad in ends else (ids != pad).long()


def _with_field(target: PreTrainedModel, call: dict, name: str, value) -> dict:
    """The call with another value of a setting, where the caller has it: transformers warns of keywords beside a config.

    What a passed config leaves open comes from the target's own, so there a keyword is needed.
    """
    config = call.get("generation_config")
    passed = isinstance(config, GenerationConfig) and getattr(config, name) and name not in call
    if not passed or getattr(target.generation_config, name):
        return call | {name: value}
    config = copy.deepcopy(config)
    setattr(config, name, value)
    return call | {"generation_config": config}


# ------------------------------------------------------------------------------------------------------------------
# Calls that go another way although they hand over a drafter.


def is_native_route(target: PreTrainedModel, call: dict) -> bool:
    """Whether transformers' own DFlash route is asked for, by name."""
    passed = call.get("generation_config")
    stated = [
        call.get("speculation_type"),
        passed and passed.speculation_type,
        target.generation_config.speculation_type,
    ]
    if next((value for value in stated if value is not None), None) != "dflash":
        return False
    if getattr(getattr(call.get("assistant_model"), "config", None), "sample_from_anchor", False):
        raise ValueError(
            "`speculation_type=\"dflash\"` asks for transformers' own loop, which takes no draft token from the anchor's position, "
            "as this drafter gives one (`sample_from_anchor`): all of them would stand one token off. Leave it unset."
        )
    return True


def is_our_custom_generate(custom_generate) -> bool:
    """Whether this is a repository of ours, whose `custom_generate` comes back here."""
    if not isinstance(custom_generate, str):
        return False
    path = cached_file(custom_generate, "custom_generate/generate.py", _raise_exceptions_for_missing_entries=False)
    return path is not None and CUSTOM_GENERATE_MARK in Path(path).read_text(encoding="utf-8")
