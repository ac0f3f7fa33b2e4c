"""Do the parts of DFlash 2 pay for a trained drafter? It is upgraded and trained on, beside itself without them.

    python -m dflash_hub.experiments.dflash2_gain --responses data/responses/smollm2-135m-instruct.jsonl --output gain \\
        --seconds 1800 --seed 0 --seed 1 --set answers-gsm8k --set answers-humaneval

All variants train on the same data for the same processor time. Acceptance is that of greedy rounds replayed on responses of
validation and of the sets, with the selector's walk and without it (the same weights, each position's likeliest token). Results
are kept variant by variant, so a run can be interrupted; the trained drafters stay in the output folder.
"""

import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..benchmark.report import acceptance_length_of
from ..common.console import run_plainly, typed_command
from ..common.identity import identify
from ..common.loading import load_target
from ..common.prompts import prompt_source
from ..common.provenance import origin
from ..common.smollm2 import smollm2
from ..common.tables import interval, over_prompts, table
from ..convert.upgrading import upgrade_drafter
from ..drafter_heads import TargetHead
from ..drafter_paths import MostLikely, path_head, walk
from ..hub_files import write_text
from ..modeling_dflash import DFlashDraftModel
from ..training.data import Collator, PackedRows, split_validation, usable_rows
from ..training.evaluation import replay
from ..training.losses import BlockLoss, SelectorLoss, gamma_of
from ..training.options import TrainOptions
from ..training.responses import read_responses, responses_file
from ..training.train import fill_cache, load_rows, prompts_by_id, training_arguments
from ..training.trainer import DFlashTrainer

# By name, which parts are added.
VARIANTS = {
    "without parts": {},
    "both parts": {"convolution": True, "selector": True},
    "convolution": {"convolution": True, "selector": False},
    "selector": {"convolution": False, "selector": True},
}


def trained(source: str, options: TrainOptions, target, training, validation, seconds: float) -> tuple:
    """Train the drafter in a folder for `seconds` of processor time: (drafter, steps, seconds that were spent)."""
    drafter = DFlashDraftModel.from_pretrained(source, dtype=torch.float32)
    loss = BlockLoss(options.loss, gamma_of(options.loss, options.gamma, drafter.config.block_size) or None)
    cache = fill_cache(options.features, identify(target), target, drafter, loss, training)

    def run(steps: int) -> float:
        arguments = training_arguments(
            dataclasses.replace(options, max_steps=steps), len(training), Path(options.output)
        )
        arguments.save_strategy = arguments.eval_strategy = "no"
        trainer = DFlashTrainer(
            drafter, target, arguments, PackedRows(training, None, options.seed), Collator(cache), loss, options.num_anchors,
            validation, 0, 8, muon=options.optimizer == "muon",
            selector_loss=SelectorLoss(loss, options.selector_loss, options.missing_gold),
        )  # fmt: skip
        started = time.process_time()
        trainer.train()
        return time.process_time() - started

    state = {name: value.clone() for name, value in drafter.state_dict().items()}
    step_seconds = run(6) / 6
    drafter.load_state_dict(state)
    steps = max(1, round(seconds / step_seconds))
    return drafter, steps, run(steps)


def acceptance(drafter, target, sets: dict[str, list[dict]], walked: bool = True) -> dict[str, str]:
    """Acceptance length by set, with its interval; `walked`: see `replay`."""
    found = {}
    for name, rows in sets.items():
        speculation, _, _ = replay(target, drafter, rows, walked=walked)
        records = [{"id": row["id"], "rounds": rounds} for row, rounds in zip(rows, speculation.acceptance_lengths)]
        found[name] = interval(over_prompts(records, lambda record: record["id"], acceptance_length_of))
    return found


