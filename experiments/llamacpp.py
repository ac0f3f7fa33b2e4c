"""`make engines`: what export writes, served by llama.cpp, beside transformers, prompt by prompt.

    python -m dflash_hub.experiments.llamacpp --output build/engines

Three drafters for SmolLM2-135M-Instruct in float32: the shipped one with its list of tokens; without it; with DFlash 2's parts, which say
something. Of each:
- `export --to gguf` states and holds what llama.cpp's own converter makes of the same drafter;
- the server writes the greedy text of transformers; another is excused where plain's two best scores are tied;
- its acceptance length is ours within 3%, on each prompt with the same text.

A fourth row is that target in 4 bits, as users of llama.cpp have it, with the shipped drafter: with it and without, the server must write
the same text. `--quantized FILE,FOLDER` adds another such target, with a fresh drafter. That is right by chance alone, so that nearly all that
is verified is taken back.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from ..benchmark.baselines.served import Served, round_totals
from ..benchmark.bench import Bench, measure
from ..benchmark.methods import Generate, Ours, TimedProposer
from ..benchmark.report import TIE, acceptance_length_of
from ..common.chat import first_turn
from ..common.console import run_plainly
from ..common.loading import load_tokenizer
from ..common.prompts import DEMO_PROMPTS, load_prompts
from ..common.server import Server
from ..common.smollm2 import gguf_file, smollm2
from ..common.tables import table
from ..common.target_source import TargetSource
from ..convert.exporting import export_drafter
from ..convert.gguf_files import unserved_target
from ..convert.init import init_drafter
from ..convert.upgrading import upgrade_drafter
from ..modeling_dflash import DFlashDraftModel
from .llamacpp_files import CONVERTER_TYPES, check_files
from .llamacpp_server import converted, llamacpp, serving

HERE = Path(__file__).parent.parent
NEAR = 0.03  # of acceptance length
COLUMNS = ["pair", "prompt", "text", "acceptance length, ours", "llama.cpp"]
# What is written in every type of weights for the first pair is written in these for the others.
FEW_TYPES = ("float32", "q8_0")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A drafter, and its target as transformers loads it."""

    name: str
    drafter: str
    target: str


@dataclasses.dataclass(frozen=True)
class QuantizedPair:
    """A target's own GGUF file, a folder with the same model, and a drafter; None for a fresh one."""

    name: str
    file: Path
    target: str
    drafter: str | None = None


class ListedOnly(TimedProposer):
    """Drafts from the listed tokens alone: other readers of a list do not add those of the text at hand."""

    def see(self, *added):
        pass


class AsEngines(Ours):
    """Our loop, with candidates as other readers of a drafter have them."""

    def _proposer(self, target, inputs, seed, baseline_ids, clock):
        return ListedOnly(self.drafter, target, clock)


def say(sentence: str):
    typer.echo(sentence, err=True)


def drafters_of_smollm2(folder: Path) -> list[Pair]:
    """Make the drafters from the shipped one."""
    target = smollm2()[0]
    whole = DFlashDraftModel.from_pretrained(HERE, dtype="auto")
    whole.set_draft_vocabulary(None)
    whole.save_pretrained(folder / "whole" / "drafter")
    upgrade_drafter(HERE, folder / "dflash-2" / "fresh", force=True)
    speaking(folder / "dflash-2" / "fresh", folder / "dflash-2" / "drafter")
    made = [Pair(name, str(folder / name / "drafter"), target) for name in ("whole", "dflash-2")]
    return [Pair("shipped", str(HERE), target), *made]


def speaking(fresh: Path, folder: Path):
    """Write an upgraded drafter whose parts change its drafts: what a fresh part computes wrongly would not show."""
    drafter = DFlashDraftModel.from_pretrained(fresh, dtype="auto")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in drafter.named_parameters():
            if "base_kernel" in name or "kernel_projection" in name:
                tensor.add_(0.02 * torch.randn_like(tensor))
            elif "successor_codebook" in name:
                tensor.normal_(std=2.0)
    drafter.save_pretrained(folder)


