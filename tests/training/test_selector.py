"""Training of DFlash 2's selector: its loss by hand, its gradient, and what is replayed of it."""

import pytest
import torch
from dflash_hub.drafter_heads import Candidates
from dflash_hub.drafter_paths import PathHead
from dflash_hub.training import evaluation
from dflash_hub.training.check import acceptance
from dflash_hub.training.losses import BlockLoss, SelectorLoss, chunked_sum
from dflash_hub.training.optimizer import MuonAdamW
from dflash_hub.training.options import TrainOptions
from helpers.tiny import CONVOLUTION, SELECTOR, tiny_drafter, tiny_target
from helpers.training import answers_of, losses_of, trainer_of


class Linear:
    """A head of one matrix."""

    looks_back = False

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, hidden):
        return Candidates(hidden @ self.weight.T)


def blocks(seed: int = 0):
    """Two blocks of three positions: (head, hidden, logits, labels, previous, supervised); gold is no candidate once."""
    torch.manual_seed(seed)
    drafter = tiny_drafter(vocab_size=11, mask_token_id=1, **SELECTOR | {"selector_top_k": 3})
    head, hidden = PathHead(Linear(torch.randn(11, 32)), drafter.candidate_selector), torch.randn(2, 3, 32)
    logits = head(hidden).logits
    labels = logits.topk(3).indices[..., 1].clone()
    labels[1, 1] = logits[1, 1].argmin()
    previous = torch.cat([torch.tensor([[4], [7]]), labels[:, :-1]], dim=1)
    supervised = torch.tensor([[True, True, True], [True, True, False]])
    return head, hidden, logits, labels, previous, supervised


@pytest.mark.parametrize("missing", ("leave-out", "insert"))
@pytest.mark.parametrize("kind", ("ce", "dpace"))
def test_the_loss_by_hand(kind, missing):
    """Behind the true previous token; the position whose token is no candidate is left out, or has it put in."""
    head, hidden, logits, labels, previous, supervised = blocks()
    pairs, total = head.pairs, 0.0
    for block in range(2):
        losses, weighed = [], []
        for k in range(3):
            ids = logits[block, k].topk(3).indices.tolist()
            if int(labels[block, k]) not in ids and missing == "insert":
                ids[-1] = int(labels[block, k])
            gate = pairs.hidden_projection.weight @ hidden[block, k] * pairs.predecessor_codebook[previous[block, k]]
            scores = torch.stack([logits[block, k, v] + (gate * pairs.successor_codebook[v]).sum() for v in ids])
            takes = bool(supervised[block, k]) and int(labels[block, k]) in ids
            losses.append(-scores.log_softmax(-1)[ids.index(int(labels[block, k]))] if takes else None)
        if kind == "ce":
            weighed = [torch.exp(torch.tensor(-k / 4.0)) for k in range(3)]
        else:  # the sum over j >= k of s_1 ... s_j over positions that take part
            s = [1.0 if loss is None else 0.5 * float(torch.exp(-loss)) + 0.5 for loss in losses]
            prefix = [float(torch.tensor(s[: k + 1]).prod()) * (losses[k] is not None) for k in range(3)]
            weighed = [sum(prefix[k:]) for k in range(3)]
        total += sum(w * loss for w, loss in zip(weighed, losses) if loss is not None)
    loss, present, picked = SelectorLoss(BlockLoss(kind, 4.0), 0.5, missing)(
        head, hidden, logits, labels, previous, supervised
    )
    torch.testing.assert_close(loss, 0.5 * total)
    assert present.tolist() == [[True, True, True], [True, False, True]] and not (picked & ~present).any()


def test_the_gradient_reaches_the_selector_chunk_by_chunk():
    head, hidden, _, labels, previous, supervised = blocks()
    parameters, loss = [*head.pairs.parameters()], SelectorLoss(BlockLoss("ce", 4.0))

    def run(chunk):
        inputs = hidden.clone().requires_grad_()

        def loss_of(part, which):
            return loss(head, part, head(part).logits, labels[which], previous[which], supervised[which])[0]

        total = loss_of(inputs, slice(None)) if chunk is None else chunked_sum(inputs, loss_of, chunk, parameters)
        return torch.autograd.grad(3 * total, [inputs, *parameters])

    for one, whole in zip(run(1), run(None)):
        torch.testing.assert_close(one, whole)
        assert whole.abs().sum() > 0


