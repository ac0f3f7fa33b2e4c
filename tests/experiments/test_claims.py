"""The variants behind the paper's claims: what each of them sees, and a run that goes on where it stopped."""

import json

import pytest
import torch
from dflash_hub.experiments import claims
from dflash_hub.experiments.variant_drafters import FusedAtInput, OneByOne
from dflash_hub.training.blocks import denoise
from dflash_hub.training.data import row_context, rows_of, single_row
from helpers.folders import save_target
from helpers.tiny import tiny_drafter, tiny_target
from helpers.training import answers_of


def of_kind(kind, **config):
    drafter = tiny_drafter(**config)
    made = kind(drafter.config).eval()
    made.load_state_dict(drafter.state_dict())
    return made


def drafted(drafter, target, row: dict, at: int, context=None) -> torch.Tensor:
    """(K, H) of the block at one anchor, and what it sees of the row is handed over as it is."""
    batch = single_row(row, target.device)
    rows = rows_of(batch)
    context = row_context(target, batch, drafter.config.target_layer_ids) if context is None else context
    drafter.show(rows.input_ids, target)
    anchors = torch.tensor([[at]])
    with torch.no_grad():
        return denoise(drafter, drafter.config, target, rows, context, anchors, torch.ones(1, 1, dtype=torch.bool))[
            0, 0
        ]


def changed(one: torch.Tensor, other: torch.Tensor) -> list[bool]:
    return [bool((a - b).abs().max() > 1e-6) for a, b in zip(one, other)]


def test_one_by_one_sees_the_tokens_before_and_not_its_own():
    """The position that drafts a token must not see it, and sees all before it: those after the anchor as tokens only."""
    target = tiny_target("llama")
    drafter = of_kind(OneByOne, block_causal=[True, True])
    row, at = answers_of(target, 1)[0], 12
    context = row_context(target, single_row(row, target.device), drafter.config.target_layer_ids)
    before = drafted(drafter, target, row, at, context)
    for ahead in (1, 2, 3):
        other = {**row, "response_ids": [*row["response_ids"]]}
        other["response_ids"][at + ahead - len(row["prompt_ids"])] += 1
        after = drafted(drafter, target, other, at, context)
        assert changed(before, after)[1:] == [slot > ahead for slot in range(1, 5)]
    for column, expected in (
        (at - 1, True),
        (at, False),
        (at + 1, False),
    ):  # hidden states: those before the anchor only
        poked = context.clone()
        poked[0, column] += 1
        assert changed(before, drafted(drafter, target, row, at, poked))[1:] == [expected] * 4
    assert drafter.passes_a_round == 4


def test_input_fusion_reads_hidden_states_once():
    """A later layer's keys come of its own states: what an early token says reaches it through the context's own layers."""
    target = tiny_target("llama")
    drafter, plain = of_kind(FusedAtInput), of_kind(OneByOne)
    row, at = answers_of(target, 1)[0], 12
    context = row_context(target, single_row(row, target.device), drafter.config.target_layer_ids)
    before = drafted(drafter, target, row, at, context)
    for column, expected in ((2, True), (at - 1, True), (at, False), (at + 3, False)):
        poked = context.clone()
        poked[0, column] += 1
        assert changed(before, drafted(drafter, target, row, at, poked)) == [expected] * 5
    other = {**row, "response_ids": [*row["response_ids"]]}
    other["response_ids"][at - 1 - len(row["prompt_ids"])] += 1
    assert all(changed(before, drafted(drafter, target, other, at, context)))  # the embedding is fused with it
    assert all(changed(before, drafted(plain, target, row, at, context)))
    seen = []
    drafter.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    drafted(drafter, target, row, at, context)
    poked = context.clone()
    poked[0, 2] += 1
    drafted(drafter, target, row, at, poked)
    blocks = [states for states in seen if states.shape[1]]
    assert changed(blocks[0][0], blocks[1][0]) == [column >= 2 for column in range(blocks[0].shape[1])]


def test_a_run_goes_on_where_it_stopped_and_names_what_is_left(tmp_path, monkeypatch):
    target = save_target(tmp_path / "target")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers_of(target, 6, answer=12)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(claims, "CLAIMS", claims.CLAIMS[:4])
    small = {"target": "target", "rows": 4, "validation": 2, "minutes": 1e-4, "layers": 2}
    claims.main(["a.jsonl"], tmp_path / "out", **small, seeds=1)
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["variant"] for result in first] == ["base", "no features", "input fusion", "DFlash-AR"]
    assert all(result["tau"] >= 1 and result["steps"] >= 1 for result in first)
    assert [result["drafter_passes_a_round"] for result in first] == [1, 1, 1, 7]
    claims.main(["a.jsonl"], tmp_path / "out", **small, seeds=2, hours=0)
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == first
    text = (tmp_path / "out" / "claims.md").read_text()
    assert (
        "Left out for lack of time: base, seed 1; no features, seed 1; input fusion, seed 1; DFlash-AR, seed 1." in text
    )
    assert all(f"| {name} | 1 | " in text for name in ("base", "no features", "input fusion", "DFlash-AR"))


@pytest.mark.parametrize("name", [name for _, name in claims.CLAIMS])
def test_each_claim_has_its_variant(name):
    assert name in {variant.name for variant in claims.ablations.VARIANTS}
