"""GGUF files: a drafter's metadata and tensors in and out, and a target's tokenizer, with llama.cpp's own `gguf` package."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from ..common.files import in_a_line
from ..common.target_source import TargetSource
from ..drafter_vocabulary import offsets_of
from .checkpoint import CODES, Checkpoint, InMemory, SomeRows, Stored, rows_of_a_piece
from .gguf_layout import ARCHITECTURE, HANDS_ON, LISTED, MASK, float32
from .init import read_target_config

SUFFIX = ".gguf"
# What the matrices of a file are written in, and the number that the file states for it; norms are always float32.
FILE_TYPES = {"float32": ("F32", 0), "float16": ("F16", 1), "bfloat16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt"]
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
# The target's tensors there, by our names for them.
TARGET_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}
# llama.cpp's names for how a byte-level BPE splits a text first, by the steps of the tokenizer.
DIGITS = ("Digits", "ByteLevel")
SPLIT = ("Split", "ByteLevel")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PRE_TOKENIZERS = {(DIGITS, None): "smollm", (SPLIT, QWEN2): "qwen2", (SPLIT, LLAMA3): "llama-bpe"}


def gguf_package():
    """Import `gguf`.

    Raises:
        ValueError: it is not installed; says how to get it.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError("reading and writing GGUF files needs llama.cpp's package `gguf`: pip install gguf.") from None
    return gguf


@dataclass(frozen=True)
class InGguf:
    """A tensor of a GGUF file, mapped into memory. One with quantized weights is read as float32.

    Attributes:
        kind: GGML's name of its type.
        data: its rows as they lie in the file, bytes where numpy has no type for them.
    """

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    data: object

    @property
    def dtype(self) -> torch.dtype | None:
        if self.kind in PLAIN:
            return PLAIN[self.kind]
        gguf = gguf_package()
        return torch.float32 if gguf.GGMLQuantizationType[self.kind] in gguf.quants._type_traits else None

    @property
    def code(self) -> str:
        return CODES.get(self.dtype, self.kind)

    def rows(self, first: int, count: int) -> "InGguf":
        return replace(self, data=self.data[first : first + count], shape=(count, *self.shape[1:]))

    def pieces(self) -> Iterator[torch.Tensor]:
        step = rows_of_a_piece(self)
        for start in range(0, self.shape[0], step):
            yield self._tensor(self.data[start : start + step])

    def whole(self) -> torch.Tensor:
        return self._tensor(self.data)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Values as a tensor of this type would hold them; itself where the type is no quantized one.

        Raises:
            ValueError: the `gguf` package cannot quantize to the type.
        """
        if self.kind in PLAIN:
            return values
        gguf = gguf_package()
        kind = gguf.GGMLQuantizationType[self.kind]
        try:
            return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.float().numpy(), kind), kind))
        except NotImplementedError:
            raise ValueError(
                f"{self.name} is quantized ({self.kind}), which cannot be compared with the target's; pass --no-check-target to drop it "
                "as it is."
            ) from None

    def _tensor(self, rows) -> torch.Tensor:
        import numpy as np

        if self.kind in PLAIN:
            return torch.from_numpy(np.array(rows)).view(self.dtype)
        gguf = gguf_package()
        return torch.from_numpy(gguf.quants.dequantize(np.array(rows), gguf.GGMLQuantizationType[self.kind]))


def open_gguf(source: str) -> Checkpoint:
    """Look at a GGUF file: its metadata as the config, and which tensors it holds. No weight is read.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged.
    """
    path = Path(source)
    if not path.is_file():
        raise OSError(f"{source} is no file here; a drafter's GGUF file is read from disk.")
    gguf = gguf_package()
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: _value(field, gguf) for name, field in reader.fields.items()}
        tensors = {
            t.name: InGguf(path, t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data)
            for t in reader.tensors
        }
    except Exception as error:  # the package raises many kinds for a file that is none, or is cut
        raise ValueError(f"{path} is no GGUF file, or damaged: {in_a_line(error)}") from error
    listed = tensors.get(LISTED)
    if listed is not None and listed.kind == "I64" and len(listed.shape) == 1:
        # Token ids there, offsets here.
        metadata[LISTED] = listed.shape[0]
        tensors[LISTED] = InMemory(path, LISTED, offsets_of(listed.whole()))
    return Checkpoint(source, path.parent, path, metadata, tensors)


def _value(field, gguf):
    """The value of a metadata field; of the long lists of a tokenizer only the length is of use, and reading them is slow."""
    if field.name.startswith("tokenizer.") and field.types[0] == gguf.GGUFValueType.ARRAY:
        return len(field.data)
    value = field.contents()
    if field.types[-1] == gguf.GGUFValueType.FLOAT32:
        return [float32(one) for one in value] if isinstance(value, list) else float32(value)
    return value


def write_gguf(
    path: Path, metadata: dict, tensors: dict[str, Stored | InMemory | SomeRows], file_type: str, target: TargetSource
):
    """Write one GGUF file, tensor by tensor, with the tokenizer of the target.

    Args:
        metadata: what `gguf_layout.write` gives.
        tensors: by the names of the layout; a list of tokens as their ids.
        file_type: one of `FILE_TYPES`. A matrix whose rows are no whole blocks of Q8_0 is written in float16, as llama.cpp's
            converter does.
        target: see `add_tokenizer`.

    Raises:
        ValueError: a value is not finite, or too large for the type, or the target's tokenizer has no name in llama.cpp.
    """
    gguf = gguf_package()
    import numpy as np

    kind, number = FILE_TYPES[file_type]
    kinds = {name: _kind_of(name, tensor, kind, gguf) for name, tensor in tensors.items()}
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_type("model")
    writer.add_file_type(number)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, target, metadata, gguf)
    for name, value in metadata.items():
        if name not in ("general.architecture", LISTED):
            _add(writer, name, value)
    for name, tensor in tensors.items():
        block, size = gguf.GGML_QUANT_SIZES[kinds[name]]
        bytes_of_it = math.prod(tensor.shape) // block * size
        writer.add_tensor_info(name, tensor.shape, np.dtype("float32"), bytes_of_it, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        writer.write_tensor_data(_written(name, tensor.whole(), kinds[name], gguf))
    writer.close()
    _check_written(path, metadata, tensors)


def _kind_of(name: str, tensor: Stored | InMemory | SomeRows, kind: str, gguf):
    """GGML's type for a tensor: norms and base kernels stay float32, since its kernels take them in no other."""
    if tensor.dtype is torch.int64:
        kind = "I64"
    elif len(tensor.shape) == 1 or not name.endswith(".weight"):
        kind = "F32"
    elif tensor.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        kind = "F16"
    return gguf.GGMLQuantizationType[kind]


