"""The README is a model card, and what it shows runs."""

import re

import pytest
from dflash_hub.hub_files import card
from helpers.tiny import ROOT, tiny_config
from huggingface_hub import ModelCard

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_metadata_is_valid():
    data = ModelCard(README).data.to_dict()
    assert data["library_name"] == "transformers" and data["license"] == "apache-2.0"
    assert data["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert {"speculative-decoding", "dflash", "draft-model", "custom_generate"} <= set(data["tags"])
    assert "base_model_relation" not in data and "pipeline_tag" not in data  # neither has a value that fits a drafter


@pytest.mark.parametrize("target", (None, "org/target"))
def test_a_written_card_is_valid_too(target):
    text = card(tiny_config(target_name_or_path=target))
    data = ModelCard(text).data.to_dict()
    assert data.get("base_model") == target
    assert "blocks of 5 tokens" in text and "not measured" in text


def test_the_readme_names_files_and_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for name in re.findall(r"`([\w/]+\.(?:py|md|cff))`", README) + re.findall(r"\]\(((?:docs|tests)/[^)]+)\)", README):
        assert (ROOT / name.split("#")[0]).exists(), name


def test_the_snippet_prints_what_the_readme_says(smollm2_path, capsys, monkeypatch):
    code, printed = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", README, re.S).groups()
    monkeypatch.chdir(ROOT)
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", smollm2_path), {})
    assert capsys.readouterr().out.strip() == printed.strip()
