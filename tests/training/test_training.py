"""Anchors, blocks, masks, losses, features, and whole runs on tiny targets."""

import contextlib
import copy
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.common.chat import encode
from dflash_hub.common.identity import identify
from dflash_hub.configuration_checks import FULL, SLIDING
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.drafter_heads import TargetHead
from dflash_hub.target_model import hidden_states_request, raw_embeddings, target_hidden_states
from dflash_hub.training import evaluation
from dflash_hub.training import train as training_run
from dflash_hub.training import trainer as training_step
from dflash_hub.training.blocks import (
    PADDING,
    block_ids,
    block_labels,
    block_positions,
    denoise,
    draw_anchors,
    layer_masks,
)
from dflash_hub.training.data import (
    Collator,
    PackedRows,
    document_features,
    document_key,
    pack,
    placed,
    row_context,
    rows_of,
    split_validation,
    usable_rows,
)
from dflash_hub.training.examples import in_a_file
from dflash_hub.training.features import FeatureCache, target_features
from dflash_hub.training.losses import BlockLoss, chunked_sum, default_gamma, dpace_weights, position_weights
from dflash_hub.training.optimizer import MuonAdamW
from dflash_hub.training.options import TrainOptions
from dflash_hub.training.responses import LocalTarget
from dflash_hub.training.train import long_context, warm_drafter
from dflash_hub.training.trainer import DFlashTrainer, checkpoint_activations, evaluate
from helpers.brute_force import training_visibility
from helpers.families import with_some_tokens
from helpers.folders import tiny_tokenizer
from helpers.tiny import prompt_of, tiny_drafter, tiny_target
from helpers.training import answers_of, losses_of, trainer_of
from rich.console import Console
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

BLOCK = 5


def row_of(prompt: int, answer: int, seed: int = 0, row_id: str | None = None) -> dict:
    ids = prompt_of(prompt + answer, seed)[0].tolist()
    return {"id": row_id or f"row-{seed}", "turn": 0, "prompt_ids": ids[:prompt], "response_ids": ids[prompt:]}


def batch_of(*packs: list[dict], **kwargs) -> dict:
    return Collator(**kwargs)([{"documents": documents} for documents in packs])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------------------------------------
# Anchors and labels


def test_pitfall_78_anchors_are_answer_tokens_with_a_successor_and_each_can_be_drawn():
    batch = batch_of([row_of(4, 6)], [row_of(3, 2, 1), row_of(2, 3, 2)])
    rows = rows_of(batch)
    seen = [set(), set()]
    for seed in range(60):
        anchors, valid = draw_anchors(rows, 2, generator(seed))
        assert anchors.shape == (2, 2) and bool(valid.all())
        assert bool((anchors[:, 0] < anchors[:, 1]).all())
        for r in range(2):
            seen[r] |= set(anchors[r].tolist())
    # The answer of the first row is 4..9; of the packed ones 3..4 and 7..9. The last token of an answer has no successor.
    assert seen == [{4, 5, 6, 7, 8}, {3, 7, 8}]


def test_a_lone_valid_anchor_is_kept_and_rows_without_one_are_padding():
    batch = batch_of([row_of(4, 2)], [row_of(1, 7, 1)])
    rows = rows_of(batch)
    anchors, valid = draw_anchors(rows, 4, generator())
    assert valid.sum(1).tolist() == [1, 4] and anchors[0, 0] == 4
    rows.answer_mask[0] = False
    anchors, valid = draw_anchors(rows, 4, generator(), fixed=True)
    assert anchors.shape == (2, 4) and valid.sum(1).tolist() == [0, 4]


def test_fixed_anchor_counts_are_padded_for_short_rows():
    anchors, valid = draw_anchors(rows_of(batch_of([row_of(2, 3)])), 16, generator(), fixed=True)
    assert anchors.shape == (1, 16) and valid.sum() == 2


def test_labels_end_with_the_document_that_the_anchor_is_in():
    first, second = row_of(3, 4, 1), row_of(2, 6, 2)
    rows = rows_of(batch_of([first, second]))
    anchors = torch.tensor([[3, 5, 9]])
    labels, supervised = block_labels(rows, anchors, torch.tensor([[True, True, True]]), BLOCK)
    assert supervised.tolist() == [[[True] * 3 + [False], [True] + [False] * 3, [True] * 4]]
    assert labels[0, 0, :3].tolist() == first["response_ids"][1:]
    assert labels[0, 1, 0] == first["response_ids"][3]
    assert labels[0, 2].tolist() == second["response_ids"][1:5]
    _, nothing = block_labels(rows, anchors, torch.zeros(1, 3, dtype=torch.bool), BLOCK)
    assert not nothing.any()


def test_blocks_hold_the_anchor_and_mask_tokens_at_the_positions_that_follow():
    rows = rows_of(batch_of([row_of(3, 4, 1), row_of(2, 6, 2)]))
    anchors = torch.tensor([[4, 10]])
    ids = block_ids(rows, anchors, BLOCK, 96)
    assert ids.tolist() == [[rows.input_ids[0, 4], 96, 96, 96, 96, rows.input_ids[0, 10], 96, 96, 96, 96]]
    positions = block_positions(rows, anchors, BLOCK)[0]
    assert positions[:15].tolist() == [*range(7), *range(8)]
    assert positions[15:].tolist() == [4, 5, 6, 7, 8, 3, 4, 5, 6, 7]


# ------------------------------------------------------------------------------------------------------------------
# Masks


@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_equal_brute_force_dense_and_flex(window, causal):
    batch = batch_of([row_of(3, 6, 1), row_of(2, 5, 2)], [row_of(4, 9, 3)])
    rows = rows_of(batch)
    anchors, valid = draw_anchors(rows, 7, generator(), fixed=True)
    valid[0, 3] = False
    kind = {"layer_types": [FULL, SLIDING], "sliding_window": window} if window else {}
    config = tiny_drafter(block_causal=[causal, causal], **kind).config
    dense = layer_masks(config, rows, anchors, valid, "sdpa")[-1]
    expected = training_visibility(rows, anchors, valid, BLOCK, window, causal)
    assert dense[:, 0].equal(expected)
    flex = layer_masks(config, rows, anchors, valid, "flex_attention")[-1]
    assert flex.shape == (2, 1, *expected.shape[1:])  # one mask for all heads
    b, q, k = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
    assert flex.mask_mod(b, torch.zeros_like(b), q, k).equal(expected)
    assert bool(dense.any(-1).all()), "a query that sees nothing would be a nan"


