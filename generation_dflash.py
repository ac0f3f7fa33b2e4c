"""Speculative decoding with a DFlash drafter, inside plain `target.generate(..., assistant_model=drafter)`.

Three parts, from the call inwards: `install_generate_hook` sends a call with a drafter to `assisted_generate`, which
refuses what is not supported and lets transformers prepare the call; `decode` is the paper's loop: draft, verify,
accept, commit; `DFlashCandidateGenerator` runs the drafter. What decides the text is in `choice_dflash.py`.

Legend of shapes: n drafted tokens of a round, V vocabulary, H hidden, T tapped layers.
"""

import functools
import inspect
from pathlib import Path

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    CandidateGenerator,
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.utils import cached_file

from .choice_dflash import GumbelNoise, TargetChoice
from .hub_dflash import CUSTOM_GENERATE_MARK
from .statistics_dflash import Speculation
from .target_dflash import (
    CACHE,
    PassLimits,
    RoundInputs,
    check_pair,
    device_of,
    embedding_rows,
    raw_embeddings,
    tap_request,
    tapped,
)

# ------------------------------------------------------------------------------------------------------------------
# The call: from the hook to the loop.


def install_generate_hook():
    """Make `target.generate(..., assistant_model=drafter)` use our loop; every other call stays as it was.

    A process can hold several copies of this code (remote code, an installed package). The first one installs; the
    drafter is recognised by its config's `model_type` and answers for itself, with its own copy.
    """
    original = GenerationMixin.generate
    if getattr(original, "_dflash_hook", False):
        return
    names = list(inspect.signature(original).parameters)[1:]  # without self
    position = names.index("assistant_model")

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        assistant = args[position] if len(args) > position else kwargs.get("assistant_model")
        if getattr(getattr(assistant, "config", None), "model_type", None) != "dflash":
            return original(self, *args, **kwargs)
        call = dict(zip(names, args)) | kwargs
        # Asked for by name: transformers' own DFlash route, and our `custom_generate`, which comes back here without it.
        if _native_route(self, call) or _is_our_custom_generate(call.get("custom_generate")):
            return original(self, *args, **kwargs)
        call.pop("assistant_model")
        return assistant.assisted_generate(self, original, **call)

    generate._dflash_hook = True
    GenerationMixin.generate = generate


def _is_our_custom_generate(custom_generate) -> bool:
    if not isinstance(custom_generate, str):
        return False
    path = cached_file(custom_generate, "custom_generate/generate.py", _raise_exceptions_for_missing_entries=False)
    return path is not None and CUSTOM_GENERATE_MARK in Path(path).read_text(encoding="utf-8")


def _native_route(target: PreTrainedModel, call: dict) -> bool:
    passed = call.get("generation_config")
    stated = [
        call.get("speculation_type"),
        passed and passed.speculation_type,
        target.generation_config.speculation_type,
    ]
    return next((value for value in stated if value is not None), None) == "dflash"


def assisted_generate(drafter, target: PreTrainedModel, generate, call: dict):
    """Run one call of `generate` with `drafter`.

    Args:
        generate: the original `GenerationMixin.generate`; it prepares inputs, processors, criteria and cache.
        call: the caller's arguments by name, without the drafter.

    Returns:
        What `target.generate(**call)` returns; an output object also has `.speculation`.

    Raises:
        ValueError: the call, the target or the pair is not supported; says what was found and what to do.
    """
    resolved, model_kwargs = _resolve_generation_config(target, generate, call)
    _refuse_unsupported(target, resolved, model_kwargs, call)
    check_pair(drafter, target)
    num_draft_tokens = _resolve_num_draft_tokens(drafter, target, call)
    call = {name: value for name, value in call.items() if name != "num_assistant_tokens"}

    # Given a callable, `generate` drops the tokenizer before it builds the stop strings' criterion: build it here.
    if resolved.stop_strings is not None:
        call["stop_strings"] = None
        own = call.get("stopping_criteria") or []
        if not any(type(criterion) is StopStringCriteria for criterion in own):
            if call.get("tokenizer") is None:
                raise ValueError(
                    "`stop_strings` needs the target's tokenizer: pass `tokenizer=` to `generate` as well."
                )
            criterion = StopStringCriteria(stop_strings=resolved.stop_strings, tokenizer=call["tokenizer"])
            call["stopping_criteria"] = StoppingCriteriaList([*own, criterion])

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        return decode(
            model,
            DFlashCandidateGenerator(drafter, model, num_draft_tokens),
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            call.get("streamer"),
        )

    output, drafter.last_speculation = generate(target, custom_generate=loop, **_without(call, "custom_generate"))
    return output


