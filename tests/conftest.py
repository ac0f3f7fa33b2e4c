"""Tiny targets and drafters, and drafters of a chosen accuracy. Everything here is random, seeded, and made in place."""

from pathlib import Path

import pytest
import tokenizers
import transformers
from helpers.tiny import DRAFTERS, FIXTURE, tiny_drafter, tiny_target


@pytest.fixture
def fixture_folder() -> Path:
    if not FIXTURE.is_dir():
        pytest.skip(f"the trained drafter with reference values is not at {FIXTURE} (a user's clone does not have it)")
    return FIXTURE


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    from dflash_hub.common.smollm2 import smollm2

    try:
        return smollm2(offline=True)[0]
    except FileNotFoundError as error:
        pytest.skip(f"the offline target is not installed: {error}")


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory) -> tuple[str, str]:
    """Folders of a tiny target, with a tokenizer of one token a character and a chat template, and of its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    characters = [" ", "\n", *map(chr, range(35, 127))]
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<pad>"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    fast.save_pretrained(folder / "target")
    tiny_target("llama").save_pretrained(folder / "target")
    tiny_drafter(num_draft_tokens=4).save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


@pytest.fixture(scope="session")
def small_pair(pair_folders):
    """The pair of `pair_folders`, loaded."""
    from dflash_hub.demo.pair import Pair

    return Pair(*pair_folders, "float32")


# ------------------------------------------------------------------------------------------------- the matrix

# These try a random, a half-right and an oracle drafter inside, see `families.equal_texts`.
ALL_KINDS_INSIDE = (
    "test_family",
    "hybrid_targets",
    "long_prompt_and_left_padding",
    "straddles",
    "by_position",
    "vision",
)


def matrix(passed: list[str]) -> list[str]:
    """Lines of what passed: every option (a test and its parameters) with its families, by kind of drafter."""
    options: dict[str, dict[str, set[str]]] = {}
    for nodeid in passed:
        test, _, parameters = nodeid.rpartition("::")[2].rstrip("]").partition("[")
        inside = any(part in test for part in ALL_KINDS_INSIDE)
        kinds = DRAFTERS if inside else [kind for kind in DRAFTERS if kind in parameters]
        for kind in kinds:
            rest = parameters.replace(kind, "").strip("-").replace("--", "-")
            options.setdefault(test.removeprefix("test_"), {}).setdefault(kind, set()).add(rest)
    lines = []
    for test, by_kind in sorted(options.items()):
        counts = "  ".join(f"{kind} {len(by_kind.get(kind, ()))}" for kind in DRAFTERS)
        names = ", ".join(sorted(set().union(*by_kind.values()) - {""}))
        lines.append(f"{test[:60]:60}  {counts}  {names[:110]}")
    return lines


def pytest_terminal_summary(terminalreporter):
    lines = matrix([report.nodeid for report in terminalreporter.stats.get("passed", []) if report.when == "call"])
    if len(lines) > 1:
        terminalreporter.section("drafter kind x option x family: passed")
        for line in lines:
            terminalreporter.line(line)
