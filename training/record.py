"""`training_record.json`: what a run states of its data, recipe, environment and result."""

import dataclasses
import json
from pathlib import Path

from ..common.identity import template_fingerprint
from ..common.provenance import environment
from ..convert.card import card_text
from .check import read_record
from .data import row_length

# Options that say where something lies, or that the rest of the record says better.
UNRECORDED = (
    "target", "target_revision", "target_name", "trust_remote_code", "responses", "rehearsal", "output", "prompts", "features",
)  # fmt: skip


def check_recordable(run, command: str):
    """Compose record and card of a run that has not begun: what fails there would fail after its last step.

    Raises:
        ValueError: something of the run cannot be recorded; says what.
    """
    nothing = {"steps": 0, "best_step": 0, "epochs": 0.0, "seconds": 0, "anchors": 0, "evaluation": None}
    record = training_record(run, command, nothing)
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the record of this run could not be written at its end: {error}.") from error
    card_text(run.config, record, run.output / "drafter")


def training_record(run, command: str, result: dict) -> dict:
    """What is recorded of a run (`train.Run`) with this result, for JSON."""
    options, training, config = run.options, run.data.training, run.config
    before = longest_trained(options.drafter) if options.drafter is not None else 0
    stated = {name: value for name, value in dataclasses.asdict(options).items() if name not in UNRECORDED}
    resolved = {
        "gamma": run.gamma, "attention": run.attention, "layers": config.num_hidden_layers, "block_size": config.block_size,
        "target_layer_ids": config.target_layer_ids,
    }  # fmt: skip
    return {
        "command": command,
        "data": {
            "files": run.data.files,
            "target": config.target_name_or_path,
            "identity": run.identity,
            "thinking": options.thinking,
            "chat_template_sha256": template_fingerprint(run.tokenizer),
            "rows": len(training),
            "answer_tokens": sum(len(row["response_ids"]) for row in training),
            "longest_row": max(*map(row_length, training), before),
            "validation": [row["id"] for row in run.data.validation],
        },
        "recipe": stated | resolved,
        "environment": environment(),
        "result": result,
    }


def training_result(run, trainer, best: Path, figures: dict) -> dict:
    """What came of a run: steps, time, and the evaluation of its best checkpoint."""
    evaluation = {
        "prompts": len(trainer.eval_rows), "max_new_tokens": run.options.eval_new_tokens,
        "acceptance_by_position": [v for name, v in figures.items() if name.startswith("acceptance_position_")],
        **{name: v for name, v in figures.items() if not name.startswith("acceptance_position_")},
    }  # fmt: skip
    return {
        "steps": trainer.state.global_step, "best_step": int(best.name.rsplit("-", 1)[1]), "epochs": trainer.state.epoch,
        "seconds": round(trainer.total("seconds")), "anchors": trainer.total("anchors"),
        "evaluation": evaluation if run.options.eval_prompts else None,
    }  # fmt: skip


def longest_trained(drafter: str) -> int:
    """Tokens of the longest text that a drafter's record says it was trained on; 0 where it does not say."""
    return ((read_record(drafter) or {}).get("data") or {}).get("longest_row") or 0
