"""Speculative decoding with a DFlash drafter, inside plain `target.generate(..., assistant_model=drafter)`.

From the call inwards: `install_generate_hook` sends a call with a drafter to `assisted_generate`, which refuses what is not
supported (`decode_settings.py`) and lets transformers prepare the call; `decode` is the paper's loop: plan, propose, verify,
accept, commit. `speculative_generate` runs the same loop with any proposer.

Legend of shapes: B sequences, n draft tokens of a round, V vocabulary.
"""

import functools
import inspect
import itertools
import math

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import logging

from .decode_accept import Acceptance
from .decode_choice import GumbelNoise, Sampler, separable
from .decode_clock import RoundClock
from .decode_confidence import ConfidentLength
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
    resolve_num_tree_nodes,
    with_healed_tokens,
    with_stop_strings,
    without,
)
from .decode_state import Call, DecodeState
from .decode_statistics import SpeculativeOutput
from .decode_tree_schedule import TreeSchedule, make_schedule
from .drafter_candidates import DFlashCandidateGenerator
from .drafter_draft import AcceptedTokens, Draft, Plan, Proposer
from .target_model import CACHE, embedding_rows, target_hidden_states
from .target_ranks import TargetRanks
from .target_runner import Path, TargetRunner
from .target_tree import pass_sizes

__all__ = ["DFlashCandidateGenerator", "assisted_generate", "install_generate_hook", "speculative_generate"]

logger = logging.get_logger(__name__)

# ------------------------------------------------------------------------------------------------------------------
# The call: from the hook to the loop.


