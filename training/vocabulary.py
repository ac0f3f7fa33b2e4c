"""The list of tokens that a drafter drafts from: the most frequent ones of responses that its target wrote."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.files import new_folder, read_json
from ..convert.card import RECORD, write_card
from ..convert.checkpoint import InMemory
from ..convert.importing import write_drafter
from ..convert.reading import OURS, nonfinite_weights, read_drafter
from ..drafter_vocabulary import check_token_ids, offsets_of
from ..hub_files import CARD_MARK, nonfinite_sentence, write_text
from .features import checksum
from .responses import iterate_responses, responses_at


@dataclass
class Vocabulary:
    """A list of tokens, and how much of the responses that it was made from is in it.

    Args:
        token_ids: (L,) ascending.
        distinct: tokens that the responses have in all.
        coverage: share of the responses' tokens that are listed.
    """

    token_ids: torch.LongTensor
    distinct: int
    coverage: float

    def __str__(self) -> str:
        return (
            f"{len(self.token_ids)} of the {self.distinct} tokens that the responses have, with which {self.coverage:.1%} of their "
            "text is written"
        )


def frequent_tokens(responses: Iterable[list[int]], size: int) -> Vocabulary:
    """List the `size` most frequent tokens of responses, or all that they have; of equally frequent ones the lower ids."""
    counts = Counter()
    for response in responses:
        counts.update(response)
    chosen = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    covered = sum(counts[token] for token in chosen) / max(counts.total(), 1)
    return Vocabulary(torch.tensor(sorted(chosen), dtype=torch.long), len(counts), covered)


def write_with_vocabulary(
    source: str, destination: str | Path, responses: list[str], size: int, force: bool = False
) -> Vocabulary:
    """Write a drafter once more, as it is but for the list of tokens that it drafts from.

    Args:
        source: a drafter of ours, folder or repository; a list that it has is replaced.
        destination: see `new_folder`.
        responses: files of responses, or folders of `dflash-hub regenerate`; prompts are not looked at.

    Raises:
        ValueError, OSError: the drafter is of another layout or damaged, or the responses are not those of its target; says
            what was found.
    """
    drafter = read_drafter(source)
    if drafter.layout != OURS:
        raise ValueError(f"{source} is in another format ({drafter.layout}); `dflash-hub import` it first.")
    if found := nonfinite_weights(drafter):
        raise ValueError(nonfinite_sentence(found, source))
    paths = [*map(responses_at, responses)]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"no responses at {path}; make them with `dflash-hub regenerate`.")
    rows = (row["response_ids"] for path in paths for row in iterate_responses(path, with_prompts=False))
    vocabulary = frequent_tokens(rows, size)
    config, tensors, folder = drafter.config, drafter.match.drafter, drafter.checkpoint.folder
    check_token_ids(vocabulary.token_ids, config.vocab_size)
    config.draft_vocab_size = len(vocabulary.token_ids)
    tensors = tensors | {"d2t": InMemory(None, "d2t", offsets_of(vocabulary.token_ids))}
    with new_folder(destination, force) as written:
        write_drafter(written, config, tensors)
        if (folder / "README.md").is_file():
            shutil.copyfile(folder / "README.md", written / "README.md")
        if (folder / RECORD).is_file():
            record = read_json(folder / RECORD)
            record["draft_vocabulary"] = {
                "responses": [path.name for path in paths],
                "coverage": round(vocabulary.coverage, 4),
            }
            weights = written / "model.safetensors"
            if weights.is_file() and "weights_sha256" in (record.get("result") or {}):
                record["result"]["weights_sha256"] = checksum(weights)
            write_text(written / RECORD, json.dumps(record, indent=1) + "\n")
        if CARD_MARK in (written / "README.md").read_text(encoding="utf-8"):
            write_card(written)
    return vocabulary
