"""Draw docs/method.png and docs/tree.png, the pictures of method and trees: `python -m dflash_hub.experiments.method_picture`."""

from pathlib import Path

import matplotlib
import typer

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

INK, QUIET, PAPER = "#1c2430", "#5b6575", "#fbfbf9"  # an opaque ground: readable on light and dark pages
KEPT, KEPT_EDGE = "#c9efe5", "#0d7d6c"
OWN, OWN_EDGE = "#e3e6ec", "#8b93a1"
GONE, GONE_EDGE = "#fbe3dd", "#d9573f"

WIDTH, HEIGHT = 1.0, 0.62  # of a token's box
STEP = 1.1


def box(axes, x, y, text, face, edge, dashed=False, color=INK):
    style = {"boxstyle": "round,pad=0,rounding_size=0.12", "linewidth": 1.4, "linestyle": "--" if dashed else "-"}
    axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, facecolor=face, edgecolor=edge, **style))
    axes.text(x + WIDTH / 2, y + HEIGHT / 2 - 0.02, text, ha="center", va="center", fontsize=11, color=color)


def bar(axes, x, y, width, text, face):
    style = {"boxstyle": "round,pad=0,rounding_size=0.1", "linewidth": 0}
    axes.add_patch(FancyBboxPatch((x, y), width, 0.5, facecolor=face, **style))
    axes.text(x + width / 2, y + 0.23, text, ha="center", va="center", fontsize=10.5, color="white", weight="bold")


def arrow(axes, x, y, to):
    axes.annotate("", (x, to), (x, y), arrowprops={"arrowstyle": "-|>", "color": QUIET, "linewidth": 1.2})


def canvas(height: float, top: float):
    """Return a figure and its axes, in units of a token's box."""
    figure, axes = plt.subplots(figsize=(11, height), facecolor=PAPER)
    axes.set_xlim(0, 12.4)
    axes.set_ylim(0.1, top)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure, axes


def heading(axes, y, title, below):
    axes.text(0.2, y, title, fontsize=14, weight="bold", color=INK, va="top")
    axes.text(0.2, y - 0.5, below, fontsize=10.5, color=QUIET, va="top", linespacing=1.5)


def draw(path: Path):
    """Draw the baseline above, and a round of DFlash below: the same words in both."""
    figure, axes = canvas(6.6, 8.3)
    words = ["she", "freezes", "4", "rolls", "."]
    left = 4.2

    heading(axes, 8.1, "Baseline", "every token takes a forward\npass of the whole model")
    for i, word in enumerate(words):
        x = left + i * STEP
        bar(axes, x, 7.2, WIDTH, "target", OWN_EDGE)
        arrow(axes, x + WIDTH / 2, 7.15, 6.85)
        box(axes, x, 6.2, word, OWN, OWN_EDGE)
    axes.text(left + 5 * STEP + 0.2, 6.5, "5 tokens,\n5 forward passes", fontsize=11.5, color=INK, va="center")
    axes.plot([0.2, 12.2], [5.75, 5.75], color=OWN, linewidth=1.2)

    heading(axes, 5.4, "DFlash", "")
    axes.text(0.2, 4.63, "1  draft", fontsize=11.5, weight="bold", color=INK, va="center")
    axes.text(
        0.2,
        4.27,
        "a small drafter, which reads\nthe target's hidden states, fills\na block of masks at once",
        fontsize=10,
        color=QUIET,
        va="top",
    )
    box(axes, left - STEP, 4.95, "So", OWN, OWN_EDGE)
    for i in range(5):
        box(axes, left + i * STEP, 4.95, "mask", PAPER, OWN_EDGE, dashed=True, color=QUIET)
    bar(axes, left - STEP, 4.2, 5 * STEP + WIDTH, "drafter: one forward pass", KEPT_EDGE)
    drafts = ["she", "freezes", "4", "loaves", "."]
    for i, word in enumerate(drafts):
        arrow(axes, left + i * STEP + WIDTH / 2, 4.17, 3.87)
        box(axes, left + i * STEP, 3.22, word, KEPT if i < 3 else GONE, KEPT_EDGE if i < 3 else GONE_EDGE)

    axes.text(0.2, 2.68, "2  verify", fontsize=11.5, weight="bold", color=INK, va="center")
    axes.text(0.2, 2.32, "the target reads the whole\nblock in one forward pass", fontsize=10, color=QUIET, va="top")
    bar(axes, left - STEP, 2.47, 5 * STEP + WIDTH, "target: one forward pass", OWN_EDGE)

    axes.text(0.2, 1.3, "3  accept", fontsize=11.5, weight="bold", color=INK, va="center")
    axes.text(0.2, 0.94, "what the target would have\nwritten itself stays", fontsize=10, color=QUIET, va="top")
    for i, word in enumerate(words[:4]):
        arrow(axes, left + i * STEP + WIDTH / 2, 2.44, 1.72)
        face, edge = (KEPT, KEPT_EDGE) if i < 3 else (OWN, OWN_EDGE)
        box(axes, left + i * STEP, 1.05, word, face, edge)
    axes.text(
        left + 1 * STEP + WIDTH / 2,
        0.68,
        "drafted and accepted",
        fontsize=10,
        color=KEPT_EDGE,
        ha="center",
        va="center",
    )
    axes.text(left + 3 * STEP + WIDTH / 2, 0.68, "the target's own", fontsize=10, color=QUIET, ha="center", va="center")
    axes.text(
        left + 5 * STEP + 0.2,
        1.36,
        "4 tokens,\n1 forward pass",
        fontsize=11.5,
        weight="bold",
        color=KEPT_EDGE,
        va="center",
    )
    axes.text(left + 5 * STEP + 0.2, 3.53, "the 4th is not what the\ntarget would write: it goes,\nwith all behind it", fontsize=10, color=GONE_EDGE, va="center")  # fmt: skip
    save(figure, path)


