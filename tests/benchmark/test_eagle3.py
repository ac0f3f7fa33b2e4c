"""EAGLE-3 under our loop: what it scores is what its definition gives, and the text is the target's own."""

import re

import pytest
import torch
from dflash_hub import speculative_generate
from dflash_hub.benchmark.baselines.eagle3 import Eagle3Proposer
from dflash_hub.benchmark.baselines.eagle3_loading import load_eagle3, target_layers
from dflash_hub.decode_choice import GumbelNoise, Sampler
from dflash_hub.decode_state import TokenBuffer
from dflash_hub.drafter_draft import AcceptedTokens, Plan
from helpers.eagle3 import (
    LAYOUTS,
    bigram_target,
    features_of,
    knowing_head,
    stated_by,
    steps_of,
    tiny_head,
    write_head,
)
from helpers.tiny import DRAFTERS, VOCAB, prompt_of, tiny_target
from safetensors.torch import load_file, save_file
from transformers import LogitsProcessorList

LISTED = [*range(0, VOCAB, 2)]


class ScriptedEagle3(Eagle3Proposer):
    """Hands over tokens of known accuracy about `text` in place of its own, and remembers what it was asked and drafted itself."""

    def __init__(self, head, target, kind: str, text: torch.LongTensor):
        super().__init__(head, target, max_draft_tokens=4)
        self.kind, self.text, self.rounds = kind, text, []

    def propose(self, anchor, plan, sampler):
        draft = super().propose(anchor, plan, sampler)
        own, steps = draft.tokens.clone(), self.model.scored[-plan.num_draft_tokens :]
        self.rounds.append(([*sampler.text.lengths], own, steps))
        for row, start in enumerate(sampler.text.lengths):
            for i in range(len(draft)):
                right = int(self.text[row, start + i]) if start + i < self.text.shape[1] else 0
                wrong = self.kind == "half-right" and (start + i + row) % 3 == 1
                if self.kind != "random":
                    draft.tokens[row, i] = (right + 1) % VOCAB if wrong else right
        return draft


def assert_defined(proposer: ScriptedEagle3, head, target, text: torch.LongTensor, padding: list[int]):
    """Every step of every round scored what the definition gives on the text so far, from the target's hidden states of it."""
    for row, (hidden, ids) in enumerate(zip(padding, text)):
        ids = ids[hidden:]
        states = features_of(target, ids[None], head.options.target_layer_ids)
        for starts, own, steps in proposer.rounds:
            start = starts[row] - hidden
            if start > len(ids):
                continue
            before = [layer[: start - 1] for layer in states]
            expected = steps_of(
                head, target.get_input_embeddings(), before, ids[:start].tolist(), own[row, :-1].tolist()
            )
            found = [step[row, 0] for step in steps]
            torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=2e-4, rtol=2e-4)


# ------------------------------------------------------------------------------------------------------------------
# What is scored.


@pytest.mark.parametrize("chunk", (None, 3))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_step_of_every_round_is_what_the_definition_gives(kind, chunk):
    """After no, some and all accepted tokens: positions, features and the KV cache are those of a cold run."""
    target, head, ids = tiny_target("llama"), tiny_head(listed=LISTED), prompt_of(8)
    call = {"do_sample": False, "max_new_tokens": 20}
    plain = target.generate(ids, **call)
    proposer = ScriptedEagle3(head, target, kind, plain)
    text, speculation = speculative_generate(
        target, proposer, input_ids=ids, num_assistant_tokens=4, prefill_chunk_size=chunk, **call
    )
    assert torch.equal(text, plain)
    rounds = [*zip(speculation.accepted[0], speculation.drafted[0])][:-1]
    accepted, drafted = sum(a for a, _ in rounds), sum(d for _, d in rounds)
    assert {"random": accepted < 0.2 * drafted, "half-right": 0 < accepted < drafted, "oracle": accepted == drafted}[
        kind
    ]
    assert len(proposer.rounds) >= 4
    assert all(set(own.flatten().tolist()) <= set(LISTED) for _, own, _ in proposer.rounds)
    assert_defined(proposer, head, target, plain, [0])


