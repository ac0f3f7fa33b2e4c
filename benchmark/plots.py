"""Plots of a benchmark folder: speedup by set, acceptance by draft position, where time goes, speedup by context and batch size."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

SPEEDUP = "speedup over the baseline"


def plot(folder: Path, settings: dict, rows: list[dict], records: list[dict], batches: list[dict]):
    """Draw what the rows allow into PNG files; a plot without data is not written.

    Args:
        settings: of the run, which name target and drafter.
        rows: of `report.summarize`.
        records: of `bench.read_records`.
        batches: of `rows.summarize_rows`.
    """
    title = f"target {short(settings['target'])}, drafter {short(settings['drafter'])}"
    for name, figure in figures(rows, records, batches):
        finish(figure, title)
        figure.savefig(folder / f"{name}.png", dpi=120)


def figures(rows: list[dict], records: list[dict], batches: list[dict]) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of every plot that has data."""
    if drafting := [row for row in rows if row["speedup"] and row["method"] != "baseline"]:
        yield "speedup", _speedup_by_set(drafting)
    if drafting := [row for row in rows if row["positions"]]:
        yield "positions", _acceptance_by_position(drafting)
    if drafting := [row for row in rows if row["share_draft"]]:
        yield "time", _time_split(drafting)
    if points := _contexts(records):
        yield "context", _speedup_by_context(points)
    if measured := [b for b in batches if b["speedup"] and b["method"] != "baseline"]:
        yield "rows", _speedup_by_batch_size(measured)


def short(name: str) -> str:
    """A repository's id as it is, of a folder its own name."""
    path = Path(name)
    return name if len(path.parts) == 2 and not path.is_absolute() else path.resolve().name


def finish(figure: Figure, title: str):
    """Add the title, and a legend beside the plots, so that it covers none of them."""
    figure.suptitle(title, fontsize=10)
    known = {}
    for axes in figure.axes:
        known |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    if known:
        figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=min(3, len(known)), fontsize=8)


def _figure(width: float, height: float, panels: int = 1):
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True)


def _speedup_by_set(rows: list[dict]) -> Figure:
    sets, methods = list(dict.fromkeys(r["set"] for r in rows)), list(dict.fromkeys(r["method"] for r in rows))
    figure, axes = _figure(max(6, 1.6 * len(sets)), 4.5)
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        mine = {r["set"]: r["speedup"] for r in rows if r["method"] == method}
        at = [s + (i - (len(methods) - 1) / 2) * width for s, name in enumerate(sets) if name in mine]
        values = [mine[name] for name in sets if name in mine]
        spread = [[v - low for v, low, _ in values], [high - v for v, _, high in values]]
        axes.bar(at, [v for v, _, _ in values], width, yerr=spread, capsize=2, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_ylabel(f"{SPEEDUP} (95% interval)")
    return figure


def _acceptance_by_position(rows: list[dict]) -> Figure:
    figure, panels = _figure(10, 4.5, panels=2)
    sets, methods = list(dict.fromkeys(r["set"] for r in rows)), list(dict.fromkeys(r["method"] for r in rows))
    for row in rows:
        # A color a set and a style a method: many lines stay apart.
        look = {
            "color": f"C{sets.index(row['set'])}",
            "linestyle": ("-", "--", ":", "-.")[methods.index(row["method"]) % 4],
        }
        positions = range(1, len(row["positions"]) + 1)
        for panel, shares in zip(panels, zip(*row["positions"])):
            panel.plot(positions, shares, marker="o", label=f"{row['set']}, {row['method']}", **look)
    panels[0].set_title("positions 1 to k accepted", fontsize=10)
    panels[1].set_title("position k accepted, given positions 1 to k - 1", fontsize=10)
    for panel in panels:
        panel.set_xlabel("draft position k")
        panel.set_ylim(0, 1.02)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels[0].set_ylabel("share of rounds")
    return figure


def _time_split(rows: list[dict]) -> Figure:
    figure, axes = _figure(7, 0.5 * len(rows) + 2)
    names = [f"{row['set']}, {row['method']}" for row in rows]
    left = [0.0] * len(rows)
    for label, values in (
        ("forward passes of the target", [row["share_target"] for row in rows]),
        ("forward passes of the drafter", [row["share_draft"] for row in rows]),
        ("loop", [max(0.0, 1 - row["share_target"] - row["share_draft"]) for row in rows]),
    ):
        axes.barh(names, values, left=left, label=label)
        left = [a + b for a, b in zip(left, values)]
    axes.set_xlabel("share of the call's time")
    return figure


def _contexts(records: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """(tokens of the prompt, speedup) of every output, by method."""
    baseline = {(r["set"], r["id"], r["turn"]): r for r in records if r["method"] == "baseline"}
    points = defaultdict(list)
    for r in records:
        key = (r["set"], r["id"], r["turn"])
        if r["method"] != "baseline" and key in baseline:
            points[r["method"]].append((r["prompt_tokens"], baseline[key]["seconds"] / r["seconds"]))
    return points


def _speedup_by_context(points: dict[str, list[tuple[int, float]]]) -> Figure:
    figure, axes = _figure(7, 4.5)
    for method, values in points.items():
        axes.scatter(*zip(*values), s=14, alpha=0.7, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel(SPEEDUP)
    return figure


def _speedup_by_batch_size(batches: list[dict]) -> Figure:
    figure, axes = _figure(7, 4.5)
    for key in dict.fromkeys((b["set"], b["method"]) for b in batches):
        points = sorted((b["rows"], b["speedup"]) for b in batches if (b["set"], b["method"]) == key)
        axes.plot(*zip(*points), marker="o", label=", ".join(key))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    sizes = sorted({b["rows"] for b in batches})
    axes.set_xticks(sizes, map(str, sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch size")
    axes.set_ylabel(SPEEDUP)
    return figure