def draw_tree(path: Path):
    """Draw a round with a chain above, and with a tree below, behind the same anchor."""
    figure, axes = canvas(6.1, 7.7)
    left, step = 3.4, 1.65

    def node(column, y, word, kept, parent=None):
        """Draw a token, and the line to the one that it follows, at (column, y)."""
        x = left + column * step
        if parent is not None:
            ends = [x - step * 1 + WIDTH + 0.02, x - 0.04], [parent + HEIGHT / 2, y + HEIGHT / 2]
            axes.plot(*ends, color=KEPT_EDGE if kept else QUIET, linewidth=2.2 if kept else 1.1, zorder=0)
        face, edge = (KEPT, KEPT_EDGE) if kept else (GONE, GONE_EDGE)
        box(axes, x, y, word, *((OWN, OWN_EDGE) if parent is None else (face, edge)))

    heading(axes, 7.4, "Chain", "one candidate a position:\nit ends at the first\nwrong one")
    chain = [("So", True), ("she", True), ("freezes", True), ("loaves", False), ("of", False)]
    for column, (word, kept) in enumerate(chain):
        node(column, 6.4, word, kept, None if column == 0 else 6.4)
    axes.text(left + 4 * step + WIDTH + 0.3, 6.71, "3 tokens", fontsize=11.5, color=INK, va="center")
    axes.plot([0.2, 12.2], [5.35, 5.35], color=OWN, linewidth=1.2)

    heading(
        axes,
        5.0,
        "Tree",
        "several candidates a\nposition, all verified in\none forward pass: each\nsees its own path only",
    )
    middle = 3.2
    node(0, middle, "So", True)
    node(1, middle + 0.5, "she", True, middle)
    node(1, middle - 0.9, "Janet", False, middle)
    node(2, middle + 1.0, "bakes", False, middle + 0.5)
    node(2, middle, "freezes", True, middle + 0.5)
    node(2, middle - 0.9, "eats", False, middle - 0.9)
    node(3, middle + 0.5, "loaves", False, middle)
    node(3, middle - 0.5, "4", True, middle)
    node(4, middle + 0.5, "of", False, middle + 0.5)
    node(4, middle - 0.5, "rolls", True, middle - 0.5)
    axes.text(
        left + 4 * step + WIDTH + 0.3,
        middle - 0.19,
        "5 tokens",
        fontsize=11.5,
        weight="bold",
        color=KEPT_EDGE,
        va="center",
    )
    y = 1.05
    axes.text(left, y, "drafted and accepted", fontsize=10, color=KEPT_EDGE, va="center")
    axes.text(left + 2.6, y, "drafted and rejected", fontsize=10, color=GONE_EDGE, va="center")
    axes.text(left, y - 0.45, "To both the target adds its own next token.", fontsize=10, color=QUIET, va="center")
    save(figure, path)


def save(figure, path: Path):
    """Write a figure on the opaque ground."""
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    figure.savefig(path, dpi=120, facecolor=PAPER)
    plt.close(figure)


def run():
    """Draw the pictures into docs/."""
    docs = Path(__file__).parents[1] / "docs"
    draw(docs / "method.png")
    draw_tree(docs / "tree.png")


if __name__ == "__main__":
    typer.run(run)