def _unless(value, neutral):
    return None if value == neutral else value


def _without(call: dict, *names: str) -> dict:
    return {name: value for name, value in call.items() if name not in names}


def _resolve_generation_config(target, generate, call: dict) -> tuple[GenerationConfig, dict]:
    """The generation config that this call will run with, and what is left for the model's forward."""
    named = set(inspect.signature(generate).parameters) | {"trust_remote_code", "tokenizer", "assistant_tokenizer"}
    return target._prepare_generation_config(
        call.get("generation_config"), **_without(call, *named, "num_assistant_tokens")
    )


# Fields of GenerationConfig that ask for another way of decoding, or for what this loop does not do yet, with the
# values that ask for nothing.
_UNSUPPORTED_FIELDS = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "use_mtp": (None, False),
    "guidance_scale": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "token_healing": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
_UNSUPPORTED_ARGUMENTS = (
    "custom_generate", "synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask", "assistant_tokenizer",
)  # fmt: skip


def _refuse_unsupported(target, resolved: GenerationConfig, model_kwargs: dict, call: dict):
    for name in _UNSUPPORTED_ARGUMENTS:
        if call.get(name) is not None and call[name] is not False:
            raise ValueError(f"`{name}` is not supported together with a DFlash drafter as `assistant_model`.")
    settings = resolved.to_dict()
    for name, neutral in _UNSUPPORTED_FIELDS.items():
        if settings.get(name) not in neutral:
            raise ValueError(
                f"`{name}={settings[name]!r}` is not supported together with a DFlash drafter. Leave it unset, or call "
                "`generate` without `assistant_model`."
            )
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder; a DFlash drafter needs a decoder-only target."
        )
    if getattr(target.config, "is_decoder", True) is False:
        raise ValueError(f"{type(target).__name__} is not set up as a decoder: its config says `is_decoder=False`.")
    for name in ("cache", "past_key_values", "cache_params"):
        if model_kwargs.get(name) is not None:
            raise ValueError(f"a cache object passed as `{name}` is not supported together with a DFlash drafter yet.")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("`inputs_embeds` is not supported together with a DFlash drafter; pass `input_ids`.")
    if type(target)._update_model_kwargs_for_generation is not GenerationMixin._update_model_kwargs_for_generation:
        raise ValueError(
            f"{type(target).__name__} updates its inputs between tokens in its own way, which the block pass of a DFlash "
            "drafter does not follow yet."
        )


def _resolve_num_draft_tokens(drafter, target, call: dict) -> int:
    """Call argument, passed config, target's config, drafter's config: the first that states a number."""
    # transformers fills an unset value with its own default, so this cannot be read from the resolved config; `pipeline`
    # does so even with the config that it passes on.
    passed, filled = call.get("generation_config"), GenerationConfig._get_default_generation_params()
    stated = {
        "the argument `num_assistant_tokens`": call.get("num_assistant_tokens"),
        "the passed `generation_config`": _unless(
            passed and passed.num_assistant_tokens, filled["num_assistant_tokens"]
        ),
        "the target's generation config": target.generation_config.num_assistant_tokens,
        "the drafter's config": drafter.config.num_draft_tokens,
    }
    place, number = next((place, number) for place, number in stated.items() if number is not None)
    if number == "auto":
        raise ValueError(f"{place} asks for 'auto' drafted tokens, which is not supported yet; pass a number.")
    most = drafter.config.block_size - 1
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise ValueError(
            f"{place} asks for {number!r} drafted tokens; a block of {drafter.config.block_size} tokens drafts 1 to {most}."
        )
    return number


# ------------------------------------------------------------------------------------------------------------------
# The loop.


