"""The command line: `dflash-hub COMMAND`, also `python -m dflash_hub COMMAND`.

Each command is a thin layer over a function elsewhere; heavy imports wait until a command runs.
"""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from ..common.console import command_line, interruptible, run_plainly, typed_command
from ..common.files import refuse_other_content, writing
from ..common.prompts import load_prompts, prompt_source
from ..common.target_source import TargetName, TargetRevision, TrustRemoteCode
from . import training as commands
from .options import License, source_or_default, target_source


class Commands(TyperGroup):
    """Our commands: Ctrl-C ends each with a sentence; long ones say more by `interruptible`."""

    def invoke(self, context):
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            print(
                f"\ndflash-hub: stopped in {context.invoked_subcommand}; no file is left half written. "
                f"Run it again with: {typed_command()}", file=sys.stderr,
            )  # fmt: skip
            sys.exit(130)


app = typer.Typer(
    cls=Commands,
    help="DFlash drafters for transformers: several tokens per forward pass of the target, the same text.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


def show_version(wanted: bool):
    """Print the version and end, where `--version` is passed."""
    if wanted:
        from .. import __version__

        typer.echo(f"dflash-hub {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end.")
    ] = False,
):
    pass


Force = Annotated[bool, typer.Option("--force", help="Replace the destination if it exists.")]


