"""Which choices of training matter, measured: one lever at a time, equal compute, acceptance of real rounds.

    python -m dflash_hub.experiments.ablations --responses answers --output orderings --seconds 60

Every variant differs from the base as its name says, mostly in one thing, and trains for the same processor time (steps
follow from the measured time of a step; batches, anchors and order are the same). Acceptance is that of greedy rounds
replayed on validation responses, see `evaluation`. Results are kept variant by variant, so a run can be interrupted.
"""

import dataclasses
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..common.console import run_plainly, typed_command
from ..common.identity import identify
from ..common.loading import load_target
from ..common.prompts import prompt_source
from ..common.provenance import origin
from ..common.smollm2 import smollm2
from ..decode_statistics import Speculation
from ..hub_files import write_text
from ..modeling_dflash import DFlashDraftModel
from ..training.data import Collator, PackedRows, split_validation, usable_rows
from ..training.evaluation import replay
from ..training.losses import BlockLoss, gamma_of
from ..training.options import TrainOptions
from ..training.train import fill_cache, fresh_drafter, load_rows, prompts_by_id, training_arguments
from ..training.trainer import DFlashTrainer
from ..training.vocabulary import frequent_tokens
from .variant_drafters import FusedAtInput, OneByOne, ReadsText


@dataclasses.dataclass
class Variant:
    """What differs from the base."""

    name: str
    options: dict = dataclasses.field(default_factory=dict)
    fixed_blocks: bool = False  # answers cut into blocks, instead of random anchors
    blind: bool = False  # no features: their projection is zero and stays so
    serve_block: int | None = None  # block size in evaluation
    kind: type[DFlashDraftModel] = DFlashDraftModel


VARIANTS = [
    Variant("base"),
    Variant("fixed blocks", fixed_blocks=True),
    Variant("uniform weights", {"gamma": 0.0}),
    Variant("D-PACE", {"loss": "dpace"}),
    Variant("one tap", {"target_layers": [14]}),
    Variant("no features", blind=True),
    Variant("block 16, served at 16", {"block_size": 16}),
    Variant("block 16, served at 8", {"block_size": 16}, serve_block=8),
    Variant("KL", {"loss": "kl"}),
    Variant("TV + CE", {"loss": "tv"}),
    Variant("from the target's layers", {"from_target_layers": True}),
    Variant("five layers", {"layers": 5}),
    Variant("one layer", {"layers": 1}),
    Variant("input fusion", kind=FusedAtInput),
    Variant("DFlash-AR", kind=OneByOne),
    Variant("full vocabulary", {"draft_vocab_size": None}),
    Variant("half the learning rate", {"learning_rate": 3e-4}),
    Variant("twice the learning rate", {"learning_rate": 1.2e-3}),
    Variant("16 anchors", {"num_anchors": 16}),
    Variant("Muon", {"optimizer": "muon"}),
    Variant("Muon, 1.2e-3", {"optimizer": "muon", "learning_rate": 1.2e-3}),
    Variant("Muon and D-PACE", {"optimizer": "muon", "loss": "dpace"}),
]


class OrderingTrainer(DFlashTrainer):
    fixed_blocks = False

    def compute_loss(self, model, inputs, *args, **kwargs):
        drafter = self.accelerator.unwrap_model(model)
        if isinstance(drafter, ReadsText):
            drafter.show(inputs["input_ids"], self.target)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def draw(self, rows, generator):
        if not self.fixed_blocks:
            return super().draw(rows, generator)
        # Every block-sized step of each answer is an anchor, the same in every epoch.
        first = rows.answer_mask.long().argmax(dim=1, keepdim=True)
        index = torch.arange(rows.input_ids.shape[1], device=first.device)[None]
        starts = rows.answer_mask & ((index - first) % self.block_size == 0)
        starts[:, :-1] &= rows.answer_mask[:, 1:]
        starts[:, -1] = False
        count = min(self.num_anchors, int(starts.sum(1).max()))
        valid, anchors = starts.long().topk(count, dim=1)
        return anchors, valid.bool()


def replayed(target, drafter: DFlashDraftModel, rows: list[dict]) -> tuple[Speculation, float]:
    """Return the rounds of `replay` and the share of first draft tokens that are right, over all anchors."""
    if not isinstance(drafter, ReadsText):
        speculation, _, first = replay(target, drafter, rows)
        return speculation, first
    whole, right, anchors = Speculation([], [], []), 0.0, 0
    for row in rows:
        drafter.show(torch.tensor([row["prompt_ids"] + row["response_ids"]], device=target.device), target)
        speculation, forced, first = replay(target, drafter, [row])
        whole.acceptance_lengths += speculation.acceptance_lengths
        whole.drafted += speculation.drafted
        whole.accepted += speculation.accepted
        if forced:
            right, anchors = right + first * len(forced), anchors + len(forced)
    return whole, right / max(anchors, 1)


