"""Prompt sets: the paper's by name, in z-lab's formats, or any local JSONL with rows {"id", "messages"}."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .files import json_lines

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
        name, rows = Path(source).stem.removeprefix("eval_"), list(_read(Path(source)))
    elif source in SETS:
        name, rows = source, _public(SETS[source])
    else:
        raise ValueError(f"{source!r} is no file and none of the prompt sets {', '.join(SETS)}.")
    if seed is not None:
        random.Random(seed).shuffle(rows)
    return name, rows[:count]


def read_prompts(source: str, column: str | None = None) -> list[dict]:
    """All rows {"id", "messages"} of a local JSONL file, of a set of `SETS`, or of a data set on the Hub.

    `NAME:SPLIT` takes another split than the set's own, or than `train`.

    Args:
        column: of a Hub data set, the one with the prompt's text; by default `messages`, of which user turns are taken.

    Raises:
        ValueError: no such data set, or a row of another form; names it.
    """
    if Path(source).is_file():
        return list(_read(Path(source)))
    name, _, split = source.partition(":")
    if name in SETS:
        return _public(SETS[name], split)
    rows = _load_dataset(name, split=split or "train")
    wanted = column or "messages"
    if wanted not in rows.column_names:
        raise ValueError(
            f"{source!r} has no column {wanted!r} but {rows.column_names}; name the prompt's with --column."
        )
    prompts = []
    for i, row in enumerate(rows):
        value = row[wanted]
        users = [m["content"] for m in value or [] if m["role"] == "user"] if wanted == "messages" else [value]
        prompts.append(
            {"id": f"{source}:{wanted}:{i}", "messages": [{"role": "user", "content": content} for content in users]}
        )
        if not _is_prompt(prompts[-1]):
            raise ValueError(
                f"{source!r}, row {i}: expected the text of a user's turn in {wanted!r}, got {str(value)[:80]!r}."
            )
    return prompts


def _read(path: Path):
    for number, line in enumerate(json_lines(path), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not _is_prompt(row):
            raise ValueError(
                f'{path}, line {number}: expected {{"id": ..., "messages": [user turns, each with a text as content]}}, got '
                f"{line[:80]!r}."
            )
        yield row | {"id": str(row["id"])}


def _is_prompt(row) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str | int):
        return False
    messages = row.get("messages")
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(m, dict) and m.get("role") == "user" and isinstance(m.get("content"), str) for m in messages)
    )


def _load_dataset(*name: str, split: str):
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError("public prompt sets need the package `datasets`: pip install 'dflash-hub[bench]'.") from None
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
