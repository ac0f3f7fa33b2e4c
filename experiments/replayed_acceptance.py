"""Acceptance of a drafter on answers that the target wrote greedily, set by set: rounds replayed, as fast as training.

    python -m dflash_hub.experiments.replayed_acceptance --drafter . --responses answers-gsm8k --responses answers-humaneval

Each folder of `dflash-hub regenerate` is a set. The rounds are those of real greedy generation (see `evaluation`); what they
cost in time is measured by `dflash-hub bench`. The last line is the `acceptance_prior` of these sets for the drafter's config.
"""

import statistics
from pathlib import Path
from typing import Annotated

import typer

from ..benchmark.report import acceptance_length_of
from ..common.console import run_plainly, typed_command
from ..common.files import read_json
from ..common.identity import identify
from ..common.loading import load_target
from ..common.provenance import origin
from ..common.smollm2 import smollm2
from ..common.tables import interval, over_prompts, table
from ..hub_files import check_finite
from ..modeling_dflash import DFlashDraftModel
from ..training.evaluation import acceptance_prior, replay
from ..training.responses import read_responses, responses_file, text_settings
from ..training.train import check_answerer, other_text_settings


def main(
    drafter: Annotated[str, typer.Option(help="Repository or folder.")],
    responses: Annotated[list[Path], typer.Option(help="Folder of greedy responses; repeatable.")],
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
):
    """Print the table."""
    loaded, _ = load_target(target or smollm2()[0], dtype)
    identity = identify(loaded)
    model = DFlashDraftModel.from_pretrained(drafter, dtype=loaded.dtype).to(loaded.device).eval()
    check_finite(dict(model.named_parameters()), drafter)
    lines, taus, shares = [], [], []
    for folder in responses:
        settings = read_json(folder / "settings.json", "generation", "identity")
        check_answerer(folder, settings, identity)
        if settings["generation"].get("do_sample", True):
            raise ValueError(f"the answers in {folder} were sampled; rounds can be replayed on greedy ones only.")
        if note := other_text_settings(folder, settings, text_settings(loaded)):
            raise ValueError(f"{note}, so rounds cannot be replayed on it; make the answers again.")
        limit = settings["generation"].get("max_new_tokens")
        rows = [
            row | {"max_new_tokens": limit}
            for row in read_responses(responses_file(folder))
            if len(row["response_ids"]) > 1
        ]
        speculation, _, first = replay(loaded, model, rows)
        records = [{"id": row["id"], "rounds": r} for row, r in zip(rows, speculation.acceptance_lengths)]
        tau = over_prompts(records, lambda record: record["id"], acceptance_length_of)
        taus.append(tau[0])
        shares.append(speculation.position_acceptance)
        positions = " ".join(f"{share:.2f}" for share in shares[-1])
        lines.append([folder.name, len(rows), interval(tau), f"{first:.2f}", positions])
    head = ["set", "answers", "tau", "position-1 accuracy, all anchors", "positions 1 to k accepted"]
    typer.echo(table(head, [*lines, ["mean", "", f"{sum(taus) / len(taus):.2f}", "", ""]]))
    prior = acceptance_prior([statistics.mean(by_set) for by_set in zip(*shares)])
    typer.echo(f'\n"acceptance_prior": {prior}')
    typer.echo("\n" + origin(typed_command("python -m dflash_hub.experiments.replayed_acceptance")) + f", {dtype}")


if __name__ == "__main__":
    run_plainly(typer.run, main)