def _written(name: str, tensor: torch.Tensor, kind, gguf):
    """The bytes of a tensor in the file.

    Raises:
        ValueError: a value is not finite, or is not in the type.
    """
    if kind.name == "I64":
        return tensor.numpy()
    values = tensor.float()
    if not values.isfinite().all():
        raise ValueError(f"{name} holds a value that is not finite: it was never trained, or is damaged.")
    if kind.name in ("F16", "Q8_0") and values.abs().max() > torch.finfo(torch.float16).max:
        raise ValueError(f"{name} holds a value beyond float16's range; write it with --dtype bfloat16 or float32.")
    return gguf.quants.quantize(values.numpy(), kind)


def _check_written(path: Path, metadata: dict, tensors: dict):
    there = open_gguf(str(path))
    for name, value in metadata.items():
        # As many digits as float32 has: 9.999999974752427e-07, of a config made from such a file, is its 1e-06.
        if there.config.get(name) != (float32(value) if isinstance(value, float) else value):
            raise ValueError(f"`{name}` is {value!r} and would be read back as {there.config.get(name)!r}.")
    if {name: t.shape for name, t in there.tensors.items()} != {name: tuple(t.shape) for name, t in tensors.items()}:
        raise ValueError(f"{path} does not hold what was written; the disk is full, or faulty.")


def _add(writer, name: str, value):
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def read_gguf_target(path: str) -> tuple[int, int, int]:
    """(layers, vocabulary, width) of a target in a GGUF file.

    Raises:
        OSError, ValueError: see `open_gguf`, or the file does not state one.
    """
    metadata = open_gguf(path).config
    architecture = metadata.get("general.architecture")
    found = (
        metadata.get(f"{architecture}.block_count"),
        metadata.get("tokenizer.ggml.tokens"),
        metadata.get(f"{architecture}.embedding_length"),
    )
    if not all(isinstance(number, int) for number in found):
        raise ValueError(f"{path} states no layers, tokens and width of a language model ({architecture!r}): {found}.")
    return found


