"""Features of the target, taken by the same functions that generation uses; made in the step, or once into a cache."""

import hashlib
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..common.files import read_json
from ..common.identity import same_target
from ..hub_files import write_text
from ..target_model import contiguous_head, hidden_states_request, target_hidden_states

SHARD_TOKENS = 100_000
SHARD_SECONDS = 300  # after as long what there is is written, so that an interruption costs no more


def feature_layers(config, target: PreTrainedModel, loss) -> list[int]:
    """The layers whose states training needs: the target layers, and the last one where the loss asks for the target's logits."""
    last = target.config.get_text_config(decoder=True).num_hidden_layers - 1
    return [*config.target_layer_ids, *([last] if loss.needs_teacher else [])]


@torch.no_grad()
def target_features(
    target: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, layer_ids: list[int]
) -> torch.Tensor:
    """(D, length, T * H) states of documents (D, length), padded on the right, after the layers `layer_ids`.

    The last layer's state is after the final norm: what the head reads.
    """
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if target._supports_logits_to_keep():
        inputs["logits_to_keep"] = 1
    with contiguous_head(target, states_only=True):
        outputs = target(**inputs, output_hidden_states=hidden_states_request(layer_ids), return_dict=True)
    return torch.cat(
        [s.to(input_ids.device) for s in target_hidden_states(outputs.hidden_states, target, layer_ids)], dim=-1
    )


@torch.no_grad()
def check_teacher(target: PreTrainedModel):
    """Refuse to rebuild the target's logits from its last hidden state where that does not give them.

    Raises:
        ValueError: the head alone does not make this target's logits (it scales or caps them, or norms elsewhere).
    """
    ids = torch.arange(3, 11, device=target.device)[None]
    last = target.config.get_text_config(decoder=True).num_hidden_layers - 1
    hidden = target_features(target, ids, torch.ones_like(ids), [last])
    rebuilt, logits = target.get_output_embeddings()(hidden[:, -1]).float(), target(ids).logits[:, -1].float()
    if not torch.allclose(rebuilt, logits, atol=1e-2 * float(logits.abs().max())):
        raise ValueError(
            f"the logits of {type(target).__name__} are not its head applied to its last hidden state, so losses on its "
            "distribution (kl, tv) are not supported for it; use ce or dpace."
        )


class FeatureCache:
    """Features on disk: shards of one tensor (length, T * H) a document, an index with checksums, and whose they are.

    A folder that was interrupted is continued; one made for another target, target layers or dtype is refused.

    Args:
        identity: of the target, see `identify`.
        layer_ids: the layers whose states are kept.
    """

    def __init__(self, folder: Path, identity: dict, layer_ids: list[int]):
        self.folder, self.index_path = folder, folder / "index.json"
        self.shards: dict[str, str] = {}  # shard's name: checksum
        self.where: dict[str, str] = {}  # document's key: shard's name
        self.described = {"identity": identity, "layer_ids": layer_ids}
        self._open: dict = {}  # shards that were read from, mapped into memory
        if self.index_path.exists():
            self._read(identity, layer_ids)

    def _read(self, identity: dict, layer_ids: list[int]):
        index = read_json(self.index_path, "identity", "layer_ids", "shards", "where")
        if not same_target(index["identity"], identity):
            raise ValueError(
                f"{self.folder} holds features of {index['identity']}, not of this target {identity}; pass another folder."
            )
        if index["layer_ids"] != layer_ids:
            raise ValueError(
                f"{self.folder} holds features of the layers {index['layer_ids']}, this drafter needs {layer_ids}; pass another folder."
            )
        self.shards, self.where = index["shards"], index["where"]
        for name in self.shards:
            if not (self.folder / name).is_file():
                raise ValueError(
                    f"{self.folder} lacks {name}, which its index lists; delete the folder and make it again."
                )

    def fill(self, rows: dict[str, dict], compute, batch_tokens: int = 16384, progress=None):
        """Compute what is missing of `rows`, by key. `compute(input_ids, attention_mask)` gives (D, length, T * H).

        Raises:
            ValueError: features that are not finite; names the example. What was written before stays.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        length = {key: len(row["prompt_ids"]) + len(row["response_ids"]) for key, row in rows.items()}
        missing = sorted((key for key in rows if key not in self.where), key=length.get)
        pending: dict[str, torch.Tensor] = {}
        written = time.monotonic()
        while missing:
            count = max(1, min(len(missing), batch_tokens // max(length[missing[-1]], 1)))
            batch, missing = missing[-count:], missing[:-count]  # the longest first: memory fails early or never
            ids, mask = pad_documents([rows[key]["prompt_ids"] + rows[key]["response_ids"] for key in batch])
            for key, states in zip(batch, compute(ids, mask)):
                pending[key] = states[: length[key]].cpu().contiguous().clone()
                if not pending[key].isfinite().all():
                    raise ValueError(not_finite([example_name(rows[key])], self.described["layer_ids"], states.dtype))
            late = time.monotonic() - written > SHARD_SECONDS
            if not missing or late or sum(map(len, pending.values())) >= SHARD_TOKENS:
                self._write(pending)
                pending, written = {}, time.monotonic()
            if progress:
                progress(count)

    def _write(self, pending: dict[str, torch.Tensor]):
        name = f"features-{len(self.shards):05d}.safetensors"
        beside = self.folder / f".{name}.part"
        save_file(pending, beside)
        shutil.move(beside, self.folder / name)
        self.shards[name] = checksum(self.folder / name)
        self.where |= {key: name for key in pending}
        write_text(self.index_path, json.dumps(self.described | {"shards": self.shards, "where": self.where}))

    def verify(self):
        """Read every shard once; ValueError names one that changed since it was written."""
        for name, expected in self.shards.items():
            if checksum(self.folder / name) != expected:
                raise ValueError(
                    f"{self.folder / name} is not what was written (checksum); delete the folder and make it again."
                )

    def __getitem__(self, key: str) -> torch.Tensor:
        name = self.where[key]
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, "pt")
        return self._open[name].get_tensor(key)


def example_name(row: dict) -> str:
    """Name an example in a message, by what tells it from the others in its file."""
    return f"{row['id']!r} (turn {row.get('turn', 0)})"


def not_finite(examples: list[str], layer_ids: list[int], dtype: torch.dtype) -> str:
    """Say which examples a target cannot be trained on, and what to do."""
    return (
        f"the target's hidden states at layers {layer_ids} are not finite (NaN or infinity) in "
        f"{str(dtype).removeprefix('torch.')}, on {'example' if len(examples) == 1 else 'examples'} {', '.join(examples)}. Pass "
        "another --dtype, or leave the example out of the answers."
    )


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pad_documents(documents: list[list[int]]) -> tuple[torch.LongTensor, torch.LongTensor]:
    """(ids, mask), each (D, longest), padded on the right."""
    width = max(len(ids) for ids in documents)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in documents])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in documents])
    return ids, mask
