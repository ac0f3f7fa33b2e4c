"""DFlash 2: the convolution along the block, and the selector that chooses a path among candidates."""

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.decode_choice import CALIBRATION, GumbelNoise, Sampler
from dflash_hub.decode_state import TokenBuffer
from dflash_hub.drafter_heads import Candidates
from dflash_hub.drafter_paths import MostLikely, PathHead, edges, walk
from helpers.families import padded_batch
from helpers.scripted import scripted
from helpers.tiny import CONVOLUTION, DRAFTERS, SELECTOR, prompt_of, tiny_config, tiny_drafter, tiny_target
from transformers.generation import logits_process

CALLS = {
    "greedy": {"do_sample": False},
    "greedy, processors of the text": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0},
    "sampled, processors of the text": {"do_sample": True, "repetition_penalty": 1.2, "temperature": 1.1},
}
PARTS = {"none": {}, "convolution": CONVOLUTION, "selector": SELECTOR, "both": CONVOLUTION | SELECTOR}


def block_and_context(drafter, length: int = 9, seed: int = 0, blocks: int = 1):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, blocks * drafter.config.block_size, 32, generator=generator)
    return noise, torch.randn(1, length, 3 * 32, generator=generator)


def test_fresh_parts_change_nothing_and_learn():
    """A fresh DFlash 2 is its DFlash twin, bit for bit; after two steps every tensor has moved."""
    plain, fresh = tiny_drafter(), DFlashDraftModel(tiny_config(**PARTS["both"])).eval()
    fresh.load_state_dict(plain.state_dict(), strict=False)
    inputs = block_and_context(plain)
    assert torch.equal(plain(*inputs).last_hidden_state, fresh(*inputs).last_hidden_state)
    previous, hidden = torch.tensor([[3, 4]]), plain(*inputs).last_hidden_state[:, 0]
    assert not fresh.candidate_selector(hidden, previous, torch.tensor([[5, 6, 7]]))[0].any()

    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    for _ in range(2):
        hidden = fresh(*inputs).last_hidden_state
        pairs, _ = fresh.candidate_selector(hidden, torch.arange(97)[None, None].expand(1, 5, -1), None)
        (hidden.pow(2).mean() + (pairs - 1).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    still = [name for name, value in fresh.state_dict().items() if torch.equal(value, before[name])]
    assert not still


@pytest.mark.parametrize("parts", ("convolution", "both"))
def test_two_blocks_in_one_pass_equal_two_passes(parts):
    """The convolution restarts at each block, where zeros enter."""
    drafter, size = tiny_drafter(**PARTS[parts]), 5
    noise, context = block_and_context(drafter, blocks=2)
    length = context.shape[1]
    mask = torch.zeros(1, 1, 2 * size, length + 2 * size, dtype=torch.bool)
    mask[..., :length] = True
    for block in range(2):
        own = slice(block * size, (block + 1) * size)
        mask[:, :, own, length + own.start : length + own.stop] = True
    positions = torch.cat([torch.arange(length), length + torch.arange(size), length + torch.arange(size)])[None]
    together = drafter(noise, context, mask, position_ids=positions).last_hidden_state
    apart = [drafter(noise[:, :size], context), drafter(noise[:, size:], context)]
    torch.testing.assert_close(together, torch.cat([part.last_hidden_state for part in apart], dim=1))


def test_a_position_reads_those_right_before_it_and_no_others():
    """With attention switched off a layer's two convolutions of two taps each move a change by two positions."""
    drafter = tiny_drafter(num_hidden_layers=1, **CONVOLUTION)
    with torch.no_grad():
        drafter.layers[0].self_attn.o_proj.weight.zero_()
    noise, context = block_and_context(drafter)
    for position in range(5):
        changed = noise.clone()
        changed[:, position] += 1.0
        moved = (drafter(noise, context).last_hidden_state != drafter(changed, context).last_hidden_state).any(-1)[0]
        assert moved.nonzero()[:, 0].tolist() == [p for p in range(position, position + 3) if p < 5]


# ---------------------------------------------------------------------------------------------------------- the walk


class Scores:
    """A head whose scores are given."""

    looks_back = False

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, hidden_states):
        return Candidates(self.logits)


def scored(batch: int = 2, length: int = 3, vocab: int = 11, **fields):
    """A selector's head over random scores: (head, hidden states, scores, anchors)."""
    torch.manual_seed(3)
    drafter = tiny_drafter(vocab_size=vocab, mask_token_id=1, **SELECTOR | {"selector_top_k": 4} | fields)
    logits, hidden = 2 * torch.randn(batch, length, vocab), torch.randn(batch, length, 32)
    return PathHead(Scores(logits), drafter.candidate_selector), hidden, logits, torch.tensor([[2], [7]])[:batch]


def pair_score(selector, hidden, previous: int, token: int) -> float:
    gate = selector.hidden_projection.weight @ hidden
    return float((selector.predecessor_codebook[previous] * gate * selector.successor_codebook[token]).sum())


