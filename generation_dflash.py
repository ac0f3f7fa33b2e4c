"""Speculative decoding with a DFlash drafter, inside plain `target.generate(..., assistant_model=drafter)`.

From the call inwards: `install_generate_hook` sends a call with a drafter to `assisted_generate`, which refuses what is
not supported (`decode_settings.py`) and lets transformers prepare the call; `decode` is the paper's loop: draft, verify,
accept, commit. What decides the text is in `decode_choice.py`, the rows' tokens and ends in `decode_state.py`, the drafter
at work in `drafter_candidates.py`, and what a target's cache needs in `target_cache.py`.

Legend of shapes: B rows, n drafted tokens of a round, V vocabulary, H hidden, T tapped layers.
"""

import functools
import inspect
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticSlidingWindowLayer
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import logging

from .decode_choice import GumbelNoise, TargetChoice, separable
from .decode_clock import RoundClock
from .decode_schedule import FLOOR_WARNING, DraftSchedule, DraftStatistics, is_at_floor
from .decode_settings import (
    OWN_ARGUMENTS,
    is_native_route,
    is_our_custom_generate,
    passed_cache,
    refuse_unsupported,
    resolve_generation_config,
    resolve_num_draft_tokens,
    with_healed_tokens,
    with_stop_strings,
    without,
)
from .decode_state import Record, Stop, Text
from .decode_statistics import Speculation
from .drafter_candidates import DFlashCandidateGenerator, Features, keep_context, take_context
from .hub_files import nonfinite, nonfinite_sentence
from .target_cache import CacheRollback, cached_length, refuse_unknown
from .target_check import (
    PassCheck,
    check_block,
    check_fed,
    check_grown,
    check_read,
    checks_of,
    difference,
    is_same,
    num_fed,
)
from .target_model import (
    CACHE,
    PassLimits,
    RoundInputs,
    check_pair,
    encoder_outputs_by_chunk,
    holds_media,
    tap_request,
    tapped,
)
from .target_ranks import TargetRanks
from .target_snapshot import CacheSnapshot

logger = logging.get_logger(__name__)

NO_DRAFT = -1  # in the place of a draft token

# ------------------------------------------------------------------------------------------------------------------
# The call: from the hook to the loop.


def install_generate_hook(adopter=None):
    """Make `target.generate(..., assistant_model=drafter)` use our loop; every other call stays as it was.

    A process can hold several copies of this code (remote code, an installed package). The first one installs; the
    drafter is recognised by its config's `model_type` and answers for itself, with its own copy.

    Args:
        adopter: `adopter.recognizes(assistant)` says by the config whether a foreign object is a drafter, and
            `adopter.adopt(assistant, target)` returns a drafter of ours in its place, or raises. Remote code has none.
    """
    if not hasattr(GenerationMixin.generate, "_dflash_adopters"):
        _wrap_generate()
    adopters = GenerationMixin.generate._dflash_adopters
    if adopter is not None and adopter not in adopters:
        adopters.append(adopter)


def _wrap_generate():
    original = GenerationMixin.generate
    names = list(inspect.signature(original).parameters)[1:]  # without self
    position = names.index("assistant_model")
    adopters = []  # of whichever copy of the code has one

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        assistant = args[position] if len(args) > position else kwargs.get("assistant_model")
        ours = getattr(getattr(assistant, "config", None), "model_type", None) == "dflash"
        adopter = None
        if assistant is not None and not ours:
            adopter = next((adopter for adopter in adopters if adopter.recognizes(assistant)), None)
        call = dict(zip(names, args)) | kwargs
        # transformers' own DFlash route is asked for by name, and takes the object as it is.
        if not (ours or adopter) or is_native_route(self, call):
            return original(self, *args, **kwargs)
        drafter = assistant if adopter is None else adopter.adopt(assistant, self)
        call["assistant_model"] = drafter
        if is_our_custom_generate(call.get("custom_generate")):  # it comes back here without `custom_generate`
            output = original(self, **call)
        else:
            output = drafter.assisted_generate(self, original, **without(call, "assistant_model"))
        # Of an adopted drafter the caller holds the foreign object only.
        assistant.last_speculation = drafter.last_speculation
        return output

    generate._dflash_hook, generate._dflash_adopters = True, adopters
    GenerationMixin.generate = generate


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
    resolved, model_kwargs = resolve_generation_config(target, generate, call)
    refuse_unsupported(target, resolved, model_kwargs, call)
    check_pair(drafter, target)
    num_draft_tokens = resolve_num_draft_tokens(drafter, target, call)
    chosen = num_draft_tokens == "auto"
    memory = ScheduleMemory.of(drafter, target)
    read_prefix, streamer, own_cache = call.get("read_prefix", True), call.get("streamer"), passed_cache(model_kwargs)
    call = with_healed_tokens(target, resolved, with_stop_strings(target, resolved, call))

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        most = drafter.config.block_size - 1
        candidates = DFlashCandidateGenerator(drafter, model, most if chosen else num_draft_tokens)
        prepared = Call(
            logits_processor, stopping_criteria, generation_config, model_kwargs, streamer,
            keeps_cache=generation_config.return_dict_in_generate or own_cache is not None,
            passed_cache=own_cache,
            read_prefix=read_prefix,
            schedule=DraftSchedule(drafter.config.block_size, memory.statistics) if chosen else None,
        )  # fmt: skip
        return decode(model, candidates, input_ids, prepared)

    output, drafter.last_speculation = generate(
        target, custom_generate=loop, **without(call, "custom_generate", *OWN_ARGUMENTS)
    )
    memory.warn_at_the_floor(drafter.last_speculation)
    return output