def test_sequences_of_a_batch_keep_their_own_positions():
    """Two texts of different lengths, padded, that accept different numbers of tokens."""
    target, head = tiny_target("llama"), tiny_head()
    ids = torch.cat([prompt_of(9, 1), torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt_of(5, 2)], dim=1)])
    call = {"input_ids": ids, "attention_mask": (ids != 0).long(), "do_sample": False, "max_new_tokens": 16}
    plain = target.generate(**call)
    proposer = ScriptedEagle3(head, target, "half-right", plain)
    text, speculation = speculative_generate(target, proposer, num_assistant_tokens=4, **call)
    assert torch.equal(text, plain)
    assert speculation.accepted[0] != speculation.accepted[1] and len(proposer.rounds) >= 4
    assert_defined(proposer, head, target, plain, [0, 4])


@pytest.mark.parametrize(
    "options",
    (
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"qk_norm": True, "target_layer_ids": [0, 1, 2, 2]},
    ),
)
def test_options_change_what_their_definition_says(options):
    target, ids = tiny_target("llama"), prompt_of(8)
    plain = target.generate(ids, do_sample=False, max_new_tokens=12)
    head = tiny_head(**options)
    proposer = ScriptedEagle3(head, target, "half-right", plain)
    speculative_generate(target, proposer, input_ids=ids, num_assistant_tokens=3, do_sample=False, max_new_tokens=12)
    assert_defined(proposer, head, target, plain, [0])


def sampler_of(ids: torch.LongTensor, vocab: int, seed: int | None) -> Sampler:
    noises = None if seed is None else [GumbelNoise(seed, ids.shape[1], 9, torch.device("cpu"))]
    return Sampler(LogitsProcessorList(), TokenBuffer(ids, None), noises, vocab, ragged=False)


def prepared(head, target, ids: torch.LongTensor, **settings) -> Eagle3Proposer:
    """A proposer that has read all tokens of `ids` but the last, which is the anchor."""
    proposer = Eagle3Proposer(head, target, **settings)
    states = [layer[None] for layer in features_of(target, ids[:, :-1], head.options.target_layer_ids)]
    proposer.read(AcceptedTokens(ids[:, :-1], states))
    return proposer


@pytest.mark.parametrize("num_nodes", (1, 7, 16, 60))
def test_the_tree_is_eagle_2s(num_nodes):
    """Against a search without caches: the best beams of each level go on, and the best of all candidates are kept."""
    target, head, ids, beams, depth = tiny_target("llama"), tiny_head(listed=LISTED), prompt_of(6), 4, 4
    draft = prepared(head, target, ids, num_beams=beams).propose(
        ids[:, -1:], Plan(depth, num_nodes), sampler_of(ids, VOCAB, None)
    )
    states = features_of(target, ids[:, :-1], head.options.target_layer_ids)
    level, candidates = [((), 0.0)], []
    for _ in range(depth):
        children = []
        for path, score in level:
            logits = steps_of(head, target.get_input_embeddings(), states, ids[0].tolist(), [*path])[-1]
            values, columns = logits.log_softmax(-1).topk(beams)
            children += [
                ((*path, LISTED[column]), score + value) for value, column in zip(values.tolist(), columns.tolist())
            ]
        candidates += children
        level = sorted(children, key=lambda child: -child[1])[:beams]
    expected = sorted(candidates, key=lambda child: -child[1])[:num_nodes]
    paths: list[tuple] = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(paths) == min(num_nodes, beams + (depth - 1) * beams**2)
    assert {path: pytest.approx(score, abs=1e-4) for path, score in expected} == dict(zip(paths, draft.scores))
    assert draft.scores == sorted(draft.scores, reverse=True)


