"""`dflash-hub align`: the target changed (fine-tuned, quantized, a LoRA merged), the drafter follows.

One folder, one command, safe to interrupt: the new target answers prompts (`answers/`), the drafter is fine-tuned on
them with some of its old data (`run/`), and the better of old and new drafter ends in `drafter/`, with a report.
"""

import dataclasses
import json
from pathlib import Path

from ..common.files import complete_lines, new_folder
from ..common.identity import has_thinking_modes
from ..common.loading import load_tokenizer
from ..configuration_dflash import DFlashConfig
from ..convert.card import RECORD, write_card
from ..convert.importing import write_drafter
from ..convert.init import read_target_config, target_skeleton
from ..convert.reading import read_drafter
from ..hub_files import write_text
from ..target_model import check_pair
from .check import read_record
from .data import split_validation
from .losses import BlockLoss
from .options import TrainOptions, resolved
from .train import check_environment, load_rows, prompts_by_id, train, training_arguments, warm_drafter


def check_alignment(options: TrainOptions, prompts: list[dict]) -> TrainOptions:
    """Options with the thinking mode of the drafter, where none is stated.

    All that can be wrong is seen here, before the target answers anything, which may take hours.

    Args:
        options: as for `align`; the files in `answers` need not exist.
        prompts: rows {"id", "messages"} that the target is to answer.

    Raises:
        ValueError, OSError: see `train`.
    """
    check_environment(options)
    resolved(options)
    BlockLoss(options.loss, None)
    split_validation(prompts, options.validation, options.seed)
    training_arguments(options, len(prompts) - options.validation, Path(options.output) / "run")
    drafter = warm_drafter(options)
    if options.target_revision is None and not options.source.is_local:
        options = dataclasses.replace(options, target_revision="main")  # not the one that the drafter was made for
    check_pair(drafter, target_skeleton(read_target_config(options.source), options.source))
    tokenizer = load_tokenizer(options.source, options.chat_template)
    if options.thinking is None and has_thinking_modes(tokenizer):
        options = dataclasses.replace(options, thinking=drafter.config.target_thinking)
    load_rows(options.rehearsal, prompts_by_id(options), options, tokenizer)
    return options


def align(options: TrainOptions, output: Path, command: str) -> str:
    """Fine-tune `options.drafter` for `options.target`, and keep it only if it accepts more on validation prompts.

    Args:
        options: with `drafter` and `answers` of the new target; `rehearsal` may name old answers.

    Returns:
        The report, as Markdown.
    """
    run = output / "run"
    options = dataclasses.replace(options, output=str(run), arguments={"eval_on_start": True} | options.arguments)
    after = train(options, command, resume=(run / "run.yaml").exists())
    before = first_evaluation(run / "log.jsonl")
    metric = "replayed_acceptance_length" if "replayed_acceptance_length" in after else "acceptance_length"
    better = after[metric] > before[metric]
    source = str(run / "drafter") if better else options.drafter
    with new_folder(output / "drafter", force=(output / "drafter").exists()) as folder:
        found = read_drafter(source, options.source)
        # The target is another one now, whatever name the drafter had for it.
        found.config.target_name_or_path = options.source.recorded_name
        found.config.target_revision = options.source.recorded_revision
        found.config.target_rows = DFlashConfig.from_pretrained(run / "drafter").target_rows
        if options.thinking is not None:
            found.config.target_thinking = options.thinking
        write_drafter(folder, found.config, found.match.drafter)
        if record := read_record(source):
            if better:
                record["data"]["target"] = options.source.recorded_name
            write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
        write_card(folder)
    trained = ((read_record(options.drafter) or {}).get("result") or {}).get("evaluation") or {}
    by_position = trained.get("acceptance_by_position") or trained.get("acceptance_by_slot", [])  # as 0.1.0 wrote it
    trained |= {f"acceptance_position_{k}": share for k, share in enumerate(by_position, start=1)}
    report = write_report(trained, before, after, better, options, command)
    write_text(output / "report.md", report)
    write_text(
        output / "report.json",
        json.dumps({"before": before, "after": after, "kept": "new" if better else "old"}, indent=1),
    )
    return report


def first_evaluation(log: Path) -> dict:
    """The evaluation before the first step."""
    for entry in complete_lines(log):
        if entry["step"] == 0 and "eval_acceptance_length" in entry:
            return {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
    raise ValueError(f"{log} holds no evaluation before the first step; delete the run and start again.")


def write_report(trained: dict, before: dict, after: dict, better: bool, options: TrainOptions, command: str) -> str:
    """`trained` is the evaluation at the end of the old drafter's training, with its old target on prompts of its own."""
    names = {
        "acceptance_length": "acceptance length, real generation",
        "replayed_acceptance_length": "acceptance length, replayed over all validation responses",
        "position_1_accuracy": "position-1 accuracy, all anchors",
    }
    names |= {
        name: f"positions 1 to {name.rsplit('_', 1)[1]} accepted"
        for name in before
        if name.startswith("acceptance_position_")
    }
    lines = ["| on validation prompts | with the old target, when trained | before | after |", "|---|---|---|---|"]
    lines += [
        f"| {text} | {format(trained[n], '.3f') if n in trained else '-'} | {before[n]:.3f} | {after[n]:.3f} |"
        for n, text in names.items()
        if n in before and n in after
    ]
    kept = (
        "The new drafter is in `drafter/`."
        if better
        else "The new drafter is not better: the old one is in `drafter/`."
    )
    return "\n".join([f"# {options.drafter} for {options.target}", "", *lines, "", kept, "", f"`{command}`", ""])
