"""Acceptance length of draft trees by their number of nodes, set by set: replayed over greedy responses, and real.

    python -m dflash_hub.experiments.tree_acceptance --drafter . --responses build/responses-gsm8k --nodes 7 --nodes 15

Each folder of `dflash-hub regenerate` is a set. A replayed round builds the tree at its anchor and walks it along the response:
the text of greedy decoding is known, so the rounds are those of `generate`. `--real` also runs `generate` on the first prompts,
greedy and at temperature 1, with and without the noise in the weights of the nodes.
"""

import math
import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..common.console import run_plainly, typed_command
from ..common.files import read_json
from ..common.loading import load_target
from ..common.provenance import origin
from ..common.smollm2 import smollm2
from ..common.tables import table
from ..decode_choice import Sampler
from ..drafter_candidates import DFlashProposer
from ..drafter_draft import Draft
from ..drafter_heads import Candidates, TargetHead
from ..drafter_tree import MAX_SIBLINGS
from ..generation_dflash import speculative_generate
from ..modeling_dflash import DFlashDraftModel
from ..target_model import embedding_rows
from ..training.blocks import denoise
from ..training.data import row_context, rows_of, single_row
from ..training.evaluation import GreedyCall
from ..training.responses import read_responses, responses_file


class BlindProposer(DFlashProposer):
    """Leaves the target's noise out of the weights of a tree's nodes."""

    def propose(self, anchor, plan, sampler):
        """Draft as without sampling."""
        return super().propose(anchor, plan, sampler.with_noises(None))


@torch.no_grad()
def drafts_at(target, drafter, row: dict, sampler: Sampler) -> list[tuple[torch.Tensor, list]]:
    """Rank the candidates behind each token of a response: by anchor, ids (n, C) and their log probabilities."""
    config, batch = drafter.config, single_row(row, target.device)
    rows, context = rows_of(batch), row_context(target, batch, config.target_layer_ids)
    head = TargetHead(config, target.get_output_embeddings(), embedding_rows(target))
    start, ranked = len(row["prompt_ids"]), []
    for anchors in torch.arange(start, start + len(row["response_ids"]) - 1)[None].split(64, dim=1):
        hidden = denoise(drafter, config, target, rows, context, anchors, torch.ones_like(anchors, dtype=torch.bool))[0]
        for block in head(hidden[:, 1:].to(target.dtype)).logits:  # (n, V)
            ids, log_probs = sampler.rank(Candidates(block[None]), MAX_SIBLINGS)
            ranked.append((ids, log_probs.tolist()))
    return ranked


def replayed(ranked: list, answer: list[int], nodes: int | None, limit: int) -> tuple[list[int], float]:
    """Walk one response: (acceptance lengths of the rounds, tokens that the trees' scores predict)."""
    anchor, lengths, predicted = 0, [], 0.0
    while anchor < len(answer) - 1:
        ids, log_probs = ranked[anchor]
        depth = min(len(log_probs), limit - anchor - 2)
        at: int | None = 0
        accepted = 0
        if depth > 0:
            draft = (
                Draft(ids[None, :depth, 0]) if nodes is None else Draft.of_tree(ids[:depth], log_probs[:depth], nodes)
            )
            predicted += sum(map(math.exp, draft.scores)) if draft.scores else 0.0
            own = draft.tokens[0].tolist()
            for token in answer[anchor + 1 :]:
                at = draft.child(own, at, token)
                if at is None:
                    break
                accepted += 1
        lengths.append(min(accepted + 1, len(answer) - 1 - anchor))
        anchor += lengths[-1]
        predicted += 1
    return lengths, predicted


def real(target, drafter, rows: list[dict], limit: int, nodes: int | None, propose=DFlashProposer, **call) -> float:
    """Return the mean acceptance length of `generate` over the prompts of some responses."""
    lengths = []
    for row in rows:
        torch.manual_seed(0)
        ids = torch.tensor([row["prompt_ids"]])
        _, speculation = speculative_generate(
            target, propose(drafter, target), input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit,
            num_assistant_tokens=drafter.config.block_size - 1, num_tree_nodes=nodes, **call,
        )  # fmt: skip
        lengths += speculation.acceptance_lengths[0]
    return statistics.mean(lengths)


def main(
    drafter: Annotated[str, typer.Option(help="Repository or folder.")],
    responses: Annotated[list[Path], typer.Option(help="Folder of greedy responses; repeatable.")],
    nodes: Annotated[list[int], typer.Option(help="Nodes of a tree; repeatable.")] = (7, 15, 31, 63),
    real_prompts: Annotated[int, typer.Option("--real", help="Prompts a set for real generation.")] = 0,
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
):
    """Print the tables."""
    loaded, _ = load_target(target or smollm2()[0], dtype)
    model = DFlashDraftModel.from_pretrained(drafter, dtype=loaded.dtype).eval()
    sizes, lines, ratios = [None, *nodes], [], {size: [0.0, 0] for size in nodes}
    measured = []
    for folder in responses:
        limit = read_json(folder / "settings.json", "generation")["generation"]["max_new_tokens"]
        rows = [row for row in read_responses(responses_file(folder)) if len(row["response_ids"]) > 1]
        by_size = {size: [] for size in sizes}
        for row in rows:
            sampler = GreedyCall.of(loaded, row | {"max_new_tokens": limit}).sampler
            ranked = drafts_at(loaded, model, row, sampler)
            for size in sizes:
                lengths, predicted = replayed(ranked, row["response_ids"], size, limit)
                by_size[size] += lengths
                if size is not None:
                    ratios[size][0] += predicted
                    ratios[size][1] += sum(lengths)
        lines.append([folder.name, len(rows), *(f"{statistics.mean(by_size[size]):.2f}" for size in sizes)])
        if real_prompts:
            cells = []
            for size in (None, nodes[0], nodes[-1]):
                cells.append(real(loaded, model, rows[:real_prompts], limit, size, do_sample=False))
            sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0}
            for size, propose in ((None, DFlashProposer), (nodes[-1], DFlashProposer), (nodes[-1], BlindProposer)):
                cells.append(real(loaded, model, rows[:real_prompts], limit, size, propose, **sampled))
            measured.append([folder.name, *(f"{cell:.2f}" for cell in cells)])
    mean = [f"{statistics.mean(float(line[i]) for line in lines):.2f}" for i in range(2, 2 + len(sizes))]
    head = ["replayed, greedy", "responses", "chain", *(f"{size} nodes" for size in nodes)]
    typer.echo(table(head, [*lines, ["mean", "", *mean]]))
    shown = ", ".join(f"{size}: {predicted / real_tokens:.2f}" for size, (predicted, real_tokens) in ratios.items())
    typer.echo(f"\npredicted tokens / real ones, by nodes: {shown}")
    if measured:
        few, many = nodes[0], nodes[-1]
        head = [
            "real",
            "chain",
            f"{few} nodes",
            f"{many} nodes",
            "chain, T=1",
            f"{many}, T=1",
            f"{many}, T=1, no noise",
        ]
        typer.echo("\n" + table(head, measured))
    typer.echo("\n" + origin(typed_command("python -m dflash_hub.experiments.tree_acceptance")) + f", {dtype}")


if __name__ == "__main__":
    run_plainly(typer.run, main)
