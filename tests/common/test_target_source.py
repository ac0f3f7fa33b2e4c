"""Targets with code of their own, pinned revisions, and the names under which they are recorded."""

import json
import shutil
import time

import pytest
import torch
import transformers
import typer
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.cli.app import app
from dflash_hub.common.loading import load_target
from dflash_hub.common.target_source import TargetSource
from dflash_hub.convert.init import init_drafter
from dflash_hub.demo.pair import Pair
from helpers.folders import save_target
from helpers.tiny import prompt_of, tiny_drafter
from typer.testing import CliRunner

COMMITS = {"v1": "a" * 40, "main": "b" * 40}
SHAPE = {"layers": 1, "block_size": 4, "target_layers": [0, 1, 2]}


@pytest.fixture
def custom(tmp_path):
    """A target whose class is in its own folder."""
    folder = tmp_path / "custom"
    save_target(folder)
    (folder / "configuration_mine.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
    )
    (folder / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_mine import MineConfig\n\n\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The repository org/target in a cache of the Hub, with other weights at v1 than at main."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path), raising=False)
    repository = tmp_path / "models--org--target"
    (repository / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate(COMMITS.items()):
        (repository / "refs" / name).write_text(commit)
        save_target(repository / "snapshots" / commit, seed=seed)
    return repository / "snapshots"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_code_of_a_target_runs_on_demand_only_and_nothing_waits_for_an_answer(custom, tmp_path):
    drafter = str(tmp_path / "drafter")
    start = time.monotonic()
    for load in (
        lambda source: init_drafter(source, None, **SHAPE),
        lambda source: load_target(source, "float32"),
        lambda source: Pair(source, drafter, "float32"),
    ):
        tiny_drafter(num_target_layers=8).save_pretrained(drafter)
        with pytest.raises(ValueError, match=r"custom brings code of its own, .* pass --trust-remote-code"):
            load(TargetSource(custom))
    assert time.monotonic() - start < 10  # transformers alone waits 15 seconds for an answer, each time

    trusted = TargetSource(custom, trust_remote_code=True)
    init_drafter(trusted, drafter, **SHAPE, force=True)
    target, _ = load_target(trusted, "float32")
    assert type(target).__name__ == "MineForCausalLM"
    model, ids = DFlashDraftModel.from_pretrained(drafter), prompt_of(8)
    text = target.generate(ids, assistant_model=model, max_new_tokens=8, do_sample=False)
    assert torch.equal(text, target.generate(ids, max_new_tokens=8, do_sample=False))
    assert model.last_speculation.drafter_passes > 0


def test_every_command_that_loads_a_target_says_from_where_and_whether_to_run_its_code():
    commands = typer.main.get_command(app).commands
    with_target = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
        if any(parameter.name == "target" for parameter in command.params)
    }
    assert len(with_target) == 11
    for name, options in with_target.items():
        assert {"--target-revision", "--trust-remote-code"} <= options, name
    for name in ("init", "train", "align", "import"):
        assert "--target-name" in with_target[name]


def test_the_recorded_revision_is_taken_and_another_is_said(hub_cache, tmp_path, capsys):
    drafter = tmp_path / "drafter"
    init_drafter(TargetSource("org/target", "v1"), drafter, **SHAPE)
    config = DFlashConfig.from_pretrained(drafter)
    assert (config.target_name_or_path, config.target_revision) == ("org/target", "v1")

    def weights(source):
        return load_target(source.for_drafter(config), "float32")[0].lm_head.weight

    at = {name: transformers.AutoModelForCausalLM.from_pretrained(hub_cache / COMMITS[name]) for name in COMMITS}
    assert torch.equal(weights(TargetSource("org/target")), at["v1"].lm_head.weight)
    assert "made for revision" not in capsys.readouterr().err
    assert torch.equal(weights(TargetSource("org/target", "main")), at["main"].lm_head.weight)
    assert "made for revision v1 of org/target, this is main" in capsys.readouterr().err
    assert Pair("org/target", str(drafter), "float32").source == "org/target at v1"


def test_a_local_copy_is_recorded_under_its_id_on_the_hub(hub_cache, tmp_path):
    """A folder of the Hub's cache has it in its path; another one is told it, or has its own name."""
    copied = tmp_path / "copy"
    shutil.copytree(hub_cache / COMMITS["v1"], copied)
    for source, name, revision in (
        (TargetSource(str(hub_cache / COMMITS["v1"])), "org/target", COMMITS["v1"]),
        (TargetSource(str(copied), name="org/target"), "org/target", None),
        (TargetSource(str(copied)), "copy", None),
    ):
        config = init_drafter(source, None, **SHAPE).config
        assert (config.target_name_or_path, config.target_revision) == (name, revision)
    # What a drafter knows of its target, a copy without a name does not change.
    assert TargetSource(str(copied)).recorded_over("org/target", "v1") == ("org/target", "v1")
    assert TargetSource(str(copied), name="org/other").recorded_over("org/target", "v1") == ("org/other", None)


def test_options_of_a_target_need_one(tmp_path):
    done = run("demo", "--target-revision", "v1")
    assert isinstance(done.exception, ValueError) and "--target-revision says more of --target" in str(done.exception)
    spelled = TargetSource("org/a b", "v1", trust_remote_code=True).options()
    assert spelled == "--target 'org/a b' --target-revision v1 --trust-remote-code"
