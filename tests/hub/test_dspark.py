"""DSpark: its layout, its Markov heads, and its confidence, which sets how much of a draft is verified."""

import random
from statistics import mean

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.decode_calibration import Calibration, log_odds
from dflash_hub.decode_choice import GumbelNoise, Sampler
from dflash_hub.decode_confidence import ConfidentLength
from dflash_hub.decode_schedule import DraftSchedule, FixedSchedule
from dflash_hub.decode_state import TokenBuffer
from dflash_hub.drafter_candidates import DFlashCandidateGenerator, DFlashProposer
from dflash_hub.drafter_draft import Draft
from dflash_hub.drafter_heads import TargetHead
from dflash_hub.drafter_paths import MostLikely, path_head, walk
from dflash_hub.target_ranks import TargetRanks
from helpers.families import padded_batch
from helpers.scripted import scripted
from helpers.tiny import DSPARK, SELECTOR, prompt_of, tiny_config, tiny_drafter, tiny_target
from torch import sigmoid, tanh
from transformers.generation import logits_process

CALLS = {
    "greedy": {"do_sample": False},
    "greedy, static cache": {"do_sample": False, "cache_implementation": "static"},
    "greedy, processors of the text": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0},
    "sampled, processors of the text": {"do_sample": True, "repetition_penalty": 1.2, "temperature": 1.1},
}


ALONE = TargetRanks(tiny_target("llama"), 1)


def small(kind: str, **fields):
    """A drafter of few tokens, all of which are candidates, and a head over a random LM head."""
    torch.manual_seed(3)
    drafter = tiny_drafter(vocab_size=11, mask_token_id=1, **DSPARK[kind] | fields)
    head = torch.nn.Linear(32, 11, bias=False)
    return drafter, path_head(drafter, TargetHead(drafter.config, head)), head


def by_hand(drafter, logits, hidden, anchor: int, noise, temperature: float):
    """Walk a block (n, V) by the formulas of the method, one position after the other: (tokens, confidences)."""
    markov, confidence, kind = drafter.markov_head, drafter.confidence_head, drafter.config.markov_head_type
    previous, state, tokens, sure = anchor, torch.zeros(4), [], []
    for u, h, g in zip(logits, hidden, noise):
        e = markov.markov_w1.weight[previous]
        if kind == "vanilla":
            latent = e
        elif kind == "gated":
            latent = sigmoid(markov.gate_proj.weight @ torch.cat([h, e]) + markov.gate_proj.bias) * e
        else:
            i, c, o = (markov.joint_proj.weight @ torch.cat([state, e, h]) + markov.joint_proj.bias).split(4)
            state = sigmoid(i) * state + (1 - sigmoid(i)) * tanh(c)
            latent = tanh(o)
        scores = (u + markov.markov_w2.weight @ latent) / temperature + g
        sure.append(float(sigmoid(confidence.proj.weight[0] @ torch.cat([h, e]) + confidence.proj.bias)))
        previous = int(scores.argmax())
        tokens.append(previous)
    return tokens, sure


@pytest.mark.parametrize("noisy", (False, True))
@pytest.mark.parametrize("kind", DSPARK)
@torch.no_grad()
def test_a_walk_and_its_confidence_by_hand(kind, noisy):
    """When sampling, logits are divided by the temperature after the Markov head's are added, and the target's noise is on top."""
    drafter, head, lm_head = small(kind)
    hidden, anchors = torch.randn(2, 5, 32), torch.tensor([[2], [7]])
    sampler, noise, temperature = MostLikely, torch.zeros(2, 5, 11), 1.0
    if noisy:
        noises = [GumbelNoise(seed, 4, 6, torch.device("cpu")) for seed in (1, 2)]
        noise, temperature = torch.stack([each.at(4, 5, 11) for each in noises]), 0.7
        text = TokenBuffer(torch.zeros(2, 4, dtype=torch.long), 0)
        warpers = logits_process.LogitsProcessorList([logits_process.TemperatureLogitsWarper(temperature)])
        sampler = Sampler(warpers, text, noises, 11, ragged=False)
    draft, likeliest = walk(head, head(hidden), anchors, sampler), lm_head(hidden) + noise
    for row in range(2):
        tokens, sure = by_hand(drafter, lm_head(hidden[row]), hidden[row], int(anchors[row]), noise[row], temperature)
        assert draft.tokens[row].tolist() == tokens != likeliest[row].argmax(-1).tolist()
        torch.testing.assert_close(draft.confidence[row].exp(), torch.tensor(sure))


