"""Checkpoints on disk: tensors that are read and written piece by piece, so that memory does not grow with a model."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import is_offline_mode, snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from ..common.files import in_a_line, read_json

# Bytes of a tensor that are in memory at a time.
PIECE = 32 * 2**20
# A config or an index beyond this is no config or index.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of a list of tokens, which is no weight.
INTEGERS = {"I64": torch.int64, "BOOL": torch.bool}
CODES = {dtype: code for code, dtype in (DTYPES | INTEGERS).items()}
# Where a stack puts weights and config inside of its output folder, beside the folder itself.
INNER_FOLDERS = ("", "model/consolidated", "model")
PICKLES = ("training_state.pt", "pytorch_model.bin")
# In a training state the drafter's tensors are one entry of several.
STATE_KEYS = ("draft_state_dict", "state_dict", "model")


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file, or some of its rows: read when asked for."""

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]
    first: int = 0

    @property
    def dtype(self) -> torch.dtype | None:
        return (DTYPES | INTEGERS).get(self.code)

    def rows(self, first: int, count: int) -> "Stored":
        return replace(self, first=self.first + first, shape=(count, *self.shape[1:]))

    def pieces(self) -> Iterator[torch.Tensor]:
        """The tensor from its first row to its last, in pieces of at most `PIECE` bytes or one row."""
        step = rows_of_a_piece(self)
        for start in range(self.first, self.first + self.shape[0], step):
            stop = min(start + step, self.first + self.shape[0])
            # Opened anew for each piece: what was read stays in memory as long as the file is open.
            with safe_open(self.file, "pt") as file:
                yield file.get_slice(self.name)[start:stop]

    def whole(self) -> torch.Tensor:
        return torch.cat(list(self.pieces()))


@dataclass(frozen=True)
class InMemory:
    """A tensor in memory: of a pickle, mapped by torch, or of a module, which has no file."""

    file: Path | None
    name: str
    tensor: torch.Tensor

    @property
    def code(self) -> str:
        return CODES.get(self.tensor.dtype, str(self.tensor.dtype))

    @property
    def dtype(self) -> torch.dtype | None:
        return (DTYPES | INTEGERS).get(self.code)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def rows(self, first: int, count: int) -> "InMemory":
        return replace(self, tensor=self.tensor[first : first + count])

    def pieces(self) -> Iterator[torch.Tensor]:
        yield from self.tensor.split(rows_of_a_piece(self))

    def whole(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True)
class SomeRows:
    """Rows of a tensor in a file, in its order."""

    tensor: Stored
    rows: torch.LongTensor

    @property
    def code(self) -> str:
        return self.tensor.code

    @property
    def dtype(self) -> torch.dtype | None:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.tensor.shape[1:])

    def pieces(self) -> Iterator[torch.Tensor]:
        start = 0
        for piece in self.tensor.pieces():
            inside = self.rows[(self.rows >= start) & (self.rows < start + len(piece))]
            if len(inside):
                yield piece[inside - start]
            start += len(piece)

    def whole(self) -> torch.Tensor:
        return torch.cat(list(self.pieces()))


@dataclass(frozen=True)
class SpreadRows:
    """Rows of a tensor at their places among more, the others zero."""

    tensor: Stored | InMemory
    places: torch.LongTensor
    count: int

    @property
    def file(self) -> Path | None:
        return self.tensor.file

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def code(self) -> str:
        return self.tensor.code

    @property
    def dtype(self) -> torch.dtype | None:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.tensor.shape[1:])

    def pieces(self) -> Iterator[torch.Tensor]:
        step = rows_of_a_piece(self)
        for start in range(0, self.count, step):
            stop = min(start + step, self.count)
            piece = torch.zeros(stop - start, *self.shape[1:], dtype=self.dtype)
            first, end = torch.searchsorted(self.places, torch.tensor([start, stop])).tolist()
            if first < end:
                piece[self.places[first:end] - start] = self.tensor.rows(first, end - first).whole().cpu()
            yield piece

    def whole(self) -> torch.Tensor:
        return torch.cat(list(self.pieces()))


