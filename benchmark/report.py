"""Tables, comparison and plots of a benchmark folder. What each figure means stands in the report itself."""

import json
from collections import defaultdict
from pathlib import Path

from ..common.tables import interval, over_prompts, table
from ..hub_files import write_text
from .bench import TIE, read_records, read_settings
from .rows import summarize_rows

DEFINITIONS = """\
- **acceptance length** (tau): mean number of tokens that a round adds, the target's own included, over all rounds of a set.
  A round is one draft and the forward pass of the target that verifies it. What the prefill adds (one token, or more
  where a method drafts for it already) belongs to no round. In brackets: 95% interval, bootstrap over prompts. All turns
  of a prompt are drawn together.
- **tokens/s**: new tokens over seconds of the whole call, the prefill included.
- **speedup**: seconds of the baseline over those of the method, on the same prompts in the same run; 95% interval.
- **first token**: mean seconds until the first new token reaches a streamer.
- **forward passes**: of target and drafter, per output.
- **same text**: greedy outputs equal to the baseline's, token for token. A difference is excused where the baseline's two
  best scores lie within 1e-4 at the first differing token (float32; half precision has wider ties, which are counted but
  not excused).
- **draft position k**: of the rounds that drafted it, the share that accepted positions 1 to k (cumulative), and the
  share of those that accepted 1 to k - 1 (conditional)."""


def acceptance_length_of(records: list[dict]) -> float:
    totals = [round_totals(record) for record in records]
    rounds = sum(rounds for _, rounds in totals)
    return sum(tokens for tokens, _ in totals) / rounds if rounds else float("nan")


def round_totals(record: dict) -> list[int]:
    """[tokens that rounds added, rounds] of an output; of a server the two are all that is known."""
    return record.get("round_totals") or [sum(record["rounds"]), len(record["rounds"])]


def speedup_of(pairs: list[tuple[dict, dict]]) -> float:
    return sum(baseline["seconds"] for baseline, _ in pairs) / sum(record["seconds"] for _, record in pairs)


def positions_of(records: list[dict]) -> list[tuple[float, float]]:
    """(cumulative, conditional) acceptance of draft positions 1, 2, ..."""
    rounds = [pair for r in records for pair in zip(r["drafted"], r["accepted"])]
    positions = []
    for position in range(1, max((drafted for drafted, _ in rounds), default=0) + 1):
        asked = [accepted for drafted, accepted in rounds if drafted >= position]
        reached = sum(accepted >= position - 1 for accepted in asked)
        passed = sum(accepted >= position for accepted in asked)
        positions.append((passed / len(asked), passed / reached if reached else float("nan")))
    return positions