@torch.no_grad()
def test_without_a_markov_head_confidence_is_of_the_position_alone():
    drafter, head, _ = small("vanilla", markov_rank=None, markov_head_type=None, confidence_head="hidden")
    hidden, proj = torch.randn(2, 5, 32), drafter.confidence_head.proj
    expected = sigmoid(hidden @ proj.weight[0] + proj.bias)
    assert not head.looks_back
    torch.testing.assert_close(head(hidden).at(slice(1, 4)).confidence.exp(), expected[:, 1:4])
    both = small("vanilla", confidence_head="hidden")[1]
    draft = walk(both, both(hidden), torch.tensor([[2], [7]]), MostLikely)
    torch.testing.assert_close(
        draft.confidence.exp(), sigmoid(hidden @ both.confidence.proj.weight[0] + both.confidence.proj.bias)
    )


@pytest.mark.parametrize("from_anchor", (False, True))
@torch.no_grad()
def test_the_layout_says_which_position_drafts_first(from_anchor):
    """One token off is a drafter that runs and accepts nothing: position 0 drafts the first token, or none."""
    target, drafter = tiny_target("llama"), tiny_drafter(sample_from_anchor=from_anchor)
    proposer = DFlashProposer(drafter, target)
    assert proposer.max_draft_tokens == (5 if from_anchor else 4) == drafter.config.drafts_per_block
    embed, ids = target.get_input_embeddings(), torch.tensor([[3, 96, 96, 96, 96]])
    context = torch.randn(1, 7, 96)
    logits = target.get_output_embeddings()(drafter(embed(ids), context).last_hidden_state)
    found = proposer.candidates(ids[:, :1], [*context.split(32, dim=-1)], 3).logits
    torch.testing.assert_close(found, logits[:, :3] if from_anchor else logits[:, 1:4])


def test_fresh_heads_change_nothing():
    """W2 starts at zero, so a fresh drafter drafts what its twin without a Markov head does."""
    for kind in DSPARK:
        fresh = DFlashDraftModel(tiny_config(**DSPARK[kind]))
        scores, _ = fresh.markov_head(torch.randn(2, 32), torch.tensor([[3, 4], [5, 6]]), None)
        assert scores.shape == (2, 2, 97) and not scores.any() and fresh.markov_head.markov_w1.weight.any()


@pytest.mark.parametrize("kind", DSPARK)
@pytest.mark.parametrize("call", CALLS)
def test_the_text_is_that_of_plain_generate(call, kind):
    """One sequence and a ragged batch, with a fixed and an adaptive draft length; an oracle's whole block is accepted."""
    target, drafter = tiny_target("llama"), tiny_drafter(**DSPARK[kind])
    for inputs in ({"input_ids": prompt_of(8)}, padded_batch()):
        call_of = {**inputs, **CALLS[call], "max_new_tokens": 13}
        torch.manual_seed(5)
        if call_of["do_sample"]:
            expected = target.generate(**call_of, assistant_model=drafter, num_assistant_tokens=0)
        else:
            expected = target.generate(**call_of)
        for drafts, num_draft in (("half-right", 5), ("oracle", 5), ("half-right", "auto"), ("random", "auto")):
            torch.manual_seed(5)
            script = scripted(drafter, drafts, expected)
            text = target.generate(**call_of, assistant_model=script, num_assistant_tokens=num_draft)
            assert text.equal(expected)
            speculation = script.last_speculation
            if num_draft == 5:
                assert speculation.num_accepted and max(map(max, speculation.drafted)) == 5
                if drafts == "oracle":
                    assert speculation.num_accepted == speculation.num_drafted


@pytest.mark.parametrize("call", ("greedy", "sampled"))
def test_trees_of_vanilla_and_gated_heads(call):
    target = tiny_target("llama")
    for kind in ("vanilla", "gated"):
        drafter, texts = tiny_drafter(**DSPARK[kind]), []
        for trees in ({"num_assistant_tokens": 0}, {"num_tree_nodes": 9}):
            torch.manual_seed(5)
            texts.append(
                target.generate(prompt_of(8), **CALLS[call], max_new_tokens=12, assistant_model=drafter, **trees)
            )
        assert texts[0].equal(texts[1]) and drafter.last_speculation.nodes


def test_a_recurrent_head_drafts_chains_only():
    target, drafter = tiny_target("llama"), tiny_drafter(**DSPARK["rnn"])
    with pytest.raises(ValueError, match="`num_tree_nodes=9` asks for draft trees.*Markov head of kind 'rnn'"):
        target.generate(prompt_of(8), assistant_model=drafter, num_tree_nodes=9)
    target.generate(prompt_of(8), assistant_model=drafter, num_tree_nodes="auto", max_new_tokens=4)
    assert any("chains only" in note and "'rnn'" in note for note in drafter.last_speculation.notes)