@dataclass(frozen=True)
class HeadsReordered:
    """A tensor whose rows are heads of channels, the channels of each head in another order.

    Args:
        order: (D,) index of the channel that comes to each place.
    """

    tensor: Stored | InMemory
    order: torch.LongTensor

    @property
    def file(self) -> Path | None:
        return self.tensor.file

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def code(self) -> str:
        return self.tensor.code

    @property
    def dtype(self) -> torch.dtype | None:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def pieces(self) -> Iterator[torch.Tensor]:
        size = len(self.order)
        step = max(rows_of_a_piece(self) // size, 1) * size
        for start in range(0, self.shape[0], step):
            rows = self.tensor.rows(start, min(step, self.shape[0] - start)).whole()
            yield rows.unflatten(0, (-1, size))[:, self.order].flatten(0, 1)

    def whole(self) -> torch.Tensor:
        return torch.cat(list(self.pieces()))


def rows_of_a_piece(tensor: Stored | InMemory) -> int:
    return max(1, PIECE // max(1, math.prod(tensor.shape[1:]) * tensor.dtype.itemsize))


@dataclass
class Checkpoint:
    """A folder as it is found: its config and its tensors by the names in the files."""

    source: str
    folder: Path
    config_path: Path
    config: dict
    tensors: dict[str, Stored | InMemory] = field(default_factory=dict)


def open_checkpoint(
    source: str, revision: str | None = None, config_file: str | None = None, allow_pickle: bool = False
) -> Checkpoint:
    """Look at a folder or a repository on the Hub: its config, and which tensors lie where. No weight is read.

    Args:
        config_file: a config.json that lies elsewhere, as for training states.
        allow_pickle: read `training_state.pt` and `pytorch_model.bin` too, with torch's `weights_only`.

    Raises:
        OSError: nothing is there, or it cannot be read.
        ValueError: something is there, but it is damaged or of another kind; names the file and what is wrong with it.
    """
    folder = local_folder(source, revision, allow_pickle)
    homes = [folder / inner for inner in INNER_FOLDERS]
    configs = [Path(config_file)] if config_file else [home / "config.json" for home in homes]
    config_path = next((path for path in configs if path.is_file()), None)
    if config_path is None:
        link = next((path for path in configs if path.is_symlink()), None)
        if link:
            raise OSError(f"{link} is a link that leads nowhere or in a circle.")
        raise OSError(f"no config.json in {source!r}{'; pass --config FILE' if not config_file else ''}.")
    config = read_json(config_path)
    for home in homes:
        if (home / "mask_embedding.pt").is_file():
            raise ValueError(
                f"{home / 'mask_embedding.pt'}: this drafter has a learned mask embedding, which is not supported. Without it "
                "the drafter would run, and draft badly."
            )
    for home in homes:
        files = _safetensors_files(home)
        if files:
            return Checkpoint(source, folder, config_path, config, tensors_of(files))
    pickle = next((home / name for home in homes for name in PICKLES if (home / name).is_file()), None)
    if pickle is None:
        raise OSError(f"no model.safetensors, and no index of several, in {source!r}.")
    if not allow_pickle:
        raise ValueError(
            f"{pickle} is a pickle, which can run code when it is read; pass --allow-pickle to read it with torch's "
            "`weights_only`, which refuses what is no tensor."
        )
    return Checkpoint(source, folder, config_path, config, _unpickle(pickle))


def local_folder(source: str, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """A folder as it is; of a repository on the Hub the snapshot in the cache, without its code."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).is_symlink():
        raise OSError(f"{source} is a link that leads nowhere or in a circle.")
    if Path(source).exists():
        raise OSError(f"{source} is a file; expected a folder or the id of a repository.")
    try:
        patterns = ["*.json", "*.safetensors", "*mask_embedding.pt", *(PICKLES if allow_pickle else ())]
        # Offline is said aloud: some versions ask the Hub for the list of files first.
        offline = is_offline_mode()
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns, local_files_only=offline))
    except HFValidationError as error:
        raise OSError(f"{source!r} is no folder here, and no id of a repository: {error}") from error
    except OSError as error:
        raise OSError(f"cannot read {source!r}: {error}") from error


def _safetensors_files(home: Path) -> dict[Path, set[str] | None]:
    """File to the names that the index promises of it, None where there is no index."""
    index, single = home / "model.safetensors.index.json", home / "model.safetensors"
    if single.is_file() or not index.is_file():  # in the order of transformers, so that all readers agree
        paths = [single] if single.is_file() else sorted(home.glob("*.safetensors"))
        return {path: None for path in paths if path.is_file()}
    files = {}
    for name, file in read_index(index).items():
        files.setdefault(home / file, set()).add(name)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(
            f"{index} names {missing[0]}, which is not there (of {len(files)} files {len(missing)} are missing)."
        )
    return files


def read_index(index: Path) -> dict[str, str]:
    """Tensor name to the name of a file beside the index.

    Raises:
        ValueError: the index says nothing of the kind, or names a file elsewhere.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} has no `weight_map` from tensor to file.")
    for file in weight_map.values():
        if Path(file).name != file or file.startswith("."):
            raise ValueError(f"{index} names a file outside of its folder: {file!r}.")
    return weight_map


def tensors_of(files: dict[Path, set[str] | None]) -> dict[str, Stored]:
    """Every tensor of the files, from their headers. The library checks that they are whole and consistent."""
    tensors = {}
    for path, promised in files.items():
        try:
            with safe_open(path, "pt") as file:
                found = {name: file.get_slice(name) for name in file.keys()}
                found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is unreadable, truncated perhaps: {error}") from error
        if promised is not None and promised != set(found):
            name = sorted(promised ^ set(found))[0]
            where = (
                "is in the index, but not in the file" if name in promised else "is in the file, but not in the index"
            )
            raise ValueError(f"{path}: {name} {where}.")
        for name, (code, shape) in found.items():
            if name in tensors:
                raise ValueError(f"{name} is in {tensors[name].file.name} and again in {path.name}.")
            tensors[name] = Stored(path, name, code, shape)
    return tensors


def _unpickle(path: Path) -> dict[str, InMemory]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for a damaged or refused pickle
        raise ValueError(f"{path} cannot be read with `weights_only`: {in_a_line(error)}") from error
    for key in STATE_KEYS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no dictionary of tensors, at the top or under one of {', '.join(STATE_KEYS)}.")
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{path} holds a tensor under {name!r}; expected its name, a string.")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
            raise ValueError(f"{path}: {name} is a {kind} tensor; expected an ordinary one, with all of its values.")
    return {name: InMemory(path, name, tensor.detach()) for name, tensor in state.items()}


def write_tensors(path: Path, tensors: dict[str, Stored | InMemory | SomeRows]):
    """Write one safetensors file, piece by piece. The same bytes as `safetensors.torch.save_file` gives.

    Raises:
        ValueError: a tensor holds a value that is not finite, or the file does not say what was written; names it.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, tensors[name].code in DTYPES, name))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        tensor = tensors[name]
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in order:
            for piece in tensors[name].pieces():
                if not torch.isfinite(piece).all():
                    raise ValueError(f"{name} holds a value that is not finite: it was never trained, or is damaged.")
                file.write(piece.contiguous().view(torch.uint8).numpy())
    there = {name: (tensor.code, tensor.shape) for name, tensor in tensors_of({path: None}).items()}
    if there != {name: (tensor.code, tuple(tensor.shape)) for name, tensor in tensors.items()}:
        raise ValueError(f"{path} does not hold what was written; the disk is full, or faulty.")
