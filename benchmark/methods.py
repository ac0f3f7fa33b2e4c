"""The methods that `dflash-hub bench` sets side by side. One is a name and the arguments it adds to `generate`.

Names: baseline, lookup, assistant, native, zlab, ours (the drafter's own default), ours-N (N draft tokens), ours-auto (as
many as pay), ours-tree-N (trees of N nodes), ours-tree-auto (chains or trees), eagle3, eagle3-N, eagle3-treeN (an EAGLE-3 draft model in our loop), served, served-N (a running server), and ceiling-P, an oracle that runs the drafter and then proposes the target's own text, each token right with probability P.
"""

import contextlib
import json
import random
import re
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..drafter_candidates import DFlashProposer
from ..drafter_draft import Draft, Plan
from ..drafter_heads import Candidates
from ..generation_dflash import assisted_generate, speculative_generate
from .baselines.eagle3 import MAX_DRAFT_TOKENS, Eagle3Proposer

EAGLE3_CHAIN = 7  # draft tokens: as many as heads are trained to draft
ZLAB_PYTHON = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"


@dataclass
class Run:
    """One text by one method. Rounds are target passes after the prompt's; times are seconds on the host's clock."""

    new_ids: list[int]
    seconds: float
    first_token: float
    prompt_tokens_added: int  # by the prompt's pass; transformers' own loops draft for it already
    rounds: list[int]  # tokens that each round added
    target_passes: int
    drafter_passes: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    target_seconds: float = 0.0  # in the target's passes
    draft_seconds: float = 0.0  # in the drafter's passes, embedding and head included
    pass_seconds: dict[int, list[float]] = field(default_factory=dict)  # target passes by length, the prompt's left out
    round_totals: list[int] | None = (
        None  # [tokens that rounds added, rounds], of a server, which says no more than that
    )
    outside: int | None = None  # new tokens that are not in a method's draft vocabulary, where it has one


