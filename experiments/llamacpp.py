"""`make engines`: what export writes, served by llama.cpp, beside transformers, prompt by prompt.

    python -m dflash_hub.experiments.llamacpp --output build/engines

For each pair of a drafter and a target:
- `export --to gguf` states and holds what llama.cpp's own converter makes of `export --to zlab`, in every type of weights;
- its server writes the greedy text of transformers; where it does not, the two best tokens are nearly tied there;
- its acceptance length is ours within 3%, over the prompts with the same text.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..benchmark.bench import Bench, read_records, run_bench
from ..benchmark.report import round_totals, tau_of, write_report
from ..common.console import run_plainly
from ..common.prompts import DEMO_PROMPTS, load_prompts
from ..common.server import Server
from ..common.smollm2 import smollm2
from ..common.tables import table
from ..convert.exporting import export_drafter
from ..convert.gguf_files import FILE_TYPES
from ..modeling_dflash import DFlashDraftModel
from .llamacpp_server import converted, llamacpp, serving

HERE = Path(__file__).parent.parent
CONVERTER_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}
# What the converter takes from the names of folders, and one setting of the tokenizer that it states for some models only.
DESCRIBING = ("general.name", "general.basename", "general.size_label", "general.version", "general.finetune")
SOMETIMES = ("tokenizer.ggml.add_bos_token",)
NEAR = 0.03  # of acceptance length
# Gap of the two best logits at which another text is taken for a tie: rounding in float32, and of activations to 8 bits beside
# weights that are quantized.
TIE, TIE_QUANTIZED = 0.02, 0.5


@dataclasses.dataclass(frozen=True)
class Pair:
    """A drafter, its target as transformers loads it, and the target's GGUF file if it is not to be converted in float32."""

    name: str
    drafter: str
    target: str
    file: str | None = None


def differences(ours: Path, theirs: Path) -> list[str]:
    """What two GGUF files state or hold differently, a sentence each."""
    import gguf
    import numpy as np

    mine, other = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    stated = [
        {
            name: field.contents()
            for name, field in reader.fields.items()
            if "." in name and not name.startswith("GGUF.")
        }
        for reader in (mine, other)
    ]
    for said in stated:
        for name in DESCRIBING:
            said.pop(name, None)
    names = set(stated[0]) | set(stated[1])
    names -= {name for name in SOMETIMES if name not in stated[1]} | {
        name for name in SOMETIMES if name not in stated[0]
    }
    found = [
        f"{name}: {str(stated[0].get(name))[:60]} here, {str(stated[1].get(name))[:60]} there"
        for name in sorted(names)
        if stated[0].get(name) != stated[1].get(name)
    ]
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in (mine, other)]
    found += [f"only one file holds {name}" for name in sorted(set(tensors[0]) ^ set(tensors[1]))]
    for name in sorted(set(tensors[0]) & set(tensors[1])):
        here, there = tensors[0][name], tensors[1][name]
        if here.tensor_type != there.tensor_type or list(here.shape) != list(there.shape):
            found.append(f"{name} is {here.tensor_type.name} {list(here.shape)} here, {there.tensor_type.name} there")
        elif not np.array_equal(here.data, there.data):
            found.append(f"{name} holds other values")
    return found


def check_files(pair: Pair, source: Path, folder: Path) -> list[str]:
    """Write the drafter in every type of weights, and compare each file with the converter's."""
    export_drafter(pair.drafter, folder / "zlab", "zlab", force=True)
    faults = []
    for ours, theirs in CONVERTER_TYPES.items():
        assert ours in FILE_TYPES
        file = folder / f"drafter-{ours}.gguf"
        export_drafter(pair.drafter, file, "gguf", force=True, target=pair.target, file_type=ours)
        (folder / f"converter-{ours}.gguf").unlink(missing_ok=True)
        other = converted(source, folder / "zlab", folder / f"converter-{ours}.gguf", theirs, pair.target)
        faults += [f"{pair.name}, {ours}: {sentence}" for sentence in differences(file, other)]
        other.unlink()
    return faults


