"""`dflash-hub train`: from answers of a target to a drafter for it, a complete Hub folder.

A run's folder holds `run.yaml` (every option as resolved), `start/` (the untrained drafter), `checkpoints/`, `log.jsonl`,
`curves.png`, and in the end `drafter/`: the best checkpoint by real acceptance, in bfloat16, with its record and card.
"""

import dataclasses
import hashlib
import json
import platform
import random
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import accelerate
import torch
import transformers
import yaml
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback, TrainingArguments

from ..benchmark.bench import commit, device_name
from ..benchmark.prompts import read_prompts
from ..configuration_dflash import FULL, SLIDING, DFlashConfig
from ..convert.folders import new_folder
from ..convert.init import init_drafter
from ..hub_dflash import write_text
from ..modeling_dflash import DFlashDraftModel
from ..target_dflash import check_pair
from .answers import read_answers
from .data import Collator, PackedRows, document_key, row_length, split_held_out, usable_rows
from .features import FeatureCache, check_teacher, tapped_features
from .identity import identify, template_fingerprint
from .losses import BlockLoss, ReducedHead, default_gamma
from .options import TrainOptions
from .trainer import DFlashTrainer, evaluate


def train(options: TrainOptions, command: str, resume: bool = False) -> dict:
    """Run or resume a training; returns the final evaluation.

    Raises:
        ValueError: options, answers, target and drafter do not fit together; says what was found and what to do.
    """
    if find_spec("matplotlib") is None:  # better now than after hours
        raise ValueError("the curves of a run need matplotlib: pip install 'dflash-hub[train]'.")
    started = time.monotonic()
    output = Path(options.output)
    target, tokenizer = load_target(options.target, options.dtype)
    rows, files = load_rows(options.answers, options, tokenizer)
    rows, dropped = usable_rows(rows, options.max_length)
    training, held_out = split_held_out(rows, options.held_out, options.seed)
    if options.rehearsal:
        old, old_files = load_rows(options.rehearsal, options, tokenizer, check=False)
        old, _ = usable_rows([row for row in old if row["id"] not in {r["id"] for r in held_out}], options.max_length)
        random.Random(options.seed).shuffle(old)
        training, files = training + old[: round(options.rehearsal_share * len(training))], files + old_files

    state = accelerate.PartialState()
    with state.main_process_first():  # which writes the fresh one
        drafter = starting_drafter(options, output)
    check_pair(drafter, target)
    attention = options.attention or ("flex_attention" if torch.cuda.is_available() else "sdpa")
    drafter.set_attn_implementation(attention)
    if options.gradient_checkpointing:
        # Renamed in transformers 5.24.
        enable = getattr(drafter, "activation_checkpointing_enable", None) or drafter.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    block_size = drafter.config.block_size
    gamma = default_gamma(block_size) if options.gamma is None else (options.gamma or None)
    loss = BlockLoss(options.loss, gamma)
    if loss.needs_teacher:
        check_teacher(target)
    if state.is_main_process:
        _open_run(output, options, resume, attention=attention, gamma=gamma)

    cache = None
    if options.features:
        with state.main_process_first():
            cache = fill_cache(options, target, drafter, loss, training)
    fixed = attention == "flex_attention"
    width = (options.pack_length or max(map(row_length, training))) if fixed else None
    reduced_head = None
    if options.vocabulary not in ("full", "answers"):
        raise ValueError(f"--vocabulary {options.vocabulary!r} is neither full nor answers.")
    if options.vocabulary == "answers":
        used = torch.tensor(sorted({token for row in training for token in row["answer_ids"]}), device=target.device)
        reduced_head = ReducedHead(target.get_output_embeddings(), used, options.negatives)

    callbacks = [LogFile(output / "log.jsonl")]
    if options.patience is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=options.patience))
    dataset = PackedRows(training, options.pack_length, options.seed)
    arguments = training_arguments(options, len(dataset), output)
    trainer = DFlashTrainer(
        drafter, target, arguments, dataset, Collator(cache, width), loss, options.num_anchors, held_out,
        options.eval_prompts, options.eval_new_tokens, reduced_head=reduced_head,
        callbacks=callbacks,
    )  # fmt: skip
    if trainer.is_world_process_zero():
        print(describe(training, held_out, dropped, dataset, drafter, reduced_head), flush=True)
    checkpoint = last_checkpoint(output) if resume else None
    trainer.train(resume_from_checkpoint=checkpoint)

    trainer.accelerator.wait_for_everyone()
    best = trainer.state.best_model_checkpoint
    figures = {}
    if trainer.is_world_process_zero():
        if best:
            best_step = int(best.rsplit("-", 1)[1])
            drafter = DFlashDraftModel.from_pretrained(best, dtype=torch.bfloat16)
        else:
            best_step = trainer.state.global_step
            drafter = trainer.accelerator.unwrap_model(trainer.model).to(torch.bfloat16)
        drafter = drafter.to(target.device).eval()
        drafter.set_attn_implementation("sdpa")
        rounded = drafter.to(target.dtype)  # what is served: bfloat16 weights, run in the target's dtype
        figures = evaluate(target, rounded, trainer.eval_rows, held_out, options.eval_new_tokens)
        drafter = rounded.to(torch.bfloat16)
        drafter.config.target_name_or_path = drafter.config.target_name_or_path or options.target
        drafter.config.target_thinking = options.thinking
        record = {
            "command": command,
            "data": {
                "files": files,
                "target": identify(target),
                "thinking": options.thinking,
                "template": template_fingerprint(tokenizer),
                "rows": len(training),
                "answer_tokens": sum(len(row["answer_ids"]) for row in training),
                "held_out": [row["id"] for row in held_out],
            },
            "recipe": {
                name: value for name, value in dataclasses.asdict(options).items()
                if name not in ("target", "answers", "rehearsal", "output", "prompts", "features")
            } | {"gamma": gamma, "attention": attention},
            "environment": environment(),
            "result": {
                "steps": trainer.state.global_step, "best_step": best_step, "epochs": trainer.state.epoch,
                "seconds": round(time.monotonic() - started),
                "evaluation": {
                    "prompts": len(trainer.eval_rows), "max_new_tokens": options.eval_new_tokens, **figures
                },
            },
        }  # fmt: skip
        with new_folder(output / "drafter", force=(output / "drafter").exists()) as folder:
            drafter.save_pretrained(folder)
            write_text(folder / "training_record.json", json.dumps(record, indent=1) + "\n")
        draw_curves(output / "log.jsonl", output / "curves.png")
    return figures