class Clock:
    """A streamer that times the first token and sees the rounds: transformers' loops hand over one piece a round."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pieces: list[int] = []
        self.first_token = 0.0

    def put(self, value: torch.Tensor):
        if len(self.pieces) == 1:
            self.first_token = self.now()
        self.pieces.append(value.numel())

    def end(self):
        pass

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Passes:
    """Times the forward passes of a module by their length; on a GPU with events, which are read at the end."""

    def __init__(self, module: torch.nn.Module, argument: str):
        self.module, self.argument = module, argument
        self.spans: list[tuple[int, object, object]] = []

    def __enter__(self):
        self.handles = [
            self.module.register_forward_pre_hook(self._start, with_kwargs=True),
            self.module.register_forward_hook(self._stop, with_kwargs=True),
        ]
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def _start(self, module, args, kwargs):
        self.started = self._mark()

    def _stop(self, module, args, kwargs, output):
        tokens = kwargs[self.argument] if self.argument in kwargs else args[0]
        self.spans.append((tokens.shape[1], self.started, self._mark()))

    def _mark(self):
        if next(self.module.parameters()).device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[tuple[int, float]]:
        return [
            (length, stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3)
            for length, start, stop in self.spans
        ]


class Generate:
    """A method that is a call of `target.generate` with further arguments."""

    def __init__(self, name: str, bench, drafter=None, **arguments):
        self.name, self.target, self.drafter, self.arguments = name, bench.target, drafter, arguments

    def run(self, inputs: dict, settings: dict, seed: int, baseline_ids: list[int] | None) -> Run:
        clock = Clock(self.target.device)
        torch.manual_seed(seed)
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(Passes(self.target, "input_ids"))
            drafter = stack.enter_context(Passes(self.drafter, self.drafter.main_input_name)) if self.drafter else None
            start = clock.now()
            output, speculation, draft_seconds = self._generate(inputs, settings, seed, baseline_ids, clock)
            seconds = clock.now() - start
        prompt_length = inputs["input_ids"].shape[1]
        spans = target.seconds()
        by_length = {}
        for length, span in spans[1:]:
            by_length.setdefault(length, []).append(span)
        return Run(
            new_ids=output[0, prompt_length:].tolist(),
            seconds=seconds,
            first_token=clock.first_token - start,
            prompt_tokens_added=clock.pieces[1],
            rounds=clock.pieces[2:],
            target_passes=len(spans),
            drafter_passes=len(drafter.spans) if drafter else 0,
            drafted=speculation.drafted[0] if speculation else [],
            accepted=speculation.accepted[0] if speculation else [],
            target_seconds=sum(span for _, span in spans),
            draft_seconds=draft_seconds or sum(span for _, span in (drafter.seconds() if drafter else [])),
            pass_seconds=by_length,
        )

    def _generate(self, inputs: dict, settings: dict, seed: int, baseline_ids: list[int] | None, clock: Clock):
        """Write the text: (output, statistics of our loop or None, seconds in drafts or 0)."""
        return self.target.generate(**inputs, **settings, **self.arguments, streamer=clock), None, 0.0


class Ours(Generate):
    """A method that hands our loop the drafter with a clock."""

    def __init__(self, name: str, bench, **arguments):
        self.assistant = TimedDrafter(bench.drafter)
        super().__init__(name, bench, bench.drafter, assistant_model=self.assistant, **arguments)

    def _generate(self, inputs: dict, settings: dict, seed: int, baseline_ids: list[int] | None, clock: Clock):
        self.assistant.make_proposer = lambda target: self._proposer(target, inputs, seed, baseline_ids, clock)
        output, _, _ = super()._generate(inputs, settings, seed, baseline_ids, clock)
        return output, self.assistant.last_speculation, sum(self.assistant.newest.seconds)

    def _proposer(self, target, inputs, seed, baseline_ids, clock):
        return TimedProposer(self.drafter, target, clock)


class Ceiling(Ours):
    """Our loop with an oracle of chosen accuracy: the best that this machine gives at that acceptance."""

    def __init__(self, name: str, bench, accuracy: float):
        super().__init__(name, bench, num_assistant_tokens=bench.drafter.config.block_size - 1)
        self.accuracy = accuracy

    def _proposer(self, target, inputs, seed, baseline_ids, clock):
        if baseline_ids is None:
            raise ValueError(f"{self.name} proposes the baseline's own tokens: run `baseline` before it.")
        text = inputs["input_ids"][0].tolist() + baseline_ids
        return Oracle(self.drafter, target, clock, text, self.accuracy, seed)


class Eagle3(Generate):
    """Our loop with an EAGLE-3 draft model in the drafter's place: as many tokens in a chain, or a tree of so many nodes."""

    def __init__(self, name: str, bench, num_draft_tokens: int, num_nodes: int | None):
        super().__init__(name, bench, bench.eagle3, num_assistant_tokens=num_draft_tokens, num_tree_nodes=num_nodes)
        self.listed = None if bench.eagle3.token_ids is None else {*bench.eagle3.token_ids.tolist()}
        self._proposer(Clock(bench.target.device)).check(bench.target)

    def run(self, inputs: dict, settings: dict, seed: int, baseline_ids: list[int] | None) -> Run:
        run = super().run(inputs, settings, seed, baseline_ids)
        return (
            run if self.listed is None else replace(run, outside=sum(token not in self.listed for token in run.new_ids))
        )

    def _generate(self, inputs: dict, settings: dict, seed: int, baseline_ids: list[int] | None, clock: Clock):
        proposer = self._proposer(clock)
        output, speculation = speculative_generate(
            self.target, proposer, **inputs, **settings, **self.arguments, streamer=clock
        )
        return output, speculation, sum(proposer.seconds)

    def _proposer(self, clock: Clock) -> "TimedEagle3":
        return TimedEagle3(self.drafter, self.target, clock, self.arguments["num_assistant_tokens"])


