"""Batches: the baseline and our loop on the same ones, at several batch sizes."""

import json
import random
import time
from collections import defaultdict
from pathlib import Path

import torch

from ..common.files import appending, complete_lines
from ..common.loading import cut_at_end, end_tokens, left_padded, pad_token
from ..decode_statistics import Speculation

METHODS = ("baseline", "ours")  # of what `--methods` names; transformers' and z-lab's loops take one sequence


def methods_of_rows(methods: list[str]) -> list[str]:
    """Return those of `methods` that take batches.

    Raises:
        ValueError: none does.
    """
    found = [name for name in methods if name.split("-")[0] in METHODS]
    if not found:
        raise ValueError(f"--rows measures baseline and ours, and --methods names neither: {', '.join(methods)}.")
    return found


def check_counts(sets: list, counts: list[int]):
    """Raise ValueError for a set that has fewer prompts than the largest batch."""
    for name, prompts in sets:
        if len(prompts) < max(counts):
            raise ValueError(f"{name} has {len(prompts)} prompts, too few for a batch of {max(counts)}; raise --count.")


def measure_rows(output: Path, bench, methods: list[str], sets: list, counts: list[int], seed: int):
    """Add what `rows.jsonl` lacks: one line a method and batch.

    The baseline goes first on every batch, then the others in turns; a short warm-up goes before.

    Raises:
        ValueError: a set has fewer prompts than the largest batch, or no method takes batches.
    """
    methods = methods_of_rows(methods)
    check_counts(sets, counts)
    done = {(r["method"], r["set"], r["rows"], r["batch"]) for r in read_rows(output)}
    warm = False
    with appending(output / "rows.jsonl") as file:
        for name, prompts in sets:
            for rows in counts:
                for batch in range(len(prompts) // rows):
                    if all((method, name, rows, batch) in done for method in methods):
                        continue
                    inputs = batch_inputs(bench, prompts[batch * rows : (batch + 1) * rows])
                    if not warm:
                        for method in methods:
                            run(bench, method, inputs, bench.settings | {"max_new_tokens": 8}, seed)
                        warm = True
                    order = [m for m in methods if m != "baseline"]
                    random.Random(batch).shuffle(order)
                    baseline = None
                    for method in ["baseline"] * ("baseline" in methods) + order:
                        text, seconds, speculation = run(bench, method, inputs, bench.settings, seed)
                        baseline = text if method == "baseline" else baseline
                        same = (
                            None
                            if baseline is None or bench.settings["do_sample"]
                            else sum(map(list.__eq__, text, baseline))
                        )
                        record = {
                            "method": method, "set": name, "rows": rows, "batch": batch, "seconds": seconds, "same": same,
                            "tokens": sum(map(len, text)),
                            "rounds": speculation.acceptance_lengths if speculation else [],
                        }  # fmt: skip
                        if (method, name, rows, batch) not in done:
                            file.write(json.dumps(record) + "\n")
                    file.flush()


def batch_inputs(bench, prompts: list[dict]) -> dict:
    """Left-padded ids and mask of the first turns."""
    encoded = [bench.inputs(row)["input_ids"][0].tolist() for row in prompts]
    return left_padded(encoded, pad_token(bench.target, bench.tokenizer), bench.target.device)


def run(
    bench, method: str, inputs: dict, settings: dict, seed: int
) -> tuple[list[list[int]], float, Speculation | None]:
    """(new tokens of each sequence, seconds, statistics) of one call."""
    arguments = {}
    if method != "baseline":
        number = method.removeprefix("ours").removeprefix("-")
        arguments = {"assistant_model": bench.drafter}
        if number:
            arguments["num_assistant_tokens"] = int(number) if number.isdigit() else number
    torch.manual_seed(seed)
    start = now(bench.target.device)
    output = bench.target.generate(**inputs, **settings, **arguments)
    seconds = now(bench.target.device) - start
    ends = end_tokens(bench.target)
    sequences = [cut_at_end(ids, ends) for ids in output[:, inputs["input_ids"].shape[1] :].tolist()]
    return sequences, seconds, bench.drafter.last_speculation if arguments else None


def now(device: torch.device) -> float:
    """Seconds of the clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def read_rows(folder: Path) -> list[dict]:
    """Read all complete lines."""
    return [with_new_name(record) for record in complete_lines(folder / "rows.jsonl")]


def with_new_name(record: dict) -> dict:
    """Return a record with the method that 0.1.0 called plain under its name of today."""
    return record | {"method": "baseline"} if record.get("method") == "plain" else record


def summarize_rows(folder: Path) -> list[dict]:
    """Return one entry a set, method and batch size."""
    groups = defaultdict(list)
    for record in read_rows(folder):
        groups[record["set"], record["method"], record["rows"]].append(record)
    entries = []
    for (name, method, rows), records in groups.items():
        baseline = {r["batch"]: r for r in groups.get((name, "baseline", rows), [])}
        pairs = [(baseline[r["batch"]], r) for r in records if r["batch"] in baseline]
        lengths = [length for r in records for row in r["rounds"] for length in row]
        seconds = sum(r["seconds"] for r in records)
        compared = [r for r in records if r["same"] is not None]
        entries.append(
            {
                "set": name, "method": method, "rows": rows, "batches": len(records),
                "tokens_per_second": sum(r["tokens"] for r in records) / seconds,
                "speedup": sum(p["seconds"] for p, _ in pairs) / sum(r["seconds"] for _, r in pairs) if pairs else None,
                "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
                "same": sum(r["same"] for r in compared), "compared": rows * len(compared),
            }
        )  # fmt: skip
    return entries
