"""Lists of tokens to draft from: made from responses, written with a drafter, and trained with."""

import json
from pathlib import Path

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.cli import app as cli
from dflash_hub.training.features import checksum
from dflash_hub.training.options import with_new_names
from dflash_hub.training.vocabulary import frequent_tokens
from helpers.folders import tiny_tokenizer
from helpers.tiny import ROOT, tiny_drafter, tiny_target
from helpers.training import answers_of
from typer.testing import CliRunner


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """In the current folder: a target, a drafter for it, and responses without their prompts."""
    target = tiny_target("llama", num_hidden_layers=8)
    monkeypatch.chdir(tmp_path)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer(90).save_pretrained(tmp_path / "target")
    tiny_drafter(num_target_layers=8, mask_token_id=95).save_pretrained(tmp_path / "drafter")
    rows = answers_of(target, 6, answer=12)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = [{"id": row["id"], "response_ids": row["response_ids"]} for row in rows]
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    return rows


def test_frequent_tokens_come_first_and_lower_ids_among_equals():
    listed = frequent_tokens([[7, 7, 9, 2], [], [9, 7, 4, 2, 5]], 3)
    assert listed.token_ids.tolist() == [2, 7, 9] and listed.token_ids.dtype == torch.long
    assert (listed.distinct, listed.coverage) == (5, 7 / 9)
    assert frequent_tokens([[7, 7, 9, 2]], 50).token_ids.tolist() == [2, 7, 9]
    assert frequent_tokens([[5, 4, 3]], 1).token_ids.tolist() == [3]


def test_a_trained_drafter_gets_a_list_in_another_folder(pair):
    record = json.loads((ROOT / "tests/data/version-0.1.0/training_record.json").read_text())
    record["result"]["weights_sha256"] = "of the weights without a list"
    Path("drafter", "training_record.json").write_text(json.dumps(record))
    result = invoke("vocabulary", "drafter", "listed", "--responses", "bare.jsonl", "--size", 5)
    assert result.exit_code == 0, result.output
    expected = frequent_tokens([row["response_ids"] for row in pair], 5)
    assert f"listed {expected}" in " ".join(result.output.split())
    record = json.loads(Path("listed", "training_record.json").read_text())
    assert record["result"]["weights_sha256"] == checksum(Path("listed", "model.safetensors"))
    assert record["draft_vocabulary"] == {"responses": ["bare.jsonl"], "coverage": round(expected.coverage, 4)}
    before, after = (DFlashDraftModel.from_pretrained(name) for name in ("drafter", "listed"))
    assert before.d2t is None and (after.d2t + torch.arange(5)).equal(expected.token_ids)
    assert all(after.state_dict()[name].equal(tensor) for name, tensor in before.state_dict().items())
    again = invoke("vocabulary", "listed", "shorter", "--responses", "bare.jsonl", "--size", 3)
    assert again.exit_code == 0 and len(DFlashDraftModel.from_pretrained("shorter").d2t) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        (["drafter", "drafter", "--responses", "bare.jsonl"], "drafter"),
        (["drafter", "x", "--responses", "none.jsonl"], "no responses at none.jsonl"),
        (["drafter", "x", "--responses", "other.jsonl"], r"must be in [0, 97), got 5 to 400"),
        (["drafter", "x", "--responses", "empty.jsonl"], "a list of 1 to 96 token ids"),
    ),
)
def test_what_no_list_is_made_of(arguments, sentence, pair, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"id": "x", "response_ids": [5, 400]}\n')
    (tmp_path / "empty.jsonl").write_text("")
    result = invoke("vocabulary", *arguments)
    assert result.exit_code != 0 and sentence in f"{result.exception} {result.output}"
    assert not (tmp_path / "x").exists() and DFlashDraftModel.from_pretrained("drafter").d2t is None


def test_training_makes_a_list_that_a_warm_start_keeps(pair):
    run = (
        "train --target target --responses a.jsonl --validation 2 --eval-prompts 1 --eval-new-tokens 6 --evaluations 1 --max-steps 1 "
        "--batch-size 2 --num-anchors 4"
    ).split()
    fresh = invoke(*run, "--output", "run", "--layers", 1, "--block-size", 4, "--draft-vocab-size", 7)
    assert fresh.exit_code == 0, f"{fresh.exception} {fresh.output}"
    assert "drafts from 7 of the" in fresh.output
    trained = DFlashDraftModel.from_pretrained("run/drafter")
    assert len(trained.d2t) == trained.config.draft_vocab_size == 7
    responses = [row["response_ids"] for row in pair]
    assert {*(trained.d2t + torch.arange(7)).tolist()} <= {token for response in responses for token in response}
    warm = invoke(*run, "--output", "warm", "--drafter", "run/drafter")
    assert warm.exit_code == 0, f"{warm.exception} {warm.output}"
    assert DFlashDraftModel.from_pretrained("warm/drafter").d2t.equal(trained.d2t)


def test_options_of_earlier_runs_are_read_or_refused_by_name():
    assert with_new_names({"vocabulary": "full", "negatives": 4096, "taps": [1]}) == {"target_layers": [1]}
    with pytest.raises(ValueError, match="`vocabulary: answers` of 0.1.0 is no more: state `draft_vocab_size`"):
        with_new_names({"vocabulary": "answers"})
