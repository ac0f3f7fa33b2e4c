"""From responses to batches: the validation split, packing, padding."""

import hashlib
import random
from collections.abc import Iterable

import torch
from accelerate.utils import send_to_device
from torch.utils.data import Dataset

from .blocks import PADDING, Rows
from .examples import shortened
from .features import FeatureCache, example_name, pad_documents, target_features


def document_key(row: dict) -> str:
    """Of the text itself: two answers to one prompt, or one answer cut at two lengths, are different documents."""
    ids = torch.tensor(row["prompt_ids"] + row["response_ids"], dtype=torch.int64)
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:24]


def usable_rows(rows: Iterable[dict], max_length: int) -> tuple[list[dict], dict[str, int]]:
    """Rows that can hold a block, cut to `max_length` tokens; and how many were dropped, by reason.

    Raises:
        ValueError: nothing is left.
    """
    empty, short = "empty answer", "answer of one token"
    kept, dropped = [], {empty: 0, short: 0, f"prompt fills --max-length {max_length}": 0}
    for row in rows:
        prompt, answer = row["prompt_ids"], row["response_ids"]
        room = max_length - len(prompt)
        if len(answer) < 2:  # a block needs an anchor and a token after it
            dropped[short if answer else empty] += 1
        elif room < 2:
            dropped[f"prompt fills --max-length {max_length}"] += 1
        else:
            kept.append(shortened(row, room))
    if not kept:
        raise ValueError(f"no row of the answers can be trained on; dropped: {dropped}.")
    return kept, {reason: count for reason, count in dropped.items() if count}


def split_validation(rows: list[dict], count: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Split into (training, validation): all turns of a prompt are on one side. Validation prompts have a first turn."""
    ids = sorted({row["id"] for row in rows if row.get("turn", 0) == 0})
    if not ids:
        raise ValueError("no response is one to a first turn, so none can be used for validation; add those.")
    if count >= len(ids):
        raise ValueError(f"{count} validation prompts of {len(ids)} leave nothing to train on; lower --validation.")
    held = set(random.Random(seed).sample(ids, count))
    return [r for r in rows if r["id"] not in held], [r for r in rows if r["id"] in held]


class PackedRows(Dataset):
    """Items are lists of documents that share a row: one each, or as many as fit into `pack_length`."""

    def __init__(self, rows: list[dict], pack_length: int | None, seed: int):
        self.packs = [[row] for row in rows] if pack_length is None else pack(rows, pack_length, seed)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict:
        return {"documents": self.packs[index]}

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [sum(map(row_length, documents)) for documents in self.packs]


def row_length(row: dict) -> int:
    return len(row["prompt_ids"]) + len(row["response_ids"])


def pack(rows: list[dict], pack_length: int, seed: int) -> list[list[dict]]:
    """Documents together in rows of at most `pack_length` tokens, longest first, each where it fits best."""
    too_long = [row["id"] for row in rows if row_length(row) > pack_length]
    if too_long:
        raise ValueError(
            f"{len(too_long)} rows are longer than --pack-length {pack_length}, {too_long[0]!r} for one; lower --max-length."
        )
    packs: list[list[dict]] = []
    room: dict[int, list[int]] = {}  # tokens left: indices of packs
    for row in sorted(rows, key=row_length, reverse=True):
        length = row_length(row)
        fit = next((left for left in range(length, pack_length + 1) if room.get(left)), None)
        if fit is None:
            packs.append([])
            index, fit = len(packs) - 1, pack_length
        else:
            index = room[fit].pop()
        packs[index].append(row)
        room.setdefault(fit - length, []).append(index)
    random.Random(seed).shuffle(packs)
    return packs


class Collator:
    """Makes a batch of packed rows, padded on the right.

    A batch holds `Rows` as tensors, and the documents, the longest first, for the target: padded ids and mask of those of
    similar length, or cached features (tokens, T * H); `row_index` and `column_index` (tokens,) say where each document's
    tokens lie in the rows, `examples` its name, row and number of tokens.

    Args:
        cache: of the target's features; None to compute them in the step.
        width: rows are padded to this length, for kernels that compile for a shape; None for the longest row's.
    """

    def __init__(self, cache: FeatureCache | None = None, width: int | None = None):
        self.cache, self.width = cache, width

    def __call__(self, items: list[dict]) -> dict[str, torch.Tensor]:
        packs = [item["documents"] for item in items]
        width = self.width or max(sum(map(row_length, documents)) for documents in packs)
        shape = (len(packs), width)
        input_ids, position_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        document_ids, answer_mask = torch.full(shape, PADDING), torch.zeros(shape, dtype=torch.bool)
        placed_documents = []
        for r, documents in enumerate(packs):
            start = 0
            for d, row in enumerate(documents):
                text, prompt = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
                end = start + len(text)
                input_ids[r, start:end] = torch.tensor(text)
                position_ids[r, start:end] = torch.arange(len(text))
                document_ids[r, start:end] = d
                answer_mask[r, start + prompt : end] = True
                placed_documents.append((row, text, torch.full((len(text),), r), torch.arange(start, end)))
                start = end
        placed_documents.sort(key=lambda document: len(document[1]), reverse=True)
        documents, texts, row_index, column_index = zip(*placed_documents)
        batch = {
            "input_ids": input_ids, "position_ids": position_ids, "document_ids": document_ids, "answer_mask": answer_mask,
            "row_index": torch.cat(row_index), "column_index": torch.cat(column_index),
            "examples": [(example_name(d), int(r[0]), len(r)) for d, r in zip(documents, row_index)],
        }  # fmt: skip
        if self.cache is None:
            batch["documents"] = [pad_documents(similar) for similar in of_similar_length(texts)]
        else:
            batch["features"] = torch.cat([self.cache[document_key(row)] for row in documents])
        return batch


def of_similar_length(texts: Iterable[list[int]]) -> list[list[list[int]]]:
    """Texts, the longest first, in groups whose shortest has at least half the longest's tokens: packed rows hold all lengths."""
    groups = []
    for text in texts:
        if not groups or 2 * len(text) < len(groups[-1][0]):
            groups.append([])
        groups[-1].append(text)
    return groups


def rows_of(batch: dict) -> Rows:
    return Rows(batch["input_ids"], batch["document_ids"], batch["answer_mask"], batch["position_ids"])


def document_features(target, batch: dict, layer_ids: list[int]) -> torch.Tensor:
    """(tokens, T * H) features of a batch's documents, made now."""
    return torch.cat([target_features(target, ids, mask, layer_ids)[mask.bool()] for ids, mask in batch["documents"]])


def row_context(target, batch: dict, layer_ids: list[int]) -> torch.Tensor:
    """(B, S, T * H) features of a batch's rows, made now."""
    return placed(document_features(target, batch, layer_ids), batch)


def single_row(row: dict, device) -> dict[str, torch.Tensor]:
    """The batch of one answer."""
    return send_to_device(Collator()([{"documents": [row]}]), device)


def placed(features: torch.Tensor, batch: dict) -> torch.Tensor:
    """(B, S, F) from features of the documents' tokens (tokens, F), zero at padding."""
    rows = features.new_zeros(*batch["input_ids"].shape, features.shape[-1])
    rows[batch["row_index"], batch["column_index"]] = features
    return rows
