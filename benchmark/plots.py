"""PNG plots of a benchmark folder: speedup by set, acceptance by slot, where a call's time goes, speedup by context and rows."""

from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot(folder: Path, rows: list[dict], records: list[dict], batches: list[dict]):
    """Draw what the rows allow; a plot without data is not written."""
    _speedup_by_set(folder / "speedup.png", [row for row in rows if row["speedup"] and row["method"] != "baseline"])
    _acceptance_by_slot(folder / "slots.png", [row for row in rows if row["slots"]])
    _time_split(folder / "time.png", [row for row in rows if row["share_draft"]])
    _speedup_by_context(folder / "context.png", records)
    _speedup_by_rows(folder / "rows.png", [b for b in batches if b["speedup"] and b["method"] != "baseline"])


def _save(figure, path: Path):
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _speedup_by_set(path: Path, rows: list[dict]):
    if not rows:
        return
    sets, methods = list(dict.fromkeys(r["set"] for r in rows)), list(dict.fromkeys(r["method"] for r in rows))
    figure, axes = plt.subplots(figsize=(max(6, 1.6 * len(sets)), 4))
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        mine = {r["set"]: r["speedup"] for r in rows if r["method"] == method}
        at = [s + (i - (len(methods) - 1) / 2) * width for s, name in enumerate(sets) if name in mine]
        values = [mine[name] for name in sets if name in mine]
        spread = [[v - low for v, low, _ in values], [high - v for v, _, high in values]]
        axes.bar(at, [v for v, _, _ in values], width, yerr=spread, capsize=2, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylabel("speedup over plain generate (95% interval)")
    axes.legend()
    _save(figure, path)


def _acceptance_by_slot(path: Path, rows: list[dict]):
    if not rows:
        return
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for row in rows:
        slots = range(1, len(row["slots"]) + 1)
        for panel, index in zip(panels, (0, 1)):
            panel.plot(
                slots, [slot[index] for slot in row["slots"]], marker="o", label=f"{row['set']}, {row['method']}"
            )
    panels[0].set_title("slots 1 to k accepted")
    panels[1].set_title("slot k accepted, given slots 1 to k - 1")
    for panel in panels:
        panel.set_xlabel("slot k")
        panel.set_ylim(0, 1.02)
    panels[0].set_ylabel("share of rounds")
    panels[0].legend(fontsize=7)
    _save(figure, path)


def _time_split(path: Path, rows: list[dict]):
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(rows) + 1.5))
    names = [f"{row['set']}, {row['method']}" for row in rows]
    left = [0.0] * len(rows)
    for label, values in (
        ("target passes", [row["share_target"] for row in rows]),
        ("drafter passes", [row["share_draft"] for row in rows]),
        ("loop", [max(0.0, 1 - row["share_target"] - row["share_draft"]) for row in rows]),
    ):
        axes.barh(names, values, left=left, label=label)
        left = [a + b for a, b in zip(left, values)]
    axes.set_xlabel("share of the call's time")
    axes.legend(loc="lower right", fontsize=8)
    _save(figure, path)


def _speedup_by_context(path: Path, records: list[dict]):
    plain = {(r["set"], r["id"], r["turn"]): r for r in records if r["method"] == "baseline"}
    points = defaultdict(list)
    for r in records:
        key = (r["set"], r["id"], r["turn"])
        if r["method"] != "baseline" and key in plain:
            points[r["method"]].append((r["prompt_tokens"], plain[key]["seconds"] / r["seconds"]))
    if not points:
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for method, values in points.items():
        axes.scatter(*zip(*values), s=14, alpha=0.7, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("speedup over plain generate")
    axes.legend()
    _save(figure, path)


def _speedup_by_rows(path: Path, batches: list[dict]):
    if not batches:
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for key in dict.fromkeys((b["set"], b["method"]) for b in batches):
        points = sorted((b["rows"], b["speedup"]) for b in batches if (b["set"], b["method"]) == key)
        axes.plot(*zip(*points), marker="o", label=", ".join(key))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows")
    axes.set_ylabel("speedup over plain generate")
    axes.legend(fontsize=7)
    _save(figure, path)