def test_transformers_own_loop():
    """It takes position 0 for the anchor's own, so a drafter that drafts there is refused; our generator for it is right."""
    target, drafter = tiny_target("llama"), tiny_drafter(**DSPARK["vanilla"])
    with pytest.raises(ValueError, match="`sample_from_anchor`"):
        target.generate(prompt_of(8), assistant_model=drafter, speculation_type="dflash", max_new_tokens=4)
    generator = DFlashCandidateGenerator(drafter, target, num_draft_tokens=5)
    with torch.no_grad():
        outputs = target(prompt_of(8), output_hidden_states=True)
        ids = torch.cat([prompt_of(8), torch.tensor([[5]])], dim=1)
        drafted, _ = generator.get_candidates(ids, {}, outputs)
    assert drafted.shape[1] == 9 + 5


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"markov_rank": 0}, "`markov_rank` must be a positive integer"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, "`markov_head_type` must be one of"),
        ({"markov_head_type": "rnn"}, "there is no `markov_rank`"),
        ({"confidence_head": "hidden+markov"}, r"must be one of \[None, 'hidden'\] without a Markov head"),
        ({"sample_from_anchor": 1}, "`sample_from_anchor` must be one of"),
        ({"num_draft_tokens": 5}, r"must be 'auto' or in \[1, 4\]"),
        (SELECTOR | DSPARK["rnn"], "parts of two methods"),
    ),
)
def test_a_config_that_makes_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


# ---------------------------------------------------------------------------------------------------- its confidence


def simulated(states, confident: bool, seed: int, tokens: int = 1200, cost: float = 0.35) -> float:
    """Seconds a token of drafts that are easy or hard as a whole; a token more in a pass costs `cost` of the first.

    Args:
        states: (acceptance, generator) to the acceptance that the drafter states.
    """
    generator, clock, position = random.Random(seed), 0.0, 0
    schedule = DraftSchedule(8)
    lengths = ConfidentLength(schedule, ALONE, fixed_lengths=False)
    while position < tokens:
        acceptance = generator.choice((0.95, 0.25))
        wanted = lengths.plan(schedule.next(1, position))
        drafted = 0
        if wanted:
            stated = [[log_odds(torch.tensor(states(acceptance, generator)).log().item()) for _ in range(wanted)]]
            confidence = torch.tensor(stated).sigmoid().log()
            draft = Draft(torch.zeros(1, wanted, dtype=torch.long), confidence=confidence if confident else None)
            drafted = len(lengths.cut(draft, [0]))
        accepted = 0
        while accepted < drafted and generator.random() < acceptance:
            accepted += 1
        seconds = 1 + cost * drafted, 0.1 * bool(drafted)
        schedule.observe(drafted, [accepted], *seconds, 1, position)
        if drafted:
            lengths.observe([accepted], drafted)
        position += accepted + 1
        clock += sum(seconds)
    return clock / position


def test_a_sure_drafter_is_faster_and_one_that_guesses_no_slower():
    """Also where it is sure of too much. A drafter whose confidence says nothing is left to the counts."""
    seeds = range(6)
    counted = mean(simulated(lambda a, _: a, False, seed) for seed in seeds)
    for states, most in (
        (lambda a, _: a, 0.85),
        (lambda a, _: a**0.3, 0.85),
        (lambda _, generator: generator.uniform(0.1, 0.99), 1.02),
        (lambda *_: 0.6, 1.001),
    ):
        assert mean(simulated(states, True, seed) for seed in seeds) <= most * counted


def test_what_a_calibration_learns():
    generator, calibration = random.Random(0), Calibration()
    for _ in range(400):
        stated = [generator.gauss(1, 1) for _ in range(4)]
        accepted = 0
        while accepted < 4 and generator.random() < 1 / (1 + 2.718 ** (-0.5 * stated[accepted])):
            accepted += 1
        calibration.observe([stated], [accepted])
    assert 0.25 < calibration.slope < 0.85  # 0.5 of faded, thus fewer, rounds
    assert Calibration().slope == 0
    assert log_odds(float("nan")) == log_odds(float("-inf")) == -10 and log_odds(0.0) == 10
    assert abs(log_odds(torch.tensor(0.75).log().item()) - 1.0986) < 1e-3


def test_a_fixed_length_is_never_cut():
    confidence = torch.full((1, 5), -20.0)
    lengths = ConfidentLength(FixedSchedule(5), ALONE, fixed_lengths=False)
    assert len(lengths.cut(Draft(torch.zeros(1, 5, dtype=torch.long), confidence=confidence), [0])) == 5
