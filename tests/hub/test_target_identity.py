"""A drafter knows its target again by a few rows of embedding and head."""

import copy
import logging

import pytest
import torch
from dflash_hub import DFlashConfig, DFlashDraftModel, target_identity
from dflash_hub.target_identity import compare_target, encoded_rows
from helpers.tiny import VOCAB, prompt_of, tiny_drafter, tiny_target
from torch import nn

SHAPE = {"hidden_size": 64, "head_dim": 16}


def target_of(seed: int = 0, **more):
    return tiny_target("llama", seed=seed, **SHAPE, **more)


def drafter_of(target) -> DFlashDraftModel:
    return tiny_drafter(**SHAPE, target_name_or_path="org/target", target_rows=encoded_rows(target, VOCAB))


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """A weight as it comes out of 4 or 8 bits with a scale for each 32 values of a row."""
    blocks = weight.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return ((blocks / scale).round() * scale).flatten(-2)


class PackedHead(nn.Module):
    """A head of 4 bits, whose dense weight nobody can read."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("dense", rounded(weight, 4))

    def forward(self, hidden):
        return hidden @ self.dense.T.to(hidden.dtype)


def changed(target, change):
    """A copy of the target with other embedding and head."""
    other = copy.deepcopy(target)
    with torch.no_grad():
        for module in (other.get_input_embeddings(), other.get_output_embeddings()):
            module.weight.copy_(change(module.weight))
    return other


@pytest.mark.parametrize("kind", ("bfloat16", "float16", "8 bits", "4 bits", "packed", "tied", "resized"))
def test_other_dtypes_and_quantized_copies_are_the_same_target(kind, caplog):
    target = target_of(tie_word_embeddings=kind == "tied")
    drafter = drafter_of(target)
    other = copy.deepcopy(target)
    if "float16" in kind:
        other = other.to(getattr(torch, kind))
    elif "bits" in kind:
        other = changed(target, lambda weight: rounded(weight, int(kind[0])))
    elif kind == "packed":
        other.lm_head = PackedHead(target.lm_head.weight.detach())
    elif kind == "resized":
        other.resize_token_embeddings(VOCAB + 30)
    cosines, same = compare_target(drafter.config, other)
    assert same is True and min(cosines) > (0.98 if kind in ("4 bits", "packed") else 0.9998)
    if kind not in ("bfloat16", "float16"):
        text = other.generate(prompt_of(6), assistant_model=drafter, max_new_tokens=6, do_sample=False)
        assert torch.equal(text, other.generate(prompt_of(6), max_new_tokens=6, do_sample=False))
        assert "other weights" not in caplog.text


def test_a_fine_tuned_target_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(target_identity.__name__), "propagate", True)
    target = target_of()
    drafter, noise = drafter_of(target), torch.Generator().manual_seed(0)
    tuned = changed(target, lambda w: w + 0.05 * w.std() * torch.randn(w.shape, generator=noise))
    for _ in range(2):
        tuned.generate(prompt_of(6), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert caplog.text.count("made for other weights of org/target") == 1
    assert "`dflash-hub check`" in caplog.text and "`dflash-hub align`" in caplog.text


def test_another_model_of_the_same_shape_is_refused_each_time():
    drafter, other = drafter_of(target_of()), target_of(seed=5)
    for _ in range(2):
        with pytest.raises(ValueError, match="made for org/target, and LlamaForCausalLM is another model: rows of its"):
            other.generate(prompt_of(6), assistant_model=drafter, max_new_tokens=4)
    tiny_target("llama", seed=5).generate(prompt_of(6), assistant_model=tiny_drafter(), max_new_tokens=4)  # none kept


def test_rows_are_kept_in_the_config(tmp_path):
    drafter = drafter_of(target_of())
    drafter.save_pretrained(tmp_path)
    assert DFlashConfig.from_pretrained(tmp_path).target_rows == drafter.config.target_rows
    assert len(drafter.config.target_rows) < 1500
    drafter.config.target_rows = "abcd"
    with pytest.raises(ValueError, match="3 bytes are no rows"):
        target_of().generate(prompt_of(6), assistant_model=drafter, max_new_tokens=4)