def load_target(name: str, dtype: str):
    """(target, tokenizer), on the accelerator of this process where there is one."""
    state = accelerate.PartialState(cpu=not torch.accelerator.is_available())
    target = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), device_map={"": state.device})
    return target.requires_grad_(False).eval(), AutoTokenizer.from_pretrained(name)


def load_rows(
    sources: list[str], options: TrainOptions, tokenizer, check: bool = True
) -> tuple[list[dict], list[dict]]:
    """(rows, files): the answers, and what they were read from.

    Args:
        check: that template and thinking mode are those of this run.

    Raises:
        ValueError: answers made with another chat template or thinking mode than stated here.
    """
    prompts = {row["id"]: row["messages"] for source in options.prompts for row in read_prompts(source)}
    rows, files = [], []
    for source in map(Path, sources):
        path = source / "answers.jsonl" if source.is_dir() else source
        if not path.is_file():
            raise ValueError(f"no answers at {path}; make them with `dflash-hub regenerate`.")
        settings_path = path.parent / "settings.json"
        if check and path.name == "answers.jsonl" and settings_path.is_file():
            settings = json.loads(settings_path.read_text(encoding="utf-8"))
            for name, here in (("template", template_fingerprint(tokenizer)), ("thinking", options.thinking)):
                if settings[name] != here:
                    raise ValueError(
                        f"{path} was made with {name} {settings[name]!r}, the target here has {here!r}. A drafter trained on "
                        "another one accepts little: pass the same, or make the answers again."
                    )
        found = read_answers(path, prompts or None, tokenizer, options.thinking)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        tokens = sum(len(row["answer_ids"]) for row in found)
        files.append({"name": path.name, "rows": len(found), "answer_tokens": tokens, "sha256": digest})
        rows += found
    unique = {document_key(row): row for row in rows}
    return list(unique.values()), files