@app.command(epilog="\b\ndflash-hub demo --prompt 'What is 15 + 27?' --max-new-tokens 64")
def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable. Default: a few of ours.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Target repository or folder. Default: SmolLM2-135M-Instruct.")
    ] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    drafter: Annotated[str | None, typer.Option(help="Drafter repository or folder. Default: the shipped one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
):
    """Race a target with its drafter against the target alone, and show which tokens were drafted."""
    from ..demo.terminal import run

    source = target_source(target, target_revision, trust_remote_code)
    run(prompt, source, drafter, max_new_tokens, temperature, seed, dtype)


@app.command(epilog="\b\ndflash-hub generate 'What is 15 + 27?' --max-new-tokens 64")
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="The prompt; several are turns of one chat. Default: standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each line of standard input is a turn, as at a terminal.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="Target repository or folder. Default: SmolLM2-135M-Instruct.")
    ] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    drafter: Annotated[str | None, typer.Option(help="Drafter repository or folder. Default: the shipped one.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    thinking: Annotated[
        bool | None,
        typer.Option(help="Thinking mode of the target's template. Default: what the drafter was made for."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Of sampling.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: the target's own.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line and answer, with statistics.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No statistics on standard error.")] = False,
    chat_template: commands.ChatTemplate = None,
):
    """Write an answer with a target and its drafter: text on standard output, statistics on standard error."""
    from ..demo.generate import run

    prompts = prompts or []
    if (bool(prompts) + (file is not None) + chat) > 1:
        raise typer.BadParameter("pass PROMPT, --file or --chat, one of them.")
    if raw and (len(prompts) > 1 or chat or system or thinking is not None or chat_template):
        raise typer.BadParameter(
            "--raw continues one text; turns, --system, --thinking and --chat-template need the chat template."
        )
    if not temperature and (top_p is not None or top_k is not None):
        raise typer.BadParameter("--top-p and --top-k are of sampling; pass --temperature as well.")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature else {}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    source = target_source(target, target_revision, trust_remote_code)
    run(
        prompts, file, chat, source, drafter, system, raw, thinking, max_new_tokens, sampling, seed, dtype, as_json, quiet,
        chat_template,
    )  # fmt: skip


@app.command(epilog="\b\ndflash-hub init --output my-fresh-drafter --dry-run")
def init(
    target: Annotated[
        str | None,
        typer.Option(help="Target repository or folder, as Qwen/Qwen3-4B. Default: SmolLM2-135M-Instruct."),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Folder to write.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Depth of the drafter.")] = 5,
    block_size: Annotated[int, typer.Option(min=2, help="Positions of a block: one anchor, the rest drafted.")] = 16,
    target_layers: Annotated[
        str | None,
        typer.Option(help="Target layers whose hidden states it reads, as 1,9,17. Default: five, by the paper's rule."),
    ] = None,
    window: Annotated[int | None, typer.Option(min=2, help="Let all layers but the last slide.")] = None,
    mask_token: Annotated[
        str | None, typer.Option(help="Id or text of the mask token. Default: an unused one.")
    ] = None,
    from_target_layers: Annotated[bool, typer.Option(help="Start from the target's last layers.")] = False,
    method: Annotated[
        str, typer.Option(help="dflash, or dflash2: with convolutions along the block and a selector of paths.")
    ] = "dflash",
    target_revision: Annotated[
        str | None, typer.Option("--target-revision", "--revision", help="Revision of the target.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    target_name: TargetName = None,
    license: License = None,
    seed: Annotated[int, typer.Option(help="Seed of the fresh weights.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print config and size, write nothing.")] = False,
    force: Force = False,
):
    """Tie a fresh drafter to a target; it drafts badly until it is trained."""
    from ..convert.init import init_drafter

    if output is None and not dry_run:
        raise ValueError("pass --output FOLDER, or --dry-run to write nothing.")
    layer_ids = commands.layer_list(target_layers)
    source = source_or_default(target, target_revision, trust_remote_code, target_name)
    written = None if dry_run else output
    plan = init_drafter(
        source, written, layers, block_size, layer_ids, window, mask_token, from_target_layers, seed, force, method
    )
    if dry_run:
        typer.echo(plan.config.to_json_string())
    for reason in plan.reasons:
        typer.echo(f"- {reason}")
    typer.echo(f"{plan.parameters / 1e6:.1f} M parameters, {plan.parameters * 2 / 1e6:.1f} MB in bfloat16")
    if written:
        commands.state_license(written, license)
        typer.echo(
            f"wrote {output}; it drafts badly until it is trained, by `dflash-hub train --drafter`\n"
            f"next: {command_line('inspect', output)}"
        )
    elif output:
        typer.echo(f"nothing written; without --dry-run it would be {output}")


@app.command(epilog="\b\ndflash-hub upgrade . drafter-2")
def upgrade(
    source: Annotated[str, typer.Argument(metavar="DRAFTER", help="A drafter's folder.")],
    destination: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    convolution: Annotated[bool, typer.Option(help="Add convolutions along the block.")] = True,
    selector: Annotated[bool, typer.Option(help="Add a selector of paths.")] = True,
    rank: Annotated[int, typer.Option(min=1, help="Of the selector's codebooks.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the fresh codebook.")] = 0,
    force: Force = False,
):
    """Add the parts of DFlash 2 to a drafter. It drafts the same until it is trained."""
    from ..convert.card import parts_in_words
    from ..convert.upgrading import upgrade_drafter

    config = upgrade_drafter(source, destination, convolution, selector, rank, seed, force)
    typer.echo(
        f"wrote {destination}: {parts_in_words(config)}; it drafts as {source} does until `dflash-hub train --drafter` trains it\n"
        f"next: {command_line('inspect', destination)}"
    )


@app.command("import", epilog="\b\ndflash-hub import . my-drafter")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Checkpoint of any known format: repository or folder, as z-lab/Qwen3-8B-DFlash-b16."
        ),
    ],
    destination: Annotated[str | None, typer.Argument(metavar="DST", help="Folder to write.")] = None,
    target: Annotated[str | None, typer.Option(help="The model that the drafter was made for.")] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    target_name: TargetName = None,
    chat: Annotated[bool | None, typer.Option(help="Record: made for text in the target's chat template.")] = None,
    thinking: Annotated[bool | None, typer.Option(help="Record: made for the target's thinking mode.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of SRC.")] = None,
    config: Annotated[str | None, typer.Option(help="A config.json elsewhere, as for training states.")] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read .pt and .bin files too.")] = False,
    check_target: Annotated[
        bool, typer.Option(help="Compare copies of the target's tensors with the target before they are dropped.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the mapping, write nothing.")] = False,
    force: Force = False,
):
    """Turn a foreign checkpoint into a folder that AutoModel loads and `generate` takes."""
    from ..convert.description import mapping
    from ..convert.importing import import_drafter

    if destination is None and not dry_run:
        raise ValueError("pass a folder to write, or --dry-run to write nothing.")
    original = target_source(target, target_revision, trust_remote_code, target_name)
    done = import_drafter(
        source, destination, force, original, chat, thinking, revision, config, allow_pickle, check_target, dry_run
    )
    if dry_run:
        typer.echo(mapping(done.lines, done.config))
    for note in done.notes:
        typer.echo(f"- {note}")
    found = done.config
    typer.echo(
        f"read {source}: {done.title}, {found.num_hidden_layers} layers, block {found.block_size}, target layers "
        f"{found.target_layer_ids} of {found.num_target_layers}, mask token {found.mask_token_id}"
    )
    if not dry_run:
        typer.echo(
            f"wrote {destination}, for AutoModel.from_pretrained({in_python(destination)}, trust_remote_code=True)\n"
            f"next: {command_line('inspect', destination)}"
        )


@app.command(epilog="\b\ndflash-hub export . drafter-for-vllm --to vllm")
def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A drafter: repository or folder.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write; of gguf a file.")],
    to: Annotated[
        str, typer.Option(help="zlab, vllm, sglang, dspark, speculators, transformers or gguf (llama.cpp).")
    ] = "zlab",
    target: Annotated[
        str | None,
        typer.Option(
            help="Where speculators' copies of its tensors come from, and gguf's tokenizer: also TARGET.gguf."
        ),
    ] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Annotated[str | None, typer.Option(help="Revision of SRC.")] = None,
    yarn: Annotated[float | None, typer.Option(help="Scale RoPE by this factor, with YaRN.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Positions to state.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of gguf: float32, float16, bfloat16 or q8_0. Default: the drafter's own.")
    ] = None,
    force: Force = False,
):
    """Write a drafter for an engine or in the format of another package."""
    from ..convert.engines import other_readers
    from ..convert.exporting import export_drafter

    original = target_source(target, target_revision, trust_remote_code)
    done = export_drafter(source, destination, to, force, original, revision, yarn, context_length, dtype)
    for warning in done.warnings:
        typer.echo(f"- {warning}.")
    typer.echo(
        f"wrote {destination} for {done.title}; not carried, for want of a place: {', '.join(done.not_carried)}\n"
        f"next:\n{done.usage}"
    )
    if to == "gguf":
        typer.echo("(tried with llama.cpp's build 11434: `make engines` compares text and acceptance length)")
    if to == "zlab":
        typer.echo(
            f"\nothers that read this folder, as their documentation says (not tried):\n{other_readers(done.config, destination)}"
        )


@app.command(epilog="\b\ndflash-hub inspect .")
def inspect(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A drafter of any known format: folder or repository.")],
    target: Annotated[str | None, typer.Option(help="The target, where the format does not state its depth.")] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Annotated[str | None, typer.Option(help="Revision of DIR.")] = None,
    config: Annotated[str | None, typer.Option(help="A config.json elsewhere, as for training states.")] = None,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read .pt and .bin files too.")] = False,
):
    """Say what a drafter is, which engines serve it and how, and what is odd about it."""
    from ..convert.description import describe
    from ..convert.reading import read_drafter

    original = target_source(target, target_revision, trust_remote_code)
    typer.echo(describe(read_drafter(source, original, revision, config, allow_pickle)))


@app.command(epilog="\b\ndflash-hub import . my-drafter\ndflash-hub card my-drafter")
def card(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A drafter's folder.")],
    benchmark: Annotated[list[Path] | None, typer.Option(help="A summary.json of bench; repeatable.")] = None,
    repository: Annotated[str | None, typer.Option(help="Id on the Hub, for the snippet.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a README.md that someone wrote.")] = False,
    license: License = None,
    target_name: Annotated[
        str | None, typer.Option(help="Hub id to record for the target: base_model of the card.")
    ] = None,
):
    """Write the model card from the folder's config, its training record and benchmarks."""
    from ..convert.card import write_card

    write_card(folder, benchmark or (), repository, force, license, target_name)
    # An id that a folder's name gives; nothing is uploaded in a dry run.
    address = (
        repository or f"my-name/{re.sub('[^A-Za-z0-9_-]+', '-', Path(folder).resolve().name).strip('-') or 'drafter'}"
    )
    typer.echo(f"wrote {folder}/README.md\nnext: {command_line('push', folder, address, '--dry-run')}")


@app.command(epilog="\b\ndflash-hub push . my-name/my-drafter --dry-run")
def push(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A drafter's folder.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="Id on the Hub, as org/name.")],
    public: Annotated[bool, typer.Option("--public", help="Create a public repository, not a private one.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files, upload nothing.")] = False,
):
    """Upload folder, code and card to the Hub."""
    from ..convert.pushing import push_drafter

    files, url = push_drafter(folder, repository, not public, dry_run)
    typer.echo("\n".join(files))
    if url is None:
        typer.echo("nothing uploaded; weights and a record that these supersede on the Hub would be deleted")
        typer.echo(f"next: {command_line('push', folder, repository)}")
    else:
        typer.echo(
            f'uploaded: {url}, for AutoModel.from_pretrained("{repository}", revision="COMMIT", trust_remote_code=True)\n'
            f"next: {command_line('inspect', repository)}"
        )


METHODS = (
    "baseline, lookup, assistant, native, zlab, ours, ours-N, ours-auto, ours-tree-N, ours-tree-auto, eagle3, eagle3-N, eagle3-treeN, "
    "served, served-N, ceiling-P."
)


@app.command(
    epilog="\b\ndflash-hub bench --prompts demo --count 2 --methods baseline,ours --max-new-tokens 32 --output bench-demo"
)
def bench(
    output: Annotated[Path, typer.Option(help="Folder of the run; an interrupted one is resumed.")],
    prompts: Annotated[list[str] | None, typer.Option(help="A set by name, a JSONL file, or demo; repeatable.")] = None,
    methods: Annotated[str, typer.Option(help=METHODS)] = "baseline,lookup,native,ours",
    target: Annotated[str | None, typer.Option(help="Repository or folder. Default: SmolLM2-135M-Instruct.")] = None,
    target_revision: TargetRevision = None,
    trust_remote_code: TrustRemoteCode = False,
    drafter: Annotated[str | None, typer.Option(help="Repository or folder. Default: the shipped one.")] = None,
    assistant: Annotated[str | None, typer.Option(help="An ordinary small model, for the method assistant.")] = None,
    eagle3: Annotated[
        str | None, typer.Option(help="An EAGLE-3 draft model for the target, for the methods eagle3 and eagle3-treeN.")
    ] = None,
    count: Annotated[int, typer.Option(min=2, help="Prompts a set.")] = 8,
    first: Annotated[
        bool, typer.Option("--first", help="The first prompts of a set instead of a seeded choice.")
    ] = False,
    rows: Annotated[str | None, typer.Option(help="Also measure batches, as 2,4,8: plain and ours only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write per prompt and turn.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice of prompts and of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    thinking: Annotated[
        bool | None,
        typer.Option(help="Thinking mode of the target's template. Default: what the drafter was made for."),
    ] = None,
    chat_template: commands.ChatTemplate = None,
    compare: Annotated[Path | None, typer.Option(help="Folder of an earlier run: what moved beyond noise?")] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="A running OpenAI-compatible server: the method served (a second one: served-2). Without that method it is "
            "measured alone, at several concurrencies."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The server's model, where it serves several.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, for a server.")] = "1,2,4,8,16,32",
):
    """Measure methods side by side on the same prompts: acceptance, speed, equality of the text."""
    here = Path(__file__).parent.parent
    sources = [prompt_source(name) for name in prompts or ["demo"]]
    choice_seed = None if first else seed
    sets = [load_prompts(source, count, choice_seed) for source in sources]
    command = typed_command()
    names = [name.strip() for name in methods.split(",")]
    batches = _checked_batches(rows, names, sets)
    levels = number_list(concurrency, "--concurrency")
    if compare is not None:
        from ..benchmark.bench import read_settings

        read_settings(compare)
    refuse_other_content(output, "settings.json", "server.json")
    servers = []
    if server:
        from ..common.server import Server

        servers = [Server(url, model) for url in server]
    if servers and not any(name.startswith("served") for name in names):
        typer.echo(_measure_alone(output, servers, sets, levels, max_new_tokens, temperature, command))
        return
    from ..benchmark.bench import Bench, run_bench
    from ..benchmark.methods import check_methods
    from ..benchmark.report import write_report
    from ..benchmark.rows import measure_rows
    from ..common.loading import dtype_of

    dtype_of(dtype)  # before a target is fetched
    check_methods(names, assistant, eagle3)
    models = Bench(
        source_or_default(target, target_revision, trust_remote_code), drafter or str(here), assistant, dtype, max_new_tokens,
        temperature, thinking, chat_template, servers, eagle3,
    )  # fmt: skip
    with interruptible(lambda: f"What was measured is in {output}. Go on with: {command}"), writing(output):
        run_bench(output, models, names, sets, choice_seed, seed, command)
        if batches and models.state.is_main_process:
            measure_rows(output, models, names, sets, batches, seed)
    if models.state.is_main_process:
        typer.echo(write_report(output, compare))
        typer.echo(f"wrote {output}/report.md, {output}/summary.json and plots\nnext: {against(output)}")


def _checked_batches(rows: str | None, methods: list[str], sets: list) -> list[int]:
    """Sizes of the batches that are asked for, once methods and sets are seen to have what they take."""
    from ..benchmark.rows import check_counts, methods_of_rows

    batches = number_list(rows, "--rows") if rows else []
    if batches:
        methods_of_rows(methods)
        check_counts(sets, batches)
    return batches


def against(output: Path) -> str:
    """The command as typed, to be measured anew and compared with what is in `output`."""
    typed, again = shlex.split(typed_command()), f"{str(output).rstrip('/')}-again"
    replaced = [
        again if word == str(output) else word.replace(f"--output={output}", f"--output={again}") for word in typed
    ]
    return shlex.join([*replaced, "--compare", str(output)])


def _measure_alone(output: Path, servers: list, sets, *settings) -> str:
    from ..benchmark.server import measure_server

    if len(servers) > 1:
        raise ValueError("--server measures one server alone; add the methods served,served-2 to compare several.")
    return measure_server(output, servers[0], sets, *settings)


def in_python(text: str) -> str:
    """As a string of Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def number_list(text: str, option: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.strip().isdecimal() and int(part) > 0]
    if len(numbers) != len(text.split(",")):
        raise ValueError(f"{option} {text!r} is no list of positive numbers; write it as 1,2,4.")
    return numbers


app.command(epilog="\b\ndflash-hub regenerate --prompts demo --max-new-tokens 48 --output responses-demo")(
    commands.regenerate
)
app.command(
    epilog="\b\ndflash-hub regenerate --prompts demo --max-new-tokens 48 --output responses-demo\n"
    "dflash-hub train --responses responses-demo --layers 1 --block-size 4 --validation 2 --eval-prompts 1 --max-steps 4 --output run-demo"
)(commands.train)
app.command(
    epilog="\b\ndflash-hub vocabulary . smaller-head --responses data/responses/smollm2-135m-instruct.jsonl --size 4096"
)(commands.vocabulary)
app.command(epilog="\b\ndflash-hub check --count 2")(commands.check)
app.command(
    epilog="\b\ndflash-hub align --prompts demo --count 4 --max-new-tokens 16 --validation 1 --eval-prompts 1 --max-steps 1 "
    "--output aligned-demo"
)(commands.align)


def main():
    run_plainly(app)
