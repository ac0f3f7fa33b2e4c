"""The model card of a drafter's folder, from what the folder records. What was not measured is said to be so."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..common.files import in_a_line, read_json
from ..common.tables import interval, table
from ..configuration_dflash import SLIDING, DFlashConfig
from ..hub_files import CARD_MARK, RECORD, YOURS, write_text
from .engines import TITLES, TYPED, blockers, export_and_serve, export_for_llamacpp, warnings_of
from .gguf_layout import unsupported_fields
from .reading import read_ours

TAGS = ["speculative-decoding", "dflash", "draft-model", "block-diffusion"]
# How the snippet loads the drafter, and where it does so until the folder has an address.
LOAD = ', trust_remote_code=True, dtype="auto", device_map="auto")'
INSIDE = "  # from inside this folder"
UNMEASURED = "Acceptance and speed: not measured. `dflash-hub bench` measures them, `dflash-hub card` adds them."
DEFINITIONS = (
    "tau: tokens that a round adds to the text, the target's own token included. Speedup: seconds of plain `generate` over "
    "seconds of the method. In brackets: 95% interval over prompts."
)


def write_card(
    folder: str | Path,
    benchmark_files=(),
    repository: str | None = None,
    force: bool = False,
    license: str | None = None,
    target_name: str | None = None,
) -> str:
    """(Re)write README.md of a drafter's folder from its config, its `training_record.json` and benchmark summaries.

    Metadata that the card does not set itself (license, language, datasets) and everything below the line that says so
    are kept from the card before.

    Args:
        benchmark_files: `summary.json` files that `dflash-hub bench` wrote.
        repository: id on the Hub, for the snippet; by default the snippet loads the folder from inside.
        force: also replace a README.md that was not written by this package.
        license: of the drafter, as the Hub spells it; by default that of the card before.
        target_name: the target's id on the Hub, recorded in config.json as well.

    Returns:
        The card.

    Raises:
        ValueError, OSError: the folder is no drafter of ours, or a record, a summary or the card before is of another kind;
            names it.
        FileExistsError: README.md was written by someone else and `force` is not set.
    """
    folder = Path(folder)
    config = read_ours(folder).config
    if target_name is not None:
        check_id(target_name)
        if target_name != config.target_name_or_path:
            config.target_name_or_path, config.target_revision = target_name, None
    if repository is not None:
        check_id(repository)
    path = folder / "README.md"
    before = _of(path, lambda: path.read_text(encoding="utf-8")) if path.is_file() else ""
    if before and CARD_MARK not in before and not force:
        raise FileExistsError(
            f"{path} was not written by dflash-hub (it lacks the line {CARD_MARK!r}); pass --force to replace it."
        )
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else None
    tags = TAGS + (["custom_generate"] if (folder / "custom_generate" / "generate.py").is_file() else [])
    text = card_text(config, record, folder, benchmark_files, repository, before, tags, license)
    if target_name is not None:
        stated = read_json(folder / "config.json")
        stated |= {name: getattr(config, name) for name in ("target_name_or_path", "target_revision")}
        write_text(folder / "config.json", json.dumps(stated, indent=2) + "\n")
    write_text(path, text)
    return text


def card_text(
    config: DFlashConfig,
    record: dict | None,
    folder: Path,
    benchmark_files=(),
    repository: str | None = None,
    before: str = "",
    tags: list[str] = TAGS,
    license: str | None = None,
) -> str:
    """The card of a drafter with this config and training record; nothing is written.

    Args:
        folder: where record and card before lie, for messages.
        before: the text of the card before, of which the owner's parts are kept.

    Raises:
        ValueError: see `write_card`.
    """
    path, training, evaluation = folder / "README.md", f"Not recorded (the folder has no `{RECORD}`).", []
    if record is not None:
        training = _of(folder / RECORD, lambda: _training(record))
        evaluation = _of(folder / RECORD, lambda: _evaluation(record))
    measured = evaluation + [part for file in benchmark_files for part in _benchmark(Path(file))]
    yours = before.split(YOURS, 1)[1] if YOURS in before else "\n"
    parts = [
        f"---\n{_of(path, lambda: _metadata(before, config, tags, license))}\n---\n\n{CARD_MARK}",
        *_introduction(config, repository or ".", repository is None),
        _engines(config, repository or "FOLDER"),
        _shape(config),
        f"## Training\n\n{training}",
        "## Measured",
        *(measured or [UNMEASURED]),
        *([DEFINITIONS] if benchmark_files else []),
        _limits(config, repository),
    ]
    return "\n\n".join(parts) + f"\n\n{YOURS}{yours}"


def address_card(text: str, repository: str) -> str:
    """A card of ours with the repository's id wherever it spoke of the folder; a card that someone wrote stays as it is."""
    if CARD_MARK not in text:
        return text
    for place, named in (
        (f'from_pretrained("."{LOAD}{INSIDE}', f'from_pretrained("{repository}"{LOAD}'),
        ("dflash-hub export FOLDER ", f"dflash-hub export {repository} "),
        ('from_pretrained("REPOSITORY"', f'from_pretrained("{repository}"'),
    ):
        text = text.replace(place, named)
    return text