def decode(
    target: PreTrainedModel,
    candidates: "DFlashCandidateGenerator",
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict,
    streamer=None,
):
    """Draft, verify, accept, commit, until a criterion stops the text (paper, section 3).

    Args:
        candidates: runs the drafter and says how many tokens to draft.
        input_ids: (1, prompt), on the device where text and scores live.
        logits_processor, stopping_criteria, generation_config, model_kwargs: as prepared by `generate`.

    Returns:
        (output, speculation): what plain `generate` returns, and the statistics of this call.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"a DFlash drafter takes one row at a time for now, got {input_ids.shape[0]} rows. Call `generate` row by row."
        )
    text = Text(input_ids)
    choice = TargetChoice(logits_processor, _noise(generation_config, input_ids, candidates.block_size))
    stop = Stop(stopping_criteria)
    record = Record(generation_config)
    speculation = Speculation()

    def accept(drafts: torch.Tensor, logits: torch.Tensor) -> tuple[int, int, bool]:
        """Append the target's choices to the text: (tokens added, drafts among them, whether the text has ended)."""
        tokens, accepted = [], 0
        for token, scores, was_drafted in verify(choice, text.ids, text.length, drafts, logits):
            text.length += 1
            accepted += was_drafted
            record.add(scores, logits[len(tokens) : len(tokens) + 1])
            tokens.append(token)
            if ended := stop(text.view(), token, record.scores):
                break
        if streamer is not None:
            streamer.put(torch.tensor(tokens))
        return len(tokens), accepted, ended

    # The prompt's pass gives the first token, which is the first anchor. Of the states only the tapped ones are kept.
    model_kwargs["output_hidden_states"] = tap_request(candidates.target_layer_ids)
    outputs = target._prefill(input_ids, generation_config, model_kwargs)
    speculation.target_passes += 1
    cache = _recording(outputs, target)
    inputs = RoundInputs(input_ids, model_kwargs)
    limits = PassLimits(target)
    logits = outputs.logits[:, -1].to(device=input_ids.device, dtype=torch.float32, copy=True)  # (1, V)
    context = tapped(outputs.hidden_states, target, candidates.target_layer_ids)
    del outputs  # the logits of a whole prompt can be large
    _, _, ended = accept(text.ids[0, :0], logits)

    with target._optimize_model_for_decode():
        while not ended:
            # Draft; the target itself adds one token, so at most one less than what is left.
            length = text.length
            position = length - 1 - inputs.offset
            num_draft = limits.most_drafts(position, min(candidates.num_draft_tokens, max(stop.budget - length - 1, 0)))
            text.reserve(num_draft + 1)
            drafts = text.ids[0, length:length]
            if num_draft > 0:
                draft_logits = candidates.draft_logits(
                    text.view()[:, -1:], context, num_draft, inputs.padding(length - 1)
                )
                context = []
                drafts = choice.propose(text.ids, length, draft_logits.to(input_ids.device, torch.float32))
                speculation.drafter_passes += 1

            # Verify: one target pass over the anchor and the drafts.
            model_inputs = target.prepare_inputs_for_generation(
                text.ids[:, : length + num_draft],
                next_sequence_length=num_draft + 1,
                is_first_iteration=False,
                **inputs.upto(length + num_draft, cache),
            )
            if "logits_to_keep" in model_inputs:
                model_inputs["logits_to_keep"] = num_draft + 1
            outputs = target(**model_inputs, return_dict=True)
            speculation.target_passes += 1
            if outputs[CACHE] is not cache:  # Phi-3 starts a new one at the boundary of its RoPE
                cache = _recording(outputs, target)
                if cache.get_seq_length() != length + num_draft:
                    raise ValueError(
                        f"{type(target).__name__} dropped its cache in the middle of a text and did not read the text again, as "
                        "older transformers do at the boundary of LongRoPE; upgrade transformers, or keep texts shorter."
                    )

            # Accept the drafts that equal the target's choices, and its own next token, the new anchor.
            logits = outputs.logits[0, -num_draft - 1 :].to(input_ids.device, torch.float32)  # (n + 1, V)
            added, accepted, ended = accept(drafts, logits)
            speculation.add_round(num_draft, accepted, added)

            # Commit: the pass put anchor and drafts into the cache; what was not accepted leaves it. Features wait until
            # the drafter runs again.
            cache.crop(added - (num_draft + 1))
            states = tapped(outputs.hidden_states, target, candidates.target_layer_ids)
            states = [layer[:, layer.shape[1] - num_draft - 1 :][:, :added] for layer in states]
            if limits.past_drafting(position):
                context = []
            else:
                context = [torch.cat(pair, dim=1) for pair in zip(context, states)] if context else states
            del outputs, logits

    if streamer is not None:
        streamer.end()
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False  # the cache is the caller's now, who may never crop it
    output = text.view().clone()
    if generation_config.return_dict_in_generate:
        output = GenerateDecoderOnlyOutput(
            sequences=output, scores=record.scores, logits=record.logits, **{CACHE: cache}
        )
        output.speculation = speculation
    return output, speculation