@pytest.mark.parametrize("backend", ["eager", "flex_attention"])
def test_attention_backends_agree_on_packed_rows(backend):
    batch = batch_of([row_of(3, 6, 1), row_of(2, 5, 2)], [row_of(4, 9, 3)])
    rows, drafter = rows_of(batch), tiny_drafter()
    anchors, valid = draw_anchors(rows, 4, generator(), fixed=True)
    context = torch.randn(2, rows.input_ids.shape[1], 96, generator=generator())
    noise = torch.randn(2, 20, 32, generator=generator(1))
    positions = block_positions(rows, anchors, BLOCK)

    def run(attention):
        drafter.set_attn_implementation(attention)
        masks = layer_masks(drafter.config, rows, anchors, valid, attention)
        with torch.no_grad():  # flex attention has no backward pass on a CPU
            return drafter(noise, context, attention_mask=masks, position_ids=positions).last_hidden_state

    torch.testing.assert_close(run("sdpa"), run(backend), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------
# Train layout and generate layout


def train_layout(target, drafter, batch, anchors):
    rows, config = rows_of(batch), drafter.config
    context = row_context(target, batch, config.target_layer_ids)
    hidden = denoise(drafter, config, target, rows, context, anchors, torch.ones_like(anchors, dtype=torch.bool))
    return TargetHead(config, target.get_output_embeddings())(hidden).logits


@pytest.mark.parametrize("kind", ["full", "causal", "sliding", "mixed"])
def test_pitfall_76_train_and_generate_layouts_give_the_same_logits(kind):
    """Also for packed rows, whose second document starts at position 0 again."""
    fields = {
        "full": {},
        "causal": {"block_causal": [True, True]},
        "sliding": {"layer_types": [SLIDING, SLIDING], "sliding_window": 4, "block_causal": [False, False]},
        "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 7},
    }[kind]
    target, drafter = tiny_target("qwen3"), tiny_drafter(**fields)
    first, second = row_of(6, 9, 1), row_of(4, 12, 2)
    batch = batch_of([first, second])
    with torch.no_grad():
        trained = train_layout(target, drafter, batch, torch.tensor([[8, 15 + 7, 15 + 10]]))[0]
        for index, (row, anchor) in enumerate(((first, 8), (second, 7), (second, 10))):
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            proposer = DFlashProposer(drafter, target)
            request = hidden_states_request(proposer.target_layer_ids)
            outputs = target(ids[:, :anchor], output_hidden_states=request)
            states = target_hidden_states(outputs.hidden_states, target, drafter.config.target_layer_ids)
            # Context comes in two parts, as it does over rounds.
            proposer.draft_logits(ids[:, 3:4], [s[:, :3] for s in states], BLOCK - 1)
            logits = proposer.draft_logits(ids[:, anchor : anchor + 1], [s[:, 3:] for s in states], BLOCK - 1)
            torch.testing.assert_close(trained[index, 1:], logits[0], rtol=1e-4, atol=1e-4)


def test_pitfall_75_a_block_sees_features_before_its_anchor_and_none_from_it_on():
    """Perturbing features at or after the anchor must not change the block; just before it must."""
    target, drafter = tiny_target("llama"), tiny_drafter()
    batch = batch_of([row_of(4, 12, 1)])
    rows, anchors = rows_of(batch), torch.tensor([[6, 9]])
    valid = torch.ones_like(anchors, dtype=torch.bool)
    context = torch.randn(1, 16, 96, generator=generator())
    noise = raw_embeddings(target.get_input_embeddings(), block_ids(rows, anchors, BLOCK, 96))

    def run(context):
        masks = layer_masks(drafter.config, rows, anchors, valid, "sdpa")
        positions = block_positions(rows, anchors, BLOCK)
        return drafter(noise, context, attention_mask=masks, position_ids=positions).last_hidden_state

    with torch.no_grad():
        before = run(context)
        for at, changed in ((5, (True, True)), (6, (False, True)), (8, (False, True)), (9, (False, False))):
            perturbed = context.clone()
            perturbed[0, at] += 1
            after = run(perturbed)
            for block, expected in enumerate(changed):
                span = slice(block * BLOCK, (block + 1) * BLOCK)
                assert (not before[:, span].equal(after[:, span])) == expected, (at, block)


def test_pitfall_78_packed_documents_do_not_see_each_other():
    target, drafter = tiny_target("llama"), tiny_drafter()
    first, second, other = row_of(4, 7, 1), row_of(3, 8, 2), row_of(4, 7, 3)
    with torch.no_grad():
        alone = train_layout(target, drafter, batch_of([second]), torch.tensor([[4, 6]]))
        for beside in (first, other):
            packed = train_layout(target, drafter, batch_of([beside, second]), torch.tensor([[11 + 4, 11 + 6]]))
            torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------
# Losses


def test_position_weights_decay_as_in_the_paper():
    assert default_gamma(16) == 7 and default_gamma(10) == 5 and default_gamma(8) == 4
    torch.testing.assert_close(position_weights(3, 4.0, "cpu"), torch.tensor([1, 0.77880, 0.60653]))
    assert position_weights(3, None, "cpu").tolist() == [1, 1, 1]


def test_dpace_weights_against_their_definition():
    q = torch.tensor([[0.9, 0.2, 0.5], [0.4, 0.6, 0.1]])
    supervised = torch.tensor([[True, True, True], [True, True, False]])
    weights = dpace_weights(q, supervised, alpha=0.5)
    s = 0.5 * q + 0.5
    for m, length in ((0, 3), (1, 2)):
        for k in range(length):
            expected = sum(float(s[m, : j + 1].prod()) for j in range(k, length))
            assert float(weights[m, k]) == pytest.approx(expected)
    assert weights[1, 2] == 0


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl", "tv"])
def test_chunked_loss_and_gradient_equal_the_whole(kind):
    head = torch.nn.Linear(8, 30, bias=False).requires_grad_(False)
    labels = torch.randint(0, 30, (7, 4), generator=generator())
    supervised = torch.rand(7, 4, generator=generator(1)) > 0.3
    teacher = torch.randn(7, 4, 30, generator=generator(2))
    loss = BlockLoss(kind, 4.0)

    def run(chunk):
        hidden = torch.randn(7, 4, 8, generator=generator(3)).requires_grad_()

        def loss_of(part, which):
            return loss(head(part), labels[which], supervised[which], teacher[which])

        total = loss_of(hidden, slice(None)) if chunk is None else chunked_sum(hidden, loss_of, chunk)
        (total * 3).backward()
        return total.detach(), hidden.grad

    whole, gradient = run(None)
    for chunk in (1, 3, 7, 50):
        total, part = run(chunk)
        torch.testing.assert_close(total, whole)
        torch.testing.assert_close(part, gradient)
    assert gradient.abs().sum() > 0


def test_distribution_losses_are_zero_for_the_target_itself():
    logits = torch.randn(3, 4, 20, generator=generator())
    labels, supervised = torch.zeros(3, 4, dtype=torch.long), torch.ones(3, 4, dtype=torch.bool)
    assert float(BlockLoss("kl", 4.0)(logits, labels, supervised, logits)) == pytest.approx(0, abs=1e-5)
    assert float(BlockLoss("tv", 4.0, ce_share=0.0)(logits, labels, supervised, logits)) == pytest.approx(0, abs=1e-5)
    opposite = BlockLoss("tv", None, ce_share=0.0)(
        torch.full((1, 1, 2), -40.0).index_fill(-1, torch.tensor([0]), 40.0),
        labels[:1, :1], supervised[:1, :1],
        torch.full((1, 1, 2), -40.0).index_fill(-1, torch.tensor([1]), 40.0),
    )  # fmt: skip
    assert float(opposite) == pytest.approx(1)


class NotedLoss(BlockLoss):
    """Keeps what it is given in its first call: (logits, labels, supervised, teacher's logits)."""

    given = None

    def __call__(self, logits, labels, supervised, teacher_logits=None):
        self.given = self.given or (logits, labels, supervised, teacher_logits)
        return super().__call__(logits, labels, supervised, teacher_logits)


@pytest.mark.parametrize("loss", ("dpace", "kl", "tv"))
@pytest.mark.parametrize("pack_length", (None, 64))
def test_the_loss_is_over_the_tokens_that_can_be_drafted(tmp_path, target, answers, loss, pack_length):
    """Listed ones and those of the text up to the anchor, of its own document: the whole head's logits without the others."""
    drafter = with_some_tokens(tiny_drafter(draft_vocab_size=12))
    trainer = trainer_of(tmp_path, target, drafter, answers[:6], answers[8:], loss, pack_length=pack_length)
    batch = next(iter(trainer.get_train_dataloader()))
    (batch,), normalizer = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    trainer.block_loss = NotedLoss(loss, None if loss == "dpace" else 4.0)
    trainer.compute_loss(drafter, batch, num_items_in_batch=normalizer)
    rows, listed = rows_of(batch), {*(drafter.d2t + torch.arange(12)).tolist()}
    anchors, valid, number = batch["anchors"], batch["valid"], 0
    logits, _, taught, teacher = trainer.block_loss.given
    for row, block in valid.nonzero().tolist():
        anchor = int(anchors[row, block])
        of_document = rows.document_ids[row] == rows.document_ids[row, anchor]
        text = {*rows.input_ids[row, : anchor + 1][of_document[: anchor + 1]].tolist()}
        can = listed | text
        assert int((logits[number, 0] > -1e4).sum()) == len(can)
        labels, supervised = batch["labels"][row, block], batch["supervised"][row, block]
        expected = [bool(known) and token in can for token, known in zip(labels.tolist(), supervised)]
        assert taught[number].tolist() == expected
        if teacher is not None:
            assert int((teacher[number, 0] > -1e4).sum()) == len(can)
        number += 1
    assert len(logits) == number and bool(taught.any()) and not bool(taught.all())
    trainer.train()
    assert all(0 < value < 50 for value in losses_of(trainer))
    assert losses_of(trainer)[-1] < losses_of(trainer)[0]


# ------------------------------------------------------------------------------------------------------------------
# Data


def test_rows_are_cut_dropped_and_split_by_prompt():
    rows = [
        row_of(4, 10, 1),
        row_of(4, 1, 2),
        row_of(4, 0, 5),
        row_of(20, 5, 3),
        row_of(3, 4, 4) | {"turn": 1, "id": "row-1"},
    ]
    kept, dropped = usable_rows(rows, 10)
    assert [len(row["response_ids"]) for row in kept] == [6, 4]
    assert dropped == {"empty answer": 1, "answer of one token": 1, "prompt fills --max-length 10": 1}
    with pytest.raises(ValueError, match="no row of the answers can be trained on"):
        usable_rows(rows[1:2], 10)
    rows = [row_of(3, 4, seed) for seed in range(8)] + [row_of(3, 4, 9) | {"id": "row-1", "turn": 1}]
    training, validation = split_validation(rows, 3, 0)
    assert len({row["id"] for row in validation}) == 3
    assert not {row["id"] for row in training} & {row["id"] for row in validation}
    with pytest.raises(ValueError, match="leave nothing to train on"):
        split_validation(rows, 8, 0)


def test_examples_in_a_file_are_those_of_the_rows():
    rows = [row_of(3 + seed, 5 + seed, seed) | {"messages_sha256": "ab"} for seed in range(4)]
    examples = in_a_file(iter(rows))
    assert [dict(example) for example in examples] == rows and in_a_file([]) == []
    assert [document_key(example) for example in examples] == [document_key(row) for row in rows]
    cut, dropped = usable_rows(examples, 9)
    assert [dict(example) for example in cut] == [dict(row) for row in usable_rows(rows, 9)[0]] and not dropped
    assert dict(examples[3]) == rows[3], "the cut ones are others"
    here, there = batch_of(rows[:2], rows[2:]), batch_of(examples[:2], examples[2:])
    assert all(here[name].equal(there[name]) for name in ("input_ids", "document_ids", "answer_mask", "position_ids"))


def test_memory_does_not_grow_with_the_tokens_of_the_answers(tmp_path):
    """A Python list takes 40 bytes a token and process; the examples of a run take none, from the file to the batches."""
    tokenizer, tokens = tiny_tokenizer(40), torch.randint(300, 50_000, (24, 2000), generator=generator())
    lines = (
        json.dumps({"id": str(i), "prompt_ids": row[:100].tolist(), "response_ids": row[100:].tolist()})
        for i, row in enumerate(tokens)
    )
    (tmp_path / "responses.jsonl").write_text("\n".join(lines) + "\n")
    options = TrainOptions(target="t", responses=[str(tmp_path / "responses.jsonl")], output="run", max_length=1800)
    tracemalloc.start()
    try:
        rows, files, _ = training_run.load_rows(options.responses, {}, options, tokenizer)
        training, validation = split_validation(usable_rows(rows, options.max_length)[0], 4, 0)
        dataset = PackedRows(training, 4000, 0)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert files[0]["answer_tokens"] == 24 * 1900 and sum(dataset.lengths()) == 20 * 1800 and len(validation) == 4
    assert held < 2.0 * tokens.numel() and peak < 12.0 * tokens.numel(), (held, peak)


def test_packing_fills_rows_and_loses_nothing():
    rows = [row_of(2 + seed % 5, 3 + seed % 7, seed) for seed in range(40)]
    packs = pack(rows, 24, 0)
    assert sorted(row["id"] for documents in packs for row in documents) == sorted(row["id"] for row in rows)
    lengths = [sum(len(row["prompt_ids"] + row["response_ids"]) for row in documents) for documents in packs]
    assert max(lengths) <= 24 and sum(lengths) / (24 * len(packs)) > 0.85
    with pytest.raises(ValueError, match="longer than --pack-length 6"):
        pack(rows, 6, 0)


def test_batches_place_every_token():
    first, second, third = row_of(3, 4, 1), row_of(2, 6, 2), row_of(10, 8, 3)
    batch = batch_of([first, second], [third])
    assert batch["document_ids"].tolist() == [[0] * 7 + [1] * 8 + [PADDING] * 3, [0] * 18]
    assert batch["answer_mask"][0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 9, 10, 11, 12, 13, 14]
    # Short documents are not padded to the longest of the batch, whose rows hold all lengths.
    assert [list(ids.shape) for ids, _ in batch["documents"]] == [[1, 18], [2, 8]]
    ids = torch.cat([ids[mask.bool()] for ids, mask in batch["documents"]])
    assert placed(ids[:, None], batch)[..., 0].equal(batch["input_ids"])
    assert batch_of([first], width=32)["input_ids"].shape == (1, 32)


def test_cached_features_are_those_of_the_step_and_refused_for_another_target(tmp_path):
    target, layers = tiny_target("qwen3"), [0, 1, 2]
    rows = [row_of(3, 4 + seed, seed) for seed in range(5)]
    documents = {document_key(row): row for row in rows}

    def compute(ids, mask):
        return target_features(target, ids, mask, layers)

    cache = FeatureCache(tmp_path, identify(target), layers)
    cache.fill(dict(list(documents.items())[:2]), compute)
    cache = FeatureCache(tmp_path, identify(target), layers)  # as after an interruption
    cache.fill(documents, compute)
    cache.verify()
    online, offline = batch_of([rows[0], rows[4]]), batch_of([rows[0], rows[4]], cache=cache)
    torch.testing.assert_close(offline["features"], document_features(target, online, layers))

    with pytest.raises(ValueError, match="not of this target"):
        FeatureCache(tmp_path, identify(tiny_target("qwen3", seed=1)), layers)
    with pytest.raises(ValueError, match="not of this target"):
        FeatureCache(tmp_path, identify(target.to(torch.bfloat16)), layers)
    with pytest.raises(ValueError, match=r"of the layers \[0, 1, 2\], this drafter needs \[0, 1\]"):
        FeatureCache(tmp_path, identify(tiny_target("qwen3")), [0, 1])
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="not what was written"):
        cache.verify()
    shard.unlink()
    with pytest.raises(ValueError, match="lacks features-"):
        FeatureCache(tmp_path, identify(tiny_target("qwen3")), layers)
    (tmp_path / "index.json").write_text('{"shards": {}}')
    with pytest.raises(ValueError, match="index.json lacks identity, layer_ids, where"):
        FeatureCache(tmp_path, identify(tiny_target("qwen3")), layers)


