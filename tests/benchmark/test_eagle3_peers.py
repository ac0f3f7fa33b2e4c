"""EAGLE-3 beside the classes that heads are trained with, in an environment of their own (`make peers`)."""

import json
import subprocess

import pytest
import torch
from dflash_hub.benchmark.baselines.eagle3 import Eagle3Proposer
from dflash_hub.benchmark.baselines.eagle3_loading import load_eagle3
from dflash_hub.decode_choice import Sampler
from dflash_hub.decode_state import TokenBuffer
from dflash_hub.drafter_draft import AcceptedTokens, Plan
from helpers.eagle3 import FIELDS, WatchedHead, features_of, steps_of, tiny_head, write_head
from helpers.tiny import ROOT, VOCAB, prompt_of, tiny_target
from safetensors.torch import load_file, save_file
from transformers import LogitsProcessorList

pytestmark = pytest.mark.peers
PEERS = ROOT / ".venv-peers" / "bin" / "python"
SPECULATORS = ROOT / ".venv-speculators" / "bin" / "python"


@pytest.mark.parametrize("package", ("specforge", "nemo"))
@pytest.mark.parametrize("options", ({}, {"fc_norm": True}, {"fc_norm": True, "norm_output": True}))
def test_a_chain_scores_what_other_packages_score(package, options, tmp_path):
    """Random weights and features: our cached steps against their unrolled passes, which are what a head is trained in."""
    if not PEERS.exists():
        pytest.skip(f"the packages are not installed at {PEERS}; run `make peers`")
    if package == "specforge" and "norm_output" in options:
        pytest.skip("SpecForge means something else by `norm_output`")
    listed, target, steps = [*range(0, VOCAB, 2)], tiny_target("llama"), 4
    folder = write_head(tmp_path / "head", package, tiny_head(listed=listed, **options))
    head, ids = load_eagle3(str(folder), target, torch.float32), prompt_of(12)
    head = watched(head)
    proposer, states = Eagle3Proposer(head, target), features_of(target, ids[:, :-1], [0, 1, 2])
    for part in (slice(0, 7), slice(7, 11)):  # two reads, as a prompt and a round
        proposer.read(AcceptedTokens(ids[:, part], [layer[None, part] for layer in states]))
        anchor = ids[:, part.stop : part.stop + 1]
        text = TokenBuffer(ids[:, : part.stop + 1], None)
        sampler = Sampler(LogitsProcessorList(), text, None, VOCAB, ragged=False)
        draft = proposer.propose(anchor, Plan(steps), sampler)
    ours = torch.stack([logits[0, 0] for logits in head.scored[-steps:]])
    given = {"tokens": ids, "drafted": draft.tokens[:, :-1].contiguous(), "features": torch.cat(states, dim=-1)[None]}
    given["embedding"] = target.get_input_embeddings().weight.detach()
    save_file(given, tmp_path / "given.safetensors")
    command = [PEERS, ROOT / "tests" / "helpers" / "eagle3_forward.py", package, folder, tmp_path / "given.safetensors"]
    done = subprocess.run([*command, tmp_path / "theirs.safetensors"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "theirs.safetensors")["logits"][0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    (
        {"model_type": "llama", "norm_before_residual": True, "norm_before_fc": True},
        {"model_type": "qwen3", "fc_norm": True, "norm_output": True},
    ),
)
def test_a_head_of_speculators_is_read_as_it_is_computed_there(options, tmp_path):
    """As the package saves it: the first step at the last column, and the second behind a known token."""
    if not SPECULATORS.exists():
        pytest.skip(f"the package is not installed at {SPECULATORS}; run `make peers`")
    stated = options | {"layer": FIELDS, "listed": [*range(1, VOCAB, 3)], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    command = [SPECULATORS, ROOT / "tests" / "helpers" / "eagle3_speculators.py", json.dumps(stated)]
    done = subprocess.run(
        [*command, tmp_path / "head", tmp_path / "theirs.safetensors"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    theirs, target = load_file(tmp_path / "theirs.safetensors"), tiny_target("llama")
    head = load_eagle3(str(tmp_path / "head"), target, torch.float32)
    assert head.options.target_layer_ids == [0, 1, 2] and torch.equal(head.embed_tokens.weight, theirs["embedding"])
    states, tokens = [*theirs["features"][0].split(32, dim=-1)], theirs["tokens"][0].tolist()
    (first,) = steps_of(head, head.embed_tokens, states, tokens, [])
    torch.testing.assert_close(first, theirs["first"][0, -1], atol=1e-4, rtol=1e-4)
    _, second = steps_of(head, head.embed_tokens, [layer[:-1] for layer in states], tokens[:-1], tokens[-1:])
    torch.testing.assert_close(second, theirs["second"][0, -2], atol=1e-4, rtol=1e-4)


def watched(head) -> WatchedHead:
    """The same head, with its logits kept."""
    copy = WatchedHead(head.config, head.options).requires_grad_(False)
    copy.load_state_dict(head.state_dict())
    return copy
