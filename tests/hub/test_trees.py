"""Draft trees: whatever is drafted, and in whatever shape, the text is the target's own."""

import itertools
import math

import pytest
import torch
import transformers
from dflash_hub import speculative_generate
from dflash_hub.decode_choice import GumbelNoise, Sampler
from dflash_hub.decode_state import TokenBuffer
from dflash_hub.drafter_draft import Draft
from dflash_hub.drafter_heads import Candidates
from dflash_hub.drafter_tree import best_first
from dflash_hub.target_cache import CacheRollback
from dflash_hub.target_model import CACHE
from dflash_hub.target_tree import MASK_FORMS, TreeShape, layer_types, tree_inputs
from helpers.families import tiny_family
from helpers.tiny import VOCAB, prompt_of, tiny_drafter, tiny_target
from helpers.trees import TREES, ScriptedTrees
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as lp

TARGETS = ("llama", "qwen3", "mistral", "gemma3_text")


def target_of(family: str, attention: str = "sdpa"):
    target = tiny_family(family)[0] if family == "gemma3_text" else tiny_target(family)
    target.set_attn_implementation(attention)
    return target


def vocab_of(target) -> int:
    return target.config.get_text_config().vocab_size


def written(target, ids, kind: str, plain, **call):
    """The text with scripted trees, its statistics and the proposer."""
    proposer = ScriptedTrees(plain[0].tolist(), kind, vocab_of(target))
    output, speculation = speculative_generate(
        target, proposer, input_ids=ids, num_assistant_tokens=4, num_tree_nodes=9, **call
    )
    return output, speculation, proposer


def assert_accepted(kind: str, speculation):
    """Hardly any, some or all of what the trees could hold was accepted."""
    counts = [*zip(speculation.accepted[0], speculation.drafted[0])][:-1]  # the last round may be cut by the text's end
    accepted, depth = sum(count for count, _ in counts), sum(depth for _, depth in counts)
    if kind == "random":
        assert accepted <= 0.2 * depth
    elif kind == "half-right":
        assert 0 < accepted < depth and speculation.branched_rounds
    else:
        assert all(count == depth for count, depth in counts) and speculation.branched_rounds


# ------------------------------------------------------------------------------------------------------------------
# The pass.