# ------------------------------------------------------------------------------------------------------------------
# Runs


def step_loss(trainer, model, *batches: dict) -> torch.Tensor:
    """Loss of an optimizer step over `batches`, as `Trainer` computes it."""
    drawn, weights = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
    return sum(trainer.compute_loss(model, batch, num_items_in_batch=weights) for batch in drawn)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def answers(target):
    return answers_of(target, 10)


def test_overfitting_eight_rows_reaches_more_than_nine_tenths_of_the_block(tmp_path, target, answers):
    drafter = tiny_drafter(initializer_range=0.05)
    before = evaluation.generate(target, drafter, [row["prompt_ids"] for row in answers[:8]], 24)
    assert before.tau < 1.5
    trainer = trainer_of(
        tmp_path, target, drafter, answers[:8], answers[8:], max_steps=260, per_device_train_batch_size=8,
        save_strategy="no", logging_steps=50,
    )  # fmt: skip
    trainer.num_anchors = 24
    trainer.train()
    after = evaluation.generate(target, drafter.eval(), [row["prompt_ids"] for row in answers[:8]], 24)
    assert after.num_accepted > 0.9 * after.num_drafted, after.tau
    replayed, _, first = evaluation.replay(target, drafter, answers[:8])
    assert replayed.acceptance_lengths == after.acceptance_lengths
    assert first > 0.9


