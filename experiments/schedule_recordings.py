"""Record what the simulated clock of draft schedules plays back: forward pass times of a machine, and draft tokens of texts.

    python -m dflash_hub.experiments.schedule_recordings times "float32, 1 thread, busy" --threads 1 --busy 2
    python -m dflash_hub.experiments.schedule_recordings texts gsm8k --prompts eval_gsm8k.jsonl

Both add to `schedule_recordings.json` beside this file; a name that is there already is replaced.
"""

import json
import multiprocessing
import random
import time
from typing import Annotated

import torch
import typer
from transformers import DynamicCache

from ..common.loading import DTYPES
from ..common.prompts import load_prompts
from ..demo.pair import Pair
from ..drafter_candidates import DFlashProposer
from ..drafter_heads import TargetHead
from ..target_model import CACHE, hidden_states_request, target_hidden_states
from ..training.evaluation import GreedyCall, right_drafts
from .schedule_simulation import RECORDINGS, recordings

PROMPT = "Explain to a child how a bicycle stays upright, and why it is harder to balance when it stands still."
LIST = 8192  # rows of the head that drafts from a list of frequent tokens

app = typer.Typer()


def _add(kind: str, name: str, recorded):
    known = recordings() if RECORDINGS.exists() else {"times": {}, "texts": {}}
    known[kind][name] = recorded
    RECORDINGS.write_text(json.dumps(known) + "\n")


class Passes:
    """Runs single forward passes as a round does, behind a prompt: the target's by its tokens, the drafter's with the drafter's whole head and with a list."""

    def __init__(self, pair: Pair):
        self.target, self.drafter = pair.target, pair.drafter
        self.layers = self.drafter.config.target_layer_ids
        ids = pair.encode([{"role": "user", "content": PROMPT}])["input_ids"]
        self.cache = DynamicCache(config=self.target.config)
        self.request = {
            "output_hidden_states": hidden_states_request(self.layers),
            "use_cache": True,
            CACHE: self.cache,
        }
        self.context = target_hidden_states(
            self.target(ids, logits_to_keep=1, **self.request).hidden_states, self.target, self.layers
        )
        self.cache.activate_past_recording()
        self.block_size = self.drafter.config.block_size
        self.ids = ids[:, -self.block_size :]
        self.whole, self.listed = (DFlashProposer(self.drafter, self.target) for _ in range(2))
        rows = torch.nn.Linear(self.target.config.hidden_size, LIST, bias=False, dtype=self.target.dtype)
        rows.weight.data.copy_(self.target.get_output_embeddings().weight[:LIST])
        self.listed.head = TargetHead(self.drafter.config, rows)

    def run(self, kind: str):
        if kind.isdigit():
            self.target(self.ids[:, : int(kind)], **self.request).logits.argmax(-1).tolist()
            self.cache.crop(-int(kind))
        else:
            proposer = self.whole if kind == "drafter" else self.listed
            # Three new tokens, as after a round that accepted two.
            new = self.context if proposer.num_passes == 0 else [layer[:, -3:] for layer in self.context]
            proposer.draft_logits(self.ids[:, -1:], new, self.block_size - 1).argmax(-1).tolist()


def _work(seed: int):
    """Multiply matrices in bursts, as other processes on a shared machine do."""
    torch.set_num_threads(1)
    generator, matrix = random.Random(seed), torch.randn(512, 512)
    while True:
        end = time.perf_counter() + generator.expovariate(1 / 4)
        while time.perf_counter() < end:
            matrix @ matrix
        time.sleep(generator.expovariate(1 / 4))


@app.command()
@torch.no_grad()
def times(
    name: str,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    threads: int = 1,
    busy: Annotated[int, typer.Option(help="Processes that work beside it, half of the time.")] = 0,
    cycles: int = 100,
):
    """Record milliseconds by kind of pass, one a cycle, of the wall clock and of the thread's CPU clock."""
    torch.set_num_threads(threads)
    passes = Passes(Pair(None, None, dtype))
    others = [multiprocessing.get_context("spawn").Process(target=_work, args=(i,), daemon=True) for i in range(busy)]
    for other in others:
        other.start()
    kinds = [*map(str, range(1, passes.block_size + 1)), "drafter", "drafter with a list"]
    clocks = {"wall": time.perf_counter, "thread": time.thread_time}
    recorded = {clock: {kind: [] for kind in kinds} for clock in clocks}
    for cycle in range(cycles + 2):
        for kind in random.Random(cycle).sample(kinds, len(kinds)):
            starts = {clock: read() for clock, read in clocks.items()}
            passes.run(kind)
            if cycle >= 2:  # the first ones are warm-up
                for clock, read in clocks.items():
                    recorded[clock][kind].append(round(1000 * (read() - starts[clock]), 1))
    for other in others:
        other.terminate()
    _add("times", name, recorded)
    for kind in kinds:
        print(
            kind, *(f"{clock} {min(by[kind]):.1f} to {max(by[kind]):.1f}" for clock, by in recorded.items()), sep=", "
        )


@app.command()
@torch.no_grad()
def texts(
    name: str,
    prompts: Annotated[str, typer.Option(help="A set that `bench` knows, or a file.")],
    count: int = 8,
    max_new_tokens: int = 96,
):
    """Record, for each token of greedy responses, how many draft tokens in a row behind it are right: a digit each."""
    pair = Pair(None, None, "float32")
    recorded = []
    for row in load_prompts(prompts, count, 0)[1]:
        inputs = pair.encode(row["messages"][:1])
        length = inputs["input_ids"].shape[1]
        ids = pair.target.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)[0].tolist()
        answer = {
            "id": row["id"],
            "prompt_ids": ids[:length],
            "response_ids": ids[length:],
            "max_new_tokens": max_new_tokens,
        }
        if len(ids) - length > 1:
            counts = right_drafts(pair.target, pair.drafter, answer, GreedyCall.of(pair.target, answer), 64)
            recorded.append("".join(map(str, counts)))
    _add("texts", name, recorded)
    print(name, recorded)


if __name__ == "__main__":
    app()