def compare(
    pair: Pair, target_file: Path, server: Path, folder: Path, prompts: list, max_new_tokens: int
) -> list[dict]:
    """Run the baseline, ours with a full block, and the server without and with the drafter, on the same prompts."""
    drafts = DFlashDraftModel.from_pretrained(pair.drafter).config.block_size - 1
    common = ["-m", target_file, "-c", 4096, "-t", torch.get_num_threads(), "-ctk", "f32", "-ctv", "f32"]
    records = []
    with (
        serving(server, common, folder / "plain.log") as plain,
        serving(server, common + drafting(folder / "drafter-float32.gguf", drafts), folder / "drafted.log") as drafted,
    ):
        bench = Bench(pair.target, pair.drafter, None, "float32", max_new_tokens, 0.0, None)
        runners = {
            "baseline": Generate("baseline", bench),
            "ours": AsEngines("ours", bench, num_assistant_tokens=drafts),
            "plain": Served("plain", bench, Server(plain, None)),
            "drafted": Served("drafted", bench, Server(drafted, None)),
        }
        for name, rows in prompts:
            for row in rows:
                say(f"{pair.name}: {row['id']}")
                records += measure(bench, runners, name, row, 0)
    return records


def drafting(file: Path, drafts: int) -> list:
    return ["-md", file, "--spec-type", "draft-dflash", "--spec-draft-n-max", drafts]


def judge(pair: str, records: list[dict]) -> tuple[list[list], list[str]]:
    """(rows of a table, faults): the server's text and acceptance length beside ours, prompt by prompt."""
    by = {(r["set"], r["id"], r["turn"], r["method"]): r for r in records}
    rows, faults, same = [], [], []
    for *place, method in by:
        if method != "drafted":
            continue
        ours, plain, drafted = (by[*place, name] for name in ("ours", "plain", "drafted"))
        prompt, gap = " ".join(map(str, place)), drafted.get("tie_gap")
        here, there = acceptance_length_of([ours]), acceptance_length_of([drafted])
        if drafted["same_text"]:
            same.append((ours, drafted))
            if not abs(there / here - 1) <= NEAR:
                faults.append(f"{pair}, {prompt}: acceptance length {there:.2f} there, {here:.2f} here")
        elif gap > TIE:
            also = "with its drafter and without" if plain["new_ids"] == drafted["new_ids"] else "with its drafter"
            faults.append(f"{pair}, {prompt}: another text {also}, where plain's two best scores are {gap:.1e} apart")
        rows.append([pair, prompt, named(gap), f"{here:.2f}", f"{there:.2f}"])
    if not same:
        return rows, [*faults, f"{pair}: no text is the same"]
    here, there = (acceptance_length_of([*records]) for records in zip(*same))
    return [*rows, [pair, f"all {len(same)} with the same text", "", f"{here:.2f}", f"{there:.2f}"]], faults


def named(gap: float | None) -> str:
    """What a text is beside plain's, by the gap of plain's two best scores where they part; None where they do not."""
    return "the same" if gap is None else f"{'a tie' if gap <= TIE else 'another'}, {gap:.1e}"