def install_generate_hook(adopter=None):
    """Make `target.generate(..., assistant_model=drafter)` use our loop; every other call stays as it was.

    A process can hold several copies of this code (remote code, an installed package). The first one installs; the
    drafter is recognized by its config's `model_type` and answers for itself, with its own copy.

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
        target, proposer, generate, call, memory, drafter.config.num_draft_tokens, drafter.config.num_tree_nodes
    )
    memory.warn_at_the_floor(drafter.last_speculation)
    if drafter.last_speculation.stopped_drafting:
        memory.warn_of_logits(drafter)
    return output


def speculative_generate(target: PreTrainedModel, proposer: Proposer, **call):
    """Generate as `target.generate(**call)` does, with draft tokens from any proposer.

    Args:
        proposer: an object with the methods of `Proposer`, for this call only.
        call: arguments of `generate`; `num_assistant_tokens` fixes the draft length, which is adaptive otherwise, and
            `num_tree_nodes` asks for trees, as with a drafter.

    Returns:
        (output, speculation): what `generate` returns, and the statistics of the call.

    Raises:
        ValueError: the call or the target is not supported.
    """
    return _generate(target, proposer, GenerationMixin.generate, call, ScheduleMemory(), "auto")


def _generate(
    target, proposer: Proposer, generate, call: dict, memory: ScheduleMemory, default: int | str, default_nodes: int | None = None
):  # fmt: skip
    """Let transformers prepare the call, then run the loop: (output, speculation)."""
    resolved, model_kwargs = resolve_generation_config(target, generate, call)
    refuse_unsupported(target, resolved, model_kwargs, call)
    proposer.check(target)
    most = proposer.max_draft_tokens
    num_draft_tokens = resolve_num_draft_tokens(default, most, target, call)
    num_nodes = resolve_num_tree_nodes(default_nodes, num_draft_tokens, call)
    schedule = make_schedule(num_draft_tokens, num_nodes, most, memory)
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
    if schedule.statistics is not None:
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
        spread = (getattr(target, "hf_device_map", None) or {}).values()
        devices = {proposer.device.type, target.device.type, *map(str, spread)}
        self.clock = RoundClock(
            proposer.device,
            wanted=adaptive and self.state.ranks.first,
            own_work=devices == {"cpu"} and not self.state.ranks.shared,
        )

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
            if check is not None and self.schedule.wants_trees:
                self._check_trees(logits[..., :num_tokens], with_attentions)
        if check is not None and check.can_rerun and check.ragged and self._needs_no_lockstep():
            state.lockstep = False
            runner.set_ragged()
            state.stopping.rests = True  # all sequences that are full are full at the same length
        noises = [self._noise() for _ in range(state.batch)] if call.config.do_sample else None
        self.sampler = Sampler(call.processors, state.text, noises, logits.shape[-1], ragged=not state.lockstep)
        self.acceptance = Acceptance(state, self.sampler, runner, call, self.clock)
        self.confidence = ConfidentLength(self.schedule, state.ranks, runner.rollback.fixed_lengths)
        runner.before = None  # from here on the caller's cache holds the prompt
        with state.ranks.alone():
            self.accept(Draft(state.text.ids[:, :0]), logits)

    def _check_trees(self, logits: torch.Tensor, with_attentions: bool):
        """Raise where trees of a size were asked for and proposer, target, KV cache or call have none; else draft chains."""
        reason = getattr(self.proposer, "no_trees", None)
        reason = reason or self.runner.check_trees(logits[:, -1].argmax(-1, keepdim=True), with_attentions)
        if reason is not None and isinstance(self.schedule, TreeSchedule):
            self.schedule.without_trees()
            self.state.speculation.notes.append(f"chains only, no draft trees: {reason}")
        elif reason is not None:
            raise ValueError(
                f"`num_tree_nodes={self.schedule.num_nodes}` asks for draft trees, which are not supported here: {reason}. Leave "
                "`num_tree_nodes` unset for chains, or pass 'auto'."
            )

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
        running, most = state.running, self.schedule.most if self.drafting else 0
        left = state.stopping.budget - min(lengths[row] for row in running) - 1  # the target adds one
        room = runner.room(runner.longest_position(lengths, state.resting), min(most, max(left, 0)))
        asked = self.confidence.plan(self.schedule.next(len(running), runner.inputs.columns))
        (wanted,) = state.ranks.agree([asked])
        if runner.rollback.fixed_lengths:  # few of them, as a target may be compiled for each
            choices = (most,) if isinstance(self.schedule, FixedSchedule) else (most // 2, most)
            room = max((n for n in choices if n <= room), default=0)
            wanted = min((n for n in choices if n >= wanted > 0), default=min(wanted, room))
        if min(wanted, room) == 0:
            state.speculation.count_undrafted(self.schedule.most, left, min(most, room))
        return Plan(min(wanted, room), self._num_nodes(), runner.fixed)

    def _num_nodes(self) -> int | None:
        """Return the size of the coming tree, as far as the KV cache has room for its pass; None for a chain."""
        if self.runner.mask_form is None:
            return None
        (wanted,), rollback = self.state.ranks.agree([self.schedule.num_nodes or 0]), self.runner.rollback
        room = rollback.most_drafts(wanted, self.runner.inputs.columns)
        if rollback.fixed_lengths:
            room = max((size for size in pass_sizes(wanted) if size <= room), default=0)
        return min(wanted, room) or None

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
        draft = self._shared(self.confidence.cut(draft, state.running))
        self.clock.mark()
        return draft

    def _shared(self, draft: Draft) -> Draft:
        """Return the first rank's draft: a pass over other tokens on some rank would be nonsense on all."""
        ranks = self.state.ranks
        if not ranks.shared:
            return draft
        if draft.parents is None:
            return Draft(ranks.share(draft.tokens), scores=draft.scores, finite=draft.finite)
        both = torch.stack([draft.tokens[0], torch.tensor(draft.parents, device=draft.tokens.device)])
        tokens, parents = ranks.share(both)
        return Draft(tokens[None], parents.tolist(), draft.scores)

    def verify(self, draft: Draft):
        """Run the target over every anchor and its draft tokens, in one forward pass."""
        state, fed = self.state, draft.tokens
        shape = draft.shape
        if shape is not None and self.runner.rollback.fixed_lengths:
            shape = shape.padded(next(size for size in pass_sizes(self.schedule.num_nodes) if size >= len(draft)))
            fed = torch.nn.functional.pad(fed, (0, len(shape.parents) - len(draft)))
        state.text.reserve(fed.shape[1] + 1)
        rows = slice(0, state.batch)
        if shape is not None:  # its tokens do not follow each other in the text
            ids = torch.cat([state.text.view(rows), fed], dim=1)
        elif state.lockstep:  # some targets look at the whole text
            state.text.write_ahead(rows, fed)
            ids = state.text.view(rows, ahead=fed.shape[1])
        else:
            ids = torch.cat([state.anchor, fed], dim=1)
        return self.runner.verify(ids, fed.shape[1] + 1, state.resting, shape)

    def accept(self, draft: Draft, logits: torch.Tensor) -> Path:
        """Append the target's choices to the text: every draft token that equals its choice, and its own next token.

        Args:
            logits: (B, at least n + 1, V); the last ones are those of the tokens of the pass.
        """
        state, lengths, running = self.state, [*self.state.text.lengths], self.state.running
        path, accepted = self.acceptance.walk(draft, logits[:, -max(self.runner.fed, 1) :])
        if state.speculation.stopped_drafting:
            self.drafting = False  # what the proposer has read stays in its KV cache, and spoils every draft
        self._count_round(running, draft, accepted, path, lengths)
        return path

    def _count_round(self, running: list[int], draft: Draft, accepted: list[int], path: Path, lengths: list[int]):
        state, drafted = self.state, draft.depth
        if max(lengths) == state.prompt.shape[1]:  # the prefill is no round
            self.clock.start()
            return
        for row in running:
            state.speculation.add_round(row, drafted, accepted[row], path.counts[row], len(draft), path.branches)
        if draft.scores is not None:
            state.speculation.add_tree(1 + sum(map(math.exp, draft.scores)), path.longest)
        if not self.clock.wanted:
            return
        seconds, context, fixed = self.clock.stop(), self.runner.inputs.columns, self.runner.fixed
        if fixed is not None and fixed.warms(path.fed):
            return
        if draft.parents is not None:
            chain = [node + 1 for node in draft.best_chain]  # rows of the pass
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chain, path.rows[0][1:]))
            self.schedule.observe_tree(len(draft), (len(chain), len([*same])), path.longest, seconds, context)
        else:
            in_lockstep = state.batch > 1 and state.lockstep
            counts = [min(drafted, path.counts[row] - 1) if in_lockstep else accepted[row] for row in running]
            self.schedule.observe(drafted, counts, *seconds, len(running), context)
            self.confidence.observe(counts, drafted)

    def commit(self, path: Path, outputs):
        """Keep the path: its keys and values in the target's KV cache, its hidden states for the proposer."""
        state, runner = self.state, self.runner
        if self.drafting:
            layer_ids = self.proposer.target_layer_ids
            layers = target_hidden_states(outputs.hidden_states, self.target, layer_ids) if layer_ids else []
            states = [runner.select(path, layer) for layer in layers]
            self.proposer.read(AcceptedTokens(runner.kept_ids(path), states, None if path.even else path.counts))
            # From the boundary of a dynamic NTK on, no pass may hold more than one token.
            self.drafting = not runner.past_drafting(state.text.lengths, path.longest)
        if state.recorder.wants_states:
            state.recorder.add_states(outputs, path.fed, path.rows[0], runner.keys_alone())
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
        speculation.notes += getattr(self.proposer, "notes", [])
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
