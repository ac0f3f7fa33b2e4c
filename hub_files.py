"""What a drafter's folder carries beside config and code: finite weights, `custom_generate/` and, where there is none, a card."""

import inspect
import json
from pathlib import Path

import torch
from transformers.dynamic_module_utils import get_relative_import_files

# By this line of its docstring our `custom_generate/generate.py` is told from others.
CUSTOM_GENERATE_MARK = "Hands over to the drafter that it is given"
# By this line a card of ours is told from one that someone wrote, and must not be replaced.
CARD_MARK = "<!-- Written by dflash-hub; `dflash-hub card` writes it again. -->"


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
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