@pytest.mark.parametrize("seed", (None, 3))
def test_provisional_pairs_leave_the_cache(seed):
    """A draft, chain or tree, changes nothing for the next one."""
    target, head, ids = tiny_target("llama"), tiny_head(), prompt_of(6)
    for plan in (Plan(5), Plan(4, 16)):
        proposer = prepared(head, target, ids)
        proposer.propose(ids[:, -1:], plan, sampler_of(ids, VOCAB, seed))
        assert proposer.cache.get_seq_length() == ids.shape[1] - 1 == proposer.positions.shape[1]
    longer = torch.cat([ids, prompt_of(3, 4)], dim=1)
    states = [layer[None, 5:8] for layer in features_of(target, longer[:, :-1], head.options.target_layer_ids)]
    proposer.read(AcceptedTokens(longer[:, 5:8], states))
    again = proposer.propose(longer[:, -1:], Plan(4, 16), sampler_of(longer, VOCAB, seed))
    cold = prepared(head, target, longer).propose(longer[:, -1:], Plan(4, 16), sampler_of(longer, VOCAB, seed))
    assert torch.equal(again.tokens, cold.tokens) and again.parents == cold.parents


def test_the_likeliest_sampled_path_of_a_tree_is_the_chain():
    """Both know the noise of each position: a tree of one child a node is the chain that the draft model would sample."""
    target, head, ids = tiny_target("llama"), tiny_head(), prompt_of(6)
    chain = prepared(head, target, ids).propose(ids[:, -1:], Plan(5), sampler_of(ids, VOCAB, 3))
    tree = prepared(head, target, ids, num_beams=1).propose(ids[:, -1:], Plan(5, 5), sampler_of(ids, VOCAB, 3))
    assert torch.equal(chain.tokens, tree.tokens) and tree.parents == [-1, 0, 1, 2, 3]
    greedy = prepared(head, target, ids).propose(ids[:, -1:], Plan(5), sampler_of(ids, VOCAB, None))
    assert not torch.equal(chain.tokens, greedy.tokens)


# ------------------------------------------------------------------------------------------------------------------
# The text.

SHAPES = {"chain": {}, "tree 16": {"num_tree_nodes": 16}, "tree 60": {"num_tree_nodes": 60}}


SMALLER = sorted([*range(0, 32, 3), *range(1, 32, 3)])


@pytest.mark.parametrize("sampling", ({}, {"do_sample": True, "temperature": 0.8, "top_k": 12}))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "listed"), [*((kind, None) for kind in DRAFTERS), ("oracle", SMALLER)])
def test_text_is_that_of_the_target(kind, listed, shape, sampling):
    """A head that knows the target has all drafted tokens accepted, with the target's noise too; a wrong one hardly any."""
    target = bigram_target()
    head, ids = knowing_head(target, kind, listed), prompt_of(6) % 32
    call = {"do_sample": False, "max_new_tokens": 24} | sampling
    texts, spoken = [], []
    for settings in ({"num_assistant_tokens": 8, **SHAPES[shape]}, {"num_assistant_tokens": 0}):
        torch.manual_seed(11)
        text, speculation = speculative_generate(
            target, Eagle3Proposer(head, target), input_ids=ids, **settings, **call
        )
        texts.append(text)
        spoken.append(speculation)
    assert torch.equal(*texts)
    if not sampling:
        assert torch.equal(texts[0], target.generate(ids, **call))
    rounds = [*zip(spoken[0].accepted[0], spoken[0].drafted[0])][:-1]
    accepted, drafted = sum(a for a, _ in rounds), sum(d for _, d in rounds)
    if kind == "oracle" and not listed:
        assert rounds and (accepted == drafted if shape == "chain" else accepted >= 0.6 * drafted)
    elif kind == "random":
        assert accepted < 0.35 * drafted
    else:
        assert 0 < accepted < drafted


@pytest.mark.parametrize("cache", (None, "static"))
@pytest.mark.parametrize("num_nodes", (16, 60))
def test_trees_of_these_sizes_are_verified_on_any_cache(num_nodes, cache):
    target, ids = tiny_target("qwen3"), prompt_of(7)
    head, call = tiny_head(), {"do_sample": False, "max_new_tokens": 80, "cache_implementation": cache}
    plain = target.generate(ids, **call)
    call["stopping_criteria"] = [
        lambda text, scores: torch.tensor([text.shape[1] >= 20])
    ]  # there is room, and no need of it
    text, speculation = speculative_generate(
        target, Eagle3Proposer(head, target), input_ids=ids, num_assistant_tokens=8, num_tree_nodes=num_nodes, **call
    )
    assert torch.equal(text, plain[:, :20]) and set(speculation.nodes[0]) == {num_nodes}


