"""Random calls of `generate`, each compared with plain `generate`: property-based tests of the whole package.

A `Case` is one combination of target, drafter, drafts, batch, options, observers, cache and turns. `check` runs it with and
without the drafter and compares everything that a caller can see. A fault prints the smallest case as a constructor.

python tests/fuzzing.py --minutes 60             # what `make fuzz` runs: all families, goes on after a fault
python tests/fuzzing.py "Case(family='llama')"   # one case again
"""

import argparse
import ast
import itertools
import logging
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from unittest import mock

import hypothesis
import tokenizers
import torch
import transformers
from dflash_hub.decode_memory import ScheduleMemory
from dflash_hub.target_cache import cached_length
from dflash_hub.target_model import CACHE
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation import MaxLengthCriteria, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers.families import VOCAB, _ours, caches, drafter_for, tiny_family
from helpers.scripted import scripted

FAULTS = Path(__file__).parents[2] / ".hypothesis" / "faults.txt"  # one minimal case a line


@dataclass(frozen=True)
class Turn:
    """A further call with the cache of the call before it.

    Args:
        new: tokens that follow the text so far.
        whole: whether the call gets the whole text, or only the new tokens and a mask for all.
        drafted: whether the drafter assists; plain turns lie between drafted ones in a real chat.
        holes: whether the mask hides what pads finished sequences in the middle of the text.
    """

    new: int = 2
    whole: bool = True
    drafted: bool = True
    holes: bool = False


@dataclass(frozen=True)
class Case:
    """One call of `generate`, and the turns that follow it. Everything is a literal, so that a case can be pasted.

    Args:
        config: overrides of `families.tiny_config`, such as a RoPE type or a window.
        drafter: overrides of the drafter's config.
        drafts: random, half-right or oracle, see `families.drafting`.
        prompts: lengths of the prompts; one sequence each.
        mask: whether an attention mask is passed.
        options: arguments of `generate`; those in `_ARGUMENTS` are names for objects.
        processors, criteria: names of custom ones, see `PROCESSORS` and `CRITERIA`.
        cache: a kind of `families.caches`.
        raises: who raises at its n-th call: "processor", "criterion" or "streamer", where plain `generate` raises as well;
            "target", "layer", "head" or "drafter", modules at work, where the next turn is compared with a run without cache.
    """

    family: str = "llama"
    config: dict = field(default_factory=dict)
    attention: str | None = None
    block_size: int = 5
    drafter: dict = field(default_factory=dict)
    drafts: str = "random"
    num_draft: int | str = "auto"
    num_nodes: int | None = None
    prompts: tuple[int, ...] = (6,)
    seed: int = 0
    padding: str = "left"
    mask: bool = True
    embeds: bool = False
    sampled: bool = False
    max_new_tokens: int = 12
    options: dict = field(default_factory=dict)
    as_config: bool = False
    processors: tuple[str, ...] = ()
    criteria: tuple[str, ...] = ()
    streamer: bool = False
    cache: str | None = None
    first_drafted: bool = True
    turns: tuple[Turn, ...] = ()
    raises: tuple[str, int] | None = None

    def __repr__(self):
        default = Case()
        changed = [f for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


class Fault(AssertionError):
    """Something differs from plain `generate`. `kind` is the same for faults that are probably one."""

    def __init__(self, case: Case, kind: str, detail: str = ""):
        self.case, self.kind = case, kind
        super().__init__(f"{kind} {detail}\n    check({case!r})")


class NotTried(Exception):
    """No tiny target of this kind can be made, or plain `generate` itself cannot be trusted."""


# ------------------------------------------------------------------------------------------------------------------
# Observers: what the caller's own code sees of a call, in one log.


class Interruption(Exception):
    """Raised by an observer at its n-th call."""


class _Observer:
    def __init__(self, log: list, raises: int | None = None):
        self.log, self.raises, self.calls = log, raises, 0

    def note(self, *seen):
        self.calls += 1
        if self.calls == self.raises:
            raise Interruption
        self.log.append((type(self).__name__, *seen))


class NotingProcessor(_Observer, LogitsProcessor):
    """Changes nothing."""

    def __call__(self, input_ids, scores):
        self.note(input_ids.clone(), scores.clone())
        return scores


class CountingProcessor(NotingProcessor):
    """Keeps state: favors another token in every call."""

    def __call__(self, input_ids, scores):
        scores = super().__call__(input_ids, scores).clone()
        scores[:, (7 * self.calls) % scores.shape[1]] += 2.0
        return scores


class InPlaceProcessor(NotingProcessor):
    """Changes the scores that it is given."""

    def __call__(self, input_ids, scores):
        scores = super().__call__(input_ids, scores)
        scores[:, 10:20] -= 1.0
        return scores


class BatchProcessor(NotingProcessor):
    """Looks at all sequences of the batch together."""

    def __call__(self, input_ids, scores):
        scores = super().__call__(input_ids, scores)
        return scores - 0.5 * scores.clamp(min=-9.0).mean(dim=0, keepdim=True) * (input_ids[:, -1:] % 2)


class NotingCriterion(_Observer, StoppingCriteria):
    """Ends nothing."""

    def __call__(self, input_ids, scores, **kwargs):
        self.note(input_ids.clone(), None if scores is None else len(scores))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class SequenceCriterion(NotingCriterion):
    """Ends single sequences."""

    def __call__(self, input_ids, scores, **kwargs):
        super().__call__(input_ids, scores)
        return input_ids[:, -1] % 11 == 3


class EndOfTextCriterion(SequenceCriterion):
    """Pads what it has ended, as plain `generate` does where a criterion has end tokens."""

    eos_token_id = torch.tensor([3])


class LengthCriterion(MaxLengthCriteria):
    """A subclass of a built-in one: everything ends two tokens before its length."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.max_length - 2)


class Streamer(_Observer):
    """Keeps the pieces."""

    def put(self, value):
        self.note(value.clone())

    def end(self):
        self.log.append((type(self).__name__, "end"))


ROUNDING = ("quantized", "fp8")
MODULES = ("head", "drafter", "target", "layer")
PROCESSORS = {p.__name__: p for p in (NotingProcessor, CountingProcessor, InPlaceProcessor, BatchProcessor)}
CRITERIA = {c.__name__: c for c in (NotingCriterion, SequenceCriterion, EndOfTextCriterion)}


@lru_cache
def tokenizer():
    """One token a character, in a vocabulary of `families.VOCAB`."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", " ", "\n", *map(chr, range(35, 127))])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<pad>"))
    model.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
    return [token for token in range(3, 96) if (token + int(ids[-1]) + batch_id) % 3]