@pytest.mark.parametrize(("end", "listed"), [(False, None), (True, None), (True, 6), (False, 30)])
def test_replayed_rounds_are_those_of_real_generation(target, answers, end, listed):
    """For a drafter that is right now and then, at a limit on length and at an end token, also with a list of tokens."""
    drafter = half_trained(target, answers)
    if listed is not None:
        drafter = copy.deepcopy(drafter)
        drafter.config.draft_vocab_size = listed
        with_some_tokens(drafter)
    ended = answers[0]["response_ids"][11]
    rows, eos = answers[:4], None
    if end:
        eos = ended
        rows = [cut_at(row, ended) for row in rows]
    prompts = [row["prompt_ids"] for row in rows]
    target.generation_config.eos_token_id, before = eos, target.generation_config.eos_token_id
    try:
        real = evaluation.generate(target, drafter, prompts, 24)
        replayed, forced, first = evaluation.replay(target, drafter, rows, blocks_at_once=5)
    finally:
        target.generation_config.eos_token_id = before
    assert real.num_accepted > 5
    assert replayed.acceptance_lengths == real.acceptance_lengths
    assert replayed.accepted == real.accepted and replayed.drafted == real.drafted
    assert len(forced) == sum(len(row["response_ids"]) - 1 for row in rows)
    assert 0.1 < first < 1


