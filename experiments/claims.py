"""Which of the paper's claims show on one CPU: each variant of the drafter trained for equal time, over several seeds.

    OMP_NUM_THREADS=1 python -m dflash_hub.experiments.claims --responses responses --output claims --hours 8

Variants are those of `ablations`, in the order of `CLAIMS`, and run by it, so a finished one is not run again. When time is over, the
table names what is left, and the same command goes on.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer

from ..common.console import run_plainly, typed_command
from ..common.provenance import origin
from ..hub_files import write_text
from . import ablations

# The claim, and the variant that leaves out what it is about. The first four are trained twice as long.
CLAIMS = (
    ("DFlash", "base"),
    ("target hidden states matter", "no features"),
    ("keys and values in every layer beat the input", "input fusion"),
    ("a block in one pass beats one token a pass", "DFlash-AR"),
    ("random anchors beat fixed ones", "fixed blocks"),
    ("depth", "one layer"),
    ("depth", "five layers"),
    ("block size", "block 16, served at 8"),
    ("number of target layers", "one tap"),
)
LONGER = 4


def table(results: dict[str, list[dict]]) -> str:
    """One line a variant: mean acceptance length over seeds with its spread, and the difference from the base.

    Args:
        results: by variant, one a seed.
    """
    lines = ["| claim | variant | seeds | tau | less the base | passes a round |", "|---|---|---|---|---|---|"]
    base = {result["seed"]: result["tau"] for result in results.get("base", [])}
    for claim, name in CLAIMS:
        found = results.get(name, [])
        if not found:
            lines.append(f"| {claim} | {name} | not run | - | - | - |")
            continue
        taus = [result["tau"] for result in found]
        paired = [result["tau"] - base[result["seed"]] for result in found if result["seed"] in base]
        less = f"{statistics.mean(paired):+.2f} ({min(paired):+.2f} to {max(paired):+.2f})" if paired else "-"
        spread = f"{statistics.mean(taus):.2f} ({min(taus):.2f} to {max(taus):.2f})"
        lines.append(
            f"| {claim} | {name} | {len(found)} | {spread} | {less if name != 'base' else '-'} | {found[0]['drafter_passes_a_round']} |"
        )
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, list[dict]]:
    """Return what `ablations` kept in a folder: by variant, one result a seed."""
    found: dict[str, list[dict]] = {}
    for result in json.loads(path.read_text()) if path.exists() else []:
        name, _, seed = result["variant"].partition(", seed ")
        found.setdefault(name, []).append(result | {"seed": int(seed or 0)})
    return found


def main(
    responses: Annotated[list[str], typer.Option(help="Responses: file or folder; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder of the results; finished variants are not run again.")],
    prompts: Annotated[list[str] | None, typer.Option(help="Prompts of responses that do not repeat them.")] = None,
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    rows: Annotated[int, typer.Option(help="Responses to train on.")] = 800,
    validation: Annotated[int, typer.Option(help="Responses to measure on.")] = 40,
    minutes: Annotated[
        float, typer.Option(help="Processor time of a variant's training; the first four have twice as much.")
    ] = 20,
    seeds: Annotated[int, typer.Option(help="Fresh weights, anchors and orders of each variant.")] = 2,
    hours: Annotated[float, typer.Option(help="No variant is begun after this.")] = 24,
    layers: Annotated[int, typer.Option(help="Of the base.")] = 3,
):
    """Train and measure the variants behind the paper's claims, in order, while time lasts."""
    until, left = time.monotonic() + 3600 * hours, []
    for seed in range(seeds):
        for number, (_, name) in enumerate(CLAIMS):
            done = {result["seed"] for result in read(output / "results.json").get(name, [])}
            if seed in done:
                continue
            if time.monotonic() >= until:
                left.append(f"{name}, seed {seed}")
                continue
            seconds = 60 * minutes * (2 if number < LONGER else 1)
            ablations.main(
                responses, output, prompts, target, rows=rows, validation=validation, seconds=seconds, layers=layers, variant=[name],
                seed=seed,
            )  # fmt: skip
    text = table(read(output / "results.json"))
    text += f"\nLeft out for lack of time: {'; '.join(left) or 'nothing'}.\n\n"
    write_text(output / "claims.md", text + origin(typed_command("python -m dflash_hub.experiments.claims")) + "\n")
    print(text)


if __name__ == "__main__":
    run_plainly(typer.run, main)
