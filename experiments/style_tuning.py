"""A target that changed: SmolLM2 fine-tuned for a few minutes to answer in another style, to try `dflash-hub align` on.

    python -m dflash_hub.experiments.style_tuning --responses answers --output smollm2-shouting --steps 40

The style is a rule, so nothing but the target's own answers is needed: lower case, and an exclamation mark for every full
stop at the end of a sentence.
"""

import random
import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from ..common.console import run_plainly
from ..common.files import new_folder
from ..common.prompts import prompt_source
from ..common.smollm2 import smollm2
from ..training.options import TrainOptions
from ..training.train import load_rows, prompts_by_id


def in_style(text: str) -> str:
    return re.sub(r"\.(?=\s|$)", "!", text.lower())


def styled(row: dict, tokenizer, max_length: int) -> dict:
    """Input ids and labels of one answer in the new style; the prompt has no loss."""
    text = in_style(tokenizer.decode(row["response_ids"], skip_special_tokens=True))
    answer = tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    ids = (row["prompt_ids"] + answer)[:max_length]
    labels = ([-100] * len(row["prompt_ids"]) + answer)[:max_length]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


def main(
    responses: Annotated[list[str], typer.Option(help="Responses of the target: file or folder; repeatable.")],
    output: Annotated[Path, typer.Option(help="Folder of the tuned target.")],
    target: Annotated[str | None, typer.Option(help="Default: SmolLM2-135M-Instruct.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="Prompts of answers that do not repeat them.")] = None,
    only: Annotated[str, typer.Option(help="Take answers whose id starts so.")] = "",
    rows: Annotated[int, typer.Option(help="Answers to tune on.")] = 256,
    steps: Annotated[int, typer.Option(help="Steps of four rows.")] = 40,
    learning_rate: Annotated[float, typer.Option(help="Peak.")] = 1e-4,
    max_length: Annotated[int, typer.Option(help="Tokens of a row; longer ones are cut.")] = 320,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast.")] = False,
):
    """Fine-tune and save."""
    target = target or smollm2()[0]
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    options = TrainOptions(target, responses, str(output), prompts=[prompt_source(p) for p in prompts or []])
    found, _, _ = load_rows(responses, prompts_by_id(options), options, tokenizer)
    found = [row for row in found if row["id"].startswith(only)]
    if not found:
        raise ValueError(f"--only {only!r} leaves no answer to tune on.")
    random.Random(0).shuffle(found)
    data = [styled(row, tokenizer, max_length) for row in found[:rows]]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    with new_folder(output) as folder:
        arguments = TrainingArguments(
            output_dir=str(folder / "runs"), max_steps=steps, per_device_train_batch_size=4, learning_rate=learning_rate,
            warmup_steps=steps // 10, logging_steps=5, save_strategy="no", report_to="none", bf16=bf16,
            use_cpu=not torch.accelerator.is_available(),
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer)).train()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    typer.echo(f"wrote {output}\nnext: dflash-hub align --drafter . --target {output} --prompts ... --output aligned")


if __name__ == "__main__":
    run_plainly(typer.run, main)