def compare_quantized(pair: QuantizedPair, server: Path, folder: Path, prompts: list, max_new_tokens: int):
    """Serve a target's own file without a drafter and with one: (rows of a table, faults)."""
    if sentences := unserved_target(TargetSource(str(pair.file))):
        return [[pair.name, "", f"not served: {sentences[0]}", "", ""]], []
    say(f"{pair.name}: files")
    drafter = pair.drafter
    if drafter is None:
        drafter = str(folder / "drafter")
        init_drafter(pair.target, drafter, layers=2, block_size=8, force=True)
    drafts = DFlashDraftModel.from_pretrained(drafter, dtype="auto").config.block_size - 1
    exported, tokenizer = folder / "drafter.gguf", load_tokenizer(pair.target)
    export_drafter(drafter, exported, "gguf", force=True, target=str(pair.file))
    # Repacked weights are multiplied with AMX where the processor announces it, which some virtual machines do and cannot.
    common, answers = ["-m", pair.file, "-c", 4096, "-t", torch.get_num_threads(), "--no-repack"], []
    with (
        serving(server, common, folder / "plain.log") as plain,
        serving(server, common + drafting(exported, drafts), folder / "drafted.log") as drafted,
    ):
        alone, beside = Server(plain, None), Server(drafted, None)
        for row in itertools.chain(*(rows for _, rows in prompts)):
            say(f"{pair.name}: {row['id']}")
            ids = tokenizer.apply_chat_template(first_turn(row), add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
            one, two = (each.continue_ids(ids, max_new_tokens) for each in (alone, beside))
            gap = None if one.ids == two.ids else served_gap(alone, ids, one.ids, two.ids)
            answers.append((row["id"], gap, round_totals(two, {}, {})))
    return judge_quantized(pair.name, answers)


def judge_quantized(
    pair: str, answers: list[tuple[str, float | None, list[int] | None]]
) -> tuple[list[list], list[str]]:
    """(rows of a table, faults) of prompts: the gap where texts part, and what the rounds added."""
    rows, faults = [], []
    for prompt, gap, totals in answers:
        if gap is not None and gap > TIE:
            faults.append(
                f"{pair}, {prompt}: another text than without the drafter, where its two best scores are {gap:.1e} apart"
            )
        if totals is None:
            faults.append(f"{pair}, {prompt}: nothing was drafted")
        tau = "" if totals is None else f"{totals[0] / totals[1]:.2f}"
        rows.append([pair, prompt, f"{named(gap)} (llama.cpp alone)", "", tau])
    return rows, faults


def served_gap(server: Server, prompt: list[int], text: list[int], other: list[int]) -> float:
    """How far apart the server's two best log probabilities are where another text parts from its own."""
    at = next((i for i, pair in enumerate(zip(text, other)) if pair[0] != pair[1]), min(len(text), len(other)))
    body = {"prompt": prompt + text[:at], "temperature": 0.0, "n_predict": 1, "n_probs": 2, "cache_prompt": False}
    best = server.request("/completion", body)["completion_probabilities"][0]["top_logprobs"]
    return best[0]["logprob"] - best[1]["logprob"]


def named_parts(text: str, names: str) -> list[str]:
    """The parts of an option that commas separate; as many as `names` has, or a ValueError says which are expected."""
    parts = text.split(",")
    if len(parts) != len(names.split(",")) or not all(parts):
        raise ValueError(f"{text!r} is not {names}.")
    return parts


def main(
    output: Annotated[Path, typer.Option(help="Folder of files and logs.")] = Path("build/engines"),
    prompts: Annotated[list[str] | None, typer.Option(help="A set by name or a JSONL file; repeatable.")] = None,
    count: Annotated[int, typer.Option(help="Prompts a set.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write per prompt.")] = 96,
    pair: Annotated[list[str] | None, typer.Option(help="A further drafter, NAME,DRAFTER,TARGET; repeatable.")] = None,
    quantized: Annotated[
        list[str] | None,
        typer.Option(help="A target's GGUF file and a folder with the same model, FILE,FOLDER; repeatable."),
    ] = None,
    shipped: Annotated[bool, typer.Option(help="The shipped drafter, and those made from it.")] = True,
):
    """Serve exported drafters with llama.cpp, and compare text and acceptance length with ours."""
    transformers.utils.logging.disable_progress_bar()
    source, server = llamacpp()
    pairs = drafters_of_smollm2(output) if shipped else []
    pairs += [Pair(*named_parts(text, "NAME,DRAFTER,TARGET")) for text in pair or []]
    files = [named_parts(text, "FILE,FOLDER") for text in quantized or []]
    quantized_pairs = [QuantizedPair("4-bit", gguf_file(), smollm2()[0], str(HERE))] if shipped else []
    quantized_pairs += [QuantizedPair(Path(file).stem, Path(file), target) for file, target in files]
    sets = [load_prompts(name, count, None) for name in prompts or [str(DEMO_PROMPTS)]]
    rows, faults = [], []
    for number, each in enumerate(pairs):
        folder = output / each.name
        folder.mkdir(parents=True, exist_ok=True)
        say(f"{each.name}: files")
        types = FEW_TYPES if number else tuple(CONVERTER_TYPES)
        faults += [f"{each.name}, {fault}" for fault in check_files(each.drafter, each.target, source, folder, types)]
        target_file = converted(source, each.target, output / f"{Path(each.target).name}.gguf", "f32")
        found, wrong = judge(each.name, compare(each, target_file, server, folder, sets, max_new_tokens))
        rows, faults = rows + found, faults + wrong
    for each in quantized_pairs:
        folder = output / each.name
        folder.mkdir(parents=True, exist_ok=True)
        found, wrong = compare_quantized(each, server, folder, sets, max_new_tokens)
        rows, faults = rows + found, faults + wrong
    typer.echo(table(COLUMNS, rows))
    for fault in faults:
        typer.echo(f"FAULT: {fault}")
    if faults:
        raise typer.Exit(1)
    typer.echo(
        f"{len(pairs) + len(quantized_pairs)} pair(s): files equal to the converter's, texts the same or tied, acceptance length within "
        f"{NEAR:.0%} on each prompt"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_plainly(app)