def _recording(outputs, target: PreTrainedModel):
    """The cache that a pass returned, set to get back what a rejected draft pushed out of a sliding window."""
    cache = outputs.get(CACHE)
    if cache is None:
        raise ValueError(f"{type(target).__name__} returns no cache, without which a DFlash drafter cannot be used.")
    if not getattr(cache, "is_croppable", False):
        raise ValueError(
            f"the cache of {type(target).__name__} cannot be rolled back to the accepted tokens (it has recurrent state), so a "
            "DFlash drafter cannot be used with it yet."
        )
    if outputs.get("hidden_states") is None:
        raise ValueError(f"{type(target).__name__} does not return hidden states, which a DFlash drafter needs.")
    cache.activate_past_recording()
    return cache


def verify(choice: TargetChoice, ids: torch.Tensor, start: int, drafts: torch.Tensor, logits: torch.Tensor):
    """Yield the target's choices, up to and including the first that differs from its draft.

    Args:
        ids: (1, capacity), with `drafts` (n,) written from `start` on; the last choice is written here.
        logits: (n + 1, V) raw, of the positions from `start` on.

    Yields:
        (token, scores, was_drafted): an int, its processed scores (1, V), whether the draft was the same.
    """
    num_draft = len(drafts)
    if choice.stateless:
        scores = choice.scores(ids, start, logits)
        choices, valid = choice.choose(scores, start)
        # The one synchronisation of a round.
        fetched = torch.cat([drafts, choices, valid.long()]).tolist()
        drafted, chosen, valid = (
            fetched[:num_draft],
            fetched[num_draft : 2 * num_draft + 1],
            fetched[2 * num_draft + 1 :],
        )
    else:
        drafted = drafts.tolist()
    for i in range(num_draft + 1):
        if choice.stateless:
            token, ok, row = chosen[i], valid[i], scores[i : i + 1]
        else:
            # Processors with state see each emitted token's scores once, in order.
            row = choice.processors(ids[:, : start + i], logits[i : i + 1])
            token, ok = torch.cat(choice.choose(row, start + i)).tolist()
        if not ok:
            raise ValueError(
                f"no token is possible at position {start + i}: its processed scores hold a nan, or nothing but -inf."
            )
        was_drafted = i < num_draft and token == drafted[i]
        if not was_drafted:
            ids[0, start + i] = token
        yield token, row, was_drafted
        if not was_drafted:
            return


def _noise(generation_config: GenerationConfig, input_ids: torch.Tensor, span: int) -> GumbelNoise | None:
    if not generation_config.do_sample:
        return None
    seed = int(torch.randint(2**63 - 1, (1,)))  # from torch's generator, so that `torch.manual_seed` reproduces a text
    return GumbelNoise(seed, input_ids.shape[1], span, input_ids.device)


class Text:
    """The row's tokens in a buffer that grows by doubling, so that no round copies them."""

    def __init__(self, input_ids: torch.LongTensor):
        self.ids = input_ids.to(torch.long)
        self.length = input_ids.shape[1]
        self.reserve(256)

    def reserve(self, count: int):
        """Make room for `count` more tokens."""
        if self.length + count > self.ids.shape[1]:
            room = self.ids.new_zeros(1, max(self.ids.shape[1], count))
            self.ids = torch.cat([self.ids, room], dim=1)

    def view(self) -> torch.LongTensor:
        return self.ids[:, : self.length]


class Stop:
    """Whether the text ends, asked once per emitted token and in order, as in plain `generate`."""

    def __init__(self, criteria: StoppingCriteriaList):
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.budget = min(lengths)  # the text is not longer, whatever a subclass makes of its length
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=float("inf"))
        self.eos = {token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.tolist()}
        # End tokens and length are decided on the host; anything else may keep state, and is called.
        self.others = StoppingCriteriaList(c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria))

    def __call__(self, text: torch.LongTensor, token: int, scores: tuple | None) -> bool:
        ended = token in self.eos or text.shape[1] >= self.max_length
        if self.others:
            ended = bool(self.others(text, scores).any()) or ended
        return ended


class Record:
    """Scores and logits of the emitted tokens, where the caller asked for them."""

    def __init__(self, generation_config: GenerationConfig):
        wanted = generation_config.return_dict_in_generate
        self.scores = () if wanted and generation_config.output_scores else None
        self.logits = () if wanted and generation_config.output_logits else None

    def add(self, scores: torch.Tensor, logits: torch.Tensor):
        if self.scores is not None:
            self.scores += (scores.clone(),)  # a copy frees the rows of the block that were rejected
        if self.logits is not None:
            self.logits += (logits.clone(),)


# ------------------------------------------------------------------------------------------------------------------
# The drafter at work.


