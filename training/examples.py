"""Examples whose token ids lie in a file: a run's memory does not grow with the tokens that it trains on."""

import tempfile
from collections.abc import Iterable, Mapping

import numpy as np


class Example(Mapping):
    """One example: a mapping like a row of `responses.jsonl`. Its token ids are read, as lists, when they are asked for.

    Args:
        fields: everything but the token ids.
        tokens: (tokens,) int32 of all examples, mapped into memory.
        start, prompt, answer: where its tokens begin, and how many of them are prompt and answer.
    """

    __slots__ = ("answer", "fields", "prompt", "start", "tokens")

    def __init__(self, fields: dict, tokens: np.ndarray, start: int, prompt: int, answer: int):
        self.fields, self.tokens, self.start, self.prompt, self.answer = fields, tokens, start, prompt, answer

    def __getitem__(self, name: str):
        first = self.start + self.prompt
        if name == "prompt_ids":
            return self.tokens[self.start : first].tolist()
        if name == "response_ids":
            return self.tokens[first : first + self.answer].tolist()
        return self.fields[name]

    def __iter__(self):
        return iter((*self.fields, "prompt_ids", "response_ids"))

    def __len__(self) -> int:
        return len(self.fields) + 2


def in_a_file(rows: Iterable[dict]) -> list[Example]:
    """Write the token ids of rows to a temporary file, 4 bytes a token, and map it into memory.

    The system keeps in memory what is in use and drops the rest. The file is in the folder for temporary files (TMPDIR),
    has no name, and ends with the last example.
    """
    file, start, places = tempfile.TemporaryFile(), 0, []
    for row in rows:
        ids = row["prompt_ids"] + row["response_ids"]
        file.write(np.asarray(ids, dtype=np.int32).tobytes())
        fields = {name: value for name, value in row.items() if name not in ("prompt_ids", "response_ids")}
        places.append((fields, start, len(row["prompt_ids"]), len(row["response_ids"])))
        start += len(ids)
    file.flush()
    if not places:
        return []
    tokens = np.asarray(np.memmap(file, dtype=np.int32, mode="r"))  # a plain array: a slice of it costs less
    return [Example(fields, tokens, *place) for fields, *place in places]


def shortened(row: Mapping, count: int) -> Mapping:
    """The row with at most the first `count` tokens of its answer."""
    if isinstance(row, Example):
        return Example(row.fields, row.tokens, row.start, row.prompt, min(count, row.answer))
    return row | {"response_ids": row["response_ids"][:count]}
