"""`dflash-hub train`: from answers of a target to a drafter for it, a complete Hub folder.

A run's folder holds `run.yaml` (every option as resolved), `start/` (the untrained drafter), `checkpoints/`, `log.jsonl`,
`curves.png`, and in the end `drafter/`: the best checkpoint by the acceptance of its rounds, in bfloat16, with its record and card.
"""

import dataclasses
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import accelerate
import torch
import yaml
from rich.console import Console
from rich.text import Text
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import get_reporting_integration_callbacks

from ..common.console import LINE_SECONDS, duration, progress_bar
from ..common.files import complete_lines, in_a_line, new_folder, one_writer, read_json, read_yaml, refuse_other_content
from ..common.identity import differences, has_thinking_modes, identify, same_target, template_fingerprint
from ..common.loading import dtype_of, load_target
from ..common.prompts import read_prompts
from ..configuration_checks import FULL, SLIDING
from ..configuration_dflash import DFlashConfig
from ..convert.card import RECORD, write_card
from ..convert.init import init_drafter
from ..convert.reading import check_borrowed, read_drafter
from ..drafter_vocabulary import check_token_ids, whole_head_reason
from ..hub_files import write_text
from ..modeling_dflash import DFlashDraftModel
from ..target_identity import encoded_rows
from ..target_model import check_pair, embedding_rows
from .arguments import read_field
from .check import read_record
from .checkpoints import FileLists, best_checkpoint, resumable_checkpoint
from .data import Collator, PackedRows, document_key, split_validation, usable_rows
from .evaluation import GreedyCall, acceptance_prior
from .examples import in_a_file
from .features import FeatureCache, check_teacher, checksum, feature_layers, target_features
from .losses import BlockLoss, SelectorLoss, gamma_of
from .options import TrainOptions, resolved, with_new_names
from .record import check_recordable, longest_trained, training_record, training_result
from .responses import iterate_responses, responses_at, text_settings
from .trainer import DFlashTrainer, check_method, check_whole, checkpoint_activations, evaluate
from .trial import forecast_training
from .vocabulary import Vocabulary, frequent_tokens

SAID_OF_THE_TARGET = (  # fields of a drafter's config
    "target_name_or_path", "target_revision", "target_rows", "target_thinking",
)  # fmt: skip


@dataclass
class Data:
    """The examples of a run and where they were read.

    `files` has a row per file for the record; `dropped` counts examples left out, by reason. `greedy` says whether rounds of
    generation can be replayed on the validation examples.
    """

    training: list[dict]
    validation: list[dict]
    dropped: dict[str, int]
    files: list[dict]
    greedy: bool


@dataclass
class Run:
    """A run as its options resolve for this target, before anything is written. `drafter` is None until a fresh one is made.

    `config` is the trained drafter's, `vocabulary` a list of tokens that it is to draft from.
    """

    options: TrainOptions
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    identity: dict
    data: Data
    dataset: PackedRows
    config: DFlashConfig
    drafter: DFlashDraftModel | None
    attention: str
    gamma: float
    loss: BlockLoss
    vocabulary: Vocabulary | None
    arguments: TrainingArguments
    output: Path

    @property
    def fixed_shape(self) -> bool:
        """Whether all batches have one shape, for which flex attention is compiled once."""
        return self.attention == "flex_attention"

    @property
    def width(self) -> int | None:
        """Length that all sequences are padded to; None for the longest of a batch."""
        return (self.options.pack_length or max(self.dataset.lengths())) if self.fixed_shape else None

    @property
    def sequences_per_step(self) -> int:
        """Sequences of an optimizer step, over all processes."""
        return self.options.batch_size * self.options.accumulate * accelerate.PartialState().num_processes

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return steps_of(self.options, len(self.dataset))


def train(options: TrainOptions, command: str, resume: bool = False, dry_run: bool = False) -> dict:
    """Run or resume a training; returns the final evaluation, empty in all processes but the first.

    Args:
        command: as typed, for the record.
        dry_run: only say what the run will take; nothing is written.

    Raises:
        ValueError: options, answers, target and drafter do not fit together; says what was found and what to do.
    """
    checkpoint = resumable_checkpoint(Path(options.output)) if resume else None
    run = plan_run(options, resume)
    check_recordable(run, command)
    if accelerate.PartialState().is_main_process:
        print(forecast_training(run), flush=True)
    if dry_run:
        return {}
    trainer = begin(run)
    if checkpoint is not None:
        run.arguments.eval_on_start = False  # to early stopping it would be an evaluation without a better one
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.accelerator.wait_for_everyone()
    return finish(run, trainer, command) if trainer.is_world_process_zero() else {}


