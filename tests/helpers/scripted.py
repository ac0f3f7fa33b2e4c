"""Proposers that do as a test says, to be handed in where a drafter's own would be."""

from collections.abc import Iterable

import torch
from dflash_hub.decode_schedule import DraftSchedule
from dflash_hub.decode_state import Call
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.drafter_draft import Draft, Plan
from dflash_hub.generation_dflash import assisted_generate, decode


class Instead:
    """Stands for an object, with some attributes of its own."""

    def __init__(self, stands_for, **own):
        self.__dict__.update(own, stands_for=stands_for)

    def __getattr__(self, name: str):
        return getattr(self.__dict__["stands_for"], name)


class ScriptedDrafter(Instead):
    """Stands for a drafter in `generate`, with proposers made by `make_proposer(drafter, target)`."""

    def __init__(self, drafter, make_proposer):
        super().__init__(drafter, make_proposer=make_proposer)

    def proposer(self, target):
        return self.make_proposer(self.stands_for, target)

    def assisted_generate(self, target, generate, **call):
        return assisted_generate(self, target, generate, call)


def scripted(drafter, kind: str, text: torch.Tensor | None = None) -> ScriptedDrafter:
    """Return a drafter that proposes a known text with a known accuracy, see `ScriptedProposer`; in place of an earlier script."""
    last = drafter.last_speculation
    drafter = drafter.stands_for if isinstance(drafter, ScriptedDrafter) else drafter
    script = ScriptedDrafter(drafter, lambda drafter, target: ScriptedProposer(drafter, target, kind, text))
    script.last_speculation = last
    return script


class ScriptedProposer(DFlashProposer):
    """Proposes tokens of known accuracy: random, half-right or oracle about `text` (B, length).

    The drafter still runs, so that its inputs and its KV cache are exercised. Only its tokens are replaced: by the text's
    (oracle), by about half of them (half-right), or not at all (random). In a tree those of its best chain are replaced.
    """

    def __init__(self, drafter, target, kind: str, text: torch.Tensor | None):
        super().__init__(drafter, target)
        self.kind, self.text = kind, text

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        draft = super().propose(anchor, plan, sampler)
        for row in range(len(anchor) if self.kind != "random" else 0):
            tokens = self.text[row].tolist()
            known = self.cache.get_seq_length() if self.seen is None else self.seen[row]
            padding = next((i for i, token in enumerate(tokens) if token != 0), 0)  # no context of the drafter
            for position, node in enumerate(draft.best_chain):
                index = padding + self.start + known + 1 + position
                right = tokens[index] if index < len(tokens) else 0
                wrong = self.kind == "half-right" and (index + row) % 2 == 1 and index % 5 != 0
                token = (right + 1) % sampler.vocab_size if wrong else right
                if draft.parents is not None:  # two children of a node cannot have one token
                    siblings = [
                        i for i, parent in enumerate(draft.parents) if parent == draft.parents[node] and i != node
                    ]
                    taken = draft.tokens[row].tolist()
                    for sibling in siblings:
                        if taken[sibling] == token:
                            draft.tokens[row, sibling] = taken[node]
                draft.tokens[row, node] = token
        return draft


class ScriptedSchedule(DraftSchedule):
    """An adaptive schedule that drafts the given numbers, and remembers what it was told of each round."""

    def __init__(self, numbers: Iterable[int]):
        super().__init__(5, None)
        self.numbers, self.told = iter(numbers), []

    def next(self, *args) -> int:
        return next(self.numbers)

    def observe(self, *round_):
        self.told.append(round_)


def generate_with(target, proposer, schedule, ids: torch.LongTensor, streamer=None, **settings):
    """Run the loop in `generate` with a schedule of the test's: (text, speculation)."""

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        call = Call(
            logits_processor, stopping_criteria, generation_config, model_kwargs, streamer, None, True, schedule
        )
        return decode(model, proposer, input_ids, call)

    return target.generate(ids, custom_generate=loop, **settings)


def without_hooks(target):
    """Let no layer of a target call its hooks, as in a compiled one: what its layers are called with cannot be seen."""
    for module in target.modules():
        if hasattr(module, "layer_idx"):
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {"__call__": lambda self, *a, **k: self.forward(*a, **k)})