class TimedEagle3(Eagle3Proposer):
    """The proposer with the seconds of each draft; on a GPU those of the passes are taken, see `TimedProposer`."""

    def __init__(self, model, target, clock: Clock, num_draft_tokens: int):
        super().__init__(model, target, max_draft_tokens=num_draft_tokens)
        self.clock, self.seconds = clock, []

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        start = self.clock.now() if self.clock.device.type != "cuda" else None
        draft = super().propose(anchor, plan, sampler)
        if start is not None:
            self.seconds.append(self.clock.now() - start)
        return draft


class TimedDrafter:
    """Stands for a drafter in `generate`, with a proposer of its own in each call."""

    def __init__(self, drafter):
        self.drafter, self.make_proposer, self.newest = drafter, None, None

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)

    def proposer(self, target) -> "TimedProposer":
        self.newest = self.make_proposer(target)
        return self.newest

    def assisted_generate(self, target, generate, **call):
        return assisted_generate(self, target, generate, call)


class TimedProposer(DFlashProposer):
    """The drafter's proposer, with the seconds of each draft: the forward pass with embedding and head."""

    def __init__(self, drafter, target, clock: Clock):
        super().__init__(drafter, target)
        self.clock, self.seconds = clock, []

    def candidates(self, *args, **kwargs) -> Candidates:
        # On a GPU its synchronization would cost what it measures; the passes' events are used there instead.
        if self.clock.device.type == "cuda":
            return super().candidates(*args, **kwargs)
        start = self.clock.now()
        candidates = super().candidates(*args, **kwargs)
        self.seconds.append(self.clock.now() - start)
        return candidates


class Oracle(TimedProposer):
    """Runs the drafter at its real cost, then proposes a known text, each token right with a given probability."""

    def __init__(self, drafter, target, clock: Clock, text: list[int], accuracy: float, seed: int):
        super().__init__(drafter, target, clock)
        self.known, self.accuracy, self.seed = text, accuracy, seed

    def propose(self, anchor: torch.LongTensor, plan: Plan, sampler) -> Draft:
        draft, start = super().propose(anchor, plan, sampler), sampler.text.lengths[0]
        for index in range(start, start + plan.num_draft_tokens):
            right = self.known[index] if index < len(self.known) else 0
            wrong = random.Random(f"{self.seed} {index}").random() >= self.accuracy
            draft.tokens[0, index - start] = (right + 1) % sampler.vocab_size if wrong else right
        return draft


