"""Tiny targets and drafters, and drafters of a chosen accuracy. Everything here is random, seeded, and made in place."""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from dflash_hub import DFlashConfig, DFlashDraftModel
from dflash_hub.drafter_candidates import DFlashProposer
from dflash_hub.hub_files import code_files
from families import drafting

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
# The code that every drafter's folder carries.
CODE = [path.name for path in code_files(ROOT)]
FIXTURE = SHARED / "fixtures" / "smollm2-dflash"

VOCAB = 97
LAYERS = 4
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral")
DRAFTERS = ("random", "half-right", "oracle")


@pytest.fixture
def fixture_folder() -> Path:
    if not FIXTURE.is_dir():
        pytest.skip(f"the trained drafter with reference values is not at {FIXTURE} (a user's clone does not have it)")
    return FIXTURE


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    from dflash_hub.demo.smollm2 import smollm2

    try:
        return smollm2(offline=True)[0]
    except FileNotFoundError as error:
        pytest.skip(f"the offline target is not installed: {error}")


def tiny_target(family: str, seed: int = 0, **overrides):
    """A random causal LM in float32; initialised widely, so that its greedy text varies and has no near ties."""
    size = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    own = {
        "qwen3": {"head_dim": 8},
        "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "mistral": {"head_dim": 8, "sliding_window": 8},
    }
    config = transformers.CONFIG_MAPPING[family](**size | own.get(family, {}) | overrides)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_config(**overrides) -> DFlashConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0},
        "block_size": 5,
        "mask_token_id": 96,
        "target_layer_ids": [0, 1, 2],
        "num_target_layers": LAYERS,
        "initializer_range": 0.3,
    }
    fields |= overrides
    # Tests count rounds and drafts: a fixed number, unless a test is about the choice.
    return DFlashConfig(**{"num_draft_tokens": fields["block_size"] - 1} | fields)


def tiny_drafter(seed: int = 1, dtype=torch.float32, **overrides) -> DFlashDraftModel:
    torch.manual_seed(seed)
    model = DFlashDraftModel(tiny_config(**overrides)).eval()
    with torch.no_grad():  # norms of one hide a norm that is not applied
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype)


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def drafts_of(monkeypatch):
    """Make every drafter propose a known text: `drafts_of(kind, text)`, see `families.drafting`."""
    run_drafter = DFlashProposer.propose

    def replace(kind: str, text: torch.Tensor | None = None):
        monkeypatch.setattr(DFlashProposer, "propose", drafting(kind, text, run_drafter))

    return replace


def expected_cut(
    plain: torch.Tensor, prompt_length: int, max_new_tokens: int, eos: set[int] = frozenset()
) -> list[int]:
    """What plain greedy decoding gives with a smaller limit or with end tokens, from its longest text without any."""
    text = plain[0, : prompt_length + max_new_tokens].tolist()
    for index in range(prompt_length, len(text)):
        if text[index] in eos:
            return text[: index + 1]
    return text


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
