"""Responses of tiny targets, and trainers for them."""

from dflash_hub.training.data import (
    Collator,
    PackedRows,
)
from dflash_hub.training.losses import BlockLoss
from dflash_hub.training.trainer import DFlashTrainer
from transformers import TrainingArguments

from helpers.tiny import prompt_of


def answers_of(target, count: int, prompt: int = 6, answer: int = 24) -> list[dict]:
    """Rows that the target wrote greedily itself."""
    rows = []
    for seed in range(count):
        ids = prompt_of(prompt, 100 + seed)
        text = target.generate(ids, max_new_tokens=answer, do_sample=False)[0].tolist()
        rows.append({"id": f"prompt-{seed}", "turn": 0, "prompt_ids": text[:prompt], "response_ids": text[prompt:]})
    return rows


def trainer_of(
    tmp_path,
    target,
    drafter,
    rows,
    validation,
    loss="ce",
    cache=None,
    pack_length=None,
    muon=False,
    num_anchors=8,
    kind=DFlashTrainer,
    **arguments,
):
    fields = {
        "output_dir": str(tmp_path), "max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine", "remove_unused_columns": False, "label_names": [], "report_to": "none", "use_cpu": True,
        "logging_steps": 1, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 10, "disable_tqdm": True,
    }  # fmt: skip
    return kind(
        drafter, target, TrainingArguments(**fields | arguments), PackedRows(rows, pack_length, 0), Collator(cache),
        BlockLoss(loss, 4.0), num_anchors, validation, 2, 24, muon=muon,
    )  # fmt: skip


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
