"""The LM head is handed what costs least: nothing where only states are read, and never a slice of several sequences."""

import torch
from dflash_hub.target_model import contiguous_head
from dflash_hub.training.features import target_features
from helpers.tiny import prompt_of, tiny_drafter, tiny_target


def read_by_head(target, run):
    """List (shape, contiguous) of what the head is given while `run` runs; the hook comes last, after those of the package."""
    seen, forward = [], target.get_output_embeddings().forward
    head = target.get_output_embeddings()
    head.forward = lambda hidden: seen.append((tuple(hidden.shape), hidden.is_contiguous())) or forward(hidden)
    try:
        run()
    finally:
        del head.forward
    return seen


def test_features_ask_the_head_for_nothing():
    target, ids = tiny_target("llama"), prompt_of(9).repeat(3, 1)
    with torch.no_grad():
        expected = target(ids, output_hidden_states=True).hidden_states[2]
    found = []
    seen = read_by_head(target, lambda: found.append(target_features(target, ids, torch.ones_like(ids), [1])))
    assert torch.equal(found[0], expected) and seen == [((3, 0, 32), True)]


def test_the_prefill_of_a_batch_hands_the_head_contiguous_states():
    target, drafter, ids = tiny_target("llama"), tiny_drafter(), torch.cat([prompt_of(9, row) for row in range(3)])
    call = {"do_sample": False, "max_new_tokens": 6}
    plain = target.generate(ids, **call)
    texts = []
    seen = read_by_head(target, lambda: texts.append(target.generate(ids, assistant_model=drafter, **call)))
    assert torch.equal(texts[0], plain) and seen[0] == ((3, 1, 32), True) and all(whole for _, whole in seen)
    sliced = torch.randn(3, 9, 32)[:, -1:]
    with contiguous_head(target):
        assert read_by_head(target, lambda: target.get_output_embeddings()(sliced)) == [((3, 1, 32), True)]
    assert not target.get_output_embeddings()._forward_pre_hooks
