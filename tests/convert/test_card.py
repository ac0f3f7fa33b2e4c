"""Model cards: valid, from what the folder records, and never in place of what someone wrote."""

import json
import re

import pytest
import torch
from dflash_hub import DFlashDraftModel
from dflash_hub.convert.card import YOURS, write_card
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.hub_files import CARD_MARK
from helpers.tiny import tiny_drafter, tiny_target
from huggingface_hub import ModelCard

RECORD = {
    "command": "dflash-hub train --recipe small",
    "data": {
        "files": [{"name": "responses.jsonl", "rows": 736, "answer_tokens": 81234, "sha256": "ab" * 32}],
        "target": "org/target", "thinking": False, "chat_template_sha256": "cd" * 32,
    },
    "recipe": {"lr": 6e-4, "epochs": 6},
    "environment": {
        "commit": "abc1234", "date": "2026-11-29T10:00+00:00", "device": "CPU, 2 threads", "python": "3.11.7",
        "torch": "2.13.0", "transformers": "5.24.0",
    },
    "result": {
        "steps": 100, "seconds": 12.5, "anchors": 5000, "best_step": 80,
        "evaluation": {
            "prompts": 16, "max_new_tokens": 64, "acceptance_length": 2.375, "acceptance_by_position": [0.71, 0.42],
        },
    },
}  # fmt: skip
RESULT = {name: value for name, value in RECORD["result"].items() if name != "evaluation"}
SUMMARY = {
    "settings": {
        "target": "org/target", "drafter": "here", "dtype": "torch.float32", "generation": {"do_sample": False},
        "thinking": None,
    },
    "provenance": {"command": "dflash-hub bench --output x", **RECORD["environment"], "processes": 1},
    "rows": [
        {
            "set": "gsm8k", "method": "ours", "texts": 8, "tau": [2.19, 2.01, 2.4], "tokens_per_second": 18.25,
            "speedup": [0.97, 0.9, 1.05], "same": 8, "compared": 8,  # as 0.1.0 named the figures
        },
        {
            "set": "mbpp", "method": "ours", "outputs": 6, "acceptance_length": [2.5, 2.25, 2.75], "tokens_per_second": 20,
            "speedup": [1.1, 1.0, 1.2], "same": 6, "compared": 6,
        },
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(target_name_or_path="org/target", target_chat=True, target_thinking=False).save_pretrained(
        tmp_path / "d"
    )
    return tmp_path / "d"


def test_license_and_name_of_the_target_are_stated_and_kept(folder):
    """The name goes into config.json too, from where `base_model` and the snippet of the next card come."""
    write_card(folder, license="apache-2.0", target_name="org/other")
    for text in ((folder / "README.md").read_text(), write_card(folder)):
        data = ModelCard(text).data.to_dict()
        assert data["license"] == "apache-2.0" and data["base_model"] == "org/other"
        assert 'AutoModelForCausalLM.from_pretrained("org/other"' in text
    before = (folder / "config.json").read_text()
    with pytest.raises(ValueError, match="'../copy' is no id of a repository"):
        write_card(folder, target_name="../copy")
    assert (folder / "config.json").read_text() == before
    assert DFlashDraftModel.from_pretrained(folder).config.target_name_or_path == "org/other"


def test_a_bare_folder_gets_a_valid_card_that_claims_nothing(folder):
    text = write_card(folder)
    assert (folder / "README.md").read_text() == text
    data = ModelCard(text).data.to_dict()
    assert data["base_model"] == "org/target" and data["library_name"] == "transformers"
    assert {"speculative-decoding", "dflash", "custom_generate"} <= set(data["tags"])
    assert "not measured" in text and "Not recorded" in text
    assert "made for text in its chat template, its non-thinking mode" in text
    assert '"num_speculative_tokens": 4' in text and "--speculative-num-draft-tokens 5" in text
    assert "2 full, bidirectional in the block" in text


def test_record_and_benchmarks_stand_with_their_provenance(folder, tmp_path):
    (folder / "training_record.json").write_text(json.dumps(RECORD))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    text = write_card(folder, [tmp_path / "summary.json"], repository="org/drafter")
    for part in (
        "dflash-hub train --recipe small",
        "736",
        "81234",
        "abababababababab",
        "`lr` | 0.0006",
        "kept: step 80",
    ):
        assert part in text
    for part in ("2.38 tokens a round", "0.71, 0.42", "commit abc1234", "CPU, 2 threads"):
        assert part in text.replace("Commit", "commit")
    assert "| mbpp | ours | 6 | 2.50 [2.25, 2.75] |" in text
    assert "| gsm8k | ours | 8 | 2.19 [2.01, 2.40] | 18.2 | 0.97 [0.90, 1.05] | 8 of 8 |" in text
    assert "not measured" not in text and 'from_pretrained("org/drafter"' in text


def test_a_refresh_keeps_what_is_the_owners(folder):
    write_card(folder)
    path = folder / "README.md"
    text = path.read_text().replace("---\n", "---\nlicense: mit\n", 1).replace("- dflash\n", "- dflash\n- mine\n", 1)
    path.write_text(text + "\nThanks to Ada.\n")
    again = write_card(folder)
    data = ModelCard(again).data.to_dict()
    assert data["license"] == "mit" and "mine" in data["tags"] and data["tags"].count("dflash") == 1
    assert again.endswith(f"{YOURS}\n\nThanks to Ada.\n") and again.count("## Use") == 1
    assert write_card(folder) == again


def test_a_card_that_someone_wrote_is_not_replaced(folder):
    (folder / "README.md").write_text("# Mine\n")
    with pytest.raises(FileExistsError, match="pass --force"):
        write_card(folder)
    assert (folder / "README.md").read_text() == "# Mine\n"
    assert "## Use" in write_card(folder, force=True)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    (
        ("training_record.json", "{", "is no JSON"),
        ("training_record.json", "[]", "must hold a JSON object, it holds a list"),
        ("training_record.json", "{}", "training_record.json is not as dflash-hub writes it: KeyError, 'data'"),
        ("training_record.json", json.dumps(RECORD | {"data": 5}), "is not as dflash-hub writes it"),
        (
            "training_record.json",
            json.dumps(RECORD | {"result": {"evaluation": [1]} | RESULT}),
            "is not as dflash-hub writes",
        ),
        ("summary.json", '{"rows": []}', "summary.json is not as dflash-hub writes it: KeyError, 'settings'"),
        ("summary.json", json.dumps(SUMMARY | {"rows": [{"set": "x"}]}), "KeyError, 'method'"),
        ("summary.json", json.dumps(SUMMARY | {"rows": 5}), "is not as dflash-hub writes it"),
        (
            "summary.json",
            json.dumps(SUMMARY | {"settings": SUMMARY["settings"] | {"dtype": None}}),
            "is not as dflash-hub",
        ),
        ("summary.json", None, "no benchmark summary at"),
        ("config.json", "{", "config.json is no JSON"),
        ("config.json", '{"model_type": "llama"}', "is of no format that is known"),
        ("config.json", '{"model_type": "dflash", "hidden_size": "many"}', "cannot be used"),
        ("model.safetensors", "", "unreadable"),
    ),
)
def test_bad_files_stop_with_a_sentence(name, content, sentence, folder):
    before = (folder / "README.md").read_text()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        write_card(folder, [folder / "summary.json"] if name == "summary.json" else ())
    assert (folder / "README.md").read_text() == before


@pytest.mark.parametrize(
    "front",
    (
        b"[1, 2]",
        b"5: x",
        b"tags: 5",
        b"a: [",
        b"tags: [{a: 1}, [2]]\nmodel-index: 5",
        b"license: \xff",
        b"eval_results: 7",
    ),
)
def test_odd_front_matter_is_kept_or_refused(front, folder):
    path = folder / "README.md"
    path.write_bytes(b"---\n" + front + b"\n---\n" + CARD_MARK.encode() + b"\n")
    before = path.read_bytes()
    try:
        write_card(folder)
    except ValueError as error:
        assert f"{path} is not as dflash-hub writes it" in str(error) and path.read_bytes() == before


def test_one_word_for_tags_is_a_tag(folder):
    write_card(folder)
    path = folder / "README.md"
    path.write_text(f"---\ntags: mine\n---\n{CARD_MARK}\n")
    tags = ModelCard(write_card(folder)).data.to_dict()["tags"]
    assert "mine" in tags and "m" not in tags


def test_only_a_folder_of_ours_has_a_card(folder, tmp_path):
    export_drafter(str(folder), tmp_path / "zlab")
    before = (tmp_path / "zlab" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"is in another format \(zlab\); `dflash-hub import` it first"):
        write_card(tmp_path / "zlab", force=True)
    assert (tmp_path / "zlab" / "README.md").read_text() == before
    with pytest.raises(OSError, match="is no folder"):
        write_card(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is no id of a repository"):
        write_card(folder, repository='a"b')


def test_the_limits_state_positions_and_how_to_pin(folder):
    limits = write_card(folder).split("## Limits")[1]
    assert "Made for 512 positions" in limits and "one target above" in limits
    assert 'AutoModel.from_pretrained("REPOSITORY", revision="COMMIT", trust_remote_code=True)' in limits
    limits = write_card(folder, repository="org/d").split("## Limits")[1]
    assert 'AutoModel.from_pretrained("org/d", revision="COMMIT", trust_remote_code=True)' in limits


def test_what_no_engine_can_serve_is_said(tmp_path):
    tiny_drafter(input_embedding_scale=2.0).save_pretrained(tmp_path / "d")
    text = write_card(tmp_path / "d")
    assert "vLLM: not served. `input_embedding_scale` is 2" in text and "dflash-hub export FOLDER drafter-zlab" in text


def test_the_snippet_runs(tmp_path, monkeypatch, capsys, smollm2_path):
    from transformers import AutoTokenizer

    target = tiny_target("llama", vocab_size=49152)
    target.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(smollm2_path).save_pretrained(tmp_path / "target")
    tiny_drafter(
        vocab_size=49152, mask_token_id=16, target_name_or_path=str(tmp_path / "target"), target_chat=True
    ).save_pretrained(tmp_path / "d")
    code = re.search(r"```python\n(.*?)```", write_card(tmp_path / "d"), re.S)[1]
    monkeypatch.chdir(tmp_path / "d")
    torch.manual_seed(0)
    exec(code.replace("max_new_tokens=256", "max_new_tokens=12").replace(', device_map="auto"', ""), {})
    assert "tokens per target pass" in capsys.readouterr().out
