"""The Hub as the Hub: loaded by AutoModel in a fresh process in which the package is not installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny import ROOT, tiny_drafter

PRELUDE = """
import sys
sys.modules["dflash_hub"] = None  # as where the package is not installed
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

def target_of():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)

ids = torch.tensor([[5, 17, 33, 60, 2, 41]])

def check(drafter, **kwargs):
    target = target_of()
    plain = target.generate(ids, do_sample=False, max_new_tokens=20)
    text = target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter, **kwargs)
    assert torch.equal(text, plain)
    assert drafter.last_speculation.drafter_passes > 3
    print("same text")
"""


@pytest.fixture
def drafter_folder(tmp_path) -> Path:
    folder = tmp_path / "drafter"
    tiny_drafter().save_pretrained(folder)
    return folder


def run(script: str, tmp_path: Path, cwd: Path | None = None, **environment) -> str:
    """Run `script` in a fresh process with caches of its own, offline; returns what it printed."""
    env = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | environment
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd or tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fill_hub_cache(folder: Path, tmp_path: Path, repo: str) -> str:
    """Copy a folder into the layout of the Hub's cache; returns the commit hash."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hf" / "hub" / ("models--" + repo.replace("/", "--"))
    shutil.copytree(folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    return commit


@pytest.mark.parametrize("name", ("drafter", "my.drafter-v1.0"))
def test_from_a_folder(name, drafter_folder, tmp_path):
    folder = tmp_path / "at" / name
    shutil.copytree(drafter_folder, folder)
    out = run(f"check(AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True))", tmp_path)
    assert "same text" in out


def test_from_the_current_folder(drafter_folder, tmp_path):
    assert "same text" in run(
        'check(AutoModel.from_pretrained(".", trust_remote_code=True))', tmp_path, cwd=drafter_folder
    )


def test_from_the_hubs_cache_offline(drafter_folder, tmp_path):
    """Pitfall 71; also by a pinned revision (pitfall 73)."""
    commit = fill_hub_cache(drafter_folder, tmp_path, "org/drafter-1.5")
    script = f"""
check(AutoModel.from_pretrained("org/drafter-1.5", trust_remote_code=True, dtype="auto"))
check(AutoModel.from_pretrained("org/drafter-1.5", trust_remote_code=True, revision={commit!r}))
"""
    assert run(script, tmp_path).count("same text") == 2


def test_saved_again_by_remote_code(drafter_folder, tmp_path):
    """What remote code saves is a complete folder, and loads as one."""
    again = tmp_path / "again"
    script = f"""
drafter = AutoModel.from_pretrained({str(drafter_folder)!r}, trust_remote_code=True)
check(drafter)
drafter.save_pretrained({str(again)!r})
check(AutoModel.from_pretrained({str(again)!r}, trust_remote_code=True))
"""
    assert run(script, tmp_path).count("same text") == 2
    files = {str(path.relative_to(again)) for path in again.rglob("*") if path.is_file()}
    assert files == {str(path.relative_to(drafter_folder)) for path in drafter_folder.rglob("*") if path.is_file()}
    for name in files - {"config.json"}:
        assert (again / name).read_bytes() == (drafter_folder / name).read_bytes(), name


def test_two_copies_of_the_code_in_one_process(drafter_folder, tmp_path):
    """Each drafter is run by its own copy, whichever copy installed the hook, and the hook is installed once."""
    other = tmp_path / "other"
    shutil.copytree(drafter_folder, other)
    with open(other / "modeling_dflash.py", "a") as file:
        file.write("\nOTHER = True\n")
    script = f"""
from transformers import GenerationMixin
first = AutoModel.from_pretrained({str(drafter_folder)!r}, trust_remote_code=True)
hook = GenerationMixin.generate
second = AutoModel.from_pretrained({str(other)!r}, trust_remote_code=True)
assert GenerationMixin.generate is hook and hook._dflash_hook and not hasattr(hook.__wrapped__, "_dflash_hook")
assert type(first) is not type(second)
assert hasattr(sys.modules[type(second).__module__], "OTHER") and not hasattr(sys.modules[type(first).__module__], "OTHER")
check(first)
check(second)
assert type(first.last_speculation) is not type(second.last_speculation)
"""
    assert run(script, tmp_path).count("same text") == 2


def test_remote_code_beside_the_installed_package(drafter_folder, tmp_path):
    script = f"""
del sys.modules["dflash_hub"]
import dflash_hub
check(dflash_hub.DFlashDraftModel.from_pretrained({str(drafter_folder)!r}))
check(AutoModel.from_pretrained({str(drafter_folder)!r}, trust_remote_code=True))
"""
    assert run(script, tmp_path).count("same text") == 2


def test_without_trust_the_message_says_what_to_pass(drafter_folder, tmp_path):
    script = f"""
for load in (AutoModel, AutoConfig):
    try:
        load.from_pretrained({str(drafter_folder)!r}, trust_remote_code=False)
    except ValueError as error:
        assert "trust_remote_code=True" in str(error), error
        print("said so")
"""
    assert run(script, tmp_path).count("said so") == 2


@pytest.mark.parametrize("place", ("folder", "hub"))
def test_custom_generate_hands_over_to_the_drafter(place, drafter_folder, tmp_path):
    repo = str(drafter_folder)
    if place == "hub":
        fill_hub_cache(drafter_folder, tmp_path, "org/drafter")
        repo = "org/drafter"
    script = f"""
drafter = AutoModel.from_pretrained({repo!r}, trust_remote_code=True)
check(drafter, custom_generate={repo!r}, trust_remote_code=True)
try:
    target_of().generate(ids, custom_generate={repo!r}, trust_remote_code=True)
except ValueError as error:
    assert "needs a DFlash drafter as `assistant_model`, got NoneType" in str(error)
    print("said so")
"""
    out = run(script, tmp_path)
    assert "same text" in out and "said so" in out


def test_z_labs_files_load_with_the_package(drafter_folder, tmp_path):
    """`dflash_hub.DFlashDraftModel.from_pretrained("z-lab/...")` reads their repositories as they are."""
    from dflash_hub.convert.exporting import export_drafter

    export_drafter(str(drafter_folder), tmp_path / "zlab")
    config = json.loads((tmp_path / "zlab" / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    (tmp_path / "zlab" / "config.json").write_text(json.dumps(config))
    (tmp_path / "zlab" / "dflash.py").write_text("raise AssertionError('code of the repository ran')")
    fill_hub_cache(tmp_path / "zlab", tmp_path, "z-lab/Tiny-DFlash-b5")
    script = """
del sys.modules["dflash_hub"]
import dflash_hub
# Their files do not say how many tokens to draft, so as many as pay: few, of a random drafter.
check(dflash_hub.DFlashDraftModel.from_pretrained("z-lab/Tiny-DFlash-b5"), num_assistant_tokens=4)
"""
    assert "same text" in run(script, tmp_path)


def test_this_repository_is_a_hub_repository(tmp_path):
    """A clone's root loads with AutoModel as it is."""
    script = """
drafter = AutoModel.from_pretrained(".", trust_remote_code=True, dtype="auto")
assert drafter.config.target_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
assert drafter.dtype is torch.bfloat16
print(sum(p.numel() for p in drafter.parameters()))
"""
    assert run(script, tmp_path, cwd=ROOT).strip() == "12280704"
    config = json.loads((ROOT / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }


def test_custom_generate_file_is_the_function_in_the_code():
    from dflash_hub.hub_files import custom_generate_source

    assert (ROOT / "custom_generate" / "generate.py").read_text() == custom_generate_source()


def test_an_older_transformers_is_refused_in_one_sentence(drafter_folder, tmp_path):
    """By what the loader comes to first: real older versions lack names that later modules import (`make versions`)."""
    script = f"""
import transformers
for transformers.__version__ in ("4.57.6", "5.0.0", "5.10.2", "5.16.0.dev0"):
    for auto in (AutoModel, AutoConfig):
        try:
            auto.from_pretrained({str(drafter_folder)!r}, trust_remote_code=True)
        except ImportError as error:
            print(error)
print([name for name in sys.modules if name.endswith(("modeling_dflash", "generation_dflash"))])
"""
    *said, modules = run(script, tmp_path).splitlines()
    assert (
        said[::2]
        == said[1::2]
        == [
            f"DFlash drafters need transformers 5.17 or newer, this is {found}: pip install -U transformers."
            for found in ("4.57.6", "5.0.0", "5.10.2", "5.16.0.dev0")
        ]
    )
    assert modules == "[]"