def run_variant(variant: Variant, base: TrainOptions, target, training, validation, seconds: float) -> dict:
    """Train one variant for `seconds` of processor time and measure it: its line of the results, without the name."""
    options = dataclasses.replace(base, **variant.options)
    with tempfile.TemporaryDirectory() as folder:
        drafter = fresh_drafter(options, Path(folder))
        if issubclass(variant.kind, ReadsText):  # the same weights
            stated = {"block_causal": [True] * drafter.config.num_hidden_layers} if variant.kind.causal else {}
            drafter = variant.kind.from_pretrained(Path(folder) / "start", dtype=torch.float32, **stated)
        if variant.blind:
            torch.nn.init.zeros_(drafter.fc.weight)
            drafter.fc.weight.requires_grad_(False)
        loss = BlockLoss(options.loss, gamma_of(options.loss, options.gamma, options.block_size) or None)
        name = "-".join(map(str, drafter.config.target_layer_ids)) + "-last" * loss.needs_teacher
        cache = fill_cache(f"{base.features}-{name}", identify(target), target, drafter, loss, training)
        if options.draft_vocab_size is not None:
            listed = frequent_tokens((row["response_ids"] for row in training), options.draft_vocab_size)
            drafter.set_draft_vocabulary(listed.token_ids)

        def trainer(steps: int) -> OrderingTrainer:
            arguments = training_arguments(dataclasses.replace(options, max_steps=steps), len(training), Path(folder))
            arguments.save_strategy = arguments.eval_strategy = "no"
            made = OrderingTrainer(
                drafter, target, arguments, PackedRows(training, None, options.seed), Collator(cache), loss,
                options.num_anchors, validation, 0, 8, muon=options.optimizer == "muon",
            )  # fmt: skip
            made.fixed_blocks = variant.fixed_blocks
            return made

        state = {key: value.clone() for key, value in drafter.state_dict().items()}
        started = time.process_time()
        trainer(6).train()
        step_seconds = (time.process_time() - started) / 6
        drafter.load_state_dict(state)
        steps = max(1, round(seconds / step_seconds))
        started = time.process_time()
        trainer(steps).train()
        spent = time.process_time() - started
        trained = DFlashDraftModel(drafter.config)  # a Hub folder holds no other code than its own
        trained.load_state_dict(drafter.state_dict())
        trained.save_pretrained(Path(folder) / "end")
        serve = {} if variant.serve_block is None else {
            "block_size": variant.serve_block, "num_draft_tokens": variant.serve_block - 1
        }  # fmt: skip
        served = variant.kind.from_pretrained(Path(folder) / "end", dtype=target.dtype, **serve).eval()
    speculation, first = replayed(target, served, validation)
    by_answer = [statistics.mean(lengths) for lengths in speculation.acceptance_lengths]
    return {
        "steps": steps, "seconds": round(spent), "tau": round(speculation.tau, 3),
        "error": round(statistics.stdev(by_answer) / len(by_answer) ** 0.5, 3),
        "positions": [round(share, 3) for share in speculation.position_acceptance],
        "position_1_accuracy": round(first, 3),
        "parameters": sum(p.numel() for p in served.parameters()),
        "drafter_passes_a_round": getattr(served, "passes_a_round", 1),
    }  # fmt: skip


def table(results: list[dict]) -> str:
    lines = [
        "| variant | tau | positions 1 to 3 accepted | position-1 accuracy, all anchors | steps | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        positions = " ".join(f"{share:.2f}" for share in r["positions"][:3])
        lines.append(
            f"| {r['variant']} | {r['tau']:.2f} ± {r['error']:.2f} | {positions} | {r['position_1_accuracy']:.2f} | {r['steps']} | "
            f"{r['seconds']} |"
        )
    return "\n".join(lines) + "\n"


def main(
    responses: Annotated[list[str], typer.Option(help="Responses: file or folder; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder of the results; finished variants are not run again.")],
    prompts: Annotated[list[str] | None, typer.Option(help="Prompts of answers that do not repeat them.")] = None,
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    only: Annotated[str, typer.Option(help="Take answers whose id starts so.")] = "",
    rows: Annotated[int, typer.Option(help="Answers to train on.")] = 800,
    validation: Annotated[int, typer.Option(help="Answers to measure on.")] = 40,
    seconds: Annotated[float, typer.Option(help="Processor time of a variant's training.")] = 360,
    layers: Annotated[int, typer.Option(help="Of the base.")] = 3,
    variant: Annotated[list[str] | None, typer.Option(help="By name; repeatable. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of fresh weights, anchors and order; the subset stays.")] = 0,
):
    """Measure variants on one subset of answers."""
    unknown = sorted(set(variant or []) - {known.name for known in VARIANTS})
    if unknown:
        raise ValueError(f"--variant {unknown[0]!r} is none of {', '.join(known.name for known in VARIANTS)}.")
    base = TrainOptions(
        target=target or smollm2()[0], responses=responses, output=str(output), prompts=[prompt_source(p) for p in prompts or []],
        layers=layers, block_size=8, loss="ce", num_anchors=32, draft_vocab_size=8192,
        features=str(output / "features"), dtype="bfloat16", bf16=True, max_length=800, learning_rate=6e-4,
        optimizer="adamw", seed=seed, batch_size=2,  # many small steps: what a lever does shows early
    )  # fmt: skip
    loaded, tokenizer = load_target(base.target, base.dtype)
    found, _, _ = load_rows(responses, prompts_by_id(base), base, tokenizer)
    found, _ = usable_rows([row for row in found if row["id"].startswith(only)], base.max_length)
    random.Random(0).shuffle(found)
    training, measured = split_validation(found[: rows + validation], validation, 0)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else []
    finished = {result["variant"] for result in results}
    for chosen in VARIANTS:
        named = chosen.name + f", seed {seed}" * (seed != 0)
        if named in finished or (variant and chosen.name not in variant):
            continue
        results.append({"variant": named} | run_variant(chosen, base, loaded, training, measured, seconds))
        write_text(path, json.dumps(results, indent=1) + "\n")
        print(results[-1], flush=True)
    below = "\n" + origin(typed_command("python -m dflash_hub.experiments.ablations")) + "\n"
    write_text(output / "table.md", table(results) + below)
    print(table(results))


if __name__ == "__main__":
    run_plainly(typer.run, main)