@torch.no_grad()
def walk_seconds(drafter, target, rounds: int = 200) -> float:
    """Time of the walk in a round, beside the head's one call that drafting needs in any case."""
    head = path_head(drafter, TargetHead(drafter.config, target.get_output_embeddings()))
    hidden = torch.randn(1, drafter.config.block_size - 1, drafter.config.hidden_size, dtype=target.dtype)
    candidates, anchor = head(hidden.to(target.device)), torch.zeros(1, 1, dtype=torch.long, device=target.device)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        walk(head, candidates, anchor, MostLikely)
        times.append(time.perf_counter() - started)
    return sorted(times)[rounds // 2]


def measure(name: str, seed: int, base: TrainOptions, source: str, target, training, validation, sets, seconds) -> dict:
    """Train and measure one variant: its line of the results. The drafter stays beside them."""
    folder = Path(base.output) / f"{name.replace(' ', '-')}-seed-{seed}"
    start = source
    if VARIANTS[name]:
        start = str(folder) + "-start"
        upgrade_drafter(source, start, **VARIANTS[name], seed=seed, force=True)
    options = dataclasses.replace(base, seed=seed)
    drafter, steps, spent = trained(start, options, target, training, validation, seconds)
    drafter.save_pretrained(folder)
    served = DFlashDraftModel.from_pretrained(folder, dtype=target.dtype).eval()
    result = {"variant": name, "seed": seed, "steps": steps, "seconds": round(spent)}
    result["acceptance"] = acceptance(served, target, sets)
    if served.candidate_selector is not None:
        result["walk_ms"] = round(1000 * walk_seconds(served, target), 2)
        result["without_walk"] = acceptance(served, target, sets, walked=False)
    return result


def lines_of(result: dict) -> list[list]:
    """Its rows of the table."""
    lines = [[result["variant"], result["seed"], result["steps"], result["seconds"], result.get("walk_ms", ""), *result["acceptance"].values()]]  # fmt: skip
    if "without_walk" in result:
        lines.append([f"{result['variant']}, no walk", result["seed"], "", "", "", *result["without_walk"].values()])
    return lines


def main(
    responses: Annotated[list[str], typer.Option(help="Responses to train on: file or folder; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder of the results; finished variants are not run again.")],
    sets: Annotated[
        list[Path] | None, typer.Option("--set", help="Folder of greedy responses to measure on; repeatable.")
    ] = None,
    drafter: Annotated[str, typer.Option(help="The trained drafter.")] = ".",
    prompts: Annotated[list[str] | None, typer.Option(help="Prompts of responses that do not repeat them.")] = None,
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(VARIANTS)}; repeatable. Default: all.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Of anchors, order and the fresh codebook; repeatable.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Responses to train on.")] = 800,
    validation: Annotated[int, typer.Option(help="Responses kept to measure on.")] = 40,
    seconds: Annotated[float, typer.Option(help="Processor time of a variant's training.")] = 1800,
    missing_gold: Annotated[str, typer.Option(help="See dflash-hub train.")] = "leave-out",
    learning_rate: Annotated[float, typer.Option(help="Peak.")] = 3e-4,
):
    """Train and measure the variants, and print the table."""
    if unknown := sorted(set(variant or []) - set(VARIANTS)):
        raise ValueError(f"--variant {unknown[0]!r} is none of {', '.join(VARIANTS)}.")
    base = TrainOptions(
        target=target or smollm2()[0], responses=responses, output=str(output), prompts=[prompt_source(p) for p in prompts or []],
        drafter=drafter, loss="dpace", num_anchors=64, features=str(output / "features"), dtype="bfloat16", bf16=True,
        max_length=800, learning_rate=learning_rate, optimizer="adamw", batch_size=2, missing_gold=missing_gold,
    )  # fmt: skip
    loaded, tokenizer = load_target(base.target, base.dtype)
    found, _, _ = load_rows(responses, prompts_by_id(base), base, tokenizer)
    found, _ = usable_rows(found, base.max_length)
    random.Random(0).shuffle(found)
    training, kept = split_validation(found[: rows + validation], validation, 0)
    measured = {"validation": kept}
    for folder in sets or []:
        measured[folder.name] = [row for row in read_responses(responses_file(folder)) if len(row["response_ids"]) > 1]
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    results = json.loads(path.read_text()) if path.exists() else []
    for number in seed or [0]:
        for name in variant or VARIANTS:
            if any((known["variant"], known["seed"]) == (name, number) for known in results):
                continue
            results.append(measure(name, number, base, drafter, loaded, training, kept, measured, seconds))
            write_text(path, json.dumps(results, indent=1) + "\n")
            print(results[-1], flush=True)
    head = ["variant", "seed", "steps", "seconds", "walk, ms", *measured]
    shown = table(head, [line for result in results for line in lines_of(result)])
    write_text(
        output / "table.md", f"{shown}\n{origin(typed_command('python -m dflash_hub.experiments.dflash2_gain'))}\n"
    )
    print(shown)


if __name__ == "__main__":
    run_plainly(typer.run, main)
