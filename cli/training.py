"""The commands of training: `regenerate`, `train`, `check`, `align`. Heavy imports wait until a command runs."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..common.console import command_line, interruptible, typed_command
from ..common.files import read_yaml, refuse_other_content, writing
from ..common.prompts import prompt_source, read_prompts
from ..common.target_source import TargetRevision, TargetSource, TrustRemoteCode
from ..training.options import ChatTemplate, TrainOptions, with_new_names
from .options import License, source_or_default, takes_fields

SHIPPED = str(Path(__file__).parent.parent)  # the folder of the shipped drafter
RECORDED = ("data", "weights")  # of `run.yaml`, and no options


def from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Options of a YAML file stand where the command line is silent."""
    if path is not None:
        stated = read_yaml(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(stated, dict | None):
            raise ValueError(f"{path} holds {stated!r}; expected options, a line each, as `layers: 5`.")
        # A run's own `run.yaml` can be passed as it is.
        stated = {name: value for name, value in (stated or {}).items() if name not in RECORDED and value is not None}
        stated = with_new_names(stated)
        if isinstance(stated.get("target_layers"), list):
            stated["target_layers"] = ",".join(map(str, stated["target_layers"]))
        if "arguments" in stated:
            further = stated.pop("arguments")
            if not isinstance(further, dict):
                raise ValueError(f"{path} has {further!r} as `arguments`; expected names with their values.")
            stated["argument"] = [
                f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
                for name, value in further.items()
            ]
        parameters = {parameter.name: parameter for parameter in context.command.params}
        unknown = sorted(str(name) for name in stated if name not in parameters)
        if unknown:
            raise ValueError(f"{path} states {unknown}; options are {', '.join(sorted(set(parameters) - {'config'}))}.")
        for name, value in stated.items():
            if parameters[name].multiple and not isinstance(value, list):
                stated[name] = [value]
        context.default_map = (context.default_map or {}) | stated
    return path


Config = Annotated[
    Path | None,
    Option(help="YAML file of options; those on the command line win.", callback=from_file, is_eager=True),
]


KeepAssistant = Annotated[
    bool,
    Option("--keep-assistant-turns", help="Keep assistant turns of the prompts as history. Default: the target's own."),
]


def regenerate(
    prompts: Annotated[list[str], Option(help="JSONL file of prompts, or a data set: NAME or NAME:SPLIT; repeatable.")],
    output: Annotated[Path, Option(help="Folder of the answers; an interrupted one is continued.")],
    target: Annotated[str | None, Option(help="Repository or folder. Default: SmolLM2-135M-Instruct.")] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    server: Annotated[
        str | None,
        Option(help="An OpenAI-compatible server that serves the target; it is sent OPENAI_API_KEY, if set."),
    ] = None,
    model: Annotated[str | None, Option(help="The server's model, where it serves several.")] = None,
    column: Annotated[
        str | None, Option(help="Column of a data set with the prompt's text. Default: messages.")
    ] = None,
    count: Annotated[int | None, Option(min=1, help="So many prompts, chosen with the seed. Default: all.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens of an answer, at most.")] = 2048,
    max_prompt_tokens: Annotated[int, Option(min=1, help="Longer prompts are listed as failures.")] = 2048,
    temperature: Annotated[float, Option(min=0.0, help="0 answers greedily.")] = 0.0,
    top_p: Annotated[float | None, Option(min=0.0, max=1.0, help="Of sampling.")] = None,
    top_k: Annotated[int | None, Option(min=1, help="Of sampling.")] = None,
    thinking: Annotated[bool | None, Option(help="Thinking mode of the target's template, where it has one.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Prompts at a time.")] = 64,
    dtype: Annotated[str, Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, Option(help="Of the order of prompts and of sampling.")] = 0,
    chat_template: ChatTemplate = None,
    keep_assistant_turns: KeepAssistant = False,
):
    """Let the target answer prompts: what a drafter is trained on. Exit code 1 where none has an answer."""
    from ..common.loading import dtype_of

    dtype_of(dtype)
    if not temperature and (top_p is not None or top_k is not None):
        raise ValueError("--top-p and --top-k are of sampling; pass --temperature as well.")
    refuse_other_content(output, "settings.json")
    rows, left_out = chosen_prompts(prompts, column, count, seed, keep_assistant_turns)
    source = source_or_default(target, target_revision, trust_remote_code)
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        sampling = {name: value for name, value in sampling.items() if value is not None}
    answer_prompts(
        rows, output, source, server=server, model=model, max_new_tokens=max_new_tokens, max_prompt_tokens=max_prompt_tokens,
        sampling=sampling, thinking=thinking, batch_size=batch_size, dtype=dtype, seed=seed, chat_template=chat_template,
        left_out=left_out,
    )  # fmt: skip
    modes = [] if thinking is None else ["--thinking" if thinking else "--no-thinking"]
    modes += ["--chat-template", chat_template] if chat_template else []
    few = ["--validation", max(1, len(rows) // 8)] if len(rows) <= 2 * TrainOptions.validation else []
    told = command_line(
        "train", *shlex.split(source.options()), "--responses", output, *modes, *few, "--output", "drafter-run"
    )
    typer.echo(f"next: {told}")


def chosen_prompts(
    sources: list[str], column: str | None, count: int | None, seed: int, keep_assistant: bool = False
) -> tuple[list[dict], list[dict]]:
    """(rows of all sources or `count` of them, rows that are left out), see `read_prompts`."""
    import random

    left_out = []
    rows = [row for source in sources for row in read_prompts(prompt_source(source), column, keep_assistant, left_out)]
    if not rows:
        raise ValueError(f"there is no prompt in {', '.join(sources)} that can be answered.")
    return rows if count is None else random.Random(seed).sample(rows, min(count, len(rows))), left_out


def answer_prompts(
    rows: list[dict], output: Path, target: TargetSource, *, max_new_tokens: int, max_prompt_tokens: int, sampling: dict,
    thinking: bool | None, batch_size: int, dtype: str, seed: int, server: str | None = None, model: str | None = None,
    chat_template: str | None = None, left_out: list[dict] = (),
):  # fmt: skip
    """Let the target answer, in this process or on a server, and say how many it answered.

    Raises:
        typer.Exit: none has an answer.
    """
    from ..common.identity import identify
    from ..common.loading import load_target, load_tokenizer
    from ..common.server import Server
    from ..training import responses

    if server:
        tokenizer = load_tokenizer(target, chat_template)
        source = responses.RemoteTarget(Server(server, model), tokenizer, max_new_tokens, sampling, batch_size)
        identity, under = None, {}  # a server may leave the generation config out
    else:
        loaded, tokenizer = load_target(target, dtype, chat_template)
        source = responses.LocalTarget(loaded, tokenizer, max_new_tokens, sampling, batch_size)
        identity, under = identify(loaded), responses.text_settings(loaded)
    generation = {"max_new_tokens": max_new_tokens, **sampling}
    if under:
        generation["generation_config"] = under
    settings = responses.response_settings(target.path, identity, tokenizer, thinking, generation)
    with interruptible(lambda: where_answers_stopped(output)), writing(output):
        counts = responses.regenerate(
            output, source, tokenizer, rows, settings, thinking, max_prompt_tokens, seed, left_out
        )
    if getattr(source, "retokenized", 0):
        typer.echo(
            f"{source.retokenized} answers came as text without token ids; their ids are the tokenizer's reading of it."
        )
    if counts["failures"]:
        typer.echo(f"{counts['failures']} prompts have no answer; why is in {output}/failures.jsonl.")
    typer.echo(
        f"wrote {responses.responses_file(output)}: {counts['answers']} answers, {counts['answer_tokens']} tokens"
    )
    if not counts["answers"]:
        raise typer.Exit(1)


def where_answers_stopped(output: Path) -> str:
    """Say how much is answered after an interruption, and how to go on."""
    from ..training.responses import responses_file

    path = responses_file(output)
    count = path.read_bytes().count(b"\n") if path.exists() else 0
    return f"{path} holds {count} answers. Go on with: {typed_command()}"


def where_training_stopped(output: Path) -> str:
    """Say which checkpoint a run can go on from, and how."""
    from ..training.checkpoints import saved_checkpoints

    if not (output / "run.yaml").exists():
        return "Nothing was written."
    saved = saved_checkpoints(output)
    where = f"The newest checkpoint is {saved[0]}." if saved else "No checkpoint was saved yet; the run begins anew."
    typed = typed_command()
    return f"{where} Go on with: {typed if '--resume' in typed.split() else f'{typed} --resume'}"


@takes_fields(TrainOptions)
def train(
    target: Annotated[str | None, Option(help="Repository or folder. Default: SmolLM2-135M-Instruct.")] = None,
    config: Config = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the last checkpoint.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Say what tokens, time, memory and disk the run will take; write nothing.")
    ] = False,
    target_layers: Annotated[
        str | None, Option(help="Target layers whose hidden states a fresh drafter reads, as 1,9,17.")
    ] = None,
    argument: Annotated[
        list[str] | None, Option(help="NAME=VALUE of transformers' TrainingArguments, as report_to=wandb; repeatable.")
    ] = None,
    license: License = None,
    **fields,
):
    """Train a drafter for a target on the target's own responses; one process, or under `accelerate launch`."""
    from ..training.train import train as run

    fields["prompts"] = [prompt_source(name) for name in fields["prompts"]]
    source = source_or_default(
        target, *(fields.pop(name) for name in ("target_revision", "trust_remote_code", "target_name"))
    )
    options = TrainOptions(
        target=source.path,
        target_layers=layer_list(target_layers),
        arguments=dict(read_argument(text) for text in argument or []),
        **fields,
    ).with_source(source)
    with interruptible(lambda: where_training_stopped(Path(options.output))), writing(options.output):
        figures = run(options, typed_command(), resume, dry_run)
    if figures:
        state_license(f"{options.output}/drafter", license)
        typer.echo(json_lines(figures))
        if "teacher_forced_acceptance_length" in figures:
            typer.echo("(teacher-forced is higher than real: anchors at random meet long accepted runs more often)")
        typer.echo(
            f"wrote {options.output}/drafter, {options.output}/curves.png\n"
            f"next: {bench_line(options.source, options.output)}"
        )


def state_license(drafter: str, license: str | None):
    """Write the license into the card of a drafter that was just made."""
    from ..convert.card import write_card

    if license is not None:
        write_card(drafter, license=license)


def bench_line(target: TargetSource, output: str | Path) -> str:
    """A command that measures the new drafter, on a few prompts of ours."""
    drafter = f"{output}/drafter"
    return command_line(
        "bench",
        *shlex.split(target.options()),
        "--drafter",
        drafter,
        "--prompts",
        "demo",
        "--output",
        f"{output}-bench",
    )


def layer_list(text: str | None) -> list[int] | None:
    try:
        return [int(layer) for layer in text.split(",")] if text else None
    except ValueError:
        raise ValueError(f"--target-layers {text!r} is no list of layers; write it as 1,9,17.") from None


def read_argument(text: str) -> tuple[str, str]:
    """(name, value) of an `--argument`; the value is read later, by the type of its field."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--argument {text!r} is not NAME=VALUE.")
    return name, value


def json_lines(figures: dict) -> str:
    return "\n".join(f"{name}: {value}" for name, value in figures.items())


def vocabulary(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="A drafter: repository or folder.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder to write.")],
    responses: Annotated[
        list[str], Option(help="Folder or file of `dflash-hub regenerate`, by the drafter's target; repeatable.")
    ],
    size: Annotated[int, Option(min=1, help="Tokens of the list, at most.")] = 4096,
    force: Annotated[bool, Option("--force", help="Replace a folder that exists.")] = False,
):
    """Let a drafter draft from its target's most frequent tokens and those of the text at hand: the head costs less."""
    from ..training.vocabulary import write_with_vocabulary

    listed = write_with_vocabulary(drafter, output, responses, size, force)
    typer.echo(f"listed {listed}")
    typer.echo(
        f"wrote {output}\nnext: dflash-hub bench --drafter {shlex.quote(output)} --prompts demo --output bench-run"
    )


def check(
    drafter: Annotated[str | None, Option(help="Repository or folder. Default: the shipped one.")] = None,
    target: Annotated[str | None, Option(help="Repository or folder. Default: SmolLM2-135M-Instruct.")] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    prompts: Annotated[list[str] | None, Option(help="JSONL file of prompts. Default: a few of ours.")] = None,
    count: Annotated[int, Option(min=1, help="Prompts, at most.")] = 4,
    max_new_tokens: Annotated[int, Option(min=4, help="Tokens of an answer.")] = 48,
    thinking: Annotated[bool | None, Option(help="Thinking mode of the target's template, where it has one.")] = None,
    dtype: Annotated[str, Option(help="float32, bfloat16 or float16.")] = "float32",
    chat_template: ChatTemplate = None,
):
    """Is this drafter right for this target, and if it accepts little, why? Exit code 1 where something is wrong."""
    from ..common.loading import drafter_config, dtype_of, load_target
    from ..modeling_dflash import DFlashDraftModel
    from ..training.check import check as run
    from ..training.check import read_record

    drafter = drafter or SHIPPED
    dtype_of(dtype)
    rows = chosen_prompts(prompts or ["demo"], None, None, 0)[0][:count]
    source = source_or_default(target, target_revision, trust_remote_code)
    source = source.for_drafter(drafter_config(drafter))
    loaded, tokenizer = load_target(source, dtype, chat_template)
    model = DFlashDraftModel.from_pretrained(drafter, dtype=loaded.dtype, device_map={"": loaded.device}).eval()
    findings = run(model, loaded, tokenizer, rows, thinking, read_record(drafter), max_new_tokens)
    for finding in findings:
        typer.echo(str(finding))
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


@takes_fields(
    TrainOptions, "target_revision", "trust_remote_code", "target_name", "column", "rehearsal", "rehearsal_share",
    "batch_size", "max_steps", "num_anchors", "draft_vocab_size", "features", "validation", "eval_prompts", "dtype", "bf16", "seed",
    "thinking", "chat_template",
    epochs=4.0, optimizer="adamw", learning_rate=3e-4, evaluations=8, patience=2,
)  # fmt: skip
def align(
    output: Annotated[Path, Option(help="Folder of the alignment; an interrupted one is continued.")],
    prompts: Annotated[list[str], Option(help="JSONL file of prompts, or a data set: NAME or NAME:SPLIT; repeatable.")],
    drafter: Annotated[
        str | None,
        Option(help="Made for the target before it changed: repository or folder. Default: the shipped one."),
    ] = None,
    target: Annotated[
        str | None, Option(help="The changed target: repository or folder. Default: SmolLM2-135M-Instruct.")
    ] = None,
    count: Annotated[int, Option(min=4, help="Prompts that the changed target answers.")] = 256,
    max_new_tokens: Annotated[int, Option(min=2, help="Tokens of a response, at most.")] = 512,
    license: License = None,
    keep_assistant_turns: KeepAssistant = False,
    **fields,
):
    """Follow a target that was fine-tuned, quantized or merged: answers, fine-tuning, and the better drafter kept."""
    import accelerate

    from ..training.align import align as run
    from ..training.align import check_alignment

    if accelerate.PartialState().num_processes > 1:
        raise ValueError("align runs in one process; train in many with `dflash-hub train --drafter`.")
    refuse_other_content(output, "answers", "run")
    drafter, target = drafter or SHIPPED, target or source_or_default(None).path
    rows, left_out = chosen_prompts(prompts, fields["column"], count, fields["seed"], keep_assistant_turns)
    options = TrainOptions(
        target=target,
        responses=[str(output / "answers")],
        output=str(output),
        drafter=drafter,
        prompts=[prompt_source(name) for name in prompts] if fields["rehearsal"] else [],
        **fields,
    )
    options = check_alignment(options, rows)
    answer_prompts(
        rows, output / "answers", options.source, max_new_tokens=max_new_tokens, max_prompt_tokens=2048,
        sampling={"do_sample": False}, thinking=options.thinking, batch_size=64, dtype=options.dtype, seed=options.seed,
        chat_template=options.chat_template, left_out=left_out,
    )  # fmt: skip
    with interruptible(lambda: f"What was done is in {output}. Go on with: {typed_command()}"), writing(output):
        report = run(options, output, typed_command())
    state_license(f"{output}/drafter", license)
    typer.echo(report)
    typer.echo(f"wrote {output}/drafter and {output}/report.md\nnext: {bench_line(options.source, output)}")