@pytest.mark.parametrize("noisy", (False, True))
@torch.no_grad()
def test_a_walk_takes_the_best_candidate_behind_the_one_before(noisy):
    """Against an explicit loop. When sampling, candidates and choice see the processors and noise that the target will choose with."""
    head, hidden, logits, anchors = scored()
    text = TokenBuffer(torch.zeros(2, 4, dtype=torch.long), 0)
    sampler, noise, temperature = MostLikely, torch.zeros(2, 3, 11), 1.0
    if noisy:
        noises = [GumbelNoise(seed, 4, 5, torch.device("cpu")) for seed in (1, 2)]
        noise, temperature = torch.stack([each.at(4, 3, 11) for each in noises]), 0.7
        warpers = [logits_process.TemperatureLogitsWarper(temperature), logits_process.TopKLogitsWarper(6)]
        sampler = Sampler(logits_process.LogitsProcessorList(warpers), text, noises, 11, ragged=False)
    expected = []
    for row in range(2):
        previous, path = int(anchors[row]), []
        for k in range(3):
            alone = logits[row, k] / temperature + noise[row, k]
            kept = logits[row, k].topk(6).indices.tolist() if noisy else range(11)  # by top-k
            shortlist = sorted(kept, key=alone.tolist().__getitem__)[-4:]
            pairs = {v: pair_score(head.pairs, hidden[row, k], previous, v) for v in shortlist}
            scores = {v: float(alone[v]) + pair / temperature for v, pair in pairs.items()}
            previous = max(scores, key=scores.get)
            path.append(previous)
        expected.append(path)
    assert walk(head, head(hidden), anchors, sampler).tokens.tolist() == expected
    assert logits.argmax(-1).tolist() != expected


def test_all_edges_at_once_are_those_of_single_tokens():
    """What a tree asks for: previous tokens (n, P) with candidates (n, C) give (n, P, C)."""
    head, hidden, _, _ = scored(batch=1)
    candidates = head(hidden).top(4)
    previous = torch.arange(11)[None, None].expand(1, 3, -1)
    edges = head.follow(candidates, hidden, previous)
    assert edges.logits.shape == edges.ids.shape == (1, 3, 11, 4)
    for token in range(11):
        alone = head.follow(candidates, hidden, torch.full((1, 3, 1), token)).logits[:, :, 0]
        torch.testing.assert_close(edges.logits[:, :, token], alone)


@torch.no_grad()
def test_a_tree_scores_each_candidate_behind_each_of_the_position_before():
    head, hidden, logits, anchors = scored(batch=1)
    text = TokenBuffer(torch.zeros(1, 4, dtype=torch.long), 0)
    sampler = Sampler(logits_process.LogitsProcessorList(), text, None, 11, ragged=False)
    ids, (first, rest) = edges(head, head(hidden), anchors, sampler, 4)
    for k in range(3):
        for p, previous in enumerate([int(anchors[0])] if k == 0 else ids[k - 1].tolist()):
            pairs = [pair_score(head.pairs, hidden[0, k], previous, v) for v in ids[k].tolist()]
            expected = (CALIBRATION * (logits[0, k, ids[k]] + torch.tensor(pairs))).log_softmax(-1)
            torch.testing.assert_close((first if k == 0 else rest[k - 1])[p], expected)


def test_a_selector_that_says_nothing_takes_the_most_likely_tokens():
    head, hidden, logits, anchors = scored(selector_top_k=11)
    with torch.no_grad():
        head.pairs.successor_codebook.zero_()
    assert walk(head, head(hidden), anchors, MostLikely).tokens.equal(logits.argmax(-1))


def test_fresh_parts_draft_bit_for_bit_the_same():
    target, plain = tiny_target("llama"), tiny_drafter()
    fresh = DFlashDraftModel(tiny_config(**PARTS["both"])).eval()
    fresh.load_state_dict(plain.state_dict(), strict=False)
    for call in CALLS.values():
        drafted = []
        for drafter in (plain, fresh):
            propose, tokens = drafter.proposer, []

            def noting(target, propose=propose, tokens=tokens):
                proposer = propose(target)
                run = proposer.propose

                def noted(*args):
                    draft = run(*args)
                    tokens.append(draft.tokens.tolist())
                    return draft

                proposer.propose = noted
                return proposer

            drafter.proposer = noting
            torch.manual_seed(0)
            target.generate(prompt_of(8), assistant_model=drafter, max_new_tokens=24, **call)
            del drafter.proposer
            drafted.append(tokens)
        assert drafted[0] == drafted[1] and len(drafted[0]) > 4


# ---------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("call", CALLS)
def test_the_text_is_that_of_plain_generate(call, kind):
    """One sequence and a batch, which is ragged. A sampled text is that of the same seed without draft tokens."""
    target, drafter = tiny_target("llama"), tiny_drafter(**PARTS["both"])
    for inputs in ({"input_ids": prompt_of(8)}, padded_batch()):
        call_of = {**inputs, **CALLS[call], "max_new_tokens": 12}
        sampled, texts = call_of["do_sample"], []
        for num_draft in (0, 4):
            torch.manual_seed(5)
            if sampled or num_draft:
                texts.append(target.generate(**call_of, assistant_model=drafter, num_assistant_tokens=num_draft))
            else:
                texts.append(target.generate(**call_of))
            drafter = scripted(drafter, kind, texts[0])
        assert texts[1].equal(texts[0])
        speculation = drafter.last_speculation
        assert speculation.num_drafted and (kind == "random" or speculation.num_accepted)
        if kind == "oracle":
            assert speculation.num_accepted == speculation.num_drafted


@pytest.mark.parametrize("call", ("greedy", "sampled"))
def test_a_tree_gives_the_same_text(call):
    target, drafter = tiny_target("llama"), tiny_drafter(**PARTS["both"])
    texts = []
    for trees in ({"num_assistant_tokens": 0}, {"num_tree_nodes": 9}):
        torch.manual_seed(5)
        texts.append(target.generate(prompt_of(8), **CALLS[call], max_new_tokens=12, assistant_model=drafter, **trees))
    assert texts[0].equal(texts[1]) and drafter.last_speculation.num_drafted