def summarize(folder: Path) -> list[dict]:
    """One row a set and method."""
    groups = defaultdict(list)
    for record in read_records(folder):
        groups[record["set"], record["method"]].append(record)
    rows = []
    for (set_name, method), records in groups.items():
        baseline = {(r["id"], r["turn"]): r for r in groups.get((set_name, "baseline"), [])}
        pairs = [(baseline[r["id"], r["turn"]], r) for r in records if (r["id"], r["turn"]) in baseline]
        tokens, seconds = sum(len(r["new_ids"]) for r in records), sum(r["seconds"] for r in records)
        compared = [r for r in records if r["same_text"] is not None]
        different = [r for r in compared if not r["same_text"]]
        by_length = defaultdict(list)
        for r in records:
            for length, spans in r["pass_seconds"].items():
                by_length[int(length)] += spans
        rows.append(
            {
                "set": set_name,
                "method": method,
                "outputs": len(records),
                "acceptance_length": over_prompts(records, lambda r: r["id"], acceptance_length_of)
                if any(round_totals(r)[1] for r in records)
                else None,
                "tokens_per_second": tokens / seconds,
                "speedup": over_prompts(pairs, lambda pair: pair[1]["id"], speedup_of) if pairs else None,
                "first_token": sum(r["first_token"] for r in records) / len(records),
                "target_passes": sum(r["target_passes"] for r in records) / len(records),
                "drafter_passes": sum(r["drafter_passes"] for r in records) / len(records),
                "share_target": sum(r["target_seconds"] for r in records) / seconds,
                "share_draft": sum(r["draft_seconds"] for r in records) / seconds,
                "positions": positions_of(records),
                "compared": len(compared),
                "same": len(compared) - len(different),
                "excused": sum(r["tie_gap"] <= TIE for r in different),
                "peak_bytes": max(r["peak_bytes"] for r in records),
                "pass_seconds": {length: sorted(s)[len(s) // 2] for length, s in sorted(by_length.items())},
                "mean_prompt": sum(r["prompt_tokens"] for r in records) / len(records),
                "outside": _share_outside(records),
            }
        )
    return rows


def _share_outside(records: list[dict]) -> float | None:
    """Share of new tokens that are in no draft vocabulary, so that no draft can hold them; None where there is none."""
    counted = [r for r in records if r.get("outside") is not None]
    return sum(r["outside"] for r in counted) / sum(len(r["new_ids"]) for r in counted) if counted else None


def results(rows: list[dict], names: dict[str, str]) -> list[str]:
    """Return the table of all numbers, and what a draft vocabulary leaves out.

    Args:
        names: whose draft tokens each method verifies.
    """
    parts = [
        table(
            ["set", "method", "drafted by", "outputs", "acceptance length", "tokens/s", "speedup", "first token", "forward passes: target, drafter", "same text"],
            [
                [
                    row["set"], row["method"], shortened(names.get(row["method"], "")), row["outputs"], interval(row["acceptance_length"]),
                    f"{row['tokens_per_second']:.1f}", interval(row["speedup"]), f"{row['first_token']:.2f} s",
                    f"{row['target_passes']:.1f}, {row['drafter_passes']:.1f}" if row["target_passes"] else "-",
                    f"{row['same']} of {row['compared']}" + (f", {row['excused']} at ties" if row["excused"] else "")
                    if row["compared"] else "-",
                ]
                for row in rows
            ],
        )
    ]  # fmt: skip
    for row in rows:
        if row["outside"] is not None:
            parts.append(
                f"{row['set']}, {row['method']}: {row['outside']:.1%} of the new tokens are not in the draft vocabulary of "
                f"`{names[row['method']]}`, which can never draft them."
            )
    return parts


def markdown(folder: Path, rows: list[dict], compare: Path | None) -> str:
    saved = read_settings(folder)
    settings, origin = saved["settings"], saved["provenance"]
    wanted = sum(len(ids) for ids in settings["sets"].values()) * len(settings["methods"])
    thinking = {None: "the template's default", True: "on", False: "off"}[settings["thinking"]]
    parts = [
        "# Benchmark",
        f"target `{settings['target']}`, drafter `{settings['drafter']}`, {settings['dtype'].removeprefix('torch.')}, "
        f"thinking mode: {thinking}\n\ngeneration config: `{json.dumps(settings['generation'])}`",
        f"`{origin['command']}`\n\ncommit {origin['commit']}, {origin['date']}, {origin['device']}, {origin['processes']} "
        f"process(es), Python {origin['python']}, torch {origin['torch']}, transformers {origin['transformers']}",
    ]
    for number, server in enumerate(settings.get("servers", []), 1):
        parts.append(f"served{f'-{number}' if number > 1 else ''}: {server}; its weights and types are its own")
    if sum(row["outputs"] for row in rows) < wanted:
        parts.append(
            f"**Not complete**: {sum(row['outputs'] for row in rows)} outputs of at least {wanted}; run the command again."
        )
    parts += results(rows, settings.get("drafted_by", {}))
    drafting = [row for row in rows if row["positions"]]
    if drafting:
        longest = max(len(row["positions"]) for row in drafting)
        parts.append("Acceptance by draft position: cumulative / conditional")
        parts.append(
            table(
                ["set", "method", *range(1, longest + 1)],
                [[r["set"], r["method"], *(f"{a:.2f} / {c:.2f}" for a, c in r["positions"])] for r in drafting],
            )
        )
    timed = [row for row in rows if row["pass_seconds"]]
    if timed:
        parts.append("Median milliseconds of a forward pass of the target by its tokens")
        parts.append(
            table(
                ["set", "method", "mean prompt", "tokens: milliseconds"],
                [
                    [
                        r["set"], r["method"], f"{r['mean_prompt']:.0f}",
                        ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in r["pass_seconds"].items()),
                    ]
                    for r in timed
                ],
            )
        )  # fmt: skip
    batches = summarize_rows(folder)
    if batches:
        parts.append("Batches: several prompts in one call; speedup over the baseline on the same batch")
        parts.append(
            table(
                ["set", "method", "batch size", "batches", "acceptance length", "tokens/s", "speedup", "same text"],
                [
                    [
                        b["set"], b["method"], b["rows"], b["batches"], "-" if b["acceptance_length"] is None else f"{b['acceptance_length']:.2f}",
                        f"{b['tokens_per_second']:.1f}", "-" if b["speedup"] is None else f"{b['speedup']:.2f}",
                        f"{b['same']} of {b['compared']}" if b["compared"] else "-",
                    ]
                    for b in batches
                ],
            )
        )  # fmt: skip
    parts.append(peak_memory(rows, on_cpu=origin["device"].startswith("CPU")))
    if compare:
        parts.append(f"## Against {compare}\n\n" + comparison(folder, compare))
    parts.append("## Definitions\n\n" + DEFINITIONS)
    return "\n\n".join(parts) + "\n"


def shortened(name: str) -> str:
    """Return the last two parts of a path or an id on the Hub."""
    return "/".join(Path(name).parts[-2:])


def peak_memory(rows: list[dict], on_cpu: bool) -> str:
    """A GPU's peak is reset before each output, a process's cannot be."""
    if on_cpu:
        return f"Peak memory of the process, all methods together: {max(r['peak_bytes'] for r in rows) / 2**20:.0f} MiB"
    peaks = {row["method"]: 0 for row in rows}
    for row in rows:
        peaks[row["method"]] = max(peaks[row["method"]], row["peak_bytes"])
    by_method = ", ".join(f"{method} {peak / 2**20:.0f} MiB" for method, peak in peaks.items())
    return f"Peak memory of the GPU by method, the weights of all models included: {by_method}"


def comparison(folder: Path, before: Path) -> str:
    """What moved beyond noise since an earlier run: differences on the prompts that both have, with 95% intervals."""
    read_settings(before)
    old = {(r["set"], r["method"], r["id"], r["turn"]): r for r in read_records(before)}
    groups = defaultdict(list)
    for record in read_records(folder):
        key = (record["set"], record["method"], record["id"], record["turn"])
        if key in old:
            groups[key[:2]].append((old[key], record))
    if not groups:
        raise ValueError(f"{before} and {folder} have no set, method and prompt in common.")

    def length_change(pairs):
        return acceptance_length_of([new for _, new in pairs]) - acceptance_length_of([was for was, _ in pairs])

    rows = []
    for (set_name, method), pairs in groups.items():
        change, speed = None, over_prompts(pairs, lambda pair: pair[1]["id"], speedup_of)
        if any(round_totals(r)[1] for pair in pairs for r in pair):
            change = over_prompts(pairs, lambda pair: pair[1]["id"], length_change)
        moved = [
            what
            for what, value, still in (("acceptance length", change, 0), ("speed", speed, 1))
            if value and not value[1] <= still <= value[2]
        ]
        rows.append([set_name, method, len(pairs), interval(change), interval(speed), ", ".join(moved) or "nothing"])
    return table(
        ["set", "method", "outputs", "acceptance length, change", "seconds before / now", "beyond noise"], rows
    )


def write_report(folder: Path, compare: Path | None = None) -> str:
    """Write report.md, summary.json and, where matplotlib is installed, the plots; returns the report."""
    rows = summarize(folder)
    if not rows:
        raise ValueError(f"{folder} holds no record yet.")
    text = markdown(folder, rows, compare)
    write_text(folder / "report.md", text)
    write_text(
        folder / "summary.json",
        json.dumps({**read_settings(folder), "rows": rows, "batches": summarize_rows(folder)}, indent=1) + "\n",
    )
    try:
        from .plots import plot
    except ImportError:
        text += "\nNo plots: they need matplotlib, `pip install matplotlib`.\n"
    else:
        plot(folder, read_settings(folder)["settings"], rows, read_records(folder), summarize_rows(folder))
    return text