# Options that stand for objects, made anew for each call.
_ARGUMENTS = {
    "stop_strings": lambda value, case: {"stop_strings": list(value), "tokenizer": tokenizer()},
    "token_healing": lambda value, case: {"token_healing": value, "tokenizer": tokenizer()},
    "negative_prompt": lambda value, case: {
        "negative_prompt_ids": prompts_of([value] * len(case.prompts), 99, "left")[0]
    },
    "watermark": lambda value, case: {"watermarking_config": WATERMARKS[value]()},
    "allowed": lambda value, case: {"prefix_allowed_tokens_fn": allowed},
    "length_criterion": lambda value, case: {},
    "first_position": lambda value, case: {},
}
WATERMARKS = {
    "kgw": lambda: WatermarkingConfig(bias=2.5, context_width=1),
    "synthid": lambda: SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 11, 23], context_history_size=8),
}


# ------------------------------------------------------------------------------------------------------------------
# One run of a case.


@dataclass
class Outcome:
    """What a caller sees of one call.

    Args:
        ids, mask: the text before it, what is cached included.
        given: how many tokens the call was handed, with which its sequences begin.
        output: what `generate` returned, as an output object's fields.
        seen: what processors, criteria and the streamer saw, in order.
        cache: a snapshot of what the cache held at the end, by layer.
    """

    ids: torch.LongTensor
    mask: torch.LongTensor
    given: int
    output: dict = field(default_factory=dict)
    seen: list = field(default_factory=list)
    error: BaseException | None = None
    cache: list | None = None
    length: int | None = None
    speculation: object = None

    @property
    def new(self) -> torch.LongTensor:
        """What the call wrote, one line a sequence."""
        return self.output["sequences"][:, self.given :]

    @property
    def text(self) -> torch.LongTensor | None:
        """All of the text at the end; None where the call raised."""
        if "sequences" not in self.output:
            return None
        if self.given == self.ids.shape[1]:
            return self.output["sequences"]  # healing may have changed the prompt
        return torch.cat([self.ids.repeat_interleave(len(self.new) // len(self.ids), dim=0), self.new], dim=1)


@lru_cache(maxsize=64)
def _target(family: str, config: str, attention: str | None):
    try:
        target, _ = tiny_family(family, layers=4, **ast.literal_eval(config))
        if attention is not None:
            target.set_attn_implementation(attention)
        target.generate(torch.tensor([[5, 6]]), max_new_tokens=2)  # Big Bird is another with its first call
    except Exception as error:
        raise NotTried(f"no tiny target: {type(error).__name__}: {error}") from error
    return target


@lru_cache(maxsize=64)
def _drafter(family: str, config: str, attention: str | None, block_size: int, fields: str):
    try:
        return drafter_for(_target(family, config, attention), block_size, **ast.literal_eval(fields))
    except Exception as error:
        raise NotTried(f"no drafter: {error}") from error


def pair_of(case: Case):
    of_target = case.family, repr(case.config), case.attention
    return _target(*of_target), _drafter(*of_target, case.block_size, repr(case.drafter))


def forget_targets():
    """Make targets and drafters anew from here on."""
    _target.cache_clear()
    _drafter.cache_clear()


def prompts_of(lengths, seed: int, padding: str) -> tuple[torch.LongTensor, torch.LongTensor]:
    """Seeded prompts of these lengths, padded to the longest: (ids, attention mask)."""
    generator, longest = torch.Generator().manual_seed(seed), max(lengths)
    ids, mask = (torch.zeros(len(lengths), longest, dtype=torch.long) for _ in range(2))
    for row, length in enumerate(lengths):
        place = slice(longest - length, longest) if padding == "left" else slice(0, length)
        ids[row, place] = torch.randint(3, 96, (length,), generator=generator)
        mask[row, place] = 1
    return ids, mask


def arguments(case: Case, log: list) -> dict:
    """Arguments of `generate` but for the text, the cache and the drafter."""
    who, at = case.raises or (None, None)
    processors = [PROCESSORS[name](log) for name in case.processors]
    criteria = [CRITERIA[name](log) for name in case.criteria]
    if who == "processor":
        processors.append(NotingProcessor(log, raises=at))
    if who == "criterion":
        criteria.append(NotingCriterion(log, raises=at))
    values = {"do_sample": case.sampled, "max_new_tokens": case.max_new_tokens}
    for name, value in case.options.items():
        values |= _ARGUMENTS[name](value, case) if name in _ARGUMENTS else {name: value}
    if "length_criterion" in case.options:
        criteria.append(LengthCriterion(case.options["length_criterion"]))
    if case.as_config:
        known = transformers.GenerationConfig()
        own = {name: values.pop(name) for name in [*values] if hasattr(known, name)}
        values["generation_config"] = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1, **own)
    if processors:
        values["logits_processor"] = LogitsProcessorList(processors)
    if criteria:
        values["stopping_criteria"] = StoppingCriteriaList(criteria)
    if case.streamer or who == "streamer":
        values["streamer"] = Streamer(log, raises=at if who == "streamer" else None)
    return values


def run(case: Case, assisted: bool, texts: list | None = None) -> list[Outcome]:
    """The call and its turns, up to the first that raises: one outcome a call.

    Args:
        assisted: whether the drafter assists where the case says so. A sampled case that is not assisted runs with
            `num_assistant_tokens=0`, which drafts nothing: noise is the same then, whatever is drafted.
        texts: by call, what half-right and oracle drafts follow.
    """
    target, _ = pair_of(case)
    ScheduleMemory._OF_PAIR.clear()  # of what earlier cases took
    ids, mask = prompts_of(case.prompts, case.seed, case.padding)
    cache = caches(case.cache, target) if case.cache else {}
    outcomes = []
    for i, turn in enumerate((Turn(drafted=case.first_drafted), *case.turns)):
        if i:
            ids, mask = _continued(case, outcomes[-1], turn, i)
        first = replace(case, raises=None) if i else case
        text = _real_text(texts[i], mask) if texts else None
        outcome = _call(first, ids, mask, cache, turn, assisted, text)
        outcomes.append(outcome)
        cache = {CACHE: outcome.output.get(CACHE) or cache.get(CACHE)}
        if cache[CACHE] is None or (outcome.error is not None and (i or case.raises is None)):
            break
        cache = {CACHE: cache[CACHE]}
    return outcomes


def _continued(case: Case, before: Outcome, turn: Turn, i: int):
    """The text of the next turn: (ids, attention mask), which begin with what the call before ended with."""
    text = before.text
    if text is None:  # it raised: what is in the cache is a beginning of the text that processors saw last
        given = before.ids[:, : before.ids.shape[1] - before.given]  # embeddings, whose tokens processors do not see
        seen = [torch.cat([given, entry[1]], dim=1) for entry in before.seen if entry[0] != "Streamer"]
        text = max((*seen, before.ids), key=lambda ids: ids.shape[1])[:, : before.length]
    rows, old = text.shape[0], before.mask.shape[1]
    mask = torch.ones_like(text)
    mask[:, :old] = before.mask.repeat_interleave(rows // len(before.mask), dim=0)[:, : text.shape[1]]
    if turn.holes:
        mask[:, old:] *= text[:, old:] != 0
    new = torch.randint(3, 96, (rows, turn.new), generator=torch.Generator().manual_seed(case.seed + i))
    return torch.cat([text, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)


def _real_text(text: torch.LongTensor | None, mask: torch.LongTensor) -> torch.LongTensor | None:
    """The text with what is masked moved to its left, since a drafter's context holds real tokens only."""
    if text is None:
        return None
    mask = mask.repeat_interleave(len(text) // len(mask), dim=0)
    rows = [torch.cat([row[: mask.shape[1]][m == 1], row[mask.shape[1] :]]) for row, m in zip(text, mask)]
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])


def _call(case: Case, ids, mask, cache: dict, turn: Turn, assisted: bool, text) -> Outcome:
    target, drafter = pair_of(case)
    past = cached_length(cache.get(CACHE))
    embeds = case.embeds and not past
    outcome = Outcome(ids, mask, 0 if embeds else ids.shape[1] if turn.whole else ids.shape[1] - past)
    assistant = scripted(drafter, case.drafts if text is not None else "random", text)
    assistant.last_speculation = None
    kwargs = arguments(case, outcome.seen) | cache
    if case.mask or not turn.whole:
        kwargs["attention_mask"] = mask
    if "first_position" in case.options and not past:
        kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + case.options["first_position"]
    given = ids if turn.whole else ids[:, past:]
    if embeds:
        kwargs["inputs_embeds"] = target.get_input_embeddings()(given)
    else:
        kwargs["inputs"] = given
    if turn.drafted and (assisted or case.sampled):
        kwargs |= {"assistant_model": assistant, "num_assistant_tokens": case.num_draft if assisted else 0}
        kwargs |= {"num_tree_nodes": case.num_nodes if assisted else None}
    module, at = _interrupted_module(case, target, drafter) if assisted else (None, None)
    if "rope_parameters" in case.config:
        target(torch.tensor([[5]]))  # dynamic NTK keeps its base between calls
    torch.manual_seed(case.seed)
    try:
        with _clock(case.seed), _raising(module, at):
            output = target.generate(**kwargs)
        outcome.output = dict(output) if isinstance(output, dict) else {"sequences": output}
    except (Exception, KeyboardInterrupt) as error:
        outcome.error = error
    outcome.speculation = assistant.last_speculation
    held = outcome.output.get(CACHE) or cache.get(CACHE)
    if isinstance(held, transformers.Cache):  # RWKV has a list
        outcome.cache, outcome.length = _snapshot(held), cached_length(held)
    return outcome


def _interrupted_module(case: Case, target, drafter):
    who, at = case.raises or (None, None)
    modules = {"head": target.get_output_embeddings(), "drafter": drafter, "target": target, "layer": target}
    if who == "layer":  # the last one, when the others have written to the cache
        layers = [m for m in target.modules() if type(m).__name__.endswith(("Layer", "Block", "BlockMoE"))]
        modules["layer"] = layers[-1] if layers else target
    return modules.get(who), at


@contextmanager
def _clock(seed: int):
    """Let rounds take seeded times inside, so that `"auto"` chooses the same draft lengths again, and many of them."""
    generator = random.Random(seed)
    ticks = itertools.accumulate(generator.expovariate(100) for _ in itertools.count())
    with mock.patch.object(time, "perf_counter", lambda: next(ticks)):
        yield


class _raising(nullcontext):
    """Inside, a module raises KeyboardInterrupt at its n-th forward pass."""

    def __init__(self, module, at: int | None):
        self.module, self.at, self.calls = module, at, 0

    def __enter__(self):
        self.hook = self.module and self.module.register_forward_hook(self)

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt

    def __exit__(self, *error):
        if self.hook is not None:
            self.hook.remove()


def _snapshot(cache) -> list:
    """By layer, its tensors and numbers as they are now. Room that is not filled is left out."""
    layers = []
    for layer in cache.layers:
        values = {name: _copied(value) for name, value in sorted(layer.__dict__.items())}
        if isinstance(layer, StaticLayer) and not isinstance(layer, StaticSlidingWindowLayer) and layer.is_initialized:
            length = int(layer.get_seq_length())
            values |= {name: values[name][:, :, :length] for name in ("keys", "values")}
        if isinstance(layer, StaticSlidingWindowLayer):
            del values["cumulative_length"]  # not counted any further once the window is full
        layers.append({"class": type(layer).__name__} | values)
    return layers


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------------------------------
# The property.


def check(case: Case, counts: Counter | None = None) -> str:
    """Return "equal", "raises" (both do), "refused" (by a sentence of ours) or "tie" (of two best tokens, up to rounding).

    Args:
        counts: takes up the numbers of drafted and accepted tokens by kind of drafts.

    Raises:
        Fault: anything else.
        NotTried: there is no such target.
    """
    if case.raises and case.raises[0] in MODULES:
        return _check_interrupted(case)
    plain = run(case, assisted=False)
    ours = run(case, assisted=True, texts=[outcome.text for outcome in plain])
    for i, (expected, found) in enumerate(zip(plain, ours)):
        if counts is not None and found.speculation is not None:
            counts[case.drafts, "drafted"] += found.speculation.num_drafted
            counts[case.drafts, "accepted"] += found.speculation.num_accepted
        verdict = _compare(case, expected, found, f"turn {i + 1}: " if i else "")
        if verdict == "another text" and (_tied(case, expected, found, i) or not _trusted(case, expected)):
            return "tie"
        if verdict == "another text":
            raise Fault(case, f"{'turn: ' if i else ''}another text", _texts(expected, found))
        if verdict != "equal" and not (verdict == "raises" and isinstance(found.error, Interruption)):
            return verdict
    return "raises" if case.raises and found.error else "equal"


def _compare(case: Case, expected: Outcome, found: Outcome, where: str) -> str:
    if found.error is not None and _ours(found.error):
        early = len(found.seen) <= 1 and all(who == "Streamer" for who, *_ in found.seen)  # it was handed the prompt
        if not early and "no token is possible" not in str(found.error):
            raise Fault(case, f"{where}refused after the first token", str(found.error))
        return "refused"
    if found.error is not None or expected.error is not None:
        if type(found.error) is not type(expected.error):
            error = found.error or expected.error
            sides = f"plain {_named(expected.error)}, ours {_named(found.error)}"
            raise Fault(case, f"{where}{sides}", "".join(traceback.format_exception(error))[-1500:])
        if not isinstance(found.error, Interruption):
            return "raises"
    elif not torch.equal(expected.text, found.text):
        return "another text"
    for name in {**expected.output, **found.output}:
        if name not in (CACHE, "speculation"):
            _expect(case, f"{where}output.{name}", expected.output.get(name), found.output.get(name))
    _expect(case, f"{where}what observers saw", *(_normal(case, outcome.seen) for outcome in (expected, found)))
    _expect(case, f"{where}cached length", expected.length, found.length)
    caches_of = [_shapes(o.cache) if case.cache in ROUNDING else o.cache for o in (expected, found)]
    _expect(case, f"{where}cache", *caches_of)
    return "raises" if found.error else "equal"


def _shapes(value):
    """A snapshot with shapes in place of tensors: where keys are rounded, a last bit may become a step."""
    if isinstance(value, dict):
        return {key: _shapes(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_shapes(part) for part in value]
    return value.shape if isinstance(value, torch.Tensor) else value


def _named(error) -> str:
    return "answers" if error is None else f"raises {type(error).__name__}"


def _normal(case: Case, seen: list) -> list:
    """What observers saw. A streamer alone gets pieces of any length for one sequence: joined."""
    pieces = [entry for entry in seen if entry[0] == "Streamer"]
    if len(pieces) < len(seen) or len(case.prompts) > 1:
        return seen
    return (
        [torch.cat([piece.reshape(-1) for _, piece in pieces if not isinstance(piece, str)]), *pieces[:0]]
        if seen
        else []
    )


def _expect(case: Case, what: str, expected, found):
    difference = _difference(expected, found)
    if difference:
        place, detail = difference
        raise Fault(case, re.sub(r"\d+", "N", f"{what}: {detail.split(':')[0]}"), f"at {what}{place}: {detail}")


def _difference(expected, found) -> tuple[str, str] | None:
    """Where two nested values differ, and how; None where they agree up to rounding."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return "", f"shape: {tuple(expected.shape)} expected, {tuple(found.shape)} found"
        return _tensor_difference(expected, found)
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs = [(f".{key}", expected[key], found[key]) for key in expected]
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(expected) == len(found):
        pairs = [(f"[{i}]", *both) for i, both in enumerate(zip(expected, found))]
    elif isinstance(expected, (dict, list, tuple)) and isinstance(found, (dict, list, tuple)):
        sizes = [sorted(map(str, value)) if isinstance(value, dict) else len(value) for value in (expected, found)]
        return "", f"length: {sizes[0]} expected, {sizes[1]} found"
    else:
        return (
            None if expected is found or expected == found else ("", f"value: {expected!r:.60} expected, {found!r:.60}")
        )
    for key, *both in pairs:
        if difference := _difference(*both):
            return key + difference[0], difference[1]
    return None


def _tensor_difference(expected: torch.Tensor, found: torch.Tensor) -> tuple[str, str] | None:
    if not expected.is_floating_point():
        return None if torch.equal(expected, found) else ("", f"values: {expected.tolist()} expected, {found.tolist()}")
    expected, found = expected.float(), found.float()
    finite = expected.isfinite()
    scale = expected[finite].abs().max().item() if finite.any() else 0.0
    close = torch.isclose(expected, found, rtol=1e-3, atol=1e-4 + 1e-4 * scale, equal_nan=True)
    if close.all():
        return None
    index = tuple((~close).nonzero()[0].tolist())
    return "", f"values: first at {list(index)}, {expected[index]:.5f} expected, {found[index]:.5f} found"


def _texts(expected: Outcome, found: Outcome) -> str:
    return f"\n    plain {expected.new.tolist()}\n    ours  {found.new.tolist()}"


def _tied(case: Case, expected: Outcome, found: Outcome, turn: int) -> bool:
    """Whether plain's two best tokens are equal up to rounding where the texts part. Only greedy scores say."""
    if case.sampled or expected.text.shape[1] != found.text.shape[1]:
        return False
    scored = replace(case, options=case.options | {"return_dict_in_generate": True, "output_scores": True}, raises=None)
    output = run(scored, assisted=False)[turn].output
    if "scores" not in output:
        return False
    step = int((expected.text != found.text).any(0).nonzero()[0]) - (expected.text.shape[1] - len(output["scores"]))
    rows = (expected.text != found.text)[:, step - len(output["scores"])]
    best = output["scores"][step][rows].topk(2).values
    near = 0.03 if case.cache in ROUNDING else 1e-4
    return bool(((best[:, 0] - best[:, 1]) < near * best.abs().amax()).any())


def _trusted(case: Case, expected: Outcome) -> bool:
    """Whether plain `generate` writes the same text without a cache; else it is no measure of anything."""
    if (
        case.sampled
        or case.cache
        or case.turns
        or "cache_implementation" in case.options
        or "prefill_chunk_size" in case.options
    ):
        return True
    uncached = run(replace(case, options=case.options | {"use_cache": False}, raises=None), assisted=False)[0]
    return uncached.text is None or torch.equal(uncached.text, expected.text)


def _check_interrupted(case: Case) -> str:
    """A call that was interrupted anywhere leaves a cache with which the next turn is right, or raises.

    Right is what follows plain `generate` that ended with as many cached tokens, since where rounding or RoPE depend on
    history, a run without that history differs.
    """
    target, _ = pair_of(case)
    turn = (case.turns or (Turn(),))[0]
    whole = run(replace(case, raises=None, turns=()), assisted=False)[0]
    if whole.error is not None:
        return "raises"
    cache = caches(case.cache or "passed dynamic", target)
    text = _real_text(whole.text, whole.mask)
    first = _call(case, whole.ids, whole.mask, cache, Turn(), True, text)
    if not isinstance(first.error, KeyboardInterrupt):
        return "refused" if first.error is not None and _ours(first.error) else "equal"  # it ended before
    prompt = whole.ids.shape[1]
    if first.length < prompt:  # nothing of it is cached, or not all
        return "equal" if first.length == 0 else "raises"
    shorter = replace(case, raises=None, turns=(turn,), max_new_tokens=first.length - prompt + 1)
    expected = run(replace(shorter, cache=case.cache or "passed dynamic"), assisted=False)
    if expected[-1].error is not None or expected[0].length != first.length:
        return "raises"
    found = _call(shorter, expected[1].ids, expected[1].mask, cache, turn, True, None)
    if found.error is not None:
        return "raises"
    if not torch.equal(expected[1].text, found.text):
        raise Fault(case, f"another text after an interruption in {case.raises[0]}", _texts(expected[1], found))
    return "equal"


# ------------------------------------------------------------------------------------------------------------------
# Strategies. The simplest comes first everywhere, since hypothesis shrinks to it.

# One of each kind: rotary, grouped, windows, positions learned or ALiBi, latent attention, experts, recurrent states.
SHORT = (
    "llama", "qwen3", "mistral", "gpt2", "gemma3_text", "bloom", "phi3", "gpt_oss", "qwen3_next", "falcon", "bamba",
    "lfm2", "opt", "deepseek_v3", "cohere2", "gpt_neox",
)  # fmt: skip
ROPES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "starcoder2", "granite")
NO_WINDOWS = ("llama", "qwen3")  # plain layers of keys: for caches that hold nothing else

_TOKEN = st.integers(3, 95)
_TOKENS = st.lists(_TOKEN, min_size=1, max_size=5, unique=True)
# By name, strategies of values; any of them may be combined.
OPTIONS = {
    "eos_token_id": _TOKENS,
    "min_new_tokens": st.integers(1, 8),
    "min_length": st.integers(1, 16),
    "return_dict_in_generate": st.just(True),
    "output_scores": st.just(True),
    "output_logits": st.just(True),
    "output_hidden_states": st.sampled_from([True, [1], [0, 3], [-1]]),
    "output_attentions": st.just(True),
    "repetition_penalty": st.sampled_from([1.3, 0.8]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_repetition_penalty": st.sampled_from([1.5, 0.7]),
    "encoder_no_repeat_ngram_size": st.integers(1, 2),
    "bad_words_ids": st.lists(st.lists(_TOKEN, min_size=1, max_size=2), min_size=1, max_size=3),
    "sequence_bias": st.lists(st.tuples(st.lists(_TOKEN, min_size=1, max_size=2), st.sampled_from([4.0, -4.0])), min_size=1, max_size=2)
    .map(lambda biases: [[ids, bias] for ids, bias in biases]),
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "forced_bos_token_id": _TOKEN,
    "forced_eos_token_id": _TOKEN,
    "exponential_decay_length_penalty": st.tuples(st.integers(1, 5), st.sampled_from([1.1, 1.5])),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
    "guidance_scale": st.sampled_from([1.5, 3.0]),
    "negative_prompt": st.integers(1, 6),
    "watermark": st.sampled_from(["kgw", "synthid"]),
    "allowed": st.just(True),
    "stop_strings": st.lists(st.text("abcdefXYZ", min_size=1, max_size=1), min_size=1, max_size=4, unique=True),
    "token_healing": st.just(True),
    "max_time": st.sampled_from([1e6, 0.0]),
    "max_length": st.integers(8, 24),
    "length_criterion": st.integers(10, 20),
    "prefill_chunk_size": st.integers(1, 5),
    "first_position": st.integers(0, 9),
    "cache_implementation": st.sampled_from(["dynamic", "static"]),
    "num_return_sequences": st.integers(2, 3),
}  # fmt: skip
SAMPLING = {
    "temperature": st.sampled_from([0.7, 1.5]),
    "top_k": st.sampled_from([1, 5, 20]),
    "top_p": st.sampled_from([0.9, 0.5]),
    "min_p": st.sampled_from([0.05, 0.3]),
    "top_h": st.sampled_from([0.4, 0.9]),
    "typical_p": st.sampled_from([0.9, 0.4]),
    "epsilon_cutoff": st.sampled_from([1e-3, 1e-2]),
    "eta_cutoff": st.sampled_from([1e-3, 1e-2]),
}


@st.composite
def configs(draw, family: str, end: int) -> dict:
    """Overrides of the family's configuration: RoPE types, tables and windows with limits at `end`, which texts cross."""
    config = {}
    if family in ROPES:
        kinds = [None, None, None, "longrope", "dynamic", "longrope", "dynamic", "yarn", "linear", "llama3"]
        kind = draw(st.sampled_from(kinds))
        if kind is not None:
            rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
            if kind in ("yarn", "llama3", "longrope"):
                rope["original_max_position_embeddings"] = end
            if kind == "llama3":
                rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            if kind == "longrope":
                rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
            config["max_position_embeddings"] = end if kind == "dynamic" else 4 * end
            config["rope_parameters"] = rope
    if family == "phi3" and draw(st.booleans()):
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        config = {"max_position_embeddings": 4 * end, "original_max_position_embeddings": end}
        config["rope_parameters"] = rope | {"original_max_position_embeddings": end}
    if family in ("gpt2", "opt") and draw(st.booleans()):
        config["n_positions" if family == "gpt2" else "max_position_embeddings"] = end
    if family in ("mistral", "gemma3_text", "gpt_oss", "cohere2", "phi3", "starcoder2") and draw(st.booleans()):
        config["sliding_window"] = draw(st.integers(2, 12))
    return config


@st.composite
def drafters(draw, block_size: int) -> dict:
    """Overrides of the drafter's config: a list of tokens to draft from, a window, order inside the block, parts of DFlash 2 or of DSpark."""
    listed = draw(st.sampled_from([None, None, 1, 20, VOCAB - 1]))
    fields = {} if listed is None else {"draft_vocab_size": listed}
    if draw(st.booleans()):
        fields |= {"layer_types": ["sliding_attention"], "sliding_window": draw(st.integers(2, 8))}
        fields |= {"block_causal": [draw(st.booleans())]}
    if draw(st.integers(0, 2)) == 2:
        fields |= {"conv_kernel_size": draw(st.integers(1, 3)), "conv_group_size": draw(st.sampled_from([1, 4]))}
    if draw(st.integers(0, 2)) == 2:
        fields |= {"selector_rank": 4, "selector_top_k": draw(st.sampled_from([1, 4, 16]))}
    if not {"conv_kernel_size", "selector_rank"} & set(fields) and draw(st.booleans()):
        fields |= draw(dspark_heads())
    return fields


@st.composite
def dspark_heads(draw) -> dict:
    """The same of DSpark: its layout and, each optional, its heads."""
    fields = {"sample_from_anchor": draw(st.booleans())}
    kind = draw(st.sampled_from([None, "vanilla", "gated", "rnn"]))
    if kind is not None:
        fields |= {"markov_rank": 4, "markov_head_type": kind}
    sure = draw(st.sampled_from([None, "hidden"] + ["hidden+markov"] * (kind is not None)))
    return fields if sure is None else fields | {"confidence_head": sure}


@st.composite
def options(draw, sampled: bool) -> dict:
    names = [*OPTIONS] if not sampled else [*OPTIONS, *SAMPLING, *SAMPLING]
    chosen = draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    values = {name: draw((OPTIONS | SAMPLING)[name]) for name in sorted(chosen)}
    if draw(st.integers(0, 2)) == 2:
        values.setdefault("eos_token_id", draw(_TOKENS))
    if any(name.startswith("output_") for name in values) or draw(st.integers(0, 3)) == 3:
        values["return_dict_in_generate"] = True
    if "exponential_decay_length_penalty" in values or "min_new_tokens" in values:
        values.setdefault("eos_token_id", draw(_TOKENS))
    if "negative_prompt" in values:
        values.setdefault("guidance_scale", 1.5)
    if not sampled:
        values.pop("num_return_sequences", None)
    return values


_TURN = st.builds(
    Turn, new=st.integers(1, 4), whole=st.sampled_from([True, True, False]), drafted=st.sampled_from([True, True, False]),
    holes=st.booleans(),
)  # fmt: skip


_RAISES = st.tuples(st.sampled_from(["processor", "criterion", "streamer", *MODULES]), st.integers(1, 8))


@st.composite
def cases(draw, families=SHORT) -> Case:
    """Every case is a call that plain `generate` may be asked; most combine a few things only."""
    family = draw(st.sampled_from(families))
    block_size = draw(st.sampled_from([5, 2, 3, 4, 8]))
    sampled = draw(st.sampled_from([False, False, True]))
    prompts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    max_new_tokens = draw(st.one_of(st.integers(8, 16), st.integers(1, 16)))
    end = max(prompts) + draw(st.integers(1, max_new_tokens + 2))
    chosen = draw(options(sampled))
    turns = tuple(draw(st.lists(_TURN, max_size=2))) if draw(st.booleans()) else ()
    raises = draw(_RAISES) if draw(st.integers(0, 5)) == 5 else None
    if raises:
        turns = turns[:1] or (draw(_TURN),)
    cache = None
    if (turns or draw(st.integers(0, 3)) == 3) and "cache_implementation" not in chosen:
        rounding = ROUNDING if family in NO_WINDOWS else ()
        cache = draw(st.sampled_from(["passed dynamic", "passed without a config", "passed static", *rounding]))
    few = st.integers(0, 3).map(lambda n: n == 3)
    names = lambda known: st.lists(st.sampled_from([*known]), max_size=2, unique=True).map(tuple)  # noqa: E731
    return Case(
        family=family,
        config=draw(configs(family, end)),
        attention="eager" if "output_attentions" in chosen else draw(st.sampled_from([None, "eager"])),
        block_size=block_size,
        drafter=draw(drafters(block_size)),
        drafts=draw(st.sampled_from(["half-right", "oracle", "random"])),
        num_draft=draw(st.one_of(st.integers(1, block_size - 1), st.just("auto"))),
        num_nodes=draw(st.integers(1, 12)) if len(prompts) == 1 and draw(st.booleans()) else None,
        prompts=tuple(prompts),
        seed=draw(st.integers(0, 99)),
        padding="right" if draw(few) else "left",
        mask=not draw(few),
        embeds=draw(few) and draw(few),
        sampled=sampled,
        max_new_tokens=max_new_tokens,
        options=chosen,
        as_config=draw(few),
        processors=draw(names(PROCESSORS)) if draw(few) else (),
        criteria=draw(names(CRITERIA)) if draw(few) else (),
        streamer=draw(few),
        cache=cache,
        first_drafted=raises is not None or not draw(few),
        turns=turns,
        raises=raises,
    )


# ------------------------------------------------------------------------------------------------------------------
# The long run.


class Hunt:
    """Draws cases until the time is over, and keeps the smallest case of every kind of fault.

    Args:
        file: takes up the cases, one a line, as soon as they are found.
    """

    def __init__(self, file):
        self.file, self.counts, self.faults = file, Counter(), {}

    def try_case(self, case: Case):
        try:
            verdict = check(case)
        except NotTried as reason:
            verdict = f"not tried: {str(reason)[:60]}"
        except Fault as fault:
            verdict = "fault"
            if (fault.kind, case.family) not in self.faults:
                self.faults[fault.kind, case.family] = fault = smallest(fault)
                print(f"\n{fault}", flush=True)
                print(repr(fault.case), file=self.file, flush=True)
        self.counts[verdict] += 1

    def hunt(self, families, seconds: float, examples: int = 200):
        end = time.monotonic() + seconds

        def one(case):
            if time.monotonic() < end:
                self.try_case(case)

        while time.monotonic() < end:
            search(families, one, examples, hypothesis.seed(time.time_ns()))
            print(f"{dict(self.counts)}", flush=True)


def search(families, one, examples: int, *decorators, **kwargs):
    """Call `one` with random cases; what it raises ends the search, with the case as it was drawn."""
    searching = settings(examples, phases=[hypothesis.Phase.generate], database=None, **kwargs)
    drawn = hypothesis.given(case=cases(families))(one)
    for decorate in (searching, *decorators):
        drawn = decorate(drawn)
    drawn()


def smallest(fault: Fault) -> Fault:
    """The same kind of fault with as few settings as it needs."""
    found = True
    while found:
        found = False
        for case in _simpler(fault.case):
            try:
                check(case)
            except Fault as other:
                if found := other.kind == fault.kind:
                    fault = other
                    break
            except NotTried:
                pass
    return fault


def _simpler(case: Case):
    """Cases with one setting less."""
    default = Case(family=case.family)
    for f in fields(case):
        if getattr(case, f.name) != getattr(default, f.name):
            yield replace(case, **{f.name: getattr(default, f.name)})
    for name in case.options:
        yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    for name in ("prompts", "turns", "processors", "criteria"):
        parts = getattr(case, name)
        for i in range(len(parts) if len(parts) > 1 else 0):
            yield replace(case, **{name: (*parts[:i], *parts[i + 1 :])})
    for i, turn in enumerate(case.turns):
        for name in ("holes", "drafted", "whole"):
            if getattr(turn, name) != getattr(Turn, name):
                changed = replace(turn, **{name: getattr(Turn, name)})
                yield replace(case, turns=(*case.turns[:i], changed, *case.turns[i + 1 :]))


def settings(examples: int, **kwargs):
    """Settings for cases that take about a tenth of a second each."""
    return hypothesis.settings(
        max_examples=examples, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
        print_blob=False, **kwargs,
    )  # fmt: skip


def quiet():
    """Switch off warnings that plain `generate` gives as well."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", help="a case as a fault prints it")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--families", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    if args.case:
        print(check(eval(args.case)))
        return
    earlier = FAULTS.read_text().splitlines() if FAULTS.is_file() else []
    FAULTS.parent.mkdir(exist_ok=True)
    with FAULTS.open("w") as file:
        hunt = Hunt(file)
        for line in earlier:
            hunt.try_case(eval(line))
        hunt.hunt(args.families, args.minutes * 60)
    print(f"{len(hunt.faults)} faults; their cases are in {FAULTS}")
    sys.exit(bool(hunt.faults))


if __name__ == "__main__":
    main()