@pytest.mark.parametrize("attention", ("sdpa", "eager"))
@pytest.mark.parametrize("family", TARGETS)
def test_the_logits_of_every_node_are_those_of_its_path(family, attention):
    """Below, at and above the window of 8: positions by depth, and only ancestors seen."""
    target, tokens, parents = target_of(family, attention), [5, 9, 5, 11, 7, 3, 8], [-1, -1, 0, 1, 1, 4, 2]
    shape = TreeShape(parents)
    for held in (1, 6, 7, 8, 9, 20):
        ids = prompt_of(held + 1) % vocab_of(target)
        cache = transformers.DynamicCache(config=target.config)
        cache.activate_past_recording()
        with torch.no_grad():
            target(ids[:, :held], **{CACHE: cache})
            positions = {"position_ids": torch.arange(held, held + 8)[None]}
            several = len(set(layer_types(target, cache))) > 1
            form = MASK_FORMS[not several]
            inputs = tree_inputs(target, cache, shape, held, positions, None, form)
            assert inputs["position_ids"].tolist() == [[held + depth for depth in shape.depths]]
            block = torch.cat([ids[:, held:], torch.tensor([tokens])], dim=1)
            logits = target(block, **inputs, **{CACHE: cache}).logits
            for node in range(len(tokens)):
                path, at = [], node
                while at >= 0:
                    path.insert(0, tokens[at])
                    at = parents[at]
                alone = target(torch.cat([ids, torch.tensor([path])], dim=1)).logits[:, -1]
                torch.testing.assert_close(logits[:, node + 1], alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("family", TARGETS)
def test_the_cache_goes_on_from_any_path(family, static):
    """After each path of a tree is kept, the next pass equals a cold run."""
    target, tokens, parents = target_of(family), [5, 9, 5, 11, 7], [-1, -1, 0, 1, 1]
    shape, rows = TreeShape(parents), [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]
    for held, path in itertools.product((3, 7, 12), rows):
        ids = prompt_of(held + 1) % vocab_of(target)
        kind = transformers.StaticCache if static else transformers.DynamicCache
        cache = kind(config=target.config, **({"max_cache_len": 40} if static else {}))
        with torch.no_grad():
            target(ids[:, :held], **{CACHE: cache})
            rollback = CacheRollback(cache, target)
            positions = {"position_ids": torch.arange(held, held + 6)[None]}
            several = len(set(layer_types(target, cache))) > 1
            inputs = tree_inputs(target, cache, shape, held, positions, None, MASK_FORMS[not several])
            block = torch.cat([ids[:, held:], torch.tensor([tokens])], dim=1)
            with rollback.verifying():
                target(block, **inputs, **{CACHE: cache})
            if path != [*range(len(path))]:
                rollback.gather(6, path, held)
            rollback.commit(6, [len(path)])
            behind = torch.tensor([[13]])
            at = {"position_ids": torch.tensor([[held + len(path)]])}
            logits = target(behind, **at, **{CACHE: cache}).logits
            text = torch.cat([ids[:, :held], block[:, path], behind], dim=1)
            torch.testing.assert_close(logits[:, -1], target(text).logits[:, -1], atol=2e-5, rtol=2e-5)


# ------------------------------------------------------------------------------------------------------------------
# The text.


@pytest.mark.parametrize("cache", (None, "static"))
@pytest.mark.parametrize("kind", (*TREES, "chain", "empty"))
@pytest.mark.parametrize("family", TARGETS)
def test_greedy_text_is_that_of_generate(family, kind, cache):
    target, call = target_of(family), {"do_sample": False, "max_new_tokens": 24, "cache_implementation": cache}
    ids = prompt_of(7) % vocab_of(target)
    plain = target.generate(ids, **call)
    text, speculation, proposer = written(target, ids, kind, plain, **call)
    assert torch.equal(text, plain)
    if kind in TREES:
        assert_accepted(kind, speculation)
    elif kind == "chain":
        assert speculation.num_accepted == speculation.num_drafted > 8 and not speculation.branched_rounds
    else:
        assert set(speculation.accepted[0]) == {0}
    with torch.no_grad():  # the hidden states of the path, and of no other branch
        states = target(plain[:, :-1], output_hidden_states=True).hidden_states[2][0]
    read = torch.cat(proposer.states)
    torch.testing.assert_close(read, states[: len(read)], atol=1e-4, rtol=1e-4)


@pytest.mark.slow  # it compiles
@pytest.mark.parametrize("kind", TREES)
def test_flex_attention_reads_trees(kind):
    target, call = target_of("llama", "flex_attention"), {"do_sample": False, "max_new_tokens": 24}
    plain = target.generate(prompt_of(7), **call)
    text, speculation, _ = written(target, prompt_of(7), kind, plain, **call)
    assert torch.equal(text, plain)
    assert_accepted(kind, speculation)


class CountsCalls(LogitsProcessor):
    """Keeps state: forbids what it has seen as the last token at every third call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores.index_fill(1, ids[0, -1:], -torch.inf) if self.calls % 3 == 0 else scores


CALLS = {
    "top-p": {"top_p": 0.8, "temperature": 1.3},
    "penalty": {"repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "min length": {"min_new_tokens": 9, "eos_token_id": [*range(30, 50)]},
    "end tokens": {"eos_token_id": [*range(30, 36)]},
    "stop with length": {"max_new_tokens": 10},
    "stateful": {},
}


@pytest.mark.parametrize("do_sample", (False, True))
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", CALLS)
def test_any_call_gives_the_text_without_drafts(name, kind, do_sample):
    """End tokens and length limits inside a tree, and processors that look at the text: of each node its own path."""
    target, ids = tiny_target("llama"), prompt_of(9)
    call = {"do_sample": do_sample, "max_new_tokens": 24, "pad_token_id": 0} | CALLS[name]

    def own():
        return {"logits_processor": LogitsProcessorList([CountsCalls()])} if name == "stateful" else {}

    torch.manual_seed(3)
    empty = ScriptedTrees([], "random", VOCAB)
    plain, _ = speculative_generate(target, empty, input_ids=ids, num_assistant_tokens=0, **call, **own())
    if not do_sample:
        assert torch.equal(plain, target.generate(ids, **call, **own()))
    torch.manual_seed(3)
    text, speculation, _ = written(target, ids, kind, plain, **call, **own())
    assert torch.equal(text, plain)
    if plain.shape[1] > 9 + 8:
        assert_accepted(kind, speculation)


@pytest.mark.parametrize("do_sample", (False, True))
@pytest.mark.parametrize("kind", TREES)
def test_what_is_returned_beside_the_text(kind, do_sample):
    target, ids = target_of("gemma3_text"), prompt_of(9)
    call = {"do_sample": do_sample, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    call |= {"output_logits": True, "output_hidden_states": True}
    torch.manual_seed(0)
    plain, _ = speculative_generate(
        target, ScriptedTrees([], "random", VOCAB), input_ids=ids, num_assistant_tokens=0, **call
    )
    torch.manual_seed(0)
    found, _, _ = written(target, ids, kind, plain.sequences, **call)
    assert torch.equal(found.sequences, plain.sequences) and len(found.speculation.nodes[0]) > 1
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name), atol=1e-4, rtol=1e-4)
    assert len(found.hidden_states) == len(plain.hidden_states)
    for mine, theirs in zip(found.hidden_states, plain.hidden_states):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TREES)
def test_a_passed_cache_holds_the_path(kind):
    """Chat turns: the next call goes on from the cache that trees were verified in."""
    target, ids = tiny_target("mistral"), prompt_of(11)
    cache = transformers.DynamicCache(config=target.config)
    cache.activate_past_recording()
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    text, _, _ = written(target, ids, kind, plain, do_sample=False, max_new_tokens=20, **{CACHE: cache})
    assert torch.equal(text, plain) and cache.get_seq_length() == plain.shape[1] - 1
    longer = torch.cat([text, prompt_of(4)], dim=1)
    expected = target.generate(longer, do_sample=False, max_new_tokens=10)
    assert torch.equal(target.generate(longer, do_sample=False, max_new_tokens=10, **{CACHE: cache}), expected)


@pytest.mark.parametrize("do_sample", (False, True))
def test_a_drafter_drafts_trees(do_sample):
    """Through the hook: trees from the drafter's own candidates, with top-p, and padding on the left."""
    target, drafter, ids = tiny_target("llama"), tiny_drafter(num_tree_nodes=11), prompt_of(9)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    call = {"do_sample": do_sample, "max_new_tokens": 20, "attention_mask": (padded != 0).long(), "top_p": 0.9}
    torch.manual_seed(1)
    plain = target.generate(padded, assistant_model=drafter, num_assistant_tokens=0, **call)
    torch.manual_seed(1)
    assert torch.equal(target.generate(padded, assistant_model=drafter, **call), plain)
    speculation = drafter.last_speculation
    assert speculation.nodes[0][0] == 11 and max(speculation.drafted[0]) <= 4


class NotFinite(ScriptedTrees):
    """Knows the text, and says that its logits were not finite."""

    def propose(self, anchor, plan, sampler) -> Draft:
        tokens = super().propose(anchor, plan, sampler).tokens
        return Draft(tokens, finite=torch.zeros_like(tokens, dtype=torch.bool))


def test_a_token_of_logits_that_are_not_finite_never_counts_as_agreement():
    target, ids = tiny_target("llama"), prompt_of(9)
    plain = target.generate(ids, do_sample=False, max_new_tokens=12)
    proposer = NotFinite(plain[0].tolist(), "oracle", VOCAB)
    text, speculation = speculative_generate(
        target, proposer, input_ids=ids, num_assistant_tokens=4, do_sample=False, max_new_tokens=12
    )
    assert torch.equal(text, plain) and speculation.stopped_drafting
    assert speculation.num_drafted == 4 and speculation.num_accepted == 0


# ------------------------------------------------------------------------------------------------------------------
# Building.


def test_the_tree_is_the_best_one():
    """Against all trees of a size, closed under parents, over 3 positions of 4 candidates."""
    log_probs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)
    log_probs = log_probs.sort(dim=-1, descending=True).values.tolist()
    nodes = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]
    weight = {path: math.exp(sum(log_probs[i][rank] for i, rank in enumerate(path))) for path in nodes}

    def trees(size: int, tree: frozenset = frozenset()):
        found = {tree}
        for _ in range(size):
            found = {t | {n} for t in found for n in nodes if n not in t and (len(n) == 1 or n[:-1] in t)}
        return found

    whole = best_first(log_probs, 84)
    for size in (1, 2, 3, 4):
        depths, ranks, parents, scores = best_first(log_probs, size)
        paths = []
        for rank, parent in zip(ranks, parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        best = max(sum(weight[path] for path in tree) for tree in trees(size))
        assert sum(weight[path] for path in paths) == pytest.approx(best)
        assert [math.exp(score) for score in scores] == pytest.approx([weight[path] for path in paths])
        assert [len(path) - 1 for path in paths] == depths
        assert (depths, ranks, parents) == tuple(part[:size] for part in whole[:3])  # nested
    assert len(whole[0]) == 84 and [*whole[3]] == sorted(whole[3], reverse=True)


def test_candidates_may_depend_on_the_token_before():
    """Edges (n, P, C): the second position is scored behind each candidate of the first."""
    edges = [[[math.log(0.6), math.log(0.4)]], [[math.log(0.1), math.log(0.9)], [math.log(0.5), math.log(0.5)]]]
    depths, ranks, parents, scores = best_first(edges, 4)
    assert list(zip(depths, ranks, parents)) == [(0, 0, -1), (1, 1, 0), (0, 1, -1), (1, 0, 2)]
    assert math.exp(scores[1]) == pytest.approx(0.54)


def test_expected_tokens_are_right_where_the_drafter_is():
    """Targets that choose with the drafter's own distribution accept as many tokens as the scores add up to."""
    generator, vocab, depth = torch.Generator().manual_seed(0), 12, 3
    logits = torch.randn(depth, vocab, generator=generator) * 2
    text = TokenBuffer(torch.zeros(1, 1, dtype=torch.long), None)
    sampler = Sampler(LogitsProcessorList(), text, None, vocab, ragged=False)
    ids, weights = sampler.rank(
        Candidates(logits[None] / 0.6), vocab
    )  # undoes the calibration: these are the true ones
    draft = Draft.of_tree(ids, weights.tolist(), 10)
    expected = sum(math.exp(score) for score in draft.scores)
    probabilities, total, tries = logits.softmax(-1), 0, 4000
    for drawn in torch.multinomial(probabilities, tries, replacement=True, generator=generator).T.tolist():
        at: int | None = 0
        for token in drawn:
            at = draft.child(draft.tokens[0].tolist(), at, token)
            if at is None:
                break
            total += 1
    assert total / tries == pytest.approx(expected, rel=0.06)


def test_the_noise_belongs_to_the_weights():
    """When sampling, the likeliest node of each position is the token that the drafter would choose with the target's noise."""
    text, noise = TokenBuffer(torch.zeros(1, 4, dtype=torch.long), None), [GumbelNoise(5, 4, 9, torch.device("cpu"))]
    logits = torch.randn(1, 5, 30, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(LogitsProcessorList([lp.TemperatureLogitsWarper(0.7)]), text, noise, 30, ragged=False)
    ids, _ = sampler.rank(Candidates(logits), 6)
    assert torch.equal(ids[None, :, 0], sampler.propose(Candidates(logits))[0])


# ------------------------------------------------------------------------------------------------------------------
# What is not supported.


def test_what_trees_do_not_support_is_named():
    drafter = tiny_drafter()

    def call(target, ids=None, **settings):
        ids = prompt_of(9) if ids is None else ids
        settings = {"num_tree_nodes": 7, "max_new_tokens": 12, "do_sample": False} | settings
        return target.generate(ids, assistant_model=drafter, **settings)

    llama = tiny_target("llama")
    with pytest.raises(ValueError, match="num_tree_nodes=7.*a batch of 2"):
        call(llama, prompt_of(9).repeat(2, 1))
    with pytest.raises(ValueError, match="output_attentions"):
        call(tiny_target("llama", attn_implementation="eager"), output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="must be a number of nodes.*'many'"):
        call(llama, num_tree_nodes="many")
    target, drafter = tiny_family("qwen3_5")
    with pytest.raises(ValueError, match="LinearAttention"):
        call(target)
