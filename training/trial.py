"""What a training will take, said before it starts: two steps are tried on a drafter that is thrown away."""

import copy
import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import accelerate
import torch

from ..common.console import duration, size
from ..common.provenance import peak_bytes
from ..modeling_dflash import DFlashDraftModel
from .data import Collator, row_length
from .forecast import free
from .losses import SelectorLoss
from .trainer import DFlashTrainer, checkpoint_activations


def forecast_training(run) -> str:
    """Say what a run (`train.Run`) will take. Two steps are tried on a drafter that is thrown away; nothing is written."""
    tokens = sum(len(row["response_ids"]) for row in run.data.training)
    read = sum(map(row_length, run.data.training))
    steps, trial = run.steps, try_steps(run)
    lines = [
        f"{len(run.data.training)} responses of {tokens:,} tokens ({read:,} with their prompts), {steps:,} steps of "
        f"{run.sequences_per_step} sequences"
    ]
    if trial is None:
        lines.append("time and memory: not tried with several processes; the first lines of progress will say")
    else:
        lines.append(
            f"time: about {duration(steps * trial.seconds)} ({trial.seconds:.2g} s a step), and evaluations on top"
        )
        lines.append(f"memory: {size(trial.peak)} at the peak of a step")
    with torch.device("meta"):
        weights = sum(p.numel() for p in DFlashDraftModel(run.config).parameters())
    state = trial.state_bytes if trial else 8 * weights
    kept = run.arguments.save_total_limit or run.options.evaluations
    checkpoints = (kept + 1) * (4 * weights + state)  # a new one is written before an old one is deleted
    needed = checkpoints + 4 * weights + 2 * weights
    lines.append(f"disk: at most {size(needed)} in {run.output}, {free(run.output)}")
    if run.options.features:
        width = len(run.config.target_layer_ids) + run.loss.needs_teacher
        cached = read * width * run.config.hidden_size * run.target.dtype.itemsize
        lines.append(f"features: {size(cached)} in {run.options.features}, {free(Path(run.options.features))}")
    return "\n".join(lines)


@dataclass
class Trial:
    """Seconds of a step, peak bytes of this process, and bytes of the optimizer's state."""

    seconds: float
    peak: int
    state_bytes: int


def try_steps(run) -> Trial | None:
    """Measure steps of training on a drafter with random weights; None in several processes, which share it in other ways."""
    if accelerate.PartialState().num_processes > 1 or run.arguments.fsdp or run.arguments.deepspeed:
        return None
    with tempfile.TemporaryDirectory() as folder:
        arguments = copy.copy(run.arguments)
        arguments.output_dir, arguments.report_to = folder, []
        drafter = DFlashDraftModel(copy.deepcopy(run.config)).float().train()
        if run.vocabulary is not None:
            drafter.set_draft_vocabulary(run.vocabulary.token_ids)
        drafter.set_attn_implementation(run.attention)
        if run.options.gradient_checkpointing:
            checkpoint_activations(drafter)
        trainer = DFlashTrainer(
            drafter, run.target, arguments, run.dataset, Collator(None, run.width), run.loss, run.options.num_anchors,
            run.data.validation, run.options.eval_prompts, run.options.eval_new_tokens, greedy_answers=run.data.greedy,
            muon=run.options.optimizer == "muon",
            selector_loss=SelectorLoss(run.loss, run.options.selector_loss, run.options.missing_gold),
        )  # fmt: skip
        optimizer = trainer.create_optimizer() or trainer.optimizer
        batches = itertools.cycle(trainer.get_train_dataloader())
        for _ in range(2):  # the first one also compiles and allocates
            start = time.perf_counter()
            step, weight = trainer.get_batch_samples(batches, arguments.gradient_accumulation_steps, arguments.device)
            for inputs in step:
                with trainer.compute_loss_context_manager():
                    loss = trainer.compute_loss(drafter, trainer._prepare_inputs(inputs), num_items_in_batch=weight)
                trainer.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
        return Trial(seconds, peak_bytes(), sum(t.numel() * t.element_size() for t in state))