CONFIGS = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.3},
    "suppressed": {"suppress_tokens": [*range(0, 60, 2)], "begin_suppress_tokens": [9], "do_sample": True, "top_k": 2},
    "biased": {
        "sequence_bias": [[[i], 4.0] for i in range(8, 40, 3)],
        "bad_words_ids": [[8], [12, 13]],
        "min_length": 9,
    },
    "ngrams": {"no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
    "forced": {"forced_eos_token_id": 7, "forced_bos_token_id": 9},
    "minimum": {"min_new_tokens": 9, "exponential_decay_length_penalty": [6, 1.3]},
    "stateful": {"guidance_scale": 1.5},
}


@contextlib.contextmanager
def generating_with(target, **fields):
    """The target with other values in its generation config."""
    before = {name: getattr(target.generation_config, name) for name in fields}
    target.generation_config.update(**fields)
    try:
        yield
    finally:
        target.generation_config.update(**before)


def answered(target, prompts: list[list[int]], limit: int) -> list[dict]:
    """Greedy answers, as `regenerate` writes them."""
    texts = LocalTarget(target, SimpleNamespace(pad_token_id=0), limit, {"do_sample": False}, 2).answer(prompts, 0)
    return [
        {"id": f"a-{i}", "turn": 0, "prompt_ids": prompt, "response_ids": ids, "max_new_tokens": limit}
        for i, (prompt, ids) in enumerate(zip(prompts, texts))
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_replay_is_generation_under_the_targets_generation_config(target, answers, name):
    """Round by round, for answers that end near their limit, far from it and at it, of prompts of one token and of several."""
    drafter = half_trained(target, answers)
    prompts, accepted = [answers[0]["prompt_ids"][:1], *(row["prompt_ids"] for row in answers[2:4])], 0
    with generating_with(target, eos_token_id=[7, 30, 31], **CONFIGS[name]):
        for limit in (10, 20):
            rows = answered(target, prompts, limit)
            real = evaluation.generate(target, drafter, prompts, limit)
            replayed, _, _ = evaluation.replay(target, drafter, rows, blocks_at_once=5)
            for name in ("acceptance_lengths", "drafted", "accepted"):
                assert getattr(replayed, name) == getattr(real, name)
            accepted += real.num_accepted
    assert 0 < accepted < 60


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"max_time": 9.0}, "cannot be replayed under MaxTimeCriteria"),
        ({"cache_implementation": "static"}, "cannot be replayed with `cache_implementation='static'`"),
        ({"eos_token_id": "inside"}, "goes on after an end token"),
        ({"eos_token_id": "last", "forced_eos_token_id": "last"}, "does not say what its limit was"),
    ],
)
def test_what_replay_cannot_follow_is_refused_by_name(target, answers, fields, sentence):
    ids = answers[0]["response_ids"]
    named = {"inside": ids[3], "last": ids[-1]}
    row = answers[0] | {"response_ids": ids[: ids.index(ids[-1]) + 1]}
    with generating_with(target, **{name: named.get(value, value) for name, value in fields.items()}):
        with pytest.raises(ValueError, match=sentence):
            evaluation.replay(target, tiny_drafter(), [row])


def cut_at(row: dict, token: int) -> dict:
    ids = row["response_ids"]
    return row | {"response_ids": ids[: ids.index(token) + 1] if token in ids else ids}


_half_trained = {}


def half_trained(target, answers) -> DFlashDraftModel:
    """Trained a little on the same answers, so that it is right now and then; made once."""
    if "drafter" not in _half_trained:
        import tempfile

        drafter = tiny_drafter(initializer_range=0.05)
        with tempfile.TemporaryDirectory() as folder:
            trainer_of(folder, target, drafter, answers[:8], answers[8:], max_steps=60, save_strategy="no").train()
        _half_trained["drafter"] = drafter.eval()
    return _half_trained["drafter"]


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize(("rows", "batch", "accumulate", "stop"), [(8, 4, 2, 10), (7, 2, 1, 6), (5, 1, 2, 4)])
def test_pitfall_82_resumed_training_equals_uninterrupted(
    tmp_path, target, answers, rows, batch, accumulate, stop, muon
):
    """In the middle of an epoch, and where batches do not divide: same losses, same weights."""
    fields = {
        "gradient_accumulation_steps": accumulate, "per_device_train_batch_size": batch, "max_steps": 2 * stop,
        "save_steps": stop, "muon": muon,
    }  # fmt: skip
    data = (vary(answers[:rows]), answers[8:])
    whole = trainer_of(tmp_path / "whole", target, tiny_drafter(), *data, **fields)
    whole.train()
    first = trainer_of(tmp_path / "part", target, tiny_drafter(), *data, **fields)
    first.add_callback(StopAt(stop))
    first.train()
    torch.manual_seed(99)  # another process has another state
    second = trainer_of(tmp_path / "part", target, tiny_drafter(seed=9), *data, **fields)
    second.train(resume_from_checkpoint=str(tmp_path / "part" / f"checkpoint-{stop}"))
    assert len(losses_of(whole)) == 2 * stop and losses_of(second) == losses_of(whole)
    assert len(set(losses_of(whole))) == 2 * stop
    for (name, one), (_, other) in zip(whole.model.named_parameters(), second.model.named_parameters()):
        assert one.equal(other), name
    counts = [[e["anchors"] for e in t.state.log_history if "anchors" in e] for t in (whole, second)]
    assert counts[0] == counts[1] and counts[0][-1] > 0


def test_muon_takes_matrices_and_adamw_the_rest():
    """Each is torch's own, with the schedule's learning rate; a matrix's step is orthogonal up to its size."""
    drafter, twin = tiny_drafter(seed=3), tiny_drafter(seed=3)
    gradients = {
        name: torch.randn(p.shape, generator=generator(i)) for i, (name, p) in enumerate(drafter.named_parameters())
    }
    for model in (drafter, twin):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
    settings = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    both = MuonAdamW(drafter.parameters(), 1e-3, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(both, lambda step: 1.0 if step == 0 else 0.5)
    alone = [
        torch.optim.Muon([p for p in twin.parameters() if p.ndim == 2], 1e-3, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in twin.parameters() if p.ndim != 2], 1e-3, **settings),
    ]
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    for _ in range(3):
        both.step()
        schedule.step()
        for optimizer in alone:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = 5e-4
    for (name, one), (_, other) in zip(drafter.named_parameters(), twin.named_parameters()):
        assert one.equal(other) and not one.equal(before[name]), name
    assert len(both.state_dict()["state"]) == len(before)


