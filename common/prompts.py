"""Prompt sets: the paper's by name, in z-lab's formats, or any local JSONL or data set of the Hub, see `prompt_rows`."""

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import json_lines
from .prompt_rows import COLUMNS, LeftOut, content_id, read_row, wrong

SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt", ".csv", ".parquet")  # of files, never of data sets
DEMO_PROMPTS = Path(__file__).with_name("demo_prompts.jsonl")
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PROGRAM = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct "
    "Python program that matches the specification and passes all tests. You will NOT return anything except for the "
    "program\n\n### Question:\n{question_content}"
)


@dataclass
class PromptSet:
    """A public data set: where it is, and how a row becomes prompts (one a turn) and an id."""

    load: tuple
    split: str
    turns: Callable[[dict], list[str]]
    row_id: Callable[[dict, int], str]


SETS = {
    "gsm8k": PromptSet(
        ("openai/gsm8k", "main"), "test", lambda r: [("{question}" + BOXED).format(**r)], lambda r, i: f"gsm8k-test-{i}"
    ),
    "math500": PromptSet(
        ("HuggingFaceH4/MATH-500",), "test", lambda r: [("{problem}" + BOXED).format(**r)], lambda r, i: r["unique_id"]
    ),
    "aime25": PromptSet(
        ("MathArena/aime_2025",), "train", lambda r: [("{problem}" + BOXED).format(**r)], lambda r, i: f"aime25-{i}"
    ),
    "humaneval": PromptSet(
        ("openai/openai_humaneval",),
        "test",
        lambda r: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{r['prompt']}\n```"
        ],
        lambda r, i: r["task_id"],
    ),
    "mbpp": PromptSet(
        ("google-research-datasets/mbpp", "sanitized"),
        "test",
        lambda r: [r["prompt"]],
        lambda r, i: f"mbpp-{r['task_id']}",
    ),
    "livecodebench": PromptSet(
        ("livecodebench/code_generation_lite",), "test", lambda r: [PROGRAM.format(**r)], lambda r, i: r["question_id"]
    ),
    "mt-bench": PromptSet(
        ("HuggingFaceH4/mt_bench_prompts",),
        "train",
        lambda r: list(r["prompt"]),
        lambda r, i: f"mt_bench-{r['prompt_id']}-{r['category']}",
    ),
    "alpaca": PromptSet(
        ("tatsu-lab/alpaca",),
        "train",
        lambda r: [r["instruction"] + (f"\n\nInput:\n{r['input']}" if r["input"] else "")],
        lambda r, i: f"alpaca-{i}",
    ),
}


def prompt_source(name: str) -> str:
    """`demo` is a file of ours; anything else stands for itself."""
    return str(DEMO_PROMPTS) if name == "demo" else name


def load_prompts(source: str, count: int, seed: int | None) -> tuple[str, list[dict]]:
    """(set name, rows {"id", "messages"}): `count` of them, chosen with `seed`, or the first ones where it is None.

    For measuring; `read_prompts` reads everything, for training.

    Raises:
        ValueError: neither a known set nor a file, or a row of another form; names it.
    """
    if count < 2:
        raise ValueError(f"one prompt proves nothing: ask for several a set, not {count}.")
    if Path(source).is_file():
        name, rows = Path(source).stem.removeprefix("eval_"), _taken(source, _of_file(Path(source)))
    elif source in SETS:
        name, rows = source, _public(SETS[source])
    else:
        refuse_missing_file(source)
        raise ValueError(f"{source!r} is no file and none of the prompt sets {', '.join(SETS)}.")
    if seed is not None:
        random.Random(seed).shuffle(rows)
    return name, rows[:count]


def read_prompts(
    source: str, column: str | None = None, keep_assistant: bool = False, left_out: list[dict] | None = None
) -> list[dict]:
    """All rows {"id", "messages", "tools" where there are some} of a JSONL file, a set of `SETS`, or a data set on the Hub.

    `NAME:SPLIT` takes another split than the set's own, or than `train`. Rows that cannot be answered are left out; how many,
    and why, is said on standard error.

    Args:
        column, keep_assistant: see `read_row`.
        left_out: takes {"id", "turn", "reason"} of the rows that are left out.

    Raises:
        ValueError: no such file or data set, or a row of another form; names it.
    """
    if Path(source).is_file():
        return _taken(source, _of_file(Path(source), column, keep_assistant), left_out)
    refuse_missing_file(source)
    name, _, split = source.partition(":")
    if name in SETS:
        return _public(SETS[name], split)
    rows = _load_dataset(name, split=split or "train")
    wanted = next((n for n in ([column] if column else COLUMNS) if n in rows.column_names), None)
    if wanted is None:
        raise ValueError(
            f"{source!r} has no column {column or 'messages'!r} but {rows.column_names}; name the prompt's with --column."
        )
    read = (
        _row(row, f"{source}:{wanted}:{i}", wanted, keep_assistant, f"{source!r}, row {i}")
        for i, row in enumerate(rows)
    )
    return _taken(source, read, left_out)


def refuse_missing_file(source: str):
    """Raise ValueError for what looks like a file and is none, before a data set of that name is looked for."""
    path = Path(source)
    if path.is_dir():
        raise ValueError(f"{source} is a folder; expected a file of prompts, a row of JSON a line.")
    if path.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~")) or source.partition(":")[0].count("/") > 1:
        raise ValueError(f"there is no file {source} (looked in {os.getcwd()}).")


def _of_file(path: Path, column: str | None = None, keep_assistant: bool = False) -> Iterator[dict]:
    """Rows of a JSONL file, each with an id: its own, or one of its content."""
    for number, line in enumerate(json_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            around = line[max(0, error.pos - 40) : error.pos + 40]
            raise ValueError(f"{place}: expected one JSON object, got {around!r} ({error.msg}).") from None
        if not isinstance(row, dict):
            hint = "; write each entry of the list on a line of its own" if isinstance(row, list) else ""
            raise ValueError(f"{place}: expected one JSON object, got {line[:80]!r}{hint}.")
        own = row.get("id")
        if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
            raise ValueError(f"{place}: {wrong('id', 'text or a whole number', own)}.")
        yield _row(row, None if own is None else str(own), column, keep_assistant, place)


def _row(row: dict, row_id: str | None, column: str | None, keep_assistant: bool, place: str) -> dict:
    """{"id", "messages"} of a row, or {"id", "reason"} where it is left out."""
    try:
        read = read_row(row, column, keep_assistant)
    except LeftOut as reason:
        return {"id": row_id or place, "reason": str(reason)}
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None
    return {"id": row_id or content_id(read)} | read


def _taken(source: str, rows: Iterator[dict], left_out: list[dict] | None = None) -> list[dict]:
    """The rows that can be answered; says how many cannot, and why."""
    taken, others, seen = [], [], set()
    for row in rows:
        if "reason" in row:
            others.append({"id": row["id"], "turn": 0, "reason": row["reason"]})
        elif row["id"] in seen and row["id"] == content_id(row):
            others.append({"id": row["id"], "turn": 0, "reason": "the same as a row before it"})
        else:
            seen.add(row["id"])
            taken.append(row)
    if others:
        reasons = Counter(row["reason"] for row in others)
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        print(f"{source}: {len(others)} of {len(others) + len(taken)} rows are left out: {listed}", file=sys.stderr)
    if left_out is not None:
        left_out += others
    return taken


def _load_dataset(*name: str, split: str):
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("public prompt sets need the package `datasets`: pip install datasets.") from None
    try:
        return load_dataset(*name, split=split)
    except Exception as error:  # of many classes, by where it looked
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name[0]!r} is no file, none of the prompt sets {', '.join(SETS)}, and no data set that can be loaded: {reason}"
        ) from error


def _public(prompt_set: PromptSet, split: str = "") -> list[dict]:
    """Its prompts; of another split than its own, ids say which."""
    rows = _load_dataset(*prompt_set.load, split=split or prompt_set.split)
    return [
        {
            "id": f"{prompt_set.row_id(row, i)}:{split}" if split else prompt_set.row_id(row, i),
            "messages": [{"role": "user", "content": turn} for turn in prompt_set.turns(row)],
        }
        for i, row in enumerate(rows)
    ]