class DFlashCandidateGenerator(CandidateGenerator):
    """Runs the drafter: features in, draft logits out. State of one call: the drafter's cache.

    A transformers `CandidateGenerator`: our loop calls `draft_logits`, transformers' own loop `get_candidates`.

    Args:
        drafter: a `DFlashDraftModel`.
        target: borrowed are its embedding and head, which are called, never read: a quantised one has no dense weight.
        num_draft_tokens: tokens to draft a round, at most `block_size - 1`.
        max_length: of the text, the prompt included; None for no limit.
    """

    requires_model_outputs = True

    def __init__(self, drafter, target: PreTrainedModel, num_draft_tokens: int, max_length: int | None = None):
        self.drafter = drafter
        self.target = target
        self.target_layer_ids = drafter.config.target_layer_ids
        self.block_size = drafter.config.block_size
        self.num_draft_tokens = num_draft_tokens
        self.max_length = max_length
        self.model_kwargs_overrides = {"output_hidden_states": tap_request(self.target_layer_ids)}

        self.cache = DynamicCache(config=drafter.config)
        self.cache.activate_past_recording()
        self.head = target.get_output_embeddings()
        self.vocab_rows = embedding_rows(target)
        self.mask_embeds: torch.Tensor | None = None  # (1, block_size - 1, H)

    def draft_logits(
        self,
        anchor: torch.LongTensor,
        context: list[torch.Tensor],
        num_draft: int,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (n, V) of the next `num_draft` tokens (paper, section 4.1).

        Args:
            anchor: (1, 1) the newest token; its own features do not exist yet.
            context: tapped states, each (1, new, H), of the tokens before the anchor that this drafter has not seen.
            attention_mask: (1, tokens before the anchor) with 0 at padding, or None.
        """
        device = self.drafter.device
        embedding = self.target.get_input_embeddings()
        anchor = anchor.to(device_of(embedding, context[-1].device))
        if self.mask_embeds is None:
            mask_ids = anchor.new_full((1, self.block_size - 1), self.drafter.config.mask_token_id)
            self.mask_embeds = raw_embeddings(embedding, mask_ids).to(device)
        # The block is always whole: its length is part of what the drafter was trained on.
        noise_embeds = torch.cat([raw_embeddings(embedding, anchor).to(device), self.mask_embeds], dim=1)  # (1, K, H)
        context_hidden_states = torch.cat([states.to(device) for states in context], dim=-1)  # (1, new, T * H)

        position_ids = None
        if attention_mask is not None:
            # Positions count real tokens, as the target's do.
            attention_mask = attention_mask.to(device)
            start = self.cache.get_seq_length()
            end = start + context_hidden_states.shape[1] + self.block_size
            position_ids = torch.arange(start, end, device=device)[None] - (attention_mask == 0).sum()
            position_ids = position_ids.clamp(min=0)
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(1, self.block_size)], dim=1)

        hidden = self.drafter(
            noise_embeds, context_hidden_states, attention_mask, position_ids=position_ids, cache=self.cache
        ).last_hidden_state
        # Context keys and values stay for good; the block's own were a guess.
        self.cache.crop(-self.block_size)

        hidden = hidden[:, 1 : num_draft + 1]  # slot 0 is the anchor's own
        hidden = hidden.to(device_of(self.head, context[-1].device), context[-1].dtype)
        logits = self.drafter.draft_logits(hidden, self.head)[0]
        if logits.shape[-1] > self.vocab_rows:  # a head padded beyond the tokens that the target can embed
            logits[:, self.vocab_rows :] = -torch.inf
        return logits

    def get_candidates(self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, **kwargs):
        """Candidates for transformers' loop: (1, length + n) ids, and None for the logits, so that the target chooses."""
        length = input_ids.shape[1]
        num_draft = self.num_draft_tokens
        if self.max_length is not None:
            num_draft = min(num_draft, self.max_length - length - 1)
        if is_first_iteration or num_draft < 1:
            return input_ids, None
        # All tokens but the anchor are in the target's cache; those that the drafter lacks came with the last pass.
        new = length - 1 - self.cache.get_seq_length()
        context = [
            states[:, :new] for states in tapped(model_outputs.hidden_states, self.target, self.target_layer_ids)
        ]
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is not None:
            attention_mask = attention_mask[:, : length - 1]
        logits = self.draft_logits(input_ids[:, -1:], context, num_draft, attention_mask)
        return torch.cat([input_ids, logits.argmax(dim=-1)[None].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Part of transformers' interface; the number of drafted tokens is fixed here."""