def plan_run(options: TrainOptions, resume: bool = False) -> Run:
    """Load target, data and a warm start, and refuse whatever does not fit together, before anything is written.

    What can be judged without the target is judged before it is loaded.

    Raises:
        ValueError: see `train`.
    """
    check_environment(options)
    options = resolved(options)
    attention = check_options(options, resume)
    prompts = prompts_by_id(options)
    drafter = None
    if options.drafter is not None:
        drafter = warm_drafter(options)
        options = options.with_source(options.source.for_drafter(drafter.config))
    target, tokenizer = load_target(options.source, options.dtype, options.chat_template)
    identity = identify(target)
    data = load_data(options, prompts, target, tokenizer, identity)
    if drafter is not None:
        check_thinking(drafter.config, options, tokenizer)
        check_pair(drafter, target)
    config = fresh_config(options) if drafter is None else drafter.config
    name_target(config, options, identity)
    config.target_rows = encoded_rows(target, config.vocab_size)
    if has_thinking_modes(tokenizer):
        config.target_thinking = options.thinking
    check_method(config)
    gamma = gamma_of(options.loss, options.gamma, config.block_size)
    loss = BlockLoss(options.loss, gamma or None)
    if loss.needs_teacher:
        check_teacher(target)
    if options.features:  # refuses a folder of others
        FeatureCache(Path(options.features), identity, feature_layers(config, target, loss))
    dataset = PackedRows(data.training, options.pack_length, options.seed)
    arguments = training_arguments(options, len(dataset), Path(options.output), attention == "flex_attention")
    check_whole(target)  # the arguments may ask for ZeRO-3, which would stop the first evaluation
    if data.greedy and options.eval_prompts and "metric_for_best_model" not in options.arguments:
        arguments.metric_for_best_model = "replayed_acceptance_length"  # the same rounds as real ones, on more prompts
    vocabulary = None
    if options.draft_vocab_size is not None:
        vocabulary = frequent_tokens((row["response_ids"] for row in data.training), options.draft_vocab_size)
        check_token_ids(vocabulary.token_ids, config.vocab_size)
    return Run(
        options, target, tokenizer, identity, data, dataset, config, drafter, attention, gamma, loss, vocabulary, arguments,
        Path(options.output),
    )  # fmt: skip


def check_options(options: TrainOptions, resume: bool) -> str:
    """Judge all options that need no target, and the folder of the run; returns the drafter's attention.

    Raises:
        ValueError: names the option, and says what to do.
    """
    output = Path(options.output)
    if accelerate.PartialState().is_main_process:  # which fills it, at once maybe
        refuse_other_content(output, "run.yaml")
        if (output / "run.yaml").exists() and not resume:
            raise ValueError(f"{output} holds a run already; pass --resume to go on with it, or another --output.")
    dtype_of(options.dtype)
    BlockLoss(options.loss, None)
    for source in options.responses + options.rehearsal:
        answers_file(source)
    attention = choose_attention(options.attention)
    training_arguments(options, 1, output, attention == "flex_attention")
    return attention


def answers_file(source: str) -> Path:
    """The file of responses that a folder or file of `regenerate` is.

    Raises:
        ValueError: there is none.
    """
    path = responses_at(source)
    if not path.is_file():
        raise ValueError(f"no answers at {path}; make them with `dflash-hub regenerate`.")
    return path


def load_data(options: TrainOptions, prompts: dict[str, dict], target, tokenizer, identity: dict) -> Data:
    """Read the responses, split off validation prompts, and add the rehearsal's share.

    Raises:
        ValueError: see `load_rows`, `check_ids`, `usable_rows` and `split_validation`; or a response cannot be replayed.
    """
    rows, files, greedy = load_rows(options.responses, prompts, options, tokenizer, identity, text_settings(target))
    check_ids(rows, embedding_rows(target))
    rows, dropped = usable_rows(rows, options.max_length)
    training, validation = split_validation(rows, options.validation, options.seed)
    for row in validation if greedy else []:  # refuses what cannot be replayed before anything is trained
        GreedyCall.of(target, row)
    if options.rehearsal:
        old, old_files, _ = load_rows(options.rehearsal, prompts, options, tokenizer)
        check_ids(old, embedding_rows(target))
        measured_on = {row["id"] for row in validation}
        old, _ = usable_rows([row for row in old if row["id"] not in measured_on], options.max_length)
        random.Random(options.seed).shuffle(old)
        training, files = training + old[: round(options.rehearsal_share * len(training))], files + old_files
    return Data(training, validation, dropped, files, greedy)