def test_a_part_of_the_vocabulary_has_its_own_columns():
    head, hidden, logits, labels, previous, supervised = blocks()
    loss = SelectorLoss(BlockLoss("ce", 4.0))
    whole = loss(head, hidden, logits, labels, previous, supervised)
    shifted = torch.arange(11).flip(0)  # a column is not its token
    other = loss(head, hidden, logits.flip(-1), 10 - labels, previous, supervised, shifted)
    torch.testing.assert_close(other[0], whole[0])


def test_codebooks_are_no_matrices_to_muon():
    drafter = tiny_drafter(**SELECTOR)
    tables = [drafter.candidate_selector.predecessor_codebook, drafter.candidate_selector.successor_codebook]
    optimizer = MuonAdamW(drafter.parameters(), 1e-3, 0.0, (0.9, 0.95), 1e-8, tables)
    of_muon, of_adamw = ({id(p) for group in part.param_groups for p in group["params"]} for part in optimizer.parts)
    assert {id(table) for table in tables} <= of_adamw and not {id(table) for table in tables} & of_muon
    assert id(drafter.candidate_selector.hidden_projection.weight) in of_muon


def test_training_moves_all_parts_and_replay_walks_as_generation(tmp_path):
    target = tiny_target("llama")
    answers = answers_of(target, 10)
    drafter = tiny_drafter(initializer_range=0.05, **CONVOLUTION | SELECTOR)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    trainer = trainer_of(
        tmp_path, target, drafter, answers[:8], answers[8:], muon=True, max_steps=12, save_strategy="no"
    )
    trainer.train()
    assert all(not p.equal(before[name]) for name, p in drafter.named_parameters())
    losses = losses_of(trainer)
    assert sum(losses[-3:]) < sum(losses[:3])
    log = trainer.state.log_history[-2]
    assert 1 <= log["walked_tau"] <= log["oracle_tau"] and 0 <= log["selector_accuracy"] <= 1
    assert log["recall_1_position_4"] <= log["recall_candidates_position_4"] <= 1

    drafter.eval()
    replayed, _, _ = evaluation.replay(target, drafter, answers)
    prompts = [row["prompt_ids"] for row in answers]
    real = evaluation.generate(target, drafter, prompts, len(answers[0]["response_ids"]))
    assert replayed.accepted == real.accepted and sum(map(sum, real.accepted)) > 0
    likeliest = evaluation.replay(target, drafter, answers, walked=False)[0]
    assert likeliest.accepted != real.accepted  # the selector took part
    (found,) = [f for f in acceptance(drafter, target, answers, prompts, 24, [], None) if f.name == "selector"]
    assert f"acceptance length {replayed.tau:.2f}; {likeliest.tau:.2f} without it" in found.detail
    with torch.no_grad():
        drafter.candidate_selector.successor_codebook.zero_()
    assert evaluation.replay(target, drafter, answers)[0].accepted == likeliest.accepted


def test_the_study_of_what_the_parts_gain_trains_and_measures_a_variant(tmp_path):
    from dflash_hub.experiments import dflash2_gain

    target = tiny_target("llama")
    answers = answers_of(target, 6)
    tiny_drafter().save_pretrained(tmp_path / "drafter")
    base = TrainOptions(
        "target", [], str(tmp_path), drafter="given", loss="dpace", num_anchors=4, optimizer="adamw", batch_size=2
    )
    base.features = str(tmp_path / "features")
    result = dflash2_gain.measure(
        "both parts",
        1,
        base,
        str(tmp_path / "drafter"),
        target,
        answers[:4],
        answers[4:],
        {"validation": answers[4:]},
        0.5,
    )
    assert result["steps"] >= 1 and result["walk_ms"] > 0
    assert {*result["acceptance"]} == {*result["without_walk"]} == {"validation"}
    assert [line[0] for line in dflash2_gain.lines_of(result)] == ["both parts", "both parts, no walk"]
    assert (tmp_path / "both-parts-seed-1" / "config.json").exists()
