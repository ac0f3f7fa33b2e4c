"""GGUF files of ours beside those that llama.cpp's own converter writes."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from ..common.target_source import TargetSource
from ..convert.exporting import export_drafter
from ..convert.reading import target_tensors
from ..drafter_vocabulary import token_ids_of
from ..hub_files import write_text
from ..modeling_dflash import DFlashDraftModel
from .llamacpp_server import converted

CONVERTER_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "q8_0": "q8_0"}
# What the converter takes from the names of folders, and one setting of the tokenizer that it states for some models only.
DESCRIBING = ("general.name", "general.basename", "general.size_label", "general.version", "general.finetune")
SOMETIMES = ("tokenizer.ggml.add_bos_token",)
# The converter reads a list of tokens in its class for DSpark alone, which states two things more.
LISTING_CLASS = "Qwen3DSparkModel"
LISTING_STATES = ("dflash.sample_from_anchor", "dflash.has_confidence_head")


def differences(ours: Path, theirs: Path, but: tuple[str, ...] = ()) -> list[str]:
    """What two GGUF files state or hold differently, a sentence each.

    Args:
        but: metadata that only the second states.
    """
    import gguf
    import numpy as np

    mine, other = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    stated = [
        {
            name: field.contents()
            for name, field in reader.fields.items()
            if "." in name and not name.startswith("GGUF.")
        }
        for reader in (mine, other)
    ]
    for said in stated:
        for name in DESCRIBING:
            said.pop(name, None)
    for name in but:
        stated[1].pop(name, None)
    names = set(stated[0]) | set(stated[1])
    names -= {name for name in SOMETIMES if name not in stated[1]} | {
        name for name in SOMETIMES if name not in stated[0]
    }
    found = [
        f"{name}: {str(stated[0].get(name))[:60]} here, {str(stated[1].get(name))[:60]} there"
        for name in sorted(names)
        if stated[0].get(name) != stated[1].get(name)
    ]
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in (mine, other)]
    found += [f"only one file holds {name}" for name in sorted(set(tensors[0]) ^ set(tensors[1]))]
    for name in sorted(set(tensors[0]) & set(tensors[1])):
        here, there = tensors[0][name], tensors[1][name]
        if here.tensor_type != there.tensor_type or list(here.shape) != list(there.shape):
            found.append(f"{name} is {here.tensor_type.name} {list(here.shape)} here, {there.tensor_type.name} there")
        elif not np.array_equal(here.data, there.data):
            found.append(f"{name} holds other values")
    return found


def check_files(drafter: str, target: str, source: Path, folder: Path, file_types: tuple[str, ...]) -> list[str]:
    """Write a drafter in some types of weights, and compare each file with the converter's: a sentence a difference.

    Args:
        source: of llama.cpp.
        folder: gets `drafter-TYPE.gguf`.
    """
    model = DFlashDraftModel.from_pretrained(drafter)
    listed = model.d2t is not None
    export_drafter(drafter, folder / "zlab", "zlab", force=True)
    if listed:
        _add_list(folder / "zlab", model, target)
    faults = []
    for ours in file_types:
        file, other = folder / f"drafter-{ours}.gguf", folder / f"converter-{ours}.gguf"
        export_drafter(drafter, file, "gguf", force=True, target=target, file_type=ours)
        other.unlink(missing_ok=True)
        converted(source, folder / "zlab", other, CONVERTER_TYPES[ours], target)
        faults += [f"{ours}: {sentence}" for sentence in differences(file, other, LISTING_STATES if listed else ())]
        other.unlink()
    return faults


def _add_list(zlab: Path, drafter: DFlashDraftModel, target: str):
    """Put the list of tokens and its rows of the head into a folder that the converter reads, spelled as it expects them."""
    head = target_tensors(TargetSource.of(target), drafter.config)["lm_head.weight"].whole()
    added = {"d2t": drafter.d2t, "lm_head.weight": head[token_ids_of(drafter.d2t)]}
    tensors = load_file(zlab / "model.safetensors") | added
    save_file(tensors, zlab / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((zlab / "config.json").read_text())
    config |= {"architectures": [LISTING_CLASS], "draft_vocab_size": len(added["d2t"])}
    write_text(zlab / "config.json", json.dumps(config, indent=2) + "\n")
