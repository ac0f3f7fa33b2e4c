"""Import and export of z-lab's layout: bit for bit, complete or not at all."""

import json
import subprocess
import sys

import pytest
import torch
from dflash_hub import DFlashConfig
from dflash_hub.common.files import new_folder
from dflash_hub.convert.exporting import export_drafter
from dflash_hub.convert.importing import import_drafter
from dflash_hub.convert.zlab import write
from dflash_hub.experiments import conversion_memory as conversion
from helpers.fake_hub import fake_hub
from helpers.formats import FULL, SLIDING, YARN
from helpers.tiny import CODE, tiny_drafter
from safetensors.torch import load_file, save_file


@pytest.fixture
def ours(tmp_path):
    folder = tmp_path / "ours"
    tiny_drafter().to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_there_and_back_with_what_it_was_made_for(ours, tmp_path):
    """The same bytes as transformers saves; what z-lab's layout has no place for is said again."""
    export_drafter(str(ours), tmp_path / "zlab")
    import_drafter(str(tmp_path / "zlab"), tmp_path / "back", target="org/target", chat=True, thinking=False)
    for folder in ("zlab", "back"):
        assert (tmp_path / folder / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    after = DFlashConfig.from_pretrained(tmp_path / "back")
    assert (after.target_name_or_path, after.target_chat, after.target_thinking) == ("org/target", True, False)


def test_the_exported_folder_says_what_engines_look_for(tmp_path):
    tiny_drafter(layer_types=[SLIDING, FULL], sliding_window=8, rope_parameters=YARN).save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    assert {path.name for path in (tmp_path / "zlab").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    config = json.loads((tmp_path / "zlab" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["DFlashDraftModel"])
    assert "auto_map" not in config  # without the flag a qwen3-typed folder with code would load as plain Qwen3
    assert config["block_size"] == config["dflash_config"]["block_size"] == 5
    assert config["dflash_config"]["mask_token_id"] == 96 and config["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert (config["use_sliding_window"], config["max_window_layers"], config["num_target_layers"]) == (True, 0, 4)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "yarn"
    assert "is_causal" not in config and "causal" not in config["dflash_config"]  # a mixed layout is not one flag


def test_all_layer_causality_is_written_in_both_places():
    config = write(tiny_drafter().config, None)
    assert config["is_causal"] is False and config["dflash_config"]["causal"] is False


def test_what_the_layout_cannot_say_stops_the_export(tmp_path):
    tiny_drafter(layer_types=[SLIDING, FULL], sliding_window=8, block_causal=[False, True]).save_pretrained(
        tmp_path / "o"
    )
    with pytest.raises(ValueError, match=r"cannot take this drafter: `block_causal` is \[False, True\]"):
        export_drafter(str(tmp_path / "o"), tmp_path / "zlab")
    assert not (tmp_path / "zlab").exists() and not list(tmp_path.glob(".zlab*"))


def test_nothing_is_overwritten_or_left_half_written(ours, tmp_path):
    destination = tmp_path / "there"
    destination.mkdir()
    (destination / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="pass --force"):
        export_drafter(str(ours), destination)
    assert (destination / "config.json").read_text() == "{}"
    export_drafter(str(ours), destination, force=True)
    assert json.loads((destination / "config.json").read_text())["model_type"] == "qwen3"

    with pytest.raises(RuntimeError, match="breaks"), new_folder(destination, force=True) as folder:
        (folder / "config.json").write_text("half")
        raise RuntimeError("breaks")
    assert json.loads((destination / "config.json").read_text())["model_type"] == "qwen3"

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="is no model folder"):
        export_drafter(str(ours), precious, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "precious", "there"]

    with pytest.raises(RuntimeError, match="breaks"), new_folder(tmp_path / "precious" / "a" / "b" / "c") as folder:
        raise RuntimeError("breaks")
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]  # no parents that were made for it


def test_a_failed_replacement_leaves_the_old_folder(monkeypatch, tmp_path):
    from pathlib import Path

    destination = tmp_path / "there"
    destination.mkdir()
    (destination / "config.json").write_text("old")
    rename = Path.rename

    def fails(self, target):
        if self.name == "new":
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="disk full"), new_folder(destination, force=True) as folder:
        (folder / "config.json").write_text("new")
    assert (destination / "config.json").read_text() == "old"


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    (
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (
            lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
            "of no format that is known",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:500]), "unreadable"),
        (lambda f: drop(f, "fc.weight"), "missing: fc.weight"),
    ),
)
def test_bad_sources_stop_with_a_sentence(break_it, sentence, tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "ours")
    export_drafter(str(tmp_path / "ours"), tmp_path / "zlab")
    break_it(tmp_path / "zlab")
    with pytest.raises((ValueError, OSError), match=sentence):
        import_drafter(str(tmp_path / "zlab"), tmp_path / "back")
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".back*"))


def drop(folder, name):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_root_checkpoint_was_trained_on_from_the_fixture_and_is_what_its_record_says(fixture_folder):
    from dflash_hub.training.features import checksum
    from helpers.tiny import ROOT

    ours, theirs = load_file(ROOT / "model.safetensors"), load_file(fixture_folder / "model.safetensors")
    assert set(ours) == {*theirs, "d2t"}  # it drafts from a list
    for name in theirs:
        assert (ours[name].shape, ours[name].dtype) == (theirs[name].shape, theirs[name].dtype)
    assert not torch.equal(ours["fc.weight"], theirs["fc.weight"])
    record = json.loads((ROOT / "training_record.json").read_text())
    assert record["result"]["weights_sha256"] == checksum(ROOT / "model.safetensors")


@pytest.mark.parametrize("how", ("push_to_hub", "save_pretrained"))
def test_push_to_hub_uploads_a_complete_folder(how, monkeypatch, tmp_path):
    with fake_hub(monkeypatch) as hub:
        if how == "push_to_hub":
            tiny_drafter().push_to_hub("org/drafter", private=True)
        else:
            tiny_drafter().save_pretrained(tmp_path / "d", push_to_hub=True, repo_id="org/drafter", private=True)
    expected = [*CODE, "README.md", "config.json", "custom_generate/generate.py", "model.safetensors"]
    assert sorted(hub.files["org/drafter"]) == sorted(expected)
    assert hub.repositories["org/drafter"]["visibility"] == "private"


def test_what_the_measurement_of_memory_measures(tmp_path):
    small, _ = conversion.measure([sys.executable, "-c", "pass"])
    large, seconds = conversion.measure([sys.executable, "-c", "import time; x = bytearray(2**30); time.sleep(0.5)"])
    assert large - small > 2**29 and seconds >= 0.5
    with pytest.raises(ValueError, match="ended with exit code 3"):
        conversion.measure([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.slow
def test_the_table_of_memory():
    done = subprocess.run(
        [sys.executable, "-m", "dflash_hub.experiments.conversion_memory", "--parameters", "1000000"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "| 0.00 billion parameters in bfloat16, 0.0 GB |" in done.stdout
        and "| `dflash-hub import zlab back` |" in done.stdout
    )
    assert "`python -m dflash_hub.experiments.conversion_memory --parameters 1000000`, commit" in done.stdout
