"""The trained drafter with reference values of an independent implementation; skipped where a clone does not have it."""

import json

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.drafter_heads import TargetHead
from dflash_hub.target_model import raw_embeddings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def target(smollm2_path):
    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)


@pytest.fixture
def drafter(fixture_folder):
    return DFlashDraftModel.from_pretrained(fixture_folder, dtype=torch.float32)


def reference(fixture_folder):
    rows = json.loads((fixture_folder / "reference.json").read_text())
    return rows if isinstance(rows, list) else rows["prompts"]


@torch.no_grad()
def test_hidden_states_match(drafter, target, fixture_folder):
    tensors = load_file(fixture_folder / "reference.safetensors")
    out = drafter(tensors["noise_embeds"], tensors["context_hidden_states"]).last_hidden_state
    torch.testing.assert_close(out, tensors["last_hidden_state"], atol=1e-4, rtol=0)
    drafts = TargetHead(drafter.config, target.get_output_embeddings())(out[:, 1:]).logits.argmax(-1)
    assert drafts.flatten().tolist() == tensors["draft_token_ids"].flatten().tolist()
    # The features and embeddings of the reference are what we take from the target.
    row = reference(fixture_folder)[0]
    states = target(torch.tensor([row["prompt_ids"]]), output_hidden_states=True).hidden_states
    context = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    torch.testing.assert_close(context, tensors["context_hidden_states"], atol=1e-3, rtol=1e-4)
    block = torch.tensor([[row["output_ids"][0]] + [drafter.config.mask_token_id] * 7])
    torch.testing.assert_close(raw_embeddings(target.get_input_embeddings(), block), tensors["noise_embeds"])


def test_every_round_matches(drafter, target, fixture_folder):
    """Token for token, and round for round; the last round may be cut at 64 tokens here, not in the reference."""
    for row in reference(fixture_folder):
        ids = torch.tensor([row["prompt_ids"]])
        text = target.generate(ids, assistant_model=drafter, max_new_tokens=64, do_sample=False, num_assistant_tokens=7)
        assert text[0, ids.shape[1] :].tolist() == row["output_ids"]
        rounds = drafter.last_speculation.acceptance_lengths[0]
        assert rounds[:-1] == row["round_tokens"][:-1]
        assert rounds[-1] <= row["round_tokens"][-1]


@pytest.mark.parametrize("dtype", (torch.bfloat16,))
def test_half_precision_stays_within_the_targets_ties(dtype, drafter, smollm2_path, fixture_folder):
    """Pitfall 12: each token of the bfloat16 text is a best one of a bfloat16 pass over it, up to rounding."""
    target = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=dtype)
    accepted = 0
    for row in reference(fixture_folder)[:3]:
        ids = torch.tensor([row["prompt_ids"]])
        text = target.generate(
            ids, assistant_model=drafter.to(dtype), max_new_tokens=32, do_sample=False, num_assistant_tokens=7
        )
        with torch.no_grad():
            scores = target(text).logits[0, ids.shape[1] - 1 : -1].float()
        gap = scores.max(-1).values - scores.gather(-1, text[0, ids.shape[1] :, None])[:, 0]
        assert gap.max() <= 8 * torch.finfo(dtype).eps * scores.abs().max()
        accepted += drafter.last_speculation.num_accepted
    assert accepted > 20


def test_sampling_accepts_about_what_greedy_accepts(drafter, target, fixture_folder):
    """A floor only: shared noise keeps the drafter useful at temperature 1 on the prompts that it was trained for."""
    lengths = []
    for seed, row in enumerate(reference(fixture_folder)[:3]):
        torch.manual_seed(seed)
        target.generate(
            torch.tensor([row["prompt_ids"]]),
            assistant_model=drafter,
            max_new_tokens=64,
            do_sample=True,
            top_k=0,
            num_assistant_tokens=7,
        )
        lengths += drafter.last_speculation.acceptance_lengths[0]
    assert sum(lengths) / len(lengths) > 1.2