class ScheduleMemory:
    """What calls with one drafter and one target learned about how many tokens to draft; it dies with either."""

    _OF_PAIR: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()  # drafter -> target -> memory

    def __init__(self):
        self.statistics: DraftStatistics | None = None
        self.devices = None
        self.warned = self.warned_of_logits = False

    @classmethod
    def of(cls, drafter, target: PreTrainedModel) -> "ScheduleMemory":
        memory = cls._OF_PAIR.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, cls())
        if memory.devices != (drafter.device, target.device):
            memory.devices, memory.statistics = (drafter.device, target.device), None
        return memory

    def warn_at_the_floor(self, speculation: Speculation):
        """Once, where nearly no first draft is accepted: over the chosen calls so far, or over this one."""
        rounds = [a for row in zip(speculation.drafted, speculation.accepted) for d, a in zip(*row) if d > 0]
        counts = [(len(rounds), sum(accepted > 0 for accepted in rounds))]
        if self.statistics is not None:
            counts.append((self.statistics.first_tried, self.statistics.first_accepted))
        if not self.warned and any(is_at_floor(*count) for count in counts):
            self.warned = True
            logger.warning(FLOOR_WARNING)

    def warn_of_logits(self, drafter):
        """Once, where a drafter's logits are not finite: say why, as far as that can be seen."""
        if self.warned_of_logits:
            return
        self.warned_of_logits = True
        dtype = str(drafter.dtype).removeprefix("torch.")
        cause = f"the target's hidden states, or the drafter's, leave the range of {dtype}: load both in bfloat16 or float32"
        if names := nonfinite(dict(drafter.named_parameters())):
            cause = nonfinite_sentence(names, "the drafter")
        logger.warning(
            "The logits of this DFlash drafter are not finite, so nothing more is drafted in this call. The text is the target's, "
            f"and takes one forward pass a token. The cause: {cause}"
        )