def measure(pair: Pair, source: Path, server: Path, folder: Path, sets: list, max_new_tokens: int, command: str):
    """Run the baseline, ours with a full block, and the server without and with the drafter, on the same prompts."""
    target = pair.file or converted(source, pair.target, folder / "target.gguf", "f32")
    drafts = DFlashDraftModel.from_pretrained(pair.drafter).config.block_size - 1
    cache = ["-ctk", "f32", "-ctv", "f32"] if pair.file is None else []
    common = ["-m", target, "-c", 4096, "-t", torch.get_num_threads(), *cache]
    drafting = ["-md", folder / "drafter-float32.gguf", "--spec-type", "draft-dflash", "--spec-draft-n-max", drafts]
    with (
        serving(server, common, folder / "plain.log") as plain,
        serving(server, [*common, *drafting], folder / "drafting.log") as drafted,
    ):
        servers = [Server(plain, None), Server(drafted, None)]
        bench = Bench(pair.target, pair.drafter, None, "float32", max_new_tokens, 0.0, None, None, servers)
        run_bench(folder / "bench", bench, ["baseline", f"ours-{drafts}", "served", "served-2"], sets, None, 0, command)
    return f"ours-{drafts}"


def judge(pair: Pair, records: list[dict], ours: str) -> tuple[list[list], list[str]]:
    """(rows of a table, faults): texts and acceptance length of the server beside ours, prompt by prompt."""
    by = {(r["method"], r["set"], r["id"], r["turn"]): r for r in records}
    rows, faults, same = [], [], []
    tie = TIE if pair.file is None else TIE_QUANTIZED
    for (method, *place), record in sorted(by.items()):
        if method != "served-2":
            continue
        mine = by[ours, *place]
        gap = record.get("tie_gap")
        if record["same_text"]:
            same.append((mine, record))
        elif gap > tie:
            faults.append(
                f"{pair.name}, {' '.join(map(str, place))}: another text, where the two best logits are {gap:.3f} apart"
            )
        lengths = [tokens / rounds if rounds else float("nan") for tokens, rounds in map(round_totals, (mine, record))]
        text = "same" if record["same_text"] else f"another, gap {gap:.4f}"
        rows.append([pair.name, *place[:2], text, f"{lengths[0]:.2f}", f"{lengths[1]:.2f}"])
    if not same:
        return rows, [*faults, f"{pair.name}: no text is the same"]
    here, there = tau_of([mine for mine, _ in same]), tau_of([theirs for _, theirs in same])
    rows.append([pair.name, "all", f"{len(same)} texts", "same", f"{here:.2f}", f"{there:.2f}"])
    if abs(there / here - 1) > NEAR:
        faults.append(f"{pair.name}: acceptance length {there:.2f} there, {here:.2f} here")
    return rows, faults


def main(
    output: Annotated[Path, typer.Option(help="Folder of files, logs and records; a run is resumed.")] = Path(
        "build/engines"
    ),
    prompts: Annotated[list[str] | None, typer.Option(help="A set by name or a JSONL file; repeatable.")] = None,
    count: Annotated[int, typer.Option(help="Prompts a set.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write per prompt.")] = 96,
    pair: Annotated[
        list[str] | None,
        typer.Option(help="A further row, NAME,DRAFTER,TARGET or NAME,DRAFTER,TARGET,TARGET.gguf; repeatable."),
    ] = None,
    shipped: Annotated[bool, typer.Option(help="The shipped drafter.")] = True,
):
    """Serve exported drafters with llama.cpp, and compare text and acceptance length with ours."""
    source, server = llamacpp()
    pairs = [Pair("shipped", str(HERE), smollm2()[0])] if shipped else []
    pairs += [Pair(*text.split(",")) for text in pair or []]
    sets = [load_prompts(name, count, None) for name in prompts or [str(DEMO_PROMPTS)]]
    rows, faults = [], []
    for each in pairs:
        folder = output / each.name
        folder.mkdir(parents=True, exist_ok=True)
        faults += check_files(each, source, folder)
        ours = measure(each, source, server, folder, sets, max_new_tokens, " ".join(sys.argv))
        found, wrong = judge(each, read_records(folder / "bench"), ours)
        rows, faults = rows + found, faults + wrong
        typer.echo(write_report(folder / "bench"))
    typer.echo(table(["pair", "set", "prompt", "text", "acceptance length, ours", "llama.cpp"], rows))
    for fault in faults:
        typer.echo(f"FAULT: {fault}")
    if faults:
        raise typer.Exit(1)
    typer.echo(f"{len(pairs)} pair(s): files equal, texts the same or tied, acceptance length within {NEAR:.0%}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_plainly(app)
