"""What 0.1.0 wrote is still read: `data/version-0.1.0/` holds a folder of each kind, made by its commands with a tiny target."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.benchmark.bench import read_records
from dflash_hub.benchmark.report import write_report
from dflash_hub.benchmark.rows import summarize_rows
from dflash_hub.cli.app import app
from dflash_hub.convert.card import _evaluation
from dflash_hub.training.options import TrainOptions, with_new_names
from dflash_hub.training.record import longest_trained
from dflash_hub.training.train import _open_run, load_rows
from helpers.folders import tiny_tokenizer
from typer.main import get_command

EARLIER = Path(__file__).parent / "data" / "version-0.1.0"


def test_a_config():
    stated = json.loads((EARLIER / "config.json").read_text())
    config = DFlashConfig.from_pretrained(EARLIER)
    same = stated.keys() - {"architectures", "auto_map", "dtype", "model_type", "transformers_version"}
    assert len(same) > 25 and {name: getattr(config, name) for name in same} == {name: stated[name] for name in same}
    assert sum(p.numel() for p in DFlashDraftModel(config).parameters()) > 0


def test_a_folder_of_responses():
    rows, files, greedy = load_rows(
        [str(EARLIER / "answers")], {}, TrainOptions("target", [], ""), tiny_tokenizer(97), written_under={}
    )
    assert greedy and [file["rows"] for file in files] == [4]
    (first,) = [row for row in rows if row["id"] == "p-0"]
    assert (first["prompt_ids"], first["response_ids"]) == ([1, 3, 4, 2], [59, 59, 59, 59, 13, 16])


def test_a_runs_yaml(tmp_path):
    """As `--config`, under today's names; and a run can go on."""
    context = get_command(app).commands["train"].make_context("train", ["--config", str(EARLIER / "run.yaml")])
    given = {name: context.params[name] for name in ("responses", "target_layers", "validation", "greedy_responses")}
    assert given == {"responses": ["answers"], "target_layers": "1,3", "validation": 1, "greedy_responses": None}
    shutil.copy(EARLIER / "run.yaml", tmp_path)
    stated = with_new_names(yaml.safe_load((EARLIER / "run.yaml").read_text()))
    fields = {field.name for field in dataclasses.fields(TrainOptions)}
    options = TrainOptions(**{name: stated[name] for name in stated.keys() & fields})
    resolved = {name: stated[name] for name in ("data", "weights")}
    _open_run(tmp_path, options, **resolved)
    with pytest.raises(ValueError, match="made with other validation"):
        _open_run(tmp_path, dataclasses.replace(options, validation=2), **resolved)


def test_a_training_record():
    assert longest_trained(str(EARLIER)) == 12
    record = json.loads((EARLIER / "training_record.json").read_text())
    assert "acceptance by draft position 0." in " ".join(_evaluation(record))


def test_rows_of_a_benchmark(tmp_path):
    assert [record["method"] for record in read_records(EARLIER / "bench")] == ["baseline", "ours"] * 2
    of_ours = [entry for entry in summarize_rows(EARLIER / "bench") if entry["method"] == "ours"]
    assert of_ours[0]["speedup"] == pytest.approx(0.158784 / 0.210642, rel=1e-3)
    shutil.copytree(EARLIER / "bench", tmp_path / "bench")
    report = write_report(tmp_path / "bench", None)
    assert "| baseline |" in report and "| ours |" in report and "plain |" not in report