class Zlab:
    """z-lab's own package, greedy, in a process and an environment of its own (`make peers` installs it)."""

    name = "zlab"

    def __init__(self, bench):
        if not ZLAB_PYTHON.exists():
            raise ValueError(f"z-lab's package is not installed at {ZLAB_PYTHON}; run `make peers`.")
        if bench.settings["do_sample"]:
            raise ValueError("zlab is measured greedily only.")
        if bench.source.revision or bench.source.trust_remote_code:
            raise ValueError(
                "zlab's worker loads a target's main branch, and no code of its own; leave the method out."
            )
        worker = Path(__file__).with_name("baselines") / "zlab_worker.py"
        arguments = [bench.zlab_folder(), bench.source.path, str(bench.target.dtype).removeprefix("torch.")]
        self.process = subprocess.Popen(
            [ZLAB_PYTHON, worker, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, inputs: dict, settings: dict, seed: int, baseline_ids: list[int] | None) -> Run:
        request = {"prompt_ids": inputs["input_ids"][0].tolist(), "max_new_tokens": settings["max_new_tokens"]}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise ValueError("z-lab's package stopped; its error is above.")
        answer = json.loads(line)
        return Run(**answer, target_passes=len(answer["rounds"]) + 1, drafter_passes=len(answer["rounds"]))


def check_methods(names: list[str], assistant: str | None, eagle3: str | None = None):
    """Refuse what cannot be measured, before a model is loaded.

    Raises:
        ValueError: there is no method of a name, or it needs a model and there is none.
    """
    for name in names:
        if check_method(name)[0] == "eagle3" and eagle3 is None:
            raise ValueError(f"the method {name!r} needs --eagle3, an EAGLE-3 draft model for the target.")
    if "assistant" in names and assistant is None:
        raise ValueError("the method `assistant` needs --assistant, an ordinary small model of the same vocabulary.")


def check_method(name: str) -> tuple[str, str]:
    """(kind, value) of a method's name, such as ours and 4.

    Raises:
        ValueError: there is none.
    """
    kind, _, value = name.partition("-")
    known = kind in ("baseline", "assistant", "zlab", "native") and not value
    known = known or (kind in ("lookup", "ours", "served") and (not value or value.isdigit())) or name == "ours-auto"
    known = known or re.fullmatch(r"ours-tree-(auto|[1-9]\d*)|eagle3(-(tree)?[1-9]\d*)?", name)
    if not known and not (kind == "ceiling" and re.fullmatch(r"0?\.\d+|[01](\.0*)?", value)):
        raise ValueError(
            f"no method {name!r}; there are baseline, lookup, assistant, native, zlab, ours, ours-N, ours-auto, ours-tree-N, "
            "eagle3, eagle3-N, eagle3-treeN, served, served-N and ceiling-P."
        )
    return kind, value


def drafted_by(name: str, bench) -> str:
    """Say whose draft tokens a method verifies, as it stands beside its numbers."""
    kind = check_method(name)[0]
    models = {"assistant": bench.assistant_path, "eagle3": bench.eagle3_path}
    others = {
        "baseline": "-",
        "lookup": "the text itself",
        "ceiling": "the baseline's text",
        "served": "the server's own",
    }
    return others.get(kind) or str(models.get(kind, bench.drafter_path))


def make_method(name: str, bench):
    """The method of this name.

    Raises:
        ValueError: there is none, or what it needs is missing; says what.
    """
    kind, value = check_method(name)
    if kind == "baseline":
        return Generate(name, bench)
    if kind == "lookup":
        return Generate(name, bench, prompt_lookup_num_tokens=int(value or 10))
    if kind == "assistant":
        if bench.assistant is None:
            raise ValueError(
                "the method `assistant` needs --assistant, an ordinary small model of the same vocabulary."
            )
        return Generate(name, bench, bench.assistant, assistant_model=bench.assistant)
    if kind == "zlab":
        return Zlab(bench)
    if kind == "served":
        from .baselines.served import Served

        if not 1 <= int(value or 1) <= len(bench.servers):
            raise ValueError(f"the method {name!r} needs its --server URL; {len(bench.servers)} given.")
        return Served(name, bench, bench.servers[int(value or 1) - 1])
    if kind == "eagle3":
        if bench.eagle3 is None:
            raise ValueError(f"the method {name!r} needs --eagle3, an EAGLE-3 draft model for the target.")
        if value.startswith("tree"):
            return Eagle3(name, bench, MAX_DRAFT_TOKENS, int(value.removeprefix("tree")))
        return Eagle3(name, bench, int(value or EAGLE3_CHAIN), None)
    if bench.drafter is None:
        raise ValueError(f"the method {name!r} needs --drafter.")
    if kind == "native":
        return Generate(name, bench, bench.drafter, assistant_model=bench.drafter, speculation_type="dflash")
    if value.startswith("tree-"):
        nodes = value.removeprefix("tree-")
        return Ours(name, bench, num_tree_nodes="auto" if nodes == "auto" else int(nodes))
    if kind == "ours":
        drafted = {"num_assistant_tokens": int(value) if value.isdigit() else value} if value else {}
        return Ours(name, bench, **drafted)
    return Ceiling(name, bench, float(value))
