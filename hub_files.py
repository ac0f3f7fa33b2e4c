"""What a drafter's folder carries beside config and code: finite weights, `custom_generate/` and, where there is none, a card."""

import contextlib
import inspect
import json
from pathlib import Path

import torch
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.modeling_utils import load_state_dict

# By this line of its docstring our `custom_generate/generate.py` is told from others.
CUSTOM_GENERATE_MARK = "Hands over to the drafter that it is given"
# By this line a card of ours is told from one that someone wrote, and must not be replaced.
CARD_MARK = "<!-- Written by dflash-hub; `dflash-hub card` writes it again. -->"
YOURS = "<!-- What stands below this line is kept when the card is written again. -->"
RECORD = "training_record.json"
# Files of weights as transformers names them: whole or in shards, of a variant or of none, and their indices.
WEIGHT_FILES = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
)


def generate(model, assistant_model=None, **kwargs):
    """`target.generate(custom_generate=<this repository>, trust_remote_code=True, assistant_model=drafter, ...)`.

    Hands over to the drafter that it is given; arguments and result are those of `generate`.
    """
    if getattr(getattr(assistant_model, "config", None), "model_type", None) != "dflash":
        raise ValueError(
            "custom_generate of a DFlash repository needs a DFlash drafter as `assistant_model`, got "
            f"{type(assistant_model).__name__}. Load it with AutoModel.from_pretrained(..., trust_remote_code=True)."
        )
    return model.generate(assistant_model=assistant_model, **kwargs)


def custom_generate_source() -> str:
    """The text of `custom_generate/generate.py`: `generate` above, which must not need anything around it."""
    return (
        '"""Speculative decoding with a DFlash drafter, as a custom generate method. The loop is the drafter\'s own."""\n'
        "\n\n" + inspect.getsource(generate)
    )


def card(config) -> str:
    """A minimal model card from a `DFlashConfig`."""
    target = config.target_name_or_path or "the target that it was trained for"
    base_model = f"base_model: {json.dumps(target)}\n" if config.target_name_or_path else ""
    return f"""---
library_name: transformers
{base_model}tags:
- speculative-decoding
- dflash
- draft-model
- block-diffusion
- custom_generate
---

{CARD_MARK}

# DFlash drafter

A block-diffusion drafter for {target}: not a model of its own, but what makes its target write several tokens a pass. No
weight of the target was changed, and the text is the target's.

```python
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{config.target_name_or_path or "TARGET"}", dtype="auto")
drafter = AutoModel.from_pretrained("THIS REPOSITORY", trust_remote_code=True, dtype="auto")
output = target.generate(**inputs, assistant_model=drafter)
```

{config.num_hidden_layers} layers, blocks of {config.block_size} tokens, target layers {config.target_layer_ids} of \
{config.num_target_layers}, mask token {config.mask_token_id}. Acceptance: not measured.
"""


def write_hub_files(folder, config):
    """Add `custom_generate/generate.py` to a saved folder, and a card if it has none."""
    folder = Path(folder)
    (folder / "custom_generate").mkdir(exist_ok=True)
    write_text(folder / "custom_generate" / "generate.py", custom_generate_source())
    if not (folder / "README.md").exists():
        write_text(folder / "README.md", card(config))


def weight_paths(folder: Path) -> set[Path]:
    """List the files of weights in a folder, and their indices."""
    return {path for pattern in WEIGHT_FILES for path in folder.glob(pattern)}


def holds_weights(folder: Path, state: dict[str, torch.Tensor]) -> bool:
    """Whether the weights that readers find in a folder are these, in however many files; unreadable ones are not."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    found = set()
    try:
        shards = {} if single.is_file() else json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for path in {folder / name for name in shards.values()} or {single}:
            for name, tensor in load_state_dict(str(path), map_location="cpu").items():
                if not torch.equal(tensor, state[name].cpu()):
                    return False
                found.add(name)
    except Exception:  # of many classes, for a damaged file, another drafter's tensors, or some that are on no device
        return False
    return found == set(state)


@contextlib.contextmanager
def superseding(folder: Path, state: dict[str, torch.Tensor], config, remove: bool):
    """Save weights in the block, then remove what the folder still holds of others: their files, and what is recorded of them.

    Args:
        state: the new weights. Where they are the old ones, in other files, records stay true and stay.
        remove: False only saves.
    """
    before = {path: path.stat().st_mtime_ns for path in weight_paths(folder)} if remove else {}
    same_weights = not before or holds_weights(folder, state)
    yield
    for path, written in before.items():
        if path.exists() and path.stat().st_mtime_ns == written:  # it is none of the new files
            path.unlink()
    if same_weights:
        return
    (folder / RECORD).unlink(missing_ok=True)
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if CARD_MARK in text:  # it says what was measured of the old ones; the owner's metadata and notes stay
        front, body = text.split(CARD_MARK, 1)
        yours = YOURS + body.split(YOURS, 1)[1] if YOURS in body else ""
        write_text(path, front + CARD_MARK + card(config).split(CARD_MARK, 1)[1] + (f"\n{yours}" if yours else ""))


def nonfinite(tensors: dict[str, torch.Tensor]) -> list[str]:
    """List the tensors that hold NaN or infinity. A drafter with one drafts nothing, whatever its target."""
    # A quantized tensor is a class of its own and holds integers; one on the meta device holds nothing.
    ordinary = {
        name: t for name, t in tensors.items() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta
    }
    return [name for name, tensor in ordinary.items() if not bool(tensor.isfinite().all())]


def check_finite(tensors: dict[str, torch.Tensor], whose: str):
    """Refuse weights of which no drafter is made.

    Raises:
        ValueError: a tensor holds NaN or infinity; names it.
    """
    if found := nonfinite(tensors):
        raise ValueError(nonfinite_sentence(found, whose))


def nonfinite_sentence(names: list[str], whose: str) -> str:
    """Say in which tensors values are not finite, and what to do."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{whose} holds values that are not finite (NaN or infinity) in {shown}: its training diverged, or the file is damaged. "
        "Take an earlier checkpoint."
    )


def code_files(folder: Path) -> list[Path]:
    """List the code that a Hub folder carries: `modeling_dflash.py` and all that it imports, directly or not.

    Returns:
        Existing files, sorted by name; none where the folder has no code.
    """
    start = folder / "modeling_dflash.py"
    if not start.exists():
        return []
    # The loader of `trust_remote_code` follows the same imports.
    return sorted({start, *map(Path, get_relative_import_files(start))})


def write_text(path: Path, text: str):
    """Write beside, then rename: a reader never sees half a file."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk names no file
        raise