def starting_drafter(options: TrainOptions, output: Path) -> DFlashDraftModel:
    """A warm start keeps everything that the drafter's config says, but for what is asked; else a fresh one, in `start/`.

    In float32: half-precision weights cannot take small steps.
    """
    if options.drafter is not None:
        changes = long_context(DFlashConfig.from_pretrained(options.drafter), options.window, options.yarn)
        return DFlashDraftModel.from_pretrained(options.drafter, dtype=torch.float32, **changes)
    if options.yarn is not None:
        raise ValueError("--yarn stretches the RoPE of a trained drafter: pass it with --drafter.")
    start = output / "start"
    if not start.exists():
        init_drafter(
            options.target, str(start), options.layers, options.block_size, options.taps, options.window,
            options.mask_token, options.from_target_layers, seed=options.seed,
        )  # fmt: skip
    return DFlashDraftModel.from_pretrained(start, dtype=torch.float32)


def long_context(config: DFlashConfig, window: int | None, yarn: float | None) -> dict:
    """Changes of a drafter's config for texts longer than it was trained on (paper, appendix on long contexts).

    YaRN leaves the frequencies of near tokens alone and stretches those of far ones; a window lets a layer see near tokens
    only, wherever they are. The weights stay; a few long samples teach them the rest.
    """
    changes = {}
    if yarn is not None:
        if config.rope_parameters["rope_type"] != "default":
            raise ValueError(f"--yarn needs a drafter with default RoPE, this one has {config.rope_parameters}.")
        changes["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": config.rope_parameters["rope_theta"], "factor": yarn,
            "original_max_position_embeddings": config.max_position_embeddings,
        }  # fmt: skip
        changes["max_position_embeddings"] = round(yarn * config.max_position_embeddings)
    if window is not None:
        changes["layer_types"] = [SLIDING] * (config.num_hidden_layers - 1) + [FULL]
        changes["sliding_window"] = window
        changes["block_causal"] = config.block_causal
    return changes


def fill_cache(options: TrainOptions, target, drafter, loss: BlockLoss, rows: list[dict]) -> FeatureCache:
    layer_ids = list(drafter.config.target_layer_ids)
    if loss.needs_teacher:
        layer_ids.append(target.config.get_text_config(decoder=True).num_hidden_layers - 1)
    cache = FeatureCache(Path(options.features), identify(target), layer_ids)
    cache.verify()

    def compute(ids, mask):
        return tapped_features(target, ids.to(target.device), mask.to(target.device), layer_ids)

    documents = {document_key(row): row["prompt_ids"] + row["answer_ids"] for row in rows}
    with Progress(transient=True) as bar:
        task = bar.add_task("features", total=sum(key not in cache.where for key in documents))
        cache.fill(documents, compute, progress=lambda count: bar.advance(task, count))
    return cache


