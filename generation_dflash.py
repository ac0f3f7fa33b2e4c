"""Speculative decoding with a DFlash drafter, inside plain `target.generate(..., assistant_model=drafter)`.

From the call inwards: `install_generate_hook` sends a call with a drafter to `assisted_generate`, which refuses what is not
supported (`decode_settings.py`) and lets transformers prepare the call; `decode` is the paper's loop: plan, propose, verify,
accept, commit. `speculative_generate` runs the same loop with any proposer.

Legend of shapes: B sequences, n draft tokens of a round, V vocabulary.
"""

import functools
import inspect
import threading
from contextlib import contextmanager

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import logging

from .decode_choice import NO_DRAFT, GumbelNoise, Sampler, separable
from .decode_clock import RoundClock
from .decode_memory import ScheduleMemory
from .decode_prefill import Prefill
from .decode_schedule import DraftSchedule, FixedSchedule
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
from .decode_state import Call, DecodeState
from .decode_statistics import SpeculativeOutput
from .drafter_candidates import AcceptedTokens, DFlashCandidateGenerator, Draft, Plan, Proposer
from .target_model import CACHE, embedding_rows, tapped
from .target_ranks import TargetRanks
from .target_runner import Path, TargetRunner

__all__ = ["DFlashCandidateGenerator", "assisted_generate", "install_generate_hook", "speculative_generate"]

logger = logging.get_logger(__name__)

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
        if isinstance(assistant, str) and kwargs.get("custom_generate") is None:
            raise ValueError(
                f"`assistant_model` is the string {assistant!r}, not a model. Load the drafter first: "
                f"AutoModel.from_pretrained({assistant!r}, trust_remote_code=True)."
            )
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
    proposer, memory = drafter.proposer(target), ScheduleMemory.of(drafter, target)
    output, drafter.last_speculation = _generate(
        target, proposer, generate, call, memory, drafter.config.num_draft_tokens
    )
    memory.warn_at_the_floor(drafter.last_speculation)
    if drafter.last_speculation.stopped_drafting:
        memory.warn_of_logits(drafter)
    return output


def speculative_generate(target: PreTrainedModel, proposer: Proposer, **call):
    """Generate as `target.generate(**call)` does, with draft tokens from any proposer.

    Args:
        proposer: an object with the methods of `Proposer`, for this call only.
        call: arguments of `generate`; `num_assistant_tokens` fixes the draft length, which is adaptive otherwise.

    Returns:
        (output, speculation): what `generate` returns, and the statistics of the call.

    Raises:
        ValueError: the call or the target is not supported.
    """
    return _generate(target, proposer, GenerationMixin.generate, call, ScheduleMemory(), "auto")


def _generate(target, proposer: Proposer, generate, call: dict, memory: ScheduleMemory, default: int | str):
    """Let transformers prepare the call, then run the loop: (output, speculation)."""
    resolved, model_kwargs = resolve_generation_config(target, generate, call)
    refuse_unsupported(target, resolved, model_kwargs, call)
    proposer.check(target)
    most = proposer.max_draft_tokens
    num_draft_tokens = resolve_num_draft_tokens(default, most, target, call)
    adaptive = num_draft_tokens == "auto"
    schedule = DraftSchedule(most + 1, memory.statistics) if adaptive else FixedSchedule(num_draft_tokens)
    read_prefix, streamer, own_cache = call.get("read_prefix", True), call.get("streamer"), passed_cache(model_kwargs)
    call = with_healed_tokens(target, resolved, with_stop_strings(target, resolved, call))

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        prepared = Call(
            logits_processor, stopping_criteria, generation_config, model_kwargs, streamer, own_cache, read_prefix, schedule
        )  # fmt: skip
        return decode(model, proposer, input_ids, prepared)

    output = generate(
        target, custom_generate=loop, **without(call, "custom_generate", "assistant_tokenizer", *OWN_ARGUMENTS)
    )
    if adaptive:
        memory.statistics = schedule.statistics
    return output


# ------------------------------------------------------------------------------------------------------------------
# The loop.


def decode(target: PreTrainedModel, proposer: Proposer, input_ids: torch.LongTensor, call: Call):
    """Plan, propose, verify, accept, commit, until every sequence has finished (paper, section 3).

    Args:
        input_ids: (B, prompt), on the device where text and scores live.

    Returns:
        (output, speculation): what plain `generate` returns, and the statistics of this call.
    """
    loop = Decoding(target, proposer, input_ids, call)
    state, ranks = loop.state, loop.state.ranks
    try:
        loop.prefill()
        with target._optimize_model_for_decode():
            while not state.finished:
                plan = loop.plan()
                draft = loop.propose(plan)
                outputs = loop.verify(draft)
                with ranks.alone():
                    path = loop.accept(draft, outputs.logits)
                loop.commit(path, outputs)
            ranks.agree([])  # none of them stopped with an error in the last round
    finally:
        loop.runner.close()
    return loop.result()