def choose_attention(asked: str | None) -> str:
    """Return the drafter's attention: flex on a GPU, SDPA elsewhere, unless another is asked for.

    Raises:
        ValueError: flex attention without a GPU.
    """
    attention = asked or ("flex_attention" if torch.cuda.is_available() else "sdpa")
    if attention == "flex_attention" and not torch.cuda.is_available():
        raise ValueError(
            "--attention flex_attention needs a GPU, its backward pass does not run on a CPU; leave it out."
        )
    return attention


def begin(run: Run) -> DFlashTrainer:
    """Write the run's folder, make a fresh drafter and the cached features, and set up the trainer."""
    options, target, data = run.options, run.target, run.data
    state = accelerate.PartialState()
    if state.is_main_process:
        _open_run(
            run.output, options, attention=run.attention, gamma=run.gamma,
            data=[file["sha256"] for file in data.files], weights=run.identity["weights"],
        )  # fmt: skip
    cache = None
    with state.main_process_first():  # which writes a fresh drafter, and the features
        if run.drafter is None:
            run.drafter = fresh_drafter(options, run.output)
        if run.vocabulary is not None:
            run.drafter.set_draft_vocabulary(run.vocabulary.token_ids)
        if options.features:
            cache = fill_cache(options.features, run.identity, target, run.drafter, run.loss, data.training)
    run.drafter.set_attn_implementation(run.attention)
    if options.gradient_checkpointing:
        checkpoint_activations(run.drafter)
    callbacks = [LogFile(run.output / "log.jsonl"), FileLists(), *([] if sys.stderr.isatty() else [StepLines()])]
    if options.patience is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=options.patience))
    trainer = DFlashTrainer(
        run.drafter, target, run.arguments, run.dataset, Collator(cache, run.width), run.loss, options.num_anchors,
        data.validation, options.eval_prompts, options.eval_new_tokens, greedy_answers=data.greedy,
        muon=options.optimizer == "muon", callbacks=callbacks,
        selector_loss=SelectorLoss(run.loss, options.selector_loss, options.missing_gold),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # its dictionaries say what the log file and `StepLines` say
    if trainer.is_world_process_zero():
        print(describe(run), flush=True)
        show_sample(data.training[0], run.tokenizer)
        if run.arguments.save_only_model:
            print("this run cannot be resumed: save_only_model leaves optimizer and schedule out of its checkpoints")
    return trainer


def finish(run: Run, trainer: DFlashTrainer, command: str) -> dict:
    """Save the best checkpoint as it will be served, evaluate it, and complete its Hub folder with record, card and curves.

    Returns:
        The evaluation, by name.
    """
    options, target, data = run.options, run.target, run.data
    best = best_checkpoint(run.output, trainer.state.best_model_checkpoint)
    drafter = DFlashDraftModel.from_pretrained(best, dtype=torch.bfloat16)
    for name in SAID_OF_THE_TARGET:
        setattr(drafter.config, name, getattr(run.config, name))
    folder = run.output / "drafter"
    with new_folder(folder, force=folder.exists()) as filling:  # the weights first: what comes after can be made again
        drafter.save_pretrained(filling)
    drafter = drafter.to(target.device).eval()
    drafter.set_attn_implementation("sdpa")
    rounded = drafter.to(target.dtype)  # what is served: bfloat16 weights, run in the target's dtype
    replayed = data.validation if data.greedy else []
    figures = evaluate(target, rounded, trainer.eval_rows, replayed, options.eval_new_tokens)
    result = training_result(run, trainer, best, figures) | {"weights_sha256": checksum(folder / "model.safetensors")}
    if by_position := result["evaluation"] and result["evaluation"]["acceptance_by_position"]:
        # Where the adaptive draft length starts from.
        config = read_json(folder / "config.json") | {"acceptance_prior": acceptance_prior(by_position)}
        write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_text(folder / RECORD, json.dumps(training_record(run, command, result), indent=1) + "\n")
    write_card(folder)
    draw_curves(run.output / "log.jsonl", run.output / "curves.png")
    return figures


def check_ids(rows: list[dict], vocab_rows: int):
    """ValueError where a row holds a token that the target cannot embed: it was written by another tokenizer."""
    for row in rows:
        if (largest := max(*row["prompt_ids"], *row["response_ids"])) >= vocab_rows:
            raise ValueError(
                f"the answer to {row['id']!r} holds token {largest}, this target has {vocab_rows}: it is another target's answer."
            )


def check_thinking(config: DFlashConfig, options: TrainOptions, tokenizer):
    """ValueError where a drafter was made for one mode of thinking, and none is stated for the answers it is to learn."""
    if options.thinking is None and config.target_thinking is not None and has_thinking_modes(tokenizer):
        mode = "--thinking" if config.target_thinking else "--no-thinking"
        raise ValueError(
            f"{options.drafter} was trained with {mode}; state the mode of these answers, --thinking or --no-thinking."
        )


def name_target(config: DFlashConfig, options: TrainOptions, identity: dict):
    """Record the target. A local copy keeps the name that a warm start has for it, unless it is seen to be another."""
    before = config.target_name_or_path
    record = read_record(options.drafter) if options.drafter is not None else None
    known = ((record or {}).get("data") or {}).get("identity")
    changed = known is not None and known["dtype"] == identity["dtype"] and not same_target(known, identity)
    config.target_name_or_path, config.target_revision = options.source.recorded_over(
        None if changed else before, config.target_revision
    )


def prompts_by_id(options: TrainOptions) -> dict[str, dict]:
    """Rows of the prompts that answers may name without repeating them.

    Raises:
        ValueError: two prompts of one id.
    """
    prompts = {}
    for source in options.prompts:
        for row in read_prompts(source, options.column, keep_assistant=True):  # of a row only the first turn counts
            if prompts.setdefault(row["id"], row) != row:
                raise ValueError(
                    f"--prompts {source}: another prompt with the id {row['id']!r} was read before; make the ids unique."
                )
    return prompts


def load_rows(
    sources: list[str],
    prompts: dict[str, dict],
    options: TrainOptions,
    tokenizer,
    identity: dict | None = None,
    written_under: dict | None = None,
) -> tuple[list[dict], list[dict], bool]:
    """(rows, files, greedy): the answers, what they were read from, and whether rounds can be replayed on them.

    They can on greedy answers of the target under the generation config that it has now.

    Args:
        prompts: see `prompts_by_id`.
        identity: of the target, to refuse answers of another; None takes those of any with the same template and mode.
        written_under: the target's `text_settings`, where rounds are to be replayed.

    Raises:
        ValueError: answers made with another chat template or thinking mode, or by another target; or two answers to one turn.
    """
    limits, greedy = {}, []
    for path in map(answers_file, sources):
        settings_path = path.parent / "settings.json"
        fields = ("template", "thinking", "identity", "generation")
        settings = read_json(settings_path, *fields) if settings_path.is_file() else None
        greedy.append(settings is not None and not settings["generation"].get("do_sample", True))
        if greedy[-1] and written_under is not None and (note := other_text_settings(path, settings, written_under)):
            print(f"{note}; rounds are not replayed on them.", file=sys.stderr)
            greedy[-1] = False
        if settings is not None:
            stated = {"template": template_fingerprint(tokenizer)}
            if has_thinking_modes(tokenizer):
                stated["thinking"] = options.thinking
            for name, here in stated.items():
                if settings[name] != here:
                    hint = " (--chat-template names one of several)" if name == "template" else ""
                    raise ValueError(
                        f"{path} was made with {name} {settings[name]!r}, the target here has {here!r}. A drafter trained on "
                        f"another one accepts little: pass the same{hint}, or make the answers again."
                    )
            if identity is not None:
                check_answerer(path, settings, identity)
        limits[path] = settings and settings["generation"].get("max_new_tokens")
    files = []
    rows = in_a_file(first_answers(limits, prompts, options, tokenizer, files))
    return rows, files, all(greedy) if options.greedy_responses is None else options.greedy_responses


def first_answers(limits: dict[Path, int | None], prompts: dict, options: TrainOptions, tokenizer, files: list[dict]):
    """The first answer to each turn, one at a time; what was read of each path is added to `files`.

    Args:
        limits: paths, each with the limit of its answers (`max_new_tokens`), where it is known.

    Raises:
        ValueError: two prompts of one id.
    """
    known: dict[tuple, int] = {}  # by id and turn, a hash of the prompt
    for path, limit in limits.items():
        count = tokens = 0
        for row in iterate_responses(path, prompts or None, tokenizer, options.thinking):
            count, tokens = count + 1, tokens + len(row["response_ids"])
            key, prompt = (row["id"], row["turn"]), hash(tuple(row["prompt_ids"]))
            if known.get(key, prompt) != prompt:
                raise ValueError(f"{path}: two different prompts have the id {row['id']!r}; make the ids unique.")
            if key not in known:
                known[key] = prompt
                yield row | {"max_new_tokens": limit}
        files.append({"name": path.name, "rows": count, "answer_tokens": tokens, "sha256": checksum(path)})


def other_text_settings(path: Path, settings: dict, here: dict) -> str | None:
    """A clause that names what differs where answers were written under other `text_settings` than the target's `here`."""
    made = settings["generation"].get("generation_config", {})
    if made == here:
        return None
    changed = {name: (made.get(name), here.get(name)) for name in made | here if made.get(name) != here.get(name)}
    found = ", ".join(f"{name}={before!r}, here {now!r}" for name, (before, now) in changed.items())
    return f"{path} was written under another generation config ({found})"


def check_answerer(path: Path, settings: dict, identity: dict):
    """ValueError where answers are seen to be another target's; a warning where that cannot be seen."""
    made = settings["identity"]
    if made and (made["class"] != identity["class"] or made["dtype"] == identity["dtype"]):
        if found := differences(made, identity):
            raise ValueError(
                f"{path} was answered by another target ({'; '.join(found)}); make the answers again. Old ones can be trained on "
                "beside them, as --rehearsal."
            )
    else:
        by = f"in {made['dtype']}" if made else "through a server"
        print(
            f"{path} was answered {by} by {settings.get('target')!r}: that these are the words of {identity['name']!r} cannot be "
            "seen from here.",
            file=sys.stderr,
        )


def check_environment(options: TrainOptions):
    """Refuse a run without what it needs, also at its end: better missed now than after hours.

    Raises:
        ValueError: matplotlib is not installed, or torch is too old for Muon; says what to do.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("the curves of a run need matplotlib: pip install matplotlib.")
    if options.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"--optimizer muon needs torch 2.9 or newer, this is {torch.__version__}; pass --optimizer adamw."
        )


def fresh_config(options: TrainOptions) -> DFlashConfig:
    """The config that a fresh drafter will have, nothing written yet."""
    return init_drafter(options.source, None, **fresh_shape(options)).config


def fresh_drafter(options: TrainOptions, output: Path) -> DFlashDraftModel:
    """A fresh drafter in float32, in `start/`: half-precision weights cannot take small steps."""
    start = output / "start"
    if not start.exists():
        init_drafter(options.source, str(start), **fresh_shape(options))
    return DFlashDraftModel.from_pretrained(start, dtype=torch.float32)


def fresh_shape(options: TrainOptions) -> dict:
    names = ("layers", "block_size", "method", "target_layers", "window", "mask_token", "from_target_layers", "seed")
    stated = {name: getattr(options, name) for name in names}
    return {name: value for name, value in stated.items() if (name, value) != ("method", None)}


def warm_drafter(options: TrainOptions) -> DFlashDraftModel:
    """`options.drafter`, of any format that `import` reads, in float32. It keeps its target layers, mask token, windows and whatever
    else its config says, but for what is asked.

    Raises:
        ValueError, OSError: see `read_drafter`, `check_borrowed` and `long_context`.
    """
    found = read_drafter(options.drafter, options.source)
    if found.match.borrowed:
        check_borrowed(found, options.source)
    trained_length = options.trained_length
    if options.yarn is not None and trained_length is None:
        trained_length = longest_trained(options.drafter)
        if not trained_length:
            raise ValueError(
                f"{options.drafter} does not record at what length it was trained, from where --yarn stretches; pass --trained-length."
            )
    changes = long_context(found.config, options.window, options.yarn, trained_length)
    config = DFlashConfig.from_dict(found.config.to_dict(), **changes, dtype=torch.float32)
    config.name_or_path = options.drafter
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict({name: tensor.whole() for name, tensor in found.match.drafter.items()})
    return drafter


def long_context(
    config: DFlashConfig, window: int | None, yarn: float | None, trained_length: int | None = None
) -> dict:
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
            "original_max_position_embeddings": trained_length,  # what `init` copies from the target is longer than that
        }  # fmt: skip
        changes["max_position_embeddings"] = round(yarn * trained_length)
    if window is not None:
        changes["layer_types"] = [SLIDING] * (config.num_hidden_layers - 1) + [FULL]
        changes["sliding_window"] = window
        changes["block_causal"] = config.block_causal
    return changes


def fill_cache(folder: str, identity: dict, target, drafter, loss: BlockLoss, rows: list[dict]) -> FeatureCache:
    """The features of all rows, in `folder`; what it lacks is computed, by one run at a time."""
    layer_ids = feature_layers(drafter.config, target, loss)

    def compute(ids, mask):
        return target_features(target, ids.to(target.device), mask.to(target.device), layer_ids)

    documents = {document_key(row): row for row in rows}
    with one_writer(folder), progress_bar() as bar:
        cache = FeatureCache(Path(folder), identity, layer_ids)  # with what another run wrote until now
        cache.verify()
        task = bar.add_task("features", total=sum(key not in cache.where for key in documents))
        cache.fill(documents, compute, progress=lambda count: bar.advance(task, count))
    return cache


def steps_of(options: TrainOptions, num_packs: int) -> int:
    """Optimizer steps that the options ask for, on so many sequences."""
    per_step = options.batch_size * options.accumulate * accelerate.PartialState().num_processes
    return options.max_steps if options.max_steps > 0 else math.ceil(options.epochs * math.ceil(num_packs / per_step))


def training_arguments(options: TrainOptions, num_packs: int, output: Path, fixed: bool = False) -> TrainingArguments:
    """The paper's recipe (section 5.1: cosine, warm-up, clipping, and AdamW where `options.optimizer` says so)."""
    steps = steps_of(options, num_packs)
    every = max(1, steps // max(1, options.evaluations))
    fields = {
        "output_dir": str(output / "checkpoints"), "max_steps": options.max_steps, "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.batch_size, "gradient_accumulation_steps": options.accumulate,
        "learning_rate": options.learning_rate, "lr_scheduler_type": "cosine", "warmup_steps": round(options.warmup * steps),
        "max_grad_norm": 1.0, "weight_decay": 0.0, "adam_beta2": 0.95, "bf16": options.bf16,
        "dataloader_drop_last": fixed and num_packs > options.batch_size, "ddp_find_unused_parameters": False,
        "remove_unused_columns": False, "label_names": [], "seed": options.seed, "data_seed": options.seed,
        "logging_steps": max(1, min(10, steps // 10)), "report_to": "none", "disable_tqdm": not sys.stderr.isatty(),
        "eval_strategy": "steps" if options.eval_prompts else "no", "eval_steps": every,
        "save_strategy": "steps", "save_steps": every, "save_total_limit": 2,
        "load_best_model_at_end": False, "restore_callback_states_from_checkpoint": True, "metric_for_best_model": "acceptance_length", "greater_is_better": True,
        "use_cpu": not torch.accelerator.is_available(),
    }  # fmt: skip
    if steps < 1:
        raise ValueError(f"--epochs {options.epochs:g} trains nothing; raise it, or pass --max-steps.")
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    unknown = sorted(set(options.arguments) - known)
    if unknown:
        raise ValueError(f"{unknown} are no fields of transformers' TrainingArguments.")
    fields |= {name: read_field(name, value) for name, value in options.arguments.items()}
    if fields["save_strategy"] == "no":
        raise ValueError("--argument save_strategy=no saves no checkpoint, of which the drafter is made; leave it out.")
    try:
        made = TrainingArguments(**fields)
        # The trainer makes them later, when a run has begun.
        for tracker in get_reporting_integration_callbacks(made.report_to):
            tracker()
        torch.optim.AdamW(
            [nn.Parameter(torch.zeros(1))], made.learning_rate, (made.adam_beta1, made.adam_beta2), made.adam_epsilon,
            made.weight_decay,
        )  # fmt: skip
    except Exception as error:  # transformers and torch raise many kinds for a value that makes no sense
        raise ValueError(f"these options cannot be trained with: {in_a_line(error)}") from error
    if made.n_gpu > 1:
        made._n_gpu = (
            1  # else transformers splits a batch over all GPUs, masks left out; several need `accelerate launch`
        )
    return made


def _open_run(output: Path, options: TrainOptions, **resolved):
    """Write the options of a new run, or compare them with those of the run that is resumed; see `check_options`."""
    path = output / "run.yaml"
    stated = dataclasses.asdict(options) | resolved
    if path.exists():
        before = read_yaml(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(before, dict):
            raise ValueError(f"{path} holds no options, it is damaged; start anew with another --output.")
        newer = {field.name: field.default for field in dataclasses.fields(TrainOptions)}  # than the file, maybe
        before = newer | with_new_names(before)
        said = ("target_name", "trust_remote_code")  # of the same target and code
        changed = [name for name in stated if name not in said and before.get(name) != stated[name]]
        if changed:
            found = {name: before.get(name) for name in changed}
            raise ValueError(
                f"{path} was made with other {', '.join(changed)} ({found}); resume with the same options."
            )
        return
    output.mkdir(parents=True, exist_ok=True)
    write_text(path, yaml.safe_dump(stated, sort_keys=False))


class StepLines(TrainerCallback):
    """Prints a line now and then where there is no terminal for a progress bar."""

    def __init__(self, every: float = LINE_SECONDS):
        self.every, self.start, self.first, self.last = every, 0.0, 0, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = self.last = time.monotonic()
        self.first = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        now, done = time.monotonic(), state.global_step - self.first
        if state.is_world_process_zero and now - self.last >= self.every:
            self.last = now
            left = duration((now - self.start) / done * (state.max_steps - state.global_step))
            loss = next((f", loss {entry['loss']}" for entry in reversed(state.log_history) if "loss" in entry), "")
            print(
                f"step {state.global_step} of {state.max_steps}{loss}, about {left} left", file=sys.stderr, flush=True
            )


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

    entries: dict[int, dict] = {}
    for entry in complete_lines(log):
        entries.setdefault(entry["step"], {}).update(entry)  # a resumed run writes some steps again
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))

    def curve(axes, name: str, label: str, style: str):
        points = [(step, entry[name]) for step, entry in sorted(entries.items()) if name in entry]
        if points:
            axes.plot(*zip(*points), style, label=label)

    curve(left, "loss", "training loss", "-")
    left.set_xlabel("step")
    left.set_ylabel("loss")
    curve(right, "teacher_forced_tau", "training batches, random anchors (higher)", "-")
    curve(right, "eval_teacher_forced_acceptance_length", "validation, all anchors (higher than real)", "--")
    curve(right, "eval_replayed_acceptance_length", "validation, replayed rounds", "o-")
    curve(right, "eval_acceptance_length", "validation, real generation", "s-")
    right.set_xlabel("step")
    right.set_ylabel("acceptance length (tau)")
    right.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def describe(run: Run) -> str:
    """Say in a few lines what is about to be trained."""
    data, drafter = run.data, run.drafter
    tokens = sum(len(row["response_ids"]) for row in data.training)
    lines = [
        f"{len(data.training)} responses of {tokens} tokens in {len(run.dataset)} sequences; {len(data.validation)} for validation",
        f"drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters, blocks of {drafter.config.block_size}",
    ]
    if data.dropped:
        lines.append(f"dropped: {data.dropped}")
    if run.vocabulary is not None:
        lines.append(f"drafts from {run.vocabulary}, and from the text's own tokens")
    if reason := whole_head_reason(drafter, run.target):
        lines.append(reason)
    return "\n".join(lines)


def show_sample(row: dict, tokenizer):
    """One row as it is trained on, the end of its prompt and the start of its answer: the loss falls on the colored part."""
    text = Text("a row, in color what the loss falls on: ")
    text.append(repr(tokenizer.decode(row["prompt_ids"][-24:]))[1:-1], style="dim")
    text.append(repr(tokenizer.decode(row["response_ids"][:24]))[1:-1], style="bold green")
    Console().print(text)