def training_arguments(options: TrainOptions, num_packs: int, output: Path) -> TrainingArguments:
    """The paper's recipe (section 5.1: AdamW, cosine, warm-up, clipping) in transformers' terms."""
    per_step = options.batch_size * options.accumulate * accelerate.PartialState().num_processes
    steps = options.max_steps if options.max_steps > 0 else max(1, int(options.epochs * num_packs / per_step))
    every = max(1, steps // max(1, options.evaluations))
    fields = {
        "output_dir": str(output / "checkpoints"), "max_steps": options.max_steps, "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.batch_size, "gradient_accumulation_steps": options.accumulate,
        "learning_rate": options.learning_rate, "lr_scheduler_type": "cosine", "warmup_steps": round(options.warmup * steps),
        "max_grad_norm": 1.0, "weight_decay": 0.0, "adam_beta2": 0.95, "bf16": options.bf16,
        "train_sampling_strategy": "random" if options.pack_length else "group_by_length", "length_column_name": "length",
        "remove_unused_columns": False, "label_names": [], "seed": options.seed, "data_seed": options.seed,
        "logging_steps": max(1, min(10, steps // 10)), "report_to": "none", "disable_tqdm": None,
        "eval_strategy": "steps" if options.eval_prompts else "no", "eval_steps": every,
        "save_strategy": "steps", "save_steps": every, "save_total_limit": 2,
        "load_best_model_at_end": False, "metric_for_best_model": "acceptance_length", "greater_is_better": True,
        "use_cpu": not torch.accelerator.is_available(),
    }  # fmt: skip
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    unknown = sorted(set(options.arguments) - known)
    if unknown:
        raise ValueError(f"{unknown} are no fields of transformers' TrainingArguments.")
    return TrainingArguments(**fields | options.arguments)


def last_checkpoint(output: Path) -> str | None:
    """The newest complete checkpoint, None where there is none yet."""
    found = sorted((output / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    complete = [path for path in found if (path / "trainer_state.json").is_file()]
    return str(complete[-1]) if complete else None


def _open_run(output: Path, options: TrainOptions, resume: bool, **resolved):
    path = output / "run.yaml"
    stated = dataclasses.asdict(options) | resolved
    if path.exists():
        if not resume:
            raise ValueError(f"{output} holds a run already; pass --resume to go on with it, or another --output.")
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
        changed = [name for name in stated if before.get(name) != stated[name]]
        if changed:
            found = {name: before.get(name) for name in changed}
            raise ValueError(
                f"{path} was made with other {', '.join(changed)} ({found}); resume with the same options."
            )
        return
    output.mkdir(parents=True, exist_ok=True)
    write_text(path, yaml.safe_dump(stated, sort_keys=False))


class LogFile(TrainerCallback):
    """Writes every log entry as a JSON line, from which the curves are drawn."""

    def __init__(self, path: Path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step} | logs) + "\n")


def draw_curves(log: Path, picture: Path):
    """Loss, and acceptance lengths of training, replay and real generation, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = {entry["step"]: {} for entry in map(json.loads, log.read_text(encoding="utf-8").splitlines())}
    for entry in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
        entries[entry["step"]] |= entry  # a resumed run writes some steps again
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))

    def curve(axes, name: str, label: str, style: str):
        points = [(step, entry[name]) for step, entry in sorted(entries.items()) if name in entry]
        if points:
            axes.plot(*zip(*points), style, label=label)

    curve(left, "loss", "training loss", "-")
    left.set_xlabel("step")
    left.set_ylabel("loss")
    curve(right, "teacher_forced_tau", "training batches, random anchors", "-")
    curve(right, "eval_teacher_forced_acceptance_length", "held out, all anchors", "--")
    curve(right, "eval_replayed_acceptance_length", "held out, replayed rounds", "o-")
    curve(right, "eval_acceptance_length", "held out, real generation", "s-")
    right.set_xlabel("step")
    right.set_ylabel("acceptance length (tau)")
    right.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def describe(training, held_out, dropped, dataset, drafter, reduced_head) -> str:
    """What is about to be trained, in a few lines."""
    tokens = sum(len(row["answer_ids"]) for row in training)
    lines = [
        f"{len(training)} answers of {tokens} tokens in {len(dataset)} rows; {len(held_out)} answers held out",
        f"drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters, blocks of {drafter.config.block_size}",
    ]
    if dropped:
        lines.append(f"dropped: {dropped}")
    if reduced_head is not None:
        lines.append(
            f"loss over {len(reduced_head.token_ids)} tokens of the answers and {reduced_head.negatives} drawn ones"
        )
    return "\n".join(lines)


def environment() -> dict:
    return {
        "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="minutes"), "device": device_name(),
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