@dataclass
class Call:
    """What `generate` prepared for the loop, and what the caller handed past it.

    Args:
        processors, criteria, config, model_kwargs: as prepared by `generate`.
        keeps_cache: whether the cache outlives the call.
        passed_cache: the caller's cache, who may go on with it although the call fails; None without one.
        read_prefix: whether the drafter reads a prefix that comes in a cache without its context.
        schedule: chooses how many tokens to draft; None for a fixed number.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict
    streamer: object | None
    keeps_cache: bool
    passed_cache: Cache | None
    read_prefix: bool
    schedule: DraftSchedule | None


# ------------------------------------------------------------------------------------------------------------------
# The loop.


def decode(target: PreTrainedModel, candidates: DFlashCandidateGenerator, input_ids: torch.LongTensor, call: Call):
    """Draft, verify, accept, commit, until every row has ended (paper, section 3).

    Args:
        candidates: runs the drafter and says how many tokens to draft.
        input_ids: (B, prompt), on the device where text and scores live.

    Returns:
        (output, speculation): what plain `generate` returns, and the statistics of this call.
    """
    decoding = Decoding(target, candidates, input_ids, call)
    try:
        decoding.read_prompt()
        with target._optimize_model_for_decode():
            while not all(decoding.stop.ended):
                drafts = decoding.draft(decoding.how_many())
                outputs = decoding.verify(drafts.shape[1])
                with decoding.ranks.alone():
                    added = decoding.accept(drafts, outputs.logits)
                decoding.commit(outputs, drafts.shape[1] + 1, added)
            decoding.ranks.agree([])  # none of them stopped with an error in the last round
    finally:
        decoding.close()
    if call.schedule is not None:
        ScheduleMemory.of(candidates.drafter, target).statistics = call.schedule.statistics
    return decoding.result(), decoding.speculation


class Decoding:
    """State of one call. Rows advance together, or each by its own count where nothing needs them together."""

    def __init__(self, target, candidates: DFlashCandidateGenerator, input_ids: torch.LongTensor, call: Call):
        self.target, self.candidates, self.call = target, candidates, call
        self.rows, self.device = input_ids.shape[0], input_ids.device
        self.prompt = input_ids
        pad = call.config._pad_token_tensor
        self.text = Text(input_ids, None if pad is None else int(pad))
        self.ranks = TargetRanks(target, self.rows)
        self.stop = Stop(call.criteria, self.rows, self.ranks)
        self.record = Record(call.config)
        self.speculation = Speculation.of_rows(self.rows)
        self.limits = PassLimits(target)
        # Without draft tokens the drafter never runs, so no hidden states are asked for.
        self.drafting = candidates.num_draft_tokens > 0
        self.unread: list[Features] = []  # of accepted tokens that the drafter has not seen
        self.prefix: torch.LongTensor | None = None  # what came in the cache
        self.apart = False  # whether rows advance by counts of their own
        self.clock = RoundClock(candidates.device, wanted=call.schedule is not None and self.ranks.first)
        self.rollback: CacheRollback | None = None
        # While the caller's cache holds what may have to leave it: the cache as it was before.
        self.before: CacheSnapshot | None = None
        self.verified = (0, 0)  # the newest pass that verified: its tokens, and the text's length before it
        self.reached = 0  # tokens of that pass whose logits the text has come to: plain `generate` has fed these
        if self.record.attentions is not None and self.rows > 1:
            raise ValueError(
                f"`output_attentions` is supported for one row, got {self.rows}, together with a DFlash drafter. Call "
                "`generate` row by row."
            )

    # ---- the prompt

    def read_prompt(self):
        """The prompt's pass gives the first token, which is the first anchor. Of the states only the tapped ones are kept."""
        kwargs, ids = self.call.model_kwargs, self.prompt
        if self.drafting:
            kwargs["output_hidden_states"] = tap_request(self.candidates.target_layer_ids)
            if self.record.hidden_states is not None:
                chosen = self.record.layers
                kwargs["output_hidden_states"] = True if chosen is None else kwargs["output_hidden_states"] + chosen
        elif self.record.hidden_states is None:
            kwargs.pop("output_hidden_states", None)
        past = cached_length(kwargs.get(CACHE))
        self._check_ranks(past)
        mask = kwargs.get("attention_mask")
        known = mask.shape[1] if mask is not None else getattr(self.call.config, "_mask_length", ids.shape[1])
        whole = past > 0 and known == ids.shape[1]  # the text, what is cached included; else only what is new
        new = ids.shape[1] - past * whole

        self.cache = kwargs.get(CACHE)
        self._guard_cache()
        if past:
            self._take_prefix(ids[:, :past] if whole else None, past)
        if self.call.config.prefill_chunk_size is not None and "inputs_embeds" not in kwargs:
            outputs = self._read_chunks(ids[:, -new:], past)
        else:
            outputs = self._with_cache(self.target._prefill(ids, self.call.config, kwargs))
            self.speculation.target_passes += 1
            embeds = kwargs.get("inputs_embeds")
            check_grown(self.target, outputs[CACHE], new if embeds is None else embeds.shape[1] - past, past)
            self._take_features(outputs, kwargs.get("attention_mask"))
        if self.record.wants_states:
            taps = tap_request(self.candidates.target_layer_ids) if self.drafting else []
            self.record.heed_choice(outputs.get("hidden_states"), taps)
            self.record.add_states(outputs, new, 0, None)
        logits = outputs.logits[:, -1:].to(device=self.device, dtype=torch.float32, copy=True)  # (B, 1, V)
        self.vocab_size, self.cache = logits.shape[-1], outputs[CACHE]
        del outputs  # the logits of a whole prompt can be large

        held = cached_length(self.cache) or past + new
        self.inputs = RoundInputs(kwargs, self.rows, ids.shape[1], held, self.device)
        self.rollback = CacheRollback(self.cache, self.target)
        self.check = self._check_target(logits)
        self._decide_how_rows_advance()
        self.before = None  # from here on the caller's cache holds the prompt
        with self.ranks.alone():
            self.accept(self.text.ids[:, :0], logits)

    def _check_ranks(self, cached: int):
        """What decides how many forward passes there are, and how long they are, must be the same on all ranks."""
        if not self.ranks.shared:
            return
        call = self.call
        facts = {
            "sequences": self.rows, "prompt tokens": self.prompt.shape[1], "cached tokens": cached,
            "checksum of the prompt": hash(tuple(self.prompt.flatten().tolist())), "length limit": self.stop.budget,
            "checksum of the end tokens": hash(frozenset(self.stop.eos)),
            "draft tokens (-1 for 'auto')": -1 if call.schedule is not None else self.candidates.num_draft_tokens,
            "`do_sample`": call.config.do_sample, "`prefill_chunk_size`": call.config.prefill_chunk_size or 0,
            "processors": len(call.processors), "stopping criteria": len(call.criteria),
            "a cache to hand back": call.keeps_cache, "a streamer of a batch": self.rows > 1 and call.streamer is not None,
        }  # fmt: skip
        self.ranks.check_call({name: int(value) for name, value in facts.items()})

    def _guard_cache(self):
        """Note how the caller's cache is before a forward pass changes it; see `close`."""
        if self.cache is not None and self.cache is self.call.passed_cache and self.before is None:
            refuse_unknown(self.cache, self.target)
            self.before = CacheSnapshot(self.cache)

    def _read_chunks(self, ids: torch.LongTensor, past: int):
        """The prompt in chunks, as `prefill_chunk_size` asks; the drafter reads each, and only its own context is kept."""
        kwargs, chunks = self.call.model_kwargs, ids.split(self.call.config.prefill_chunk_size, dim=1)
        encoded = encoder_outputs_by_chunk(self.target, kwargs.pop("mm_encoder_outputs", None), ids, chunks)
        images = [name for name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL if kwargs.get(name) is not None]
        if images and len(chunks) > 1:
            raise ValueError(f"`prefill_chunk_size` cannot split {images} into chunks; leave it unset.")
        inputs = RoundInputs(kwargs, self.rows, self.prompt.shape[1], past + ids.shape[1], self.device)
        inputs.columns, cache = past, kwargs.get(CACHE)
        for chunk, features_of_images in zip(chunks, encoded):
            if self.unread:
                features = Features.joined(self.unread)
                self.candidates.absorb(features.states, features.counts)
                self.speculation.drafter_passes += 1
                self.unread = []
            ahead = inputs.ahead(chunk.shape[1], cache)
            model_inputs = self.target.prepare_inputs_for_generation(chunk, is_first_iteration=True, **ahead)
            model_inputs |= features_of_images
            check_fed(self.target, model_inputs, chunk.shape[1], cache, inputs.columns)
            outputs = self._with_cache(self.target(**model_inputs, return_dict=True))
            cache = outputs[CACHE]
            check_grown(self.target, cache, chunk.shape[1], inputs.columns)
            self.speculation.target_passes += 1
            self._take_features(outputs, ahead.get("attention_mask"))
            inputs.commit([chunk.shape[1]] * self.rows)
        return outputs

    def _with_cache(self, outputs):
        name = type(self.target).__name__
        if outputs.get(CACHE) is None:
            raise ValueError(f"{name} returns no cache, without which a DFlash drafter cannot be used.")
        if self.drafting and outputs.get("hidden_states") is None:
            raise ValueError(f"{name} does not return hidden states, which a DFlash drafter needs.")
        return outputs

    def _take_features(self, outputs, mask: torch.Tensor | None):
        if not self.drafting:
            return
        states = tapped(outputs.hidden_states, self.target, self.candidates.target_layer_ids)
        self.unread.append(Features.of_prompt(states, None if mask is None else mask[:, -states[0].shape[1] :]))

    def _take_prefix(self, prefix: torch.LongTensor | None, past: int):
        """The drafter's context of what came in the cache: kept with it, or read from the text once more."""
        if not self.drafting:
            return
        kept = take_context(self.cache, self.candidates, prefix, self.rows, past)
        self.prefix = prefix if kept is None else kept.ids
        if kept is not None:
            self.unread = kept.unread
        elif prefix is None or not self.call.read_prefix or holds_media(self.target, prefix):
            self.candidates.start = past
        else:
            given = self.call.model_kwargs
            inputs = {name: given[name][..., :past] for name in RoundInputs.PER_TOKEN if given.get(name) is not None}
            inputs |= {"input_ids": prefix, "output_hidden_states": tap_request(self.candidates.target_layer_ids)}
            if "logits_to_keep" in given:
                inputs["logits_to_keep"] = 1
            self._take_features(self.target(**inputs, use_cache=False, return_dict=True), inputs.get("attention_mask"))
            self.speculation.target_passes += 1
            self.speculation.prefix_passes += 1

    def _can_be_apart(self) -> bool:
        """Whether the target and its cache have a way for sequences of different counts, as far as their kinds say."""
        takes_mask = "attention_mask" in inspect.signature(self.target.forward).parameters
        return self.rows > 1 and self.rollback.moves_rows and takes_mask and not self.limits.by_length

    def _decide_how_rows_advance(self):
        call = self.call
        self.apart = (
            self._can_be_apart()
            and not call.keeps_cache  # it is handed back as plain `generate` leaves it
            and call.streamer is None
            and separable(call.processors)
            and self.stop.by_row
            and self.check is not None
            and self.check.can_rerun
            and self.check.ragged
        )
        if self.apart:
            self.inputs.set_apart()
            self.stop.rests = True  # all rows that are full are full at the same length
        self.groups = [slice(row, row + 1) for row in range(self.rows)] if self.apart else [slice(0, self.rows)]
        noises = [self._noise() for _ in range(self.rows)] if call.config.do_sample else None
        self.choice = TargetChoice(call.processors, noises, self.rows if self.apart else 0)

    def _noise(self) -> GumbelNoise:
        # From torch's generator, so that `torch.manual_seed` reproduces a text.
        seed = int(torch.randint(2**63 - 1, (1,)))
        return GumbelNoise(seed, self.prompt.shape[1], self.candidates.num_draft_tokens + 1, self.device)

    @property
    def _with_attentions(self) -> bool:
        """Whether forward passes are asked for attentions, returned or not: the target may take another path then."""
        return bool(self.call.model_kwargs.get("output_attentions"))

    def _check_target(self, logits: torch.Tensor) -> PassCheck | None:
        """Check that this target reads several tokens as it reads them one by one, before the first token of the text.

        The inputs of a forward pass are looked at in every call, its logits once a target.

        Args:
            logits: (B, 1, V) of the first token.

        Returns:
            What was seen; None where this call leaves no room for a draft.

        Raises:
            ValueError: the target counts in another way, or its logits differ.
        """
        most, length = self.candidates.num_draft_tokens, self.text.lengths[0]
        left = self.stop.budget - length - 2  # the first token, and the target's own one behind the drafts
        most_drafts = self._room(self._longest_position() + 1, min(most, max(left, 0)))
        if most_drafts < (most if self.rollback.fixed_lengths else 1):
            return None
        count = most_drafts + 1
        first = logits[:, -1, : self.candidates.vocab_rows].argmax(-1, keepdim=True)
        last = self.prompt[:, -1:] if self.prompt.shape[1] else first
        text = torch.cat([self.prompt, first.to(self.device), last.expand(-1, most_drafts)], dim=1)
        text = self.ranks.share(text)
        checks, can_be_apart = checks_of(self.target), self._can_be_apart()
        attention = (self._with_attentions, self.target.config._attn_implementation)
        kind = (self.rows > 1, can_be_apart, *attention)
        if kind not in checks:
            before = self.speculation.target_passes
            checks[kind] = self._compare_passes(text, count, can_be_apart)
            self.speculation.check_passes += self.speculation.target_passes - before
        else:
            check_fed(self.target, self._model_inputs(text, count), count, self.cache, self.inputs.columns)
        # Code that looks at the whole text to know what to feed has it in lockstep only.
        if checks[kind].ragged and num_fed(self._model_inputs(text[:, -count:], count)) != count:
            return replace(checks[kind], ragged=False)
        return checks[kind]

    def _compare_passes(self, text: torch.LongTensor, count: int, can_be_apart: bool) -> PassCheck:
        """Read the last `count` tokens of `text` (B, length) together, and the first two of them one by one.

        Where sequences can be apart, the first one is read once more after every other sequence has moved.
        """
        rollback, inputs, start = self.rollback, self.inputs, text.shape[1] - count
        with rollback.verifying():
            outputs = self._read(text, count)
            block = outputs.logits[:, :2].clone()
            dtype = next(state.dtype for state in outputs.hidden_states if state is not None)
            del outputs
            can_rerun = rollback.recurrent is None or rollback.recurrent.can_rerun
            if can_be_apart:
                moved = torch.tensor([count * (row % 2) for row in range(self.rows)])
                rollback.move(moved)
                self.inputs = inputs.moved(moved.tolist(), count)
                again = self._read(text[:, start : start + 1], 1).logits
                self.inputs = inputs
                rollback.move(count + 1 - moved, back=True)
        if not can_be_apart:
            rollback.commit(count, [0] * self.rows)
        with rollback.verifying():
            singles = [self._read(text[:, : start + 1], 1).logits]
            inputs.columns += 1
            singles.append(self._read(text[:, : start + 2], 1).logits)
            inputs.columns -= 1
        rollback.commit(2, [0] * self.rows)
        with self.ranks.alone():
            recurrent = rollback.recurrent is not None
            check_block(self.target, block, torch.cat(singles, dim=1), dtype, recurrent, self._with_attentions)
        ragged = can_be_apart and is_same(again[1::2], singles[0][1::2], block[1::2, :1], dtype)
        if (
            ragged and torch.finfo(dtype).bits < 32
        ):  # its rounding could hide that the target counts the cache's columns
            ragged = self._heeds_positions(text[:, : start + 1], singles[0], block[:, :1])
        (ragged,) = self.ranks.agree([int(ragged)])  # each rank has rounded in its own way
        return PassCheck(can_rerun, bool(ragged))

    def _heeds_positions(self, text: torch.LongTensor, single: torch.Tensor, block: torch.Tensor) -> bool:
        """Whether the last token of `text` (B, length) has other logits at position 0; its own are given, read in two ways."""
        if "position_ids" not in self.inputs.grown:
            return False
        with self.rollback.verifying():
            elsewhere = self._read(text, 1, at_start=True).logits
        self.rollback.commit(1, [0] * self.rows)
        return difference(elsewhere, single) > 4 * difference(block, single)

    # ---- a round

    def how_many(self) -> int:
        """How many tokens to draft: what is asked for, or pays, as far as text, target and cache have room for it."""
        text, most = self.text, self.candidates.num_draft_tokens if self.drafting else 0
        running = [row for row in range(self.rows) if not self.stop.resting(row)]
        left = self.stop.budget - min(text.lengths[row] for row in running) - 1  # the target itself adds one
        room = self._room(self._longest_position(), min(most, max(left, 0)))
        schedule = self.call.schedule
        wanted = most if schedule is None else schedule.next(len(running), self.inputs.columns)
        (wanted,) = self.ranks.agree([wanted])  # each rank has a clock of its own
        if not self.rollback.fixed_lengths:
            return min(wanted, room)
        lengths = [n for n in ((most,) if schedule is None else (most // 2, most)) if 0 < n <= room]
        if wanted == 0 or not lengths:
            return 0
        return next((n for n in lengths if n >= wanted), lengths[-1])

    def _longest_position(self) -> int:
        """Position of the newest token of the longest sequence whose tokens the next forward pass goes on with.

        In lockstep the pass feeds finished sequences too, at positions that grow like the others'.
        """
        fed = [row for row in range(self.rows) if not (self.apart and self.stop.resting(row))]
        return max(self.inputs.position(self.text.lengths[row], row) for row in fed)

    def _room(self, position: int, wanted: int) -> int:
        """How many of `wanted` draft tokens the target and its cache have room for behind an anchor at `position`."""
        positions = [position]
        if "position_ids" not in self.inputs.grown:  # it counts by the mask, or by the cache's columns
            positions.append(self.inputs.columns)
        return self.rollback.most_drafts(min(self.limits.most_drafts(place, wanted) for place in positions))

    def draft(self, count: int) -> torch.LongTensor:
        """Draft tokens (B, count), in the text's buffer as well; `NO_DRAFT` where the drafter's logits are not finite."""
        text, candidates = self.text, self.candidates
        text.reserve(count + 1)
        if count == 0:
            return text.ids[:, :0]
        self.clock.mark()
        features = Features.joined(self.unread)
        logits = candidates.draft_logits(text.newest(1), features.states, count, counts=features.counts)
        self.unread = []
        self.speculation.drafter_passes += 1
        logits = logits[..., : self.vocab_size]  # some targets cut what pads their head off their own logits
        finite = logits.amax(dim=-1).isfinite().to(self.device)  # -inf is a token that is not possible, but not all are
        drafts = self.choice.propose(text.ids, text.lengths, logits.to(self.device, torch.float32))
        drafts = drafts.masked_fill(~finite, NO_DRAFT)
        for row in range(self.rows):
            if self.stop.resting(row) and not self.apart:  # what plain `generate` writes there
                drafts[row] = text.pad_token_id
                text.ids[row, text.lengths[row] : text.lengths[row] + count] = text.pad_token_id
        if self.ranks.shared:  # a forward pass over other tokens on some rank would be nonsense on all
            drafts = self.ranks.share(drafts)
            for row, length in enumerate(text.lengths):
                text.ids[row, length : length + count] = drafts[row].clamp(min=0)
        self.clock.mark()
        return drafts

    def verify(self, num_draft: int):
        """One target pass over every row's anchor and its drafts."""
        count, self.reached = num_draft + 1, 0
        outputs = self._pass(self.text.upto(num_draft) if not self.apart else self.text.newest(count), count)
        if outputs[CACHE] is not self.cache:  # Phi-3 starts a new one at the boundary of its RoPE
            self.rollback.close()
            self.cache, self.before = outputs[CACHE], None
            self.rollback = CacheRollback(self.cache, self.target)
        self.verified, self.reached = (count, min(self.text.lengths)), 1
        return outputs

    def _pass(self, ids: torch.LongTensor, count: int):
        """A pass over the last `count` tokens of `ids`; the whole text where rows advance together, as Phi-3 looks at it."""
        self._guard_cache()
        with self.rollback.verifying():
            return self._read(ids, count)

    def _read(self, ids: torch.LongTensor, count: int, at_start: bool = False):
        """Run the target over the last `count` tokens of `ids`; `at_start` as if they stood at position 0."""
        held, model_inputs = self.inputs.columns, self._model_inputs(ids, count, at_start)
        check_fed(self.target, model_inputs, count, self.cache, held)
        if model_inputs.get(CACHE) is None:
            # Phi-3 starts a new cache at the boundary of its RoPE, with drafts in its first pass: sliding layers must keep
            # what those push out of the window, as only a cache that exists before the pass can be told.
            model_inputs[CACHE] = DynamicCache(config=self.target.config.get_text_config(decoder=True))
            model_inputs[CACHE].activate_past_recording()
        self.speculation.target_passes += 1
        outputs = self.target(**model_inputs, return_dict=True)
        check_read(self.target, model_inputs, outputs, count, held)
        return outputs

    def _model_inputs(self, ids: torch.LongTensor, count: int, at_start: bool = False) -> dict:
        """What the target's forward is given for the last `count` tokens of `ids`."""
        resting = [row for row in range(self.rows) if self.apart and self.stop.resting(row)]
        ahead = self.inputs.ahead(count, self.cache, resting)
        if at_start:
            ahead["position_ids"] = torch.zeros_like(ahead["position_ids"])
        model_inputs = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=False, **ahead
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = count
        return model_inputs

    def accept(self, drafts: torch.LongTensor, logits: torch.Tensor) -> list[int]:
        """Append the target's choices to the text: every draft that equals its choice, and its own next token.

        Args:
            drafts: (B, n) as in the text's buffer; `NO_DRAFT` equals no choice.
            logits: (B, at least n + 1, V), the last n + 1 are those of the positions that follow the text.

        Returns:
            Tokens added, by row.
        """
        count, text = drafts.shape[1], self.text
        logits = logits[:, -count - 1 :].to(self.device, torch.float32)
        before, resting = [*text.lengths], [self.stop.resting(row) for row in range(self.rows)]
        if self.choice.stateless:
            drafted, choices, scores = self._choices_of_block(drafts, logits)
        else:
            drafted = drafts.tolist()
        if any(NO_DRAFT in drafted[row] for row in range(self.rows) if not resting[row]):
            self._stop_drafting()
        # By the block, but where somebody's code looks at each step.
        by_token = self.rows > 1 or self.stop.foreign or not self.choice.stateless
        accepted, written = [0] * self.rows, []
        for group in self.groups:
            if self.apart and resting[group.start]:
                continue
            for i in range(count + 1):
                self.reached = i + 1
                if self.choice.stateless:
                    step_logits, step_scores = logits[:, i], None if scores is None else scores[:, i]
                    tokens = [row[i] for row in choices[group]]
                else:
                    # What is recorded is what a processor that works in place makes of it, as in plain `generate`.
                    step_logits = logits[:, i].contiguous()
                    step_scores, tokens = self._choices_of_step(step_logits)
                tokens, agreed = self._append(group, tokens, [row[i] if i < count else None for row in drafted[group]])
                for row, same in zip(range(self.rows)[group], agreed):
                    accepted[row] += same
                if self.record.wants_scores:
                    self.record.add(step_scores, step_logits)
                self.stop(group, text.view(group), tokens, self.record.scores)
                if by_token:
                    self._stream(tokens)
                else:
                    written += tokens
                if all(self.stop.ended[group]) or not all(agreed):
                    break
        added = [now - then for now, then in zip(text.lengths, before)]
        if max(before) > self.prompt.shape[1]:  # the prompt's pass is no round
            self._count_round([row for row in range(self.rows) if not resting[row]], count, accepted, added)
        else:
            self.clock.start()
        if written:
            self._stream(written)
        return added

    def _stop_drafting(self):
        """Go on without a drafter whose logits are not finite: what it has read stays in its cache, and spoils every draft."""
        self.drafting, self.unread = False, []
        ScheduleMemory.of(self.candidates.drafter, self.target).warn_of_logits(self.candidates.drafter)

    def _stream(self, tokens: list[int]):
        if self.call.streamer is not None:
            with self.clock.elsewhere():
                self.call.streamer.put(torch.tensor(tokens))

    def _count_round(self, running: list[int], drafted: int, accepted: list[int], added: list[int]):
        for row in running:
            self.speculation.add_round(row, drafted, accepted[row], added[row])
        if self.call.schedule is not None and self.ranks.first:
            together = self.rows > 1 and not self.apart
            counts = [min(drafted, added[row] - 1) if together else accepted[row] for row in running]
            self.call.schedule.observe(drafted, counts, *self.clock.stop(), len(running), self.inputs.columns)

    def _choices_of_block(self, drafts: torch.LongTensor, logits: torch.Tensor):
        """(drafted, choices, scores (B, n + 1, V)): by row, of all positions; -1 where no token is possible; scores if recorded."""
        text, wanted = self.text, self.record.scores is not None
        choices, scores = self.choice.choose_block(text.ids, text.lengths, logits, keep_scores=wanted)
        fetched = self.ranks.share(torch.cat([drafts, choices], dim=1)).tolist()  # the one synchronisation of a round
        count = drafts.shape[1]
        return [row[:count] for row in fetched], [row[count:] for row in fetched], scores

    def _choices_of_step(self, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Of one position, with processors that keep state: they see each emitted token's logits (B, V) once, in order."""
        text = self.text
        with self._counted_passes():
            scores = self.choice.processors(text.view(slice(0, self.rows)).contiguous(), logits)
        return scores, self.ranks.agree(self.choice.choose(scores[:, None], text.lengths)[:, 0].tolist())

    @contextmanager
    def _counted_passes(self):
        """Count the target's passes that processors make, in this thread."""
        mine = threading.get_ident()

        def count(*args):
            self.speculation.processor_passes += threading.get_ident() == mine

        hook = self.target.register_forward_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()

    def _append(self, group: slice, tokens: list[int], drafted: list[int | None]) -> tuple[list[int], list[bool]]:
        """Write one token to each row of a group: (tokens, whether each was drafted). A resting row is padded."""
        text, final, agreed = self.text, [], []
        for row, token, draft in zip(range(self.rows)[group], tokens, drafted):
            length = text.lengths[row]
            if self.stop.resting(row):
                token = text.pad_token_id
            elif token < 0:
                raise ValueError(
                    f"no token is possible at position {length}: its processed scores hold a nan, or nothing but -inf."
                )
            if token != draft:
                text.ids[row, length] = token
            text.lengths[row] += 1
            final.append(token)
            agreed.append(token == draft)
        return final, agreed

    def commit(self, outputs, fed: int, added: list[int]):
        """The pass put anchors and drafts into the cache; what was not accepted leaves it.

        Features of what was accepted wait until the drafter runs again.
        """
        most = max(added)
        if self.drafting:
            states = tapped(outputs.hidden_states, self.target, self.candidates.target_layer_ids)
            start = states[0].shape[1] - fed
            states = [layer[:, start : start + most] for layer in states]
            if self.limits.past_drafting(
                max(self.inputs.position(n, row) for row, n in enumerate(self.text.lengths)) - most
            ):
                self.unread = []
            else:
                self.unread.append(Features(states, None if min(added) == most else added))
        if self.record.wants_states:
            self.record.add_states(outputs, fed, most, self._keys_alone())

        self._roll_back(fed, added)
        if trim := self.inputs.commit(added):
            self.rollback.trim(trim)

    def _roll_back(self, fed: int, added: list[int]):
        self.reached = 0  # whoever interrupts a rollback has the cache as it was before the pass
        recurrent, most = self.rollback.recurrent, max(added)
        if recurrent is not None and 0 < most < fed and not recurrent.can_rerun:
            if self.apart:
                checks_of(self.target).clear()
                raise ValueError(
                    f"the recurrent layers of {type(self.target).__name__} can no longer be seen at work, as they could in an "
                    "earlier call (was it compiled since?), and rows advance by counts of their own here. Call `generate` again: "
                    "rows will advance together."
                )
            self._replay(fed, most)
        else:
            self.rollback.commit(fed, added)
        self.before = None

    def _replay(self, fed: int, added: int):
        """Read accepted tokens once more, from before the pass that verified them."""
        self.rollback.commit(fed, [0] * self.rows)
        self._pass(self.text.ids[:, : self.verified[1] - 1 + added], added)
        self.rollback.commit(added, [added] * self.rows)
        self.speculation.replay_passes += 1

    def _keys_alone(self) -> list[tuple[int, int] | int | None]:
        """By layer with keys, what a pass over the next token alone would see; see `Record.add_states`."""

        def seen(layer):
            if layer.is_compileable:
                return layer.max_cache_len if isinstance(layer, StaticSlidingWindowLayer) else None
            return self.inputs.columns + 1, getattr(layer, "sliding_window", 1 << 62)

        return [seen(layer) for layer, linear in zip(self.cache.layers, self.cache.is_linear) if not linear]

    # ---- the end

    def close(self):
        """Leave target and cache as others expect them, whatever happened."""
        try:
            if self.before is not None:
                self._give_back()
        finally:
            if self.rollback is not None:
                self.rollback.close()

    def _give_back(self):
        """Leave the caller's cache with the text so far where a processor, a criterion or a streamer raised.

        Where a forward pass or a rollback was interrupted, leave it as it was before the pass.
        """
        try:
            # Mixers of a target that ranks share run on all of them or on none, and the error may be of this one only.
            if self.reached and not (self.ranks.shared and self.rollback.recurrent is not None):
                self._roll_back(self.verified[0], [self.reached] * self.rows)
        finally:
            if self.before is not None:
                self.before.restore()

    def result(self):
        """What plain `generate` returns."""
        call, record = self.call, self.record
        if call.streamer is not None:
            call.streamer.end()
        if call.keeps_cache:
            self._keep_context()
        sequences = self.text.finished()
        if not call.config.return_dict_in_generate:
            return sequences
        output = GenerateDecoderOnlyOutput(
            sequences=sequences, scores=record.scores, logits=record.logits, attentions=record.attentions,
            hidden_states=record.hidden_states, **{CACHE: self.cache},
        )  # fmt: skip
        output.speculation = self.speculation
        return output

    def _keep_context(self):
        """For a later call with the same cache, unless the text that the cache holds is not known."""
        behind = self.inputs.columns - (self.text.lengths[0] - 1)  # what came in the cache and not as text
        ids = self.text.ids[:, : self.text.lengths[0] - 1]
        if behind:
            if self.prefix is None or self.prefix.shape[1] != behind:
                return
            ids = torch.cat([self.prefix, ids], dim=1)
        if not all(self.cache.is_linear) and self.unread:
            keep_context(self.cache, self.candidates, ids.clone(), self.unread)