# ------------------------------------------------------------------------------------------------------------------
# Checkpoints.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_as_they_were_written(layout, tmp_path):
    options = {"deepspec": {"qk_norm": True, "own_embedding": True, "target_layer_ids": [0, 1, 2]}}
    listed = None if layout == "deepspec" else LISTED
    flags = {"norm_output": True, "fc_norm": True} if layout in ("nemo", "speculators") else {}
    head = tiny_head(listed=listed, **options.get(layout, {}), **flags)
    target = tiny_target("llama")
    loaded = load_eagle3(str(write_head(tmp_path / "head", layout, head)), target, torch.float32)
    assert loaded.options == head.options and loaded.config.rope_parameters == head.config.rope_parameters
    found, written = loaded.state_dict(), head.state_dict()
    assert found.keys() == written.keys() and all(torch.equal(found[name], written[name]) for name in found)


def test_speculators_qwen3_layer_has_norms_of_queries_and_keys(tmp_path):
    head = tiny_head(listed=LISTED, qk_norm=True, norm_before_residual=True)
    loaded = load_eagle3(str(write_head(tmp_path / "head", "speculators", head)), tiny_target("llama"), torch.float32)
    assert loaded.options == head.options


@pytest.mark.parametrize(
    ("stated", "kind", "expected"),
    (
        ({}, "safeailab", [1, 17, 32]),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, "safeailab", [1, 17, 32]),
        ({"eagle_config": {"layer_ids": [2, 18, 33]}}, "safeailab", [1, 17, 32]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, "safeailab", [1, 15, 28]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "safeailab", [1, 17, 32]),
        ({"target_layer_ids": [1, 9, 17, 25, 33]}, "deepspec", [1, 9, 17, 25, 33]),
    ),
)
def test_target_layers_are_counted_as_their_field_counts(stated, kind, expected):
    assert target_layers(stated, kind, 36, "x") == expected


def test_what_reaches_fc_are_the_outputs_of_these_layers():
    """A target whose layer i gives i everywhere: the off-by-one is invisible in a text."""
    target, seen, ids = tiny_target("llama"), [], prompt_of(6)
    head = tiny_head(target_layer_ids=[0, 2])
    head.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for index, layer in enumerate(target.model.layers):
        layer.register_forward_hook(lambda module, args, output, index=index: torch.full_like(output, float(index)))
    speculative_generate(
        target, Eagle3Proposer(head, target), input_ids=ids, num_assistant_tokens=2, do_sample=False, max_new_tokens=4
    )
    assert seen and all(set(fed[..., :32].unique().tolist()) == {0.0} for fed in seen)
    assert all(set(fed[..., 32:].unique().tolist()) == {2.0} for fed in seen)


REFUSED = [
    ("specforge", {"parallel_drafting": True}, "`parallel_drafting` True"),
    ("specforge", {"num_hidden_layers": 2}, "`num_hidden_layers` 2"),
    ("specforge", {"norm_output": False}, "`norm_output` false"),
    ("specforge", {"architectures": ["LlamaForCausalLMEagle"]}, "no EAGLE-3 layout"),
    ("specforge", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "reads target layers [-1, 0, 1]"),
    ("specforge", {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, "expected ascending"),
    ("specforge", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 1, 2]}}, "RoPE of type 'mrope'"),
    ("specforge", {"hidden_size": 16}, "fuses 96 values"),
    ("specforge", {"intermediate_size": 40}, "of another shape: midlayer.mlp.down_proj.weight"),
    ("specforge", {"fc_norm": True}, "missing: fc_norm.0.weight"),
    ("modelopt", {"eagle_config": {"use_aux_hidden_state": False}}, "`eagle_config.use_aux_hidden_state` False"),
    ("modelopt", {"eagle_config": {"something_new": 1}}, "`eagle_config.something_new` 1"),
    ("modelopt", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "different target layers"),
    ("speculators", {"norm_before_residual": None}, "speculators takes that for false, vLLM for true"),
    ("speculators", {"speculators_model_type": "peagle"}, "kind 'peagle'"),
    ("speculators", {"norm_before_fc": True, "fc_norm": True}, "both `norm_before_fc` and `fc_norm`"),
    ("deepspec", {"target_layer_ids": None}, "does not state `target_layer_ids`"),
    ("deepspec", {"target_layer_ids": [0, 2, 3]}, "the last one's output"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "stated", "message"), REFUSED)