def check_id(repository: str):
    """Raises ValueError for what cannot be the id of a repository on the Hub."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is no id of a repository: {error}") from error


def _of(path: Path, said: Callable):
    """What is said from a file; anything may stand in it."""
    try:
        return said()
    except Exception as error:
        raise ValueError(
            f"{path} is not as dflash-hub writes it: {type(error).__name__}, {in_a_line(error)}. Nothing is written."
        ) from error


def _metadata(before: str, config: DFlashConfig, tags: list[str], license: str | None) -> str:
    """The front matter: what the card sets, and what its owner added to the card before."""
    kept = ModelCard(before, ignore_metadata_errors=True).data.to_dict() if before.startswith("---") else {}
    own = {"library_name": "transformers", "base_model": config.target_name_or_path, "license": license}
    data = {**kept, **{name: value for name, value in own.items() if value is not None}}
    theirs = [kept["tags"]] if isinstance(kept.get("tags"), str) else kept.get("tags") or []
    data["tags"] = tags + [tag for tag in theirs if tag not in tags]
    return ModelCardData(**data).to_yaml()


def _introduction(config: DFlashConfig, repository: str, inside: bool) -> list[str]:
    target = config.target_name_or_path
    chat = config.target_chat is not False
    thinking = "" if config.target_thinking is None else f", enable_thinking={config.target_thinking}"
    where = INSIDE if inside else ""
    prompt = (
        'messages = [{"role": "user", "content": "Why is the sky blue?"}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{thinking}\n'
        ").to(target.device)"
        if chat
        else 'inputs = tokenizer("The sky is blue because", return_tensors="pt").to(target.device)'
    )
    modes = [
        {True: "text in its chat template", False: "plain text", None: None}[config.target_chat],
        {True: "its thinking mode", False: "its non-thinking mode", None: None}[config.target_thinking],
    ]
    made_for = ", ".join(mode for mode in modes if mode)
    revision = f" (revision {config.target_revision})" if config.target_revision else ""
    return [
        f"# DFlash drafter for {target or 'a target that its config does not name'}",
        f"A block-diffusion drafter ([DFlash](https://arxiv.org/abs/2602.06036)) for `{target or 'TARGET'}`{revision}"
        + (f", made for {made_for}" if made_for else "")
        + ". It is no model of its own: it makes its target write several tokens a pass. No weight of the target was "
        "changed, and the text is the target's.",
        f"""## Use

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target or "TARGET"}", dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{target or "TARGET"}")
drafter = AutoModel.from_pretrained("{repository}"{LOAD}{where}

{prompt}
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{{drafter.last_speculation.tau:.2f}} tokens per target pass")
```""",
    ]


def _engines(config: DFlashConfig, source: str) -> str:
    parts = [
        "## Serve",
        f"Engines read other layouts than transformers does; `dflash-hub export` writes them. {TYPED}.",
    ]
    for engine in TITLES:
        if stopped := blockers(engine, config):
            parts.append(f"{TITLES[engine]}: not served. {'; '.join(stopped)}.")
            continue
        parts.append(f"{TITLES[engine]}:\n\n```bash\n{export_and_serve(engine, config, source)}\n```")
        parts += [f"{warning}." for warning in warnings_of(engine, config)]
    if stopped := unsupported_fields(config):
        parts.append(f"llama.cpp: not served. {'; '.join(stopped)}.")
    else:
        parts.append(
            f"llama.cpp, with a GGUF file of the target:\n\n```bash\n{export_for_llamacpp(config, source)}\n```"
        )
        parts += [f"{warning}." for warning in warnings_of("gguf", config)]
    return "\n\n".join(parts)


def _shape(config: DFlashConfig) -> str:
    rope = ", ".join(f"{name} {value}" for name, value in config.rope_parameters.items())
    rows = [
        ("layers", f"{config.num_hidden_layers}: {attention_in_words(config)}"),
        ("block", f"{config.block_size}: one anchor, {config.drafts_per_block} draft tokens"),
        ("target layers", f"{config.target_layer_ids} of {config.num_target_layers} (0-based)"),
        ("mask token", config.mask_token_id),
        (
            "width, heads, key heads, head size, MLP",
            f"{config.hidden_size}, {config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}, "
            f"{config.intermediate_size}",
        ),
        ("RoPE", f"{rope}; {config.max_position_embeddings} positions"),
        ("dtype", str(config.dtype).removeprefix("torch.")),
        ("draft vocabulary", vocabulary_in_words(config)),
        ("further parts", parts_in_words(config)),
    ]
    return "## Shape\n\n" + table(("", ""), rows)


def vocabulary_in_words(config: DFlashConfig) -> str:
    """Which tokens are drafted."""
    if config.draft_vocab_size is None:
        return f"all of the target's {config.vocab_size} tokens"
    return f"{config.draft_vocab_size} of {config.vocab_size} tokens, and those of the text at hand"


def parts_in_words(config: DFlashConfig) -> str:
    """Which parts of DFlash 2 or DSpark a drafter has."""
    found = []
    if config.conv_kernel_size is not None:
        found.append(f"convolutions of {config.conv_kernel_size} taps, groups of {config.conv_group_size} channels")
    if config.selector_rank is not None:
        found.append(f"selector of rank {config.selector_rank} over {config.selector_top_k} candidates")
    if config.markov_rank is not None:
        found.append(f"{config.markov_head_type} Markov head of rank {config.markov_rank} (DSpark)")
    if config.confidence_head is not None:
        inputs = {"hidden": "the position", "hidden+markov": "the position and the token before it"}
        found.append(f"confidence head, of {inputs[config.confidence_head]}")
    if config.sample_from_anchor:
        found.append("the anchor's position drafts too")
    return "; ".join(found) or "none"


def attention_in_words(config: DFlashConfig) -> str:
    """Which layers slide, and which let a draft position see only those before it."""
    kinds = Counter(zip(config.layer_types, config.block_causal))
    return ", ".join(
        f"{count} {f'sliding (window {config.sliding_window})' if kind == SLIDING else 'full'}, "
        f"{'causal' if causal else 'bidirectional'} in the block"
        for (kind, causal), count in kinds.items()
    )


def _training(record: dict) -> str:
    data, result = record["data"], record["result"]
    thinking = {True: "on", False: "off", None: "not stated"}[data.get("thinking")]
    files = [(f["name"], f["rows"], f["answer_tokens"], f"`{f['sha256'][:16]}`") for f in data["files"]]
    recipe = [(f"`{name}`", value) for name, value in record["recipe"].items()]
    return "\n\n".join(
        [
            f"`{record['command']}`",
            _provenance(record["environment"]),
            f"Answers of `{data.get('target')}`, thinking mode {thinking}; chat template "
            f"`{str(data.get('chat_template_sha256'))[:16]}` (sha256).",
            table(("file", "rows", "answer tokens", "sha256"), files),
            f"{result['steps']} steps in {result['seconds']:.0f} s, {result['anchors']} anchors; kept: step "
            f"{result['best_step']}.",
            table(("recipe", ""), recipe),
        ]
    )


def _evaluation(record: dict) -> list[str]:
    evaluation = record["result"].get("evaluation")
    if not evaluation:
        return []
    # 0.1.0 wrote the second name.
    name = "acceptance_by_position" if "acceptance_by_position" in evaluation else "acceptance_by_slot"
    shares = ", ".join(f"{share:.2f}" for share in evaluation[name])
    return [
        f"At the end of training, on {evaluation['prompts']} validation prompts, {evaluation['max_new_tokens']} new tokens "
        f"each, greedy: acceptance length {evaluation['acceptance_length']:.2f} tokens a round, the target's own "
        f"included; acceptance by draft position {shares}. {_provenance(record['environment'])}"
    ]


def _benchmark(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"no benchmark summary at {path}; `dflash-hub bench` writes summary.json.")
    summary = read_json(path)
    return _of(path, lambda: _summary(summary["settings"], summary["provenance"], summary["rows"]))


def _summary(settings: dict, provenance: dict, rows: list[dict]) -> list[str]:
    thinking = {None: "as the template", True: "on", False: "off"}[settings.get("thinking")]
    cells = [
        (
            row["set"], row["method"], row["outputs"], interval(row["acceptance_length"]), f"{row['tokens_per_second']:.1f}",
            interval(row["speedup"]), f"{row['same']} of {row['compared']}" if row["compared"] else "-",
        )
        for row in map(with_new_names, rows)
    ]  # fmt: skip
    return [
        f"Target `{settings['target']}`, drafter `{settings['drafter']}`, {settings['dtype'].removeprefix('torch.')}, "
        f"batch 1, thinking {thinking}, `{json.dumps(settings['generation'])}`",
        table(("set", "method", "outputs", "acceptance length", "tokens/s", "speedup", "same text"), cells),
        f"`{provenance['command']}`\n\n{_provenance(provenance)}",
    ]


def with_new_names(row: dict) -> dict:
    """Return a row of a summary with the names of today in the place of those of 0.1.0."""
    return {{"texts": "outputs", "tau": "acceptance_length"}.get(name, name): value for name, value in row.items()}


def _limits(config: DFlashConfig, repository: str | None) -> str:
    return f"""## Limits

- It drafts for the one target above. With another model of the same width it runs, and drafts badly; the text stays right.
- Made for {config.max_position_embeddings} positions; beyond, and on text unlike its training data, fewer drafts are accepted.
- `trust_remote_code=True` runs the Python files of this repository: read them, and pin what you have read with
  `AutoModel.from_pretrained("{repository or "REPOSITORY"}", revision="COMMIT", trust_remote_code=True)`.
"""


def _provenance(origin: dict) -> str:
    return (
        f"Commit {origin['commit']}, {origin['date']}, {origin['device']}, Python {origin['python']}, torch {origin['torch']}, "
        f"transformers {origin['transformers']}."
    )
