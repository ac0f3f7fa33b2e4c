"""Measure a running engine (vLLM, SGLang, anything with OpenAI's API) at several concurrencies, by streaming requests."""

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..common.chat import first_turn
from ..common.console import progress_bar
from ..common.provenance import environment
from ..common.server import Server
from ..hub_files import write_text

# Counters that say how much was accepted: tokens accepted and drafts made, by engine.
COUNTERS = {
    "vllm": ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"),
}
# SGLang exports the mean acceptance length itself.
GAUGES = ("sglang:spec_accept_length",)


def acceptance_length(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Mean acceptance length between two readings, the target's own token included; None where the server does not say."""
    for accepted, drafts in COUNTERS.values():
        rounds = after.get(drafts, 0) - before.get(drafts, 0)
        if rounds > 0:
            return 1 + (after.get(accepted, 0) - before.get(accepted, 0)) / rounds
    return next((after[name] for name in GAUGES if name in after), None)


def measure_server(
    output: Path,
    server: Server,
    sets: list,
    concurrency: list[int],
    max_new_tokens: int,
    temperature: float,
    command: str,
) -> str:
    """Run every set at every concurrency; writes `server.json` and `server.md`, returns the table.

    Each level starts with as many warm-up requests as it has slots, which are not counted.
    """
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("requests", total=len(concurrency) * sum(len(prompts) for _, prompts in sets))
        for name, level, prompts in [(name, level, prompts) for name, prompts in sets for level in concurrency]:
            bar.update(task, description=f"{name}, {level} at a time"[:40])

            def answer(row):
                done = server.complete(first_turn(row), max_new_tokens, temperature, row.get("tools"))
                bar.advance(task)
                return done

            with ThreadPoolExecutor(level) as pool:
                warm_up = (prompts * level)[:level]
                list(pool.map(lambda r: server.complete(first_turn(r), 8, temperature, r.get("tools")), warm_up))
                before, start = server.metrics(), time.perf_counter()
                answers = list(pool.map(answer, prompts))
                seconds = time.perf_counter() - start
            tokens = sum(answer[0] for answer in answers)
            rows.append(
                {
                    "set": name, "concurrency": level, "requests": len(answers), "tokens": tokens,
                    "tokens_per_second": tokens / seconds, "first_token": statistics.median(a[2] for a in answers),
                    "acceptance_length": acceptance_length(before, server.metrics()),
                }
            )  # fmt: skip
    lines = [
        "| set | concurrency | requests | tokens/s | first token, median | acceptance length |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        length = "not reported" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        lines.append(
            f"| {row['set']} | {row['concurrency']} | {row['requests']} | {row['tokens_per_second']:.1f} | "
            f"{row['first_token']:.3f} s | {length} |"
        )
    # Of the client; what the server runs, only the server knows.
    origin = {"command": command, "server": server.root, "model": server.model, **environment()}
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "server.json", json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")
    text = "\n".join(lines) + (
        f"\n\n`{command}`, {server.model} at {server.root}, {origin['date']}; client: commit {origin['commit']}, Python "
        f"{origin['python']}, {origin['device']}\n"
    )
    write_text(output / "server.md", text)
    return text