class Decoding:
    """One call at work: the steps of a round, over the state of the text, the target and the proposer."""

    def __init__(self, target, proposer: Proposer, input_ids: torch.LongTensor, call: Call):
        self.target, self.proposer, self.call, self.schedule = target, proposer, call, call.schedule
        self.state = DecodeState(input_ids, call, TargetRanks(target, input_ids.shape[0]))
        self.runner = TargetRunner(target, call.model_kwargs, input_ids, call.passed_cache, self.state.ranks)
        # Without draft tokens the proposer never runs, so no hidden states are asked for.
        self.drafting = self.schedule.most > 0
        adaptive = isinstance(self.schedule, DraftSchedule)
        self.clock = RoundClock(proposer.device, wanted=adaptive and self.state.ranks.first)

    def prefill(self):
        """Read the prompt, see how the target's passes behave, and emit the first token, which is the first anchor."""
        state, call, runner = self.state, self.call, self.runner
        prefill = Prefill(runner, self.proposer if self.drafting else None, state, call)
        self._check_ranks(prefill.past)
        logits = prefill.run()  # (B, 1, V)
        check = None
        if self.drafting:
            left = state.stopping.budget - state.prompt.shape[1] - 2  # the first token, and the target's own one
            num_tokens = embedding_rows(self.target)
            # Returned or not: a target that is asked for attentions may take another path.
            with_attentions = bool(call.model_kwargs.get("output_attentions"))
            check = runner.check(logits, self.schedule.most, left, num_tokens, with_attentions)
        if check is not None and check.can_rerun and check.ragged and self._needs_no_lockstep():
            state.lockstep = False
            runner.set_ragged()
            state.stopping.rests = True  # all sequences that are full are full at the same length
        noises = [self._noise() for _ in range(state.batch)] if call.config.do_sample else None
        self.sampler = Sampler(call.processors, state.text, noises, logits.shape[-1], ragged=not state.lockstep)
        runner.before = None  # from here on the caller's cache holds the prompt
        with state.ranks.alone():
            self.accept(Draft(state.text.ids[:, :0]), logits)

    def _needs_no_lockstep(self) -> bool:
        """Tell whether nothing in this call needs the batch as plain `generate` has it."""
        call, state = self.call, self.state
        handed_back = call.keeps_cache or call.streamer is not None
        return not handed_back and separable(call.processors) and state.stopping.by_row

    def _check_ranks(self, cached: int):
        """Check that what decides how many forward passes there are, and how long they are, is the same on all ranks."""
        call, state = self.call, self.state
        if not state.ranks.shared:
            return
        fixed = isinstance(self.schedule, FixedSchedule)
        facts = {
            "sequences": state.batch, "prompt tokens": state.prompt.shape[1], "cached tokens": cached,
            "checksum of the prompt": hash(tuple(state.prompt.flatten().tolist())), "length limit": state.stopping.budget,
            "checksum of the end tokens": hash(frozenset(state.stopping.eos)),
            "draft tokens (-1 for 'auto')": self.schedule.most if fixed else -1,
            "`do_sample`": call.config.do_sample, "`prefill_chunk_size`": call.config.prefill_chunk_size or 0,
            "processors": len(call.processors), "stopping criteria": len(call.criteria),
            "a cache to hand back": call.keeps_cache, "a streamer of a batch": state.batch > 1 and call.streamer is not None,
        }  # fmt: skip
        state.ranks.check_call({name: int(value) for name, value in facts.items()})

    def _noise(self) -> GumbelNoise:
        # From torch's generator, so that `torch.manual_seed` reproduces a text.
        seed = int(torch.randint(2**63 - 1, (1,)))
        return GumbelNoise(seed, self.state.prompt.shape[1], self.schedule.most + 1, self.state.device)

    # ---- a round

    def plan(self) -> Plan:
        """Say how many tokens to draft: what is asked for, or pays, as far as text, target and cache have room for it."""
        state, runner, lengths = self.state, self.runner, self.state.text.lengths
        resting = state.resting
        most = self.schedule.most if self.drafting else 0
        left = (
            state.stopping.budget - min(n for n, ended in zip(lengths, resting) if not ended) - 1
        )  # the target adds one
        room = runner.room(runner.longest_position(lengths, resting), min(most, max(left, 0)))
        (wanted,) = state.ranks.agree([self.schedule.next(resting.count(False), runner.inputs.columns)])
        if runner.rollback.fixed_lengths:  # few of them, as a target may be compiled for each
            choices = (most,) if isinstance(self.schedule, FixedSchedule) else (most // 2, most)
            room = max((n for n in choices if n <= room), default=0)
            wanted = min((n for n in choices if n >= wanted > 0), default=min(wanted, room))
        if min(wanted, room) == 0:
            state.speculation.count_undrafted(self.schedule.most, left, min(most, room))
        return Plan(min(wanted, room))

    def propose(self, plan: Plan) -> Draft:
        """Let the proposer draft behind each anchor."""
        state = self.state
        if plan.num_draft_tokens == 0:
            return Draft(state.text.ids[:, :0])
        self.clock.mark()
        draft = self.proposer.propose(state.anchor, plan, self.sampler)
        resting = state.resting
        if state.lockstep and any(resting):  # what plain `generate` writes there
            for row in [row for row, ended in enumerate(resting) if ended]:
                draft.tokens[row] = state.text.pad_token_id
        draft.tokens = state.ranks.share(draft.tokens)  # a pass over other tokens on some rank would be nonsense on all
        self.clock.mark()
        return draft

    def verify(self, draft: Draft):
        """Run the target over every anchor and its draft tokens, in one forward pass."""
        state, fed = self.state, draft.tokens.clamp(min=0)  # `NO_DRAFT` is no token, and will be rejected
        state.text.reserve(len(draft) + 1)
        if state.lockstep:  # some targets look at the whole text
            rows = slice(0, state.batch)
            state.text.write_ahead(rows, fed)
            ids = state.text.view(rows, ahead=len(draft))
        else:
            ids = torch.cat([state.anchor, fed], dim=1)
        return self.runner.verify(ids, len(draft) + 1, state.resting)

    def accept(self, draft: Draft, logits: torch.Tensor) -> Path:
        """Append the target's choices to the text: every draft token that equals its choice, and its own next token.

        Args:
            logits: (B, at least n + 1, V); the last n + 1 are those of the positions that follow the text.
        """
        state, count = self.state, len(draft)
        text, lengths, resting = state.text, [*state.text.lengths], state.resting
        logits = logits[:, -count - 1 :].to(state.device, torch.float32)
        tokens, choices, scores = self._read_choices(draft, logits)
        if any(NO_DRAFT in tokens[row] for row in range(state.batch) if not resting[row]):
            # What the proposer has read stays in its KV cache, and spoils every draft.
            self.drafting, state.speculation.stopped_drafting = False, True
        # By the block, but where somebody's code looks at each step.
        by_token = state.batch > 1 or state.stopping.foreign or choices is None
        accepted, written = [0] * state.batch, []
        for group in state.groups:
            if not state.lockstep and resting[group.start]:
                continue
            for i in range(count + 1):
                self.runner.reached = i + 1
                if choices is None:
                    # What is recorded is what a processor that works in place makes of it, as in plain `generate`.
                    step_logits = logits[:, i].contiguous()
                    step_scores, step = self._choose_next(step_logits)
                else:
                    step_logits, step_scores = logits[:, i], None if scores is None else scores[:, i]
                    step = [row[i] for row in choices[group]]
                step, agreed = self._append(
                    group, step, [row[i] if i < count else None for row in tokens[group]], choices is None
                )
                for row, same in zip(range(state.batch)[group], agreed):
                    accepted[row] += same
                if state.recorder.wants_scores:
                    state.recorder.add(step_scores, step_logits)
                state.stopping(group, text.view(group), step, state.recorder.scores)
                if by_token:
                    self._stream(step)
                else:
                    written += step
                if all(state.stopping.ended[group]) or not all(agreed):
                    break
        path = Path([now - then for now, then in zip(text.lengths, lengths)], count + 1)
        self._count_round([row for row, ended in enumerate(resting) if not ended], count, accepted, path, lengths)
        if written:
            self._stream(written)
        return path

    def _read_choices(self, draft: Draft, logits: torch.Tensor):
        """Choose after every token of the block and read draft and choices: the one synchronization of a round.

        Returns:
            (tokens, choices, scores): by sequence, -1 where no token is possible; scores (B, n + 1, V) if they are recorded.
            Choices are None where processors keep state, and see one position after the other.
        """
        state, count = self.state, len(draft)
        if not self.sampler.stateless:
            return draft.tokens.tolist(), None, None
        keep_scores = state.recorder.scores is not None
        choices, scores = self.sampler.choose_block(draft.tokens.clamp(min=0), logits, keep_scores)
        both = state.ranks.share(torch.cat([draft.tokens, choices], dim=1))
        for group in state.groups:  # what will be rejected lies behind the text's end
            state.text.write_ahead(group, both[group, count:])
        fetched = both.tolist()
        return [row[:count] for row in fetched], [row[count:] for row in fetched], scores

    def _choose_next(self, logits: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Choose one token with processors that keep state: they see each emitted token's logits (B, V) once, in order."""
        with self._counted_passes():
            choices, scores = self.sampler.choose_next(logits)
        return scores, self.state.ranks.agree(choices.tolist())

    @contextmanager
    def _counted_passes(self):
        """Count the target's passes that processors make, in this thread."""
        mine = threading.get_ident()

        def count(*args):
            self.state.speculation.processor_passes += threading.get_ident() == mine

        hook = self.target.register_forward_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()

    def _append(self, group: slice, tokens: list[int], drafted: list[int | None], write: bool):
        """Append one token to each sequence of a group: (tokens, whether each was drafted). A finished one is padded.

        Args:
            write: whether the tokens have to be written, and are not in the buffer already.
        """
        state, text, final, agreed = self.state, self.state.text, [], []
        for row, token, draft in zip(range(state.batch)[group], tokens, drafted):
            length, padded = text.lengths[row], state.stopping.resting(row)
            if padded:
                token = text.pad_token_id
            elif token < 0:
                raise ValueError(
                    f"no token is possible at position {length}: its processed scores hold a nan, or nothing but -inf."
                )
            if write or padded:
                text.ids[row, length] = token
            text.lengths[row] += 1
            final.append(token)
            agreed.append(token == draft)
        return final, agreed

    def _stream(self, tokens: list[int]):
        if self.call.streamer is not None:
            with self.clock.elsewhere():
                self.call.streamer.put(torch.tensor(tokens))

    def _count_round(self, running: list[int], drafted: int, accepted: list[int], path: Path, lengths: list[int]):
        state = self.state
        if max(lengths) == state.prompt.shape[1]:  # the prefill is no round
            self.clock.start()
            return
        for row in running:
            state.speculation.add_round(row, drafted, accepted[row], path.counts[row])
        if self.clock.wanted:
            in_lockstep = state.batch > 1 and state.lockstep
            counts = [min(drafted, path.counts[row] - 1) if in_lockstep else accepted[row] for row in running]
            self.schedule.observe(drafted, counts, *self.clock.stop(), len(running), self.runner.inputs.columns)

    def commit(self, path: Path, outputs):
        """Keep the path: its keys and values in the target's KV cache, its hidden states for the proposer."""
        state, runner = self.state, self.runner
        if self.drafting:
            states = []
            if layer_ids := self.proposer.target_layer_ids:
                states = tapped(outputs.hidden_states, self.target, layer_ids)
                start = states[0].shape[1] - path.fed
                states = [layer[:, start : start + path.longest] for layer in states]
            self.proposer.read(AcceptedTokens(runner.kept_ids(path), states, None if path.even else path.counts))
            # From the boundary of a dynamic NTK on, no pass may hold more than one token.
            self.drafting = not runner.past_drafting(state.text.lengths, path.longest)
        if state.recorder.wants_states:
            state.recorder.add_states(outputs, path.fed, path.longest, runner.keys_alone())
        runner.keep(path)

    # ---- the end

    def result(self):
        """Return what plain `generate` returns, and the statistics: (output, speculation)."""
        call, state, runner, recorder = self.call, self.state, self.runner, self.state.recorder
        if call.streamer is not None:
            call.streamer.end()
        if call.keeps_cache:
            self._keep_context()
        speculation = state.speculation
        speculation.target_passes, speculation.drafter_passes = runner.num_passes, self.proposer.num_passes
        speculation.check_passes, speculation.replay_passes = runner.num_check_passes, runner.num_replay_passes
        speculation.notes = [*getattr(self.proposer, "notes", [])]
        sequences = state.text.finished()
        if not call.config.return_dict_in_generate:
            return sequences, speculation
        output = SpeculativeOutput(
            sequences=sequences, scores=recorder.scores, logits=recorder.logits, attentions=recorder.attentions,
            hidden_states=recorder.hidden_states, **{CACHE: runner.cache},
        )  # fmt: skip
        output.speculation = speculation
        return output, speculation

    def _keep_context(self):
        """Keep the proposer's state beside the cache for a later call, unless the text that it holds is not known."""
        text, runner, prefix = self.state.text, self.runner, self.state.prefix
        ids = text.ids[:, : text.lengths[0] - 1]
        if behind := runner.inputs.columns - ids.shape[1]:  # what came in the cache and not as text
            if prefix is None or prefix.shape[1] != behind:
                return
            ids = torch.cat([prefix, ids], dim=1)
        if not all(runner.cache.is_linear) and self.drafting:
            self.proposer.keep(runner.cache, ids.clone())