def test_what_is_not_read_is_refused_by_name(layout, stated, message, tmp_path):
    deepspec = {"qk_norm": True, "own_embedding": True} if layout == "deepspec" else {"listed": LISTED}
    folder, target = write_head(tmp_path / "head", layout, tiny_head(**deepspec), **stated), tiny_target("llama")
    with pytest.raises(ValueError, match=re.escape(message)):
        Eagle3Proposer(load_eagle3(str(folder), target, torch.float32), target).check(target)


def test_a_draft_vocabulary_is_offsets_and_must_agree_with_its_mask(tmp_path):
    """By hand, V 11 and L 4: token = index + offset. A token outside is never drafted."""
    target = tiny_target("llama", vocab_size=11)
    head = tiny_head(listed=[1, 4, 5, 9], fields={"vocab_size": 11})
    assert head.d2t.tolist() == [1, 3, 3, 6]
    folder = write_head(tmp_path / "head", "specforge", head)
    ids = prompt_of(6) % 11
    draft = prepared(load_eagle3(str(folder), target, torch.float32), target, ids).propose(
        ids[:, -1:], Plan(6, 20), sampler_of(ids, 11, 1)
    )
    assert set(draft.tokens[0].tolist()) <= {1, 4, 5, 9} and len(draft) == 20
    tensors = load_file(folder / "model.safetensors")
    for name, broken, message in (
        ("d2t", torch.tensor([1, 4, 5, 9]), "different ones of 4"),
        ("t2d", torch.ones(11, dtype=torch.bool), "t2d marks 11 of 11"),
        ("midlayer.extra.weight", torch.zeros(2), "unknown: midlayer.extra.weight"),
        ("norm.weight", torch.full((32,), torch.nan), "norm.weight"),
    ):
        save_file(tensors | {name: broken}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_eagle3(str(folder), target, torch.float32)


def test_a_target_that_a_head_does_not_fit_is_refused():
    head = tiny_head()
    wider = tiny_target("llama", hidden_size=48)
    for other, message in (
        (wider, "hidden states of width 32, the target's have 48"),
        (tiny_target("llama", num_hidden_layers=3), "reads the outputs of layers"),
        (tiny_target("llama", vocab_size=90), "vocabulary of 97"),
    ):
        with pytest.raises(ValueError, match=message):
            speculative_generate(other, Eagle3Proposer(head, other), input_ids=prompt_of(5), max_new_tokens=4)
    embeds = tiny_target("llama")
    with pytest.raises(ValueError, match="pass `input_ids`"):
        speculative_generate(
            embeds, Eagle3Proposer(head, embeds), inputs_embeds=torch.randn(1, 5, 32), max_new_tokens=4, do_sample=False
        )


def test_frequencies_of_rope_are_the_heads_own_and_stay_in_float32(tmp_path):
    head = tiny_head(listed=LISTED)
    folder = write_head(tmp_path / "head", "specforge", head, rope_theta=500.0)
    loaded = load_eagle3(str(folder), tiny_target("llama", rope_theta=1e6), torch.bfloat16)
    expected = 500.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(loaded.rotary_emb.inv_freq, expected, atol=0, rtol=1e-6)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    # Where no base is stated it is 10000, as in the writers' class, whatever the target's is.
    assert not [name for name in stated_by("specforge", head) if "rope" in name]
    loaded = load_eagle3(str(write_head(tmp_path / "other", "specforge", head)), tiny_target("llama"), torch.float32)
    assert loaded.config.rope_parameters["rope_theta"] == 10000.0
