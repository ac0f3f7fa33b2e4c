"""What a target and its tokenizer are, in a few values that can be compared: recorded beside all that is made from them."""

import hashlib
import json
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

SAMPLES = 64  # elements of a tensor that go into the fingerprint


def identify(target: PreTrainedModel) -> dict:
    """Name, class, dtype, and fingerprints of weights and buffers.

    They read some elements of every tensor, not all: a fine-tuned or requantized target differs in them, and they take
    seconds at most. Buffers hold the frequencies of RoPE, and what some quantized layers have for weights.
    """
    return {
        "name": target.config.name_or_path,
        "class": type(target).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": _fingerprint(target.named_parameters()),
        # Rounded: frequencies are computed anew by each version and device.
        "buffers": _fingerprint((name, buffer.to(torch.bfloat16)) for name, buffer in target.named_buffers()),
    }


def _fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        flat = tensor.detach().flatten()
        count = min(SAMPLES, flat.numel())
        picked = flat[
            torch.arange(count, device=flat.device) * flat.numel() // max(count, 1)
        ]  # integers: exact for any size
        digest.update(name.encode())
        digest.update(picked.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def same_target(one: dict, other: dict) -> bool:
    """Whether two records are of one target in one dtype, whatever path it was loaded from. Older ones have no `buffers`."""
    return not differences(one, other)


def differences(one: dict, other: dict) -> list[str]:
    """What tells two targets apart, with both values."""
    names = ("class", "dtype", "weights") + (("buffers",) if "buffers" in one and "buffers" in other else ())
    called = {"buffers": "RoPE or other buffers"}
    return [f"{called.get(name, name)} {one[name]}, here {other[name]}" for name in names if one[name] != other[name]]


def has_thinking_modes(tokenizer) -> bool:
    """Whether the chat template asks for a mode; else there is one only, whatever is stated or recorded."""
    return "enable_thinking" in template_text(tokenizer)


def template_fingerprint(tokenizer) -> str:
    """Of the chat template's text and the vocabulary: two tokenizers with the same one write the same prompts."""
    parts = [template_text(tokenizer), json.dumps(tokenizer.get_vocab(), sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def template_text(tokenizer) -> str:
    """The text of the chat template; of several named ones, all of them with their names. Empty where there is none."""
    template = tokenizer.chat_template
    return json.dumps(template, sort_keys=True) if isinstance(template, dict) else template or ""