def unserved_target(target: TargetSource) -> list[str]:
    """A sentence where llama.cpp serves the target, and not with a drafter; empty where it does, or the architecture is unknown there."""
    if target.path.endswith(SUFFIX):
        name = open_gguf(target.path).config.get("general.architecture")
    else:
        kind = read_target_config(target).get_text_config(decoder=True).model_type.removesuffix("_text")
        spelled = {_letters(name): name for name in gguf_package().MODEL_ARCH_NAMES.values()}
        name = spelled.get(_letters(kind))
    if name is None or name in HANDS_ON:
        return []
    return [
        f"llama.cpp's build 11434 stops at the first prompt of a target of the architecture {name!r} with a drafter: it hands on hidden "
        f"states of {', '.join(HANDS_ON)} alone"
    ]


def _letters(name: str) -> str:
    """A name without what Python's and llama.cpp's spelling differ in."""
    return name.replace("_", "").replace("-", "")


def add_tokenizer(writer, target: TargetSource, metadata: dict, gguf):
    """Add the target's tokenizer to a file of which nothing is written yet.

    Args:
        target: a GGUF file, whose tokenizer is taken as it is; or a folder or repository with a byte-level BPE of which the name in
            llama.cpp is known.

    Raises:
        ValueError: the name is not known.
    """
    if target.path.endswith(SUFFIX):
        architecture = ""
        for name, field in gguf.GGUFReader(target.path).fields.items():
            if name == "general.architecture":
                architecture = field.contents()
            if name.startswith("tokenizer.") and name != MASK:
                writer.add_key_value(
                    name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None
                )
        sections = f"{architecture}.rope.dimension_sections" in gguf.GGUFReader(target.path).fields
    else:
        if not target.is_local:
            folder = snapshot_download(target.path, revision=target.revision, allow_patterns=TOKENIZER_FILES)
            target = TargetSource(folder, trust_remote_code=target.trust_remote_code)
        _add_bpe(writer, target, gguf)
        rope = read_target_config(target).get_text_config(decoder=True).rope_parameters or {}
        sections = "mrope_section" in rope
    if sections:
        # Such a target counts positions in several directions; a drafter knows the one along the text.
        half = metadata[f"{ARCHITECTURE}.attention.key_length"] // 2
        writer.add_array(f"{ARCHITECTURE}.rope.dimension_sections", [half, 0, 0, 0])


def _add_bpe(writer, target: TargetSource, gguf):
    tokenizer = target.tokenizer()
    steps = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter = steps["pre_tokenizer"] or {}
    splitters = splitter.get("pretokenizers", [splitter])
    kinds = tuple(step.get("type") for step in splitters)
    pattern = splitters[0].get("pattern", {}).get("Regex")
    name = PRE_TOKENIZERS.get((kinds, pattern)) if steps["model"]["type"] == "BPE" else None
    if name is None:
        raise ValueError(
            f"how llama.cpp calls the tokenizer in {target.path!r} ({steps['model']['type']}, split by {', '.join(map(str, kinds))}) is not "
            "known here; pass the target's own GGUF file as --target, whose tokenizer is taken as it is."
        )
    size = read_target_config(target).get_text_config(decoder=True).vocab_size
    texts, added = {number: text for text, number in tokenizer.get_vocab().items()}, tokenizer.added_tokens_decoder
    kind = gguf.TokenType
    types = [
        kind.UNUSED if number not in texts
        else kind.NORMAL if number not in added
        else kind.CONTROL if added[number].special
        else kind.USER_DEFINED
        for number in range(size)
    ]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(types)
    special = gguf.SpecialVocab(
        target.path, load_merges=True, special_token_types=("bos", "eos", "unk", "sep", "pad", "cls")
    )
    # Measured, since it is stated in several places of a tokenizer's files, or in none.
    special.add_special_token = {"bos": tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id}
    special.add_to_gguf(writer, quiet=True)
