"""Every command of the README runs, as written, with tiny models in the place of large ones; others exist as documented."""

import re
import runpy
import shlex
import sys

import pytest
import typer
from dflash_hub.cli.app import app
from helpers.folders import prompts_of, save_target, tiny_tokenizer, write_prompts
from helpers.tiny import ROOT, tiny_target
from typer.testing import CliRunner

README = (ROOT / "README.md").read_text(encoding="utf-8")
# What a user has, and what stands for it here.
PLACES = {
    "Qwen/Qwen3-4B": "target",
    "my-tuned-qwen3-4b": "tuned",
    "z-lab/Qwen3-8B-DFlash-b16": "zlab",
    "Qwen/Qwen3-8B": "target",
}
# Sizes that fit a tiny model; what a command does stays the same.
SMALLER = {
    "regenerate": "--max-new-tokens 12",
    "train": "--max-steps 2 --layers 1 --block-size 4 --validation 3 --eval-prompts 2 --eval-new-tokens 6 --evaluations 1",
    "check": "--count 1 --max-new-tokens 8 --prompts prompts.jsonl",
    "bench": "--count 2 --max-new-tokens 8 --methods baseline,ours",
    "align": "--count 8 --max-new-tokens 12 --max-steps 2 --validation 3 --eval-prompts 2 --evaluations 1",
    "generate": "--max-new-tokens 8",
}
ELSEWHERE = {"push", "demo"}  # needs the Hub (tests/convert/test_push.py) or a real target (tests/cli/test_cli.py)


def commands() -> list[list[str]]:
    found = []
    for block in re.findall(r"```bash\n(.*?)```", README, re.S):
        for line in block.splitlines():
            if line.startswith("dflash-hub "):
                found.append(shlex.split(line, comments=True)[1:])
    return found


def run(*arguments):
    # In this process: a start of Python each would take longer than the commands.
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_readmes_commands_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_target(tmp_path / "target", "qwen3")
    tuned = tiny_target("qwen3", seed=3, num_hidden_layers=8)
    tuned.save_pretrained(tmp_path / "tuned")
    tiny_tokenizer(90).save_pretrained(tmp_path / "tuned")
    for name in ("prompts.jsonl", "unseen.jsonl"):
        write_prompts(tmp_path / name, len(prompts_of(8)))
    for preparation in (
        ("init", "--target", "target", "--output", "for-zlab", "--layers", 1, "--block-size", 4),
        ("export", "for-zlab", "zlab", "--to", "zlab"),
    ):
        assert run(*preparation).exit_code == 0
    ran = set()
    for command in commands():
        name = command[0]
        if name in ELSEWHERE:
            continue
        arguments = [PLACES.get(word, word) for word in command] + SMALLER.get(name, "").split()
        done = run(*arguments)
        # An untrained drafter accepts little, which `check` reports with exit code 1.
        failed = set(re.findall(r"^FAIL ([^:]*):", done.output, re.M))
        low = name == "check" and failed <= {"acceptance", "likely cause"}
        assert done.exit_code == 0 or low, (command, done.output, done.exception)
        ran.add(name)
    assert {"init", "import", "export", "inspect", "regenerate", "train", "check", "align", "bench"} <= ran


# ------------------------------------------------------------------------------------------------------ what is read first


def words_of(text: str) -> int:
    """Count the words of prose: no front matter, code or tables."""
    text = re.sub(r"\A---\n.*?^---$", "", text, flags=re.M | re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return len(" ".join(line for line in text.splitlines() if not line.startswith("|")).split())


def test_the_readme_shows_the_snippet_and_the_results_first_and_is_short():
    assert words_of(README[: README.index("```python")]) <= 120
    assert words_of(README[: README.index("\n| dataset | acceptance length |")]) <= 200
    assert words_of(README) <= 700


def test_pictures_of_the_readme_show_wherever_it_is_read():
    """An index or a card shows the page alone, without the repository's files."""
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)|<img[^>]+src=[\"']([^\"']+)", README)
    assert all(address.startswith("https://") for address in map("".join, pictures)), pictures


def test_how_to_pages_are_short_and_hold_no_provenance():
    assert words_of((ROOT / "docs/training.md").read_text(encoding="utf-8")) <= 900
    for page in PAGES:
        if page.parent.name in ("docs", "internals") and page.name != "families.md":  # that one is generated
            text = page.read_text(encoding="utf-8")
            assert not re.search(r"\bcommit [0-9a-f]{7}|\bEPYC\b|20\d\d-\d\d-\d\d(?!-)", text), page


def test_every_link_to_a_file_of_the_repository_leads_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), (page, link)


# ------------------------------------------------------------------------------------------------- what is named exists

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [
    page for folder in ("docs", "docs/internals", "docs/results") for page in sorted((ROOT / folder).glob("*.md"))
]


def code_of(text: str) -> list[str]:
    """Lines of code blocks, fenced or indented, and spans of code."""
    fenced = re.compile(r"^```.*?^```", re.M | re.S)
    lines = [line.strip() for block in fenced.findall(text) for line in block.splitlines()]
    text = fenced.sub("", text)
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return lines + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def documented(start: str) -> list[list[str]]:
    """The words of every piece of code that starts so, comments left out."""
    pieces = [piece for page in PAGES for piece in code_of(page.read_text(encoding="utf-8"))]
    return [shlex.split(piece, comments=True) for piece in pieces if piece.startswith(start)]


def options_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_every_target_of_make_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {words[1] for words in documented("make ")}
    assert {"demo", "test", "peers", "lint", "test-oldest", "test-slow"} <= named <= targets


def test_every_command_and_its_options_exist():
    commands = typer.main.get_command(app).commands
    named = [words[1:] for words in documented("dflash-hub ")]
    assert len(named) > 15
    for name, *words in named:
        known = {option for part in commands[name].params for option in (*part.opts, *part.secondary_opts)}
        assert options_of(words) <= known, (name, options_of(words) - known)


def modules() -> dict[str, set[str]]:
    """Options that are named anywhere, by module."""
    found = {}
    for _, _, module, *words in documented("python -m dflash_hub."):
        found.setdefault(module, set()).update(options_of(words))
    return found


@pytest.mark.parametrize("module", modules())
def test_every_module_that_is_run_and_its_options_exist(module, monkeypatch, capsys):
    if module == "dflash_hub.demo.app":
        pytest.importorskip("gradio")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert "--help" in known and modules()[module] <= known