def vary(rows: list[dict]) -> list[dict]:
    """Answers of different lengths, so that grouping by length has something to do."""
    return [row | {"response_ids": row["response_ids"][: 10 + 2 * i]} for i, row in enumerate(rows)]


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_pitfall_84_gradient_checkpointing_changes_no_gradient_and_recomputes(tmp_path, target, answers):
    gradients, forwards = [], []
    for on in (False, True):
        drafter = tiny_drafter()
        if on:
            drafter.gradient_checkpointing_enable({"use_reentrant": False})
        calls = []
        # Before the call: a recomputation ends as soon as it has what the gradient needs.
        drafter.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer = trainer_of(tmp_path, target, drafter.train(), answers[:4], answers[8:])
        step_loss(trainer, drafter, batch_of(*[[row] for row in answers[:4]])).backward()
        gradients.append({name: p.grad for name, p in drafter.named_parameters()})
        forwards.append(len(calls))
    assert forwards == [1, 2]
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradient, gradients[1][name])


def test_pitfall_84_gradient_checkpointing_goes_through_ddp(tmp_path, target, answers):
    """A reentrant checkpoint would mark parameters ready twice. Two batches, so that the reducer is used again."""
    batches = [batch_of(*[[row] for row in answers[i : i + 2]]) for i in (0, 2)]
    gradients = []
    for distributed in (False, True):
        drafter = tiny_drafter().train()
        trainer = trainer_of(tmp_path, target, drafter, answers[:4], answers[8:])
        model = drafter
        if distributed:
            checkpoint_activations(drafter)
            store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            model = DistributedDataParallel(drafter, find_unused_parameters=False)
        try:
            for batch in batches:
                step_loss(trainer, model, batch).backward()
        finally:
            if distributed:
                torch.distributed.destroy_process_group()
        gradients.append({name: p.grad for name, p in drafter.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_pitfall_83_bf16_is_autocast_over_float32_weights_evaluation_included(tmp_path, answers):
    target = tiny_target("llama").to(torch.bfloat16)
    drafter, seen = tiny_drafter(initializer_range=0.05), []
    drafter.layers[0].mlp.gate_proj.register_forward_hook(
        lambda module, inputs, output: seen.append((module.training, output.dtype))
    )
    trainer = trainer_of(
        tmp_path, target, drafter, answers[:8], answers[8:], max_steps=4, save_strategy="no", bf16=True,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    trainer.train()
    assert {dtype for training, dtype in seen if training} == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in drafter.parameters())
    moments = [state[name] for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert moments and all(moment.dtype == torch.float32 for moment in moments)
    figures = next(entry for entry in trainer.state.log_history if "eval_acceptance_length" in entry)
    real = evaluation.generate(target, drafter.eval(), [row["prompt_ids"] for row in answers[8:]], 24)
    assert figures["eval_acceptance_length"] == pytest.approx(real.tau, abs=1e-4)
    assert any(not training for training, _ in seen) and losses_of(trainer)[-1] < losses_of(trainer)[0]


class LargestLogits(TorchDispatchMode):
    """The most bytes that tensors with a column a token take at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == 97:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return output


def test_pitfall_86_memory_does_not_grow_with_anchors_times_vocabulary(tmp_path, monkeypatch):
    target = tiny_target("llama")
    rows = [row_of(6, 80, seed) for seed in range(2)]

    def peak(num_anchors: int) -> int:
        trainer = trainer_of(tmp_path, target, tiny_drafter(), rows, rows)
        trainer.num_anchors = num_anchors
        loss, logits = None, LargestLogits()
        batch = batch_of(*[[row] for row in rows])
        batch["features"] = document_features(
            target, batch, [0, 1, 2]
        )  # given, so that the target's own logits are not counted
        with logits:
            loss = step_loss(trainer, trainer.model, batch)
            loss.backward()
        return logits.most

    monkeypatch.setattr(training_step, "CHUNK_POSITIONS", 4 * (BLOCK - 1))
    few, many = peak(8), peak(64)
    assert few == many > 0
    monkeypatch.setattr(training_step, "CHUNK_POSITIONS", 10**6)
    assert peak(64) > 10 * many


TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_pitfall_79_the_loss_falls_on_the_coloured_answer_and_on_no_word_of_the_template(monkeypatch):
    specials = ("<pad>", "<start>", "<end>", "user", "assistant", "<think>", "</think>")
    tokenizer = tiny_tokenizer(90, specials, TEMPLATE)
    prompt = encode(tokenizer, {"messages": [{"role": "user", "content": "w3 w4"}]}, [], False)
    assert tokenizer.convert_ids_to_tokens(prompt[-4:]) == ["<start>", "assistant", "<think>", "</think>"]
    answer = tokenizer("w5 w6 w7").input_ids + [tokenizer.eos_token_id]
    row = {"id": "a", "turn": 0, "prompt_ids": prompt, "response_ids": answer}
    rows = rows_of(batch_of([row]))
    anchors = torch.arange(len(prompt), len(prompt) + 3)[None]  # every place that has a successor
    labels, supervised = block_labels(rows, anchors, torch.ones_like(anchors, dtype=torch.bool), BLOCK)
    assert labels[0, 0][supervised[0, 0]].tolist() == answer[1:]
    assert set(labels[supervised].tolist()) == set(answer[1:])
    drawn, valid = draw_anchors(rows, 50, generator())
    assert drawn[valid].tolist() == anchors[0].tolist()

    console = Console(record=True, width=300, highlight=False, force_terminal=True, color_system="standard")
    monkeypatch.setattr(training_run, "Console", lambda: console)
    training_run.show_sample(row, tokenizer)
    segments = {}
    for segment in console._record_buffer:
        segments.setdefault(str(segment.style), []).append(segment.text)
    assert "".join(segments["bold green"]) == tokenizer.decode(answer)
    assert "".join(segments["dim"]) == tokenizer.decode(prompt)


@pytest.mark.parametrize("layout", ["ours", "zlab", "speculators", "transformers"])
def test_pitfall_88_a_warm_start_keeps_window_mask_and_taps(tmp_path, layout):
    """Of a drafter in any format that `import` reads."""
    from dflash_hub.convert.exporting import export_drafter
    from helpers.folders import save_target

    save_target(tmp_path / "target")
    kinds = {"layer_types": [SLIDING, FULL], "sliding_window": 7, "block_causal": [False, False]}
    drafter = tiny_drafter(num_target_layers=8, target_layer_ids=[0, 2, 5], mask_token_id=95, **kinds)
    drafter.save_pretrained(tmp_path / "ours")
    if layout != "ours":
        export_drafter(str(tmp_path / "ours"), tmp_path / layout, layout, target=str(tmp_path / "target"))
    options = TrainOptions(str(tmp_path / "target"), [], "run", drafter=str(tmp_path / layout))
    warm = warm_drafter(options)
    for name in ("layer_types", "sliding_window", "block_causal", "mask_token_id", "target_layer_ids", "block_size"):
        assert getattr(warm.config, name) == getattr(drafter.config, name), name
    assert all(p.dtype == torch.float32 for p in warm.parameters())
    for (name, one), (_, other) in zip(warm.named_parameters(), drafter.named_parameters()):
        assert one.equal(other), name
    options.window = 9
    assert warm_drafter(options).config.sliding_window == 9


def overflowing(target, token: int, value: float):
    """The target, with one embedding that leaves a type's range: what a token with large activations does in float16."""
    target = copy.deepcopy(target)
    with torch.no_grad():
        target.get_input_embeddings().weight[token] = value
    return target


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("pack_length", [None, 64])
def test_a_run_stops_before_the_step_that_meets_an_overflow_and_names_the_example(
    tmp_path, target, offline, pack_length
):
    """One example of eight has a token with infinite states; it is found in any row of any batch, and no weight changes."""
    rows = [row_of(6, 12, seed, f"prompt-{seed}") for seed in range(8)]
    for row in rows:
        row["response_ids"] = [token if token != 90 else 91 for token in row["response_ids"]]
        row["prompt_ids"] = [token if token != 90 else 91 for token in row["prompt_ids"]]
    rows[5]["response_ids"][3] = 90
    broken = overflowing(target, 90, float("inf"))
    sentence = r"hidden states at layers \[0, 1, 2\] are not finite .* in float32, on example 'prompt-5' \(turn 0\)\."
    if offline:
        cache = FeatureCache(tmp_path / "features", identify(broken), [0, 1, 2])
        with pytest.raises(ValueError, match=sentence):
            cache.fill({document_key(row): row for row in rows}, lambda i, m: target_features(broken, i, m, [0, 1, 2]))
        assert not (tmp_path / "features" / "index.json").exists()
        return
    drafter = tiny_drafter()
    trainer = trainer_of(tmp_path, broken, drafter, rows, [], pack_length=pack_length, per_device_train_batch_size=2)
    weights = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            weights.append({name: value.clone() for name, value in drafter.state_dict().items()})

    trainer.add_callback(Watch())
    with pytest.raises(
        ValueError, match=f"step {r'[1-4]'} was not taken, its loss or gradient is not finite: the target's {sentence}"
    ):
        trainer.train()
    assert all(value.equal(weights[-1][name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_or_gradient_that_overflows_in_the_drafter_stops_the_run(tmp_path, target, answers, accumulate):
    """In the log a loss that is not finite never becomes a zero or an average."""
    drafter, calls = tiny_drafter(), []

    class Overflows(DFlashTrainer):
        def _loss(self, *args):
            calls.append(1)
            # A finite loss whose gradient is not: the square root at zero.
            return super()._loss(*args) + ((args[1].sum() * 0).sqrt() if len(calls) >= 4 else 0)

    trainer = trainer_of(
        tmp_path, target, drafter, answers[:8], [], per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate, kind=Overflows,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"the backward pass overflows on one of the examples 'prompt-\d' \(turn 0\), "
    ):
        trainer.train()
    assert torch.tensor(losses_of(trainer)).isfinite().all() and losses_of(trainer)
    assert all(value.isfinite().all() for value in drafter.state_dict().values())

    with torch.no_grad():
        drafter.norm.weight[0] = float("inf")
    with pytest.raises(ValueError, match=r"step 1 was not taken, .* the drafter overflows on examples 'prompt-\d'"):
        trainer_of(tmp_path, target, drafter, answers[:8], []).train()
    with pytest.raises(ValueError, match=r"this drafter holds values that are not finite .* in norm.weight"):
        drafter.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ValueError, match=r"the drafter to be evaluated holds values .* in norm.weight"):
        evaluate(target, drafter, answers[:1], answers[:1], 4)


def test_drafts_that_are_not_finite_agree_with_nothing_in_replay(target, answers):
    """Not even where the answer's tokens are those at which `argmax` finds a NaN."""
    drafter = tiny_drafter()
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    row = answers[0] | {"response_ids": [0] * 12}
    replayed, forced, first = evaluation.replay(target, drafter, [row])
    assert (replayed.num_accepted, first) == (0, 0.0) and set(forced) == {1}


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_offline_features_train_like_online_ones(tmp_path, target, answers, loss):
    layers = [0, 1, 2] + [3] * (loss == "kl")
    cache = FeatureCache(tmp_path / "features", identify(target), layers)
    documents = {document_key(row): row for row in answers}
    cache.fill(documents, lambda ids, mask: target_features(target, ids, mask, layers))
    losses = []
    for which in (None, cache):
        trainer = trainer_of(
            tmp_path / "run", target, tiny_drafter(), answers[:8], answers[8:], loss, which, max_steps=4,
            save_strategy="no",
        )  # fmt: skip
        trainer.train()
        losses.append(losses_of(trainer))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and len(losses[0]) == 4


@pytest.mark.parametrize("loss", ["ce", "dpace", "kl", "tv"])
def test_every_loss_learns_packed_rows(tmp_path, target, answers, loss):
    trainer = trainer_of(
        tmp_path, target, tiny_drafter(initializer_range=0.05), answers[:8], answers[8:], loss, pack_length=64,
        max_steps=40, save_strategy="no",
    )  # fmt: skip
    assert len(trainer.train_dataset) == 4
    trainer.train()
    losses = losses_of(trainer)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
    assert trainer.state.log_history[-2]["teacher_forced_tau"] > 1


def test_only_the_drafter_learns(tmp_path, target, answers):
    before = {name: p.clone() for name, p in target.named_parameters()}
    drafter = tiny_drafter()
    weights = {name: p.clone() for name, p in drafter.named_parameters()}
    trainer = trainer_of(tmp_path, target, drafter, answers[:8], answers[8:], max_steps=2, save_strategy="no")
    trainer.train()
    assert all(before[name].equal(p) and p.grad is None for name, p in target.named_parameters())
    assert all(not weights[name].equal(p) for name, p in drafter.named_parameters())


def test_pitfall_87_evaluation_during_training_is_real_generation(tmp_path, target, answers):
    drafter = half_trained(target, answers)
    trainer = trainer_of(tmp_path, target, drafter, answers[:8], answers[8:], save_strategy="no")
    figures = trainer.evaluate()
    assert drafter.training
    real = evaluation.generate(target, drafter.eval(), [row["prompt_ids"] for row in answers[8:]], 24)
    assert figures["eval_acceptance_length"] == pytest.approx(real.tau, abs=1e-4)
    assert figures["eval_acceptance_position_1"] == pytest.approx(real.position_acceptance[0], abs=1e-4)
    assert figures["eval_replayed_acceptance_length"] == figures["eval_acceptance_length"]


def test_short_training_fine_tuned_on_long_texts_accepts_at_long_prompts(tmp_path, target, answers):
    """YaRN and sliding layers on a drafter that was trained on texts of 30 tokens; measured at 150, before and after."""
    half_trained(target, answers).save_pretrained(tmp_path / "short")
    rows = answers_of(target, 6, prompt=150, answer=20)
    prompts = [row["prompt_ids"] for row in rows]
    options = TrainOptions("tiny", [], "", drafter=str(tmp_path / "short"), window=40, yarn=8.0)
    with pytest.raises(ValueError, match="does not record at what length it was trained"):
        warm_drafter(options)
    (tmp_path / "short" / "training_record.json").write_text('{"data": {"longest_row": 32}}')
    longer = warm_drafter(options)
    assert longer.config.rope_parameters["original_max_position_embeddings"] == 32
    assert longer.config.rope_parameters["rope_type"] == "yarn" and longer.config.max_position_embeddings == 256
    assert longer.config.layer_types == [SLIDING, FULL] and longer.config.block_causal == [False, False]
    before = evaluation.generate(target, longer.eval(), prompts, 20).tau
    trainer = trainer_of(
        tmp_path, target, longer, rows, answers[8:], max_steps=80, save_strategy="no", logging_steps=80
    )
    trainer.train()
    longer.eval()
    longer.save_pretrained(tmp_path / "long")
    served = DFlashDraftModel.from_pretrained(tmp_path / "long", dtype=torch.float32)
    after = evaluation.generate(target, served, prompts, 20).tau
    assert before < 1.6 and after > before + 0.7, (before, after)
    with pytest.raises(ValueError, match="--yarn needs a drafter with default RoPE"):
        long_context(served.config, None, 2.0)


def test_pitfall_85_a_compiled_block_mask_compiles_once():
    """A new mask each step is no new program."""
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import create_block_mask

    counter = CompileCounter()
    create = torch.compile(create_block_mask, backend=counter)
    rows, config = rows_of(batch_of([row_of(3, 9, 1)], width=32)), tiny_drafter().config
    for seed in range(4):
        anchors, valid = draw_anchors(rows, 4, generator(seed), fixed=True)
        layer_masks(config, rows, anchors, valid, "flex_attention", create)
    assert counter.frame_count == 1


def test_a_batch_without_an_anchor_gives_no_loss(tmp_path, target, answers):
    trainer = trainer_of(tmp_path, target, tiny_drafter(), answers[:2], answers[8:])
    batch = batch_of([answers[0]])
    batch["answer_mask"][:] = False
    loss = step_loss(trainer, trainer.model, batch)
    loss.backward()
    assert float(loss.detach()) == 0


@pytest.mark.parametrize("loss", ["ce", "dpace", "tv"])
def test_a_step_over_several_batches_is_the_step_over_one(tmp_path, target, answers, loss):
    """A draft position weighs the same in a batch of short answers as in one of long ones, and beside a batch without any."""
    rows = vary(answers[:6])
    silent = batch_of([answers[7]])
    silent["answer_mask"][:] = False
    spread = [batch_of(*[[row] for row in rows[:2]]), batch_of(*[[row] for row in rows[2:]]), silent]
    losses, gradients = [], []
    for batches in ([batch_of(*[[row] for row in rows])], spread):
        drafter = tiny_drafter().train()
        trainer = trainer_of(tmp_path, target, drafter, rows, answers[8:], loss)
        trainer.num_anchors = 100  # all there are, so that both draw the same
        losses.append(step_loss(trainer, drafter, *batches))
        losses[-1].backward()
        gradients.append({name: p.grad for name, p in drafter.named_parameters()})
    torch.testing.assert_close(losses[0], losses[1])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_two_runs_that_fill_one_folder_take_turns(tmp_path, target, answers, monkeypatch, capsys):
    """Each finds what the other wrote; without turns, both write the same shard, and one index loses the other's."""
    computed, lock = [], threading.Lock()
    whole = training_run.target_features

    def slow(*args):
        with lock:
            computed.append(len(args[1]))
        time.sleep(0.3)
        return whole(*args)

    monkeypatch.setattr(training_run, "target_features", slow)
    drafter, loss, identity = tiny_drafter(), BlockLoss("ce", None), identify(target)

    def fill(rows):
        return training_run.fill_cache(str(tmp_path / "f"), identity, target, drafter, loss, rows)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, (answers[:6], answers[4:])))
    cache = FeatureCache(tmp_path / "f", identity, drafter.config.target_layer_ids)
    cache.verify()
    assert sum(computed) == len(answers) and len(cache.shards) == 2
    for row in answers:
        assert cache[document_key(row)].equal(whole_features(target, row))
    assert "is being written by another process; waiting for it" in capsys.readouterr().err


def whole_features(target, row: dict) -> torch.Tensor:
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    return target_features(target, ids, torch.ones_like(ids), [0, 1, 2])[0]


def test_features_are_kept_by_text_and_not_by_name(tmp_path):
    target = tiny_target("qwen3")
    cache = FeatureCache(tmp_path, identify(target), [0, 1])
    one, other = row_of(3, 6, 1, "same"), row_of(3, 6, 2, "same")
    for row in (one, other):
        cache.fill(
            {document_key(row): row},
            lambda ids, mask: target_features(target, ids, mask, [0, 1]),
        )
    assert not cache[document_key(one)].equal(cache[document_key(other)])
