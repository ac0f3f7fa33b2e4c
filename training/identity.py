"""What a target and its tokenizer are, in a few values that can be compared: recorded beside all that is made from them."""

import hashlib
import json

import torch
from transformers import PreTrainedModel

SAMPLES = 64  # elements of a tensor that go into the fingerprint


def identify(target: PreTrainedModel) -> dict:
    """Name, class, dtype and a fingerprint of the weights.

    The fingerprint reads some elements of every parameter, not all: a fine-tuned or requantised target differs in it, and
    it takes seconds at most.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(target.named_parameters()):
        flat = parameter.detach().flatten()
        count = min(SAMPLES, flat.numel())
        picked = flat[torch.arange(count, device=flat.device) * flat.numel() // count]  # integers: exact for any size
        digest.update(name.encode())
        digest.update(picked.float().cpu().numpy().tobytes())
    return {
        "name": target.config.name_or_path,
        "class": type(target).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": digest.hexdigest()[:16],
    }


def same_target(one: dict, other: dict) -> bool:
    """Whether two records are of one target in one dtype, whatever path it was loaded from."""
    return all(one[name] == other[name] for name in ("class", "dtype", "weights"))


def template_fingerprint(tokenizer) -> str:
    """Of the chat template's text and the vocabulary: two tokenizers with the same one write the same prompts."""
    parts = [tokenizer.chat_template or "", json.dumps(tokenizer.get_vocab(), sort_keys=True)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
