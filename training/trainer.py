"""The step of training, on transformers' `Trainer`: target features, blocks at random anchors, loss. Only the drafter learns."""

import statistics
import time
from collections.abc import Callable

import torch
from accelerate.utils import gather_object
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..convert.zlab import dspark_parts
from ..drafter_paths import path_head
from ..drafter_vocabulary import Places, make_head
from ..hub_files import check_finite
from ..modeling_dflash import DFlashDraftModel
from ..target_ranks import sharding
from .blocks import block_labels, denoise, draw_anchors
from .data import Collator, PackedRows, document_features, placed, rows_of
from .evaluation import generate, replay
from .features import feature_layers, not_finite
from .losses import BlockLoss, SelectorLoss, chunked_sum
from .optimizer import MuonAdamW

# Draft positions whose logits exist at one time: on a vocabulary of 150 thousand, 1.2 GB in float32.
CHUNK_POSITIONS = 2048


class LengthGroupedBatches(Sampler):
    """Rows of similar length in a batch, in an order that depends on seed and epoch only, so that a run can be resumed in it."""

    def __init__(self, dataset: PackedRows, batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed, self.epoch = dataset.lengths(), batch_size, seed, 0

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


def checkpoint_activations(drafter: DFlashDraftModel):
    """Gradient checkpointing, which transformers 5.24 renamed."""
    if hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        drafter.activation_checkpointing_enable({"use_reentrant": False})
    else:
        drafter.gradient_checkpointing_enable({"use_reentrant": False})


class FiniteSteps(TrainerCallback):
    """Stops a run before an optimizer step whose loss or gradient is not finite, so that weights and checkpoints stay finite."""

    def __init__(self, trainer: "DFlashTrainer"):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.check_step()


def texts_of(rows, anchors: torch.LongTensor, valid: torch.Tensor) -> tuple[Places, Callable]:
    """Return where blocks draft, and what returns the texts that they stand in: one a document.

    Args:
        anchors, valid: (B, N), see `draw_anchors`; the places are those of valid blocks.
    """
    width = rows.input_ids.shape[1]
    own = rows.document_ids - rows.document_ids.min()  # padding has a number of its own
    numbers = own + torch.arange(len(own), device=own.device)[:, None] * (width + 1)  # of a document, over all rows
    known, sequences = numbers.unique(return_inverse=True)  # (B, S)
    places = Places(sequences.gather(1, anchors)[valid], rows.position_ids.gather(1, anchors)[valid])

    def texts() -> list[list[int]]:
        found = [[] for _ in known]
        for sequence, token in zip(sequences.flatten().tolist(), rows.input_ids.flatten().tolist()):
            found[sequence].append(token)
        return found

    return places, texts


def possible(candidates) -> torch.Tensor:
    """Return logits in float32 of which none is -inf, which has no gradient: a token that is none has a very small one."""
    logits = candidates.logits.float()
    return logits if candidates.ids is None else logits.clamp(min=-1e4)


def check_whole(target: PreTrainedModel):
    """Refuse a target that is spread over processes, before the first step.

    Each process runs it on examples of its own, in training and in evaluation, so each needs all of its weights.

    Raises:
        ValueError: names what spreads it.
    """
    if kind := sharding(target):
        raise ValueError(
            f"{type(target).__name__} is sharded over processes by {kind}, but training needs a whole target in each process. Load "
            "it on one device in each; the drafter may be sharded by FSDP, or DeepSpeed be used up to ZeRO-2."
        )


def check_method(config):
    """Refuse to train a drafter of DSpark, whose losses and layout are others.

    Raises:
        ValueError: names its parts.
    """
    if found := dspark_parts(config):
        raise ValueError(
            f"training a drafter of DSpark ({', '.join(found)}) is not supported; it drafts, imports and exports."
        )


class DFlashTrainer(Trainer):
    """Trains `drafter` on answers of `target`, whose weights stay as they are.

    A loss or gradient that is not finite ends the run with an error that names the example. It is not left out: the same
    example would be met in each epoch, by all later runs, and NaN has as often another cause than its example.

    Args:
        loss: of drafted blocks.
        num_anchors: at most so many a row.
        train_dataset: `PackedRows`; `data_collator` a `Collator`.
        validation: rows of answers that no training row shares a prompt with.
        eval_prompts: for how many of the validation prompts text is generated, up to `eval_new_tokens`.
        greedy_answers: whether the validation responses are the target's greedy ones, so that rounds can be replayed on them.
        muon: the optimizer of matrices; else it is that of `args`, AdamW.
        selector_loss: of a drafter with a selector; by default that of `loss`.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: PackedRows,
        data_collator: Collator,
        loss: BlockLoss,
        num_anchors: int,
        validation: list[dict],
        eval_prompts: int,
        eval_new_tokens: int,
        greedy_answers: bool = True,
        muon: bool = False,
        selector_loss: SelectorLoss | None = None,
        **kwargs,
    ):
        check_whole(target)
        check_method(drafter.config)
        super().__init__(
            drafter, args, data_collator=data_collator, train_dataset=train_dataset, eval_dataset=validation, **kwargs
        )
        self.target = target.requires_grad_(False).eval()
        self.block_size, self.muon = drafter.config.block_size, muon
        self.block_loss, self.num_anchors = loss, num_anchors
        self.selector_loss = selector_loss or SelectorLoss(loss)
        self.validation, self.eval_new_tokens, self.greedy_answers = validation, eval_new_tokens, greedy_answers
        self.eval_rows = [row for row in validation if row["turn"] == 0][:eval_prompts]
        self.flex = drafter.config._attn_implementation == "flex_attention"
        # Compiled, the block mask is made without a dense one; on a CPU compiling costs more than it saves.
        self.create_mask = (
            torch.compile(create_block_mask) if self.flex and args.device.type == "cuda" else create_block_mask
        )
        self.layer_ids = feature_layers(drafter.config, target, loss)
        self.model_accepts_loss_kwargs = True  # so that Trainer leaves dividing by the batches of a step to us
        self.args.logging_nan_inf_filter = False  # it writes an average where a loss is NaN
        self.add_callback(FiniteSteps(self))
        # Of the batches of a step: loss, and whether each row's hidden states are finite (B,).
        self._step: list[tuple[dict, torch.Tensor, torch.Tensor]] = []
        self._anchors: torch.Tensor | int = 0  # of this process since the last log
        self._last_log = time.monotonic()
        self._logged: dict[str, list[torch.Tensor]] = {}

    def _get_train_sampler(self, train_dataset=None):
        return LengthGroupedBatches(self.train_dataset, self.args.train_batch_size, self.args.seed)

    def create_optimizer(self, model=None):
        if self.optimizer is None and self.muon:
            args, model = self.args, self.model if model is None else model
            tables = [parameter for name, parameter in model.named_parameters() if name.endswith("_codebook")]
            self.optimizer = MuonAdamW(
                model.parameters(), args.learning_rate, args.weight_decay, (args.adam_beta1, args.adam_beta2), args.adam_epsilon,
                tables,
            )  # fmt: skip
        return super().create_optimizer(model)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of an optimizer step, their blocks drawn, and what the step's loss is divided by: the weights of all
        draft positions, over batches and processes, so that it does not matter how they are spread.

        Draws depend on seed, step and process only, so a resumed run draws what an uninterrupted one would have.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step = []
        seed = (self.args.seed * 1_000_003 + self.state.global_step) * self.args.world_size + self.args.process_index
        generator = torch.Generator().manual_seed(seed % 2**63)
        weights = torch.zeros((), device=device)
        for batch in batches:
            rows = rows_of(batch)
            anchors, valid = self.draw(rows, generator)  # (B, N)
            labels, supervised = block_labels(rows, anchors, valid, self.block_size)  # (B, N, K - 1)
            batch |= {"anchors": anchors, "valid": valid, "labels": labels, "supervised": supervised}
            weights += self.block_loss.normalizer(supervised)
            self._anchors = self._anchors + valid.sum()
        # Gradients are averaged over processes.
        return batches, self.accelerator.reduce(weights, "mean").clamp(min=1e-6)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        drafter: DFlashDraftModel = self.accelerator.unwrap_model(model)
        config, rows = drafter.config, rows_of(inputs)
        anchors, valid = inputs["anchors"], inputs["valid"]  # (B, N)
        labels, supervised = inputs["labels"], inputs["supervised"]  # (B, N, K - 1)

        features = inputs.get("features")
        if features is None:
            # Not under autocast: features are those of generation, and those of a cache.
            with torch.autocast(anchors.device.type, enabled=False):
                features = document_features(self.target, inputs, self.layer_ids)  # (tokens, T * H)
        width = len(config.target_layer_ids) * config.hidden_size
        context = placed(features[:, :width], inputs)  # (B, S, T * H)

        hidden = denoise(model, config, self.target, rows, context, anchors, valid, self.create_mask)
        hidden = hidden[:, :, 1:]  # (B, N, K - 1, H)

        teacher = None
        if self.block_loss.needs_teacher:
            states = placed(features[:, width:], inputs)  # (B, S, H): row j makes the target's logits of token j + 1
            index = (anchors[:, :, None] + torch.arange(config.block_size - 1, device=anchors.device)).flatten(1)
            index = index.clamp(max=states.shape[1] - 1)[..., None].expand(-1, -1, states.shape[2])
            teacher = states.gather(1, index).unflatten(1, labels.shape[1:])[valid]  # (M, K - 1, H)
        with self.accelerator.autocast():  # blocks of padding cost nothing from here on
            places = texts_of(rows, anchors, valid)
            anchor_ids = rows.input_ids.gather(1, anchors)[valid]
            total = self._loss(drafter, hidden[valid], labels[valid], supervised[valid], teacher, anchor_ids, *places)
        self._step.append((inputs, total.detach(), hidden.detach().isfinite().flatten(1).all(1)))
        return total / num_items_in_batch

    def check_step(self):
        """Look at the losses and the gradient of the step that is to be taken, all at once.

        Raises:
            ValueError: one of them is not finite, in any process; names the examples and the likely cause.
        """
        finite = torch.stack([loss for _, loss, _ in self._step]).isfinite().all()
        # Under float16 autocast the scaler itself leaves out a step whose gradient overflows, and lowers the scale.
        if self.accelerator.scaler is None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            finite = finite & torch.nn.utils.get_total_norm(gradients).isfinite()
        if self.args.world_size > 1:  # so that all processes stop at the same step
            finite = self.accelerator.reduce(finite.float(), "sum") == self.args.world_size
        if finite:
            return
        causes = self._not_finite()
        if self.args.world_size > 1:
            causes = gather_object(causes)
        if not causes:
            names = [name for inputs, _, _ in self._step for name, _, _ in inputs["examples"]]
            causes = [f"the backward pass overflows on one of the examples {', '.join(names)}. Lower --learning-rate."]
        raise ValueError(
            f"step {self.state.global_step + 1} was not taken, its loss or gradient is not finite: {' '.join(causes)} Nothing that "
            f"was saved is harmed: --drafter {self.args.output_dir}/checkpoint-N starts a run from the checkpoint of step N."
        )

    def _not_finite(self) -> list[str]:
        """Say which examples of this process made a step not finite, with the cause: a sentence, or none."""
        overflowing, rows = [], []
        for inputs, loss, sound in self._step:
            features = inputs.get("features")
            if features is None:
                features = document_features(self.target, inputs, self.layer_ids)
            whole = features.isfinite().all(-1).split([length for _, _, length in inputs["examples"]])
            suspect = ~sound if not sound.all() else (~loss.isfinite()).expand_as(sound)
            for (name, row, _), finite in zip(inputs["examples"], whole):
                rows += [name] * bool(suspect[row])
                overflowing += [name] * (not finite.all())
        if overflowing:
            return [not_finite(overflowing, self.layer_ids, self.target.dtype)]
        return [f"the drafter overflows on examples {', '.join(rows)}. Lower --learning-rate."] if rows else []

    def draw(self, rows, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_anchors(rows, self.num_anchors, generator, fixed=self.flex)

    def _loss(self, drafter, hidden, labels, supervised, teacher, anchor_ids, places, texts) -> torch.Tensor:
        """Weighted sum of the loss over the draft positions of blocks (M, K - 1), over the tokens that can be drafted at their places.

        Args:
            anchor_ids: (M,) tokens of the anchors.
        """
        selector = [] if drafter.candidate_selector is None else [*drafter.candidate_selector.parameters()]
        if len(labels) == 0:  # no row of this batch has an anchor
            return hidden.sum() + sum(parameter.sum() * 0 for parameter in selector)
        head = path_head(drafter, make_head(drafter, self.target))
        previous = torch.cat([anchor_ids[:, None], labels[:, :-1]], dim=1)
        if head.reads_text:
            head.see(texts())
        right, present, picked, count = [], [], [], supervised.sum()

        def loss_of(part: torch.Tensor, which: slice) -> torch.Tensor:
            here = Places(places.sequences[which], places.ends[which])
            candidates = head(part.to(self.target.dtype), here)
            columns, supervised_here = candidates.columns(labels[which]), supervised[which]
            teacher_logits = None
            if teacher is not None:
                teacher_logits = possible(head.unscaled()(teacher[which].to(self.target.dtype), here))
            logits = possible(candidates)
            right.append((logits.argmax(-1) == columns) & supervised_here)
            # A token that cannot be drafted is not learned, and counts as wrong.
            taught = supervised_here & (columns >= 0)
            columns = columns.clamp(min=0)
            loss = self.block_loss(logits, columns, taught, teacher_logits)
            if selector:
                known = logits if candidates.ids is not None else logits[..., : drafter.config.vocab_size]
                of_selector, *found = self.selector_loss(
                    head, part, known, columns, previous[which], taught, candidates.ids
                )
                loss = loss + of_selector
                for noted, value in zip((present, picked), found):
                    noted.append(value & taught)
            return loss

        chunk = max(1, CHUNK_POSITIONS // labels.shape[1])
        loss = chunked_sum(hidden, loss_of, chunk, selector)
        right = torch.cat(right)
        if selector:
            self._note_selector(right, torch.cat(present), torch.cat(picked), supervised)
        self._note("accuracy", right.sum() / count.clamp(min=1))
        self._note("accuracy_position_1", right[:, 0].sum() / supervised[:, 0].sum().clamp(min=1))
        # Of blocks at random anchors: higher than what rounds of generation accept, see `evaluation`.
        self._note("teacher_forced_tau", 1 + right.long().cumprod(1).sum() / max(len(right), 1))
        return loss

    def _note_selector(self, right, present, picked, supervised):
        """Note how far the candidates reach, what the selector makes of them, and by draft position how often they hold the token.

        Args:
            right, present, picked: (M, L) whether the likeliest token is right, a candidate is, and the picked one is.
        """
        self._note("selector_accuracy", picked.sum() / present.sum().clamp(min=1))
        for name, correct in (("walked_tau", picked), ("oracle_tau", present)):
            self._note(name, 1 + correct.long().cumprod(1).sum() / len(right))
        counts = supervised.sum(0).clamp(min=1)
        for name, correct in (("recall_1", right), ("recall_candidates", present)):
            for position, share in enumerate(correct.sum(0) / counts, start=1):
                self._note(f"{name}_position_{position}", share)

    def _note(self, name: str, value: torch.Tensor):
        self._logged.setdefault(name, []).append(value.detach())

    def log(self, logs: dict[str, float], *args, **kwargs):
        if "loss" in logs:
            logs |= {name: round(float(torch.stack(values).mean()), 4) for name, values in self._logged.items()}
            self._logged.clear()
            # Totals go on in a resumed run, from what its checkpoint's log says.
            seen, now = torch.as_tensor(self._anchors, device=self.args.device).sum(), time.monotonic()
            logs["anchors"] = self.total("anchors") + int(self.accelerator.reduce(seen, "sum"))
            logs["seconds"] = round(self.total("seconds") + now - self._last_log, 1)
            self._anchors, self._last_log = 0, now
        super().log(logs, *args, **kwargs)

    def total(self, name: str) -> float:
        """The newest logged total: `anchors`, or `seconds` of training and evaluation."""
        return next((entry[name] for entry in reversed(self.state.log_history) if name in entry), 0)

    def evaluate(self, *args, metric_key_prefix: str = "eval", **kwargs) -> dict[str, float]:
        """Measure acceptance on validation prompts, by real generation, replayed and teacher-forced (see `evaluation`).

        Every process measures its share of the prompts.
        """
        drafter = self.accelerator.unwrap_model(self.model).eval()
        attention = drafter.config._attn_implementation
        # Lengths differ from text to text, for which flex attention would compile anew.
        drafter.set_attn_implementation("sdpa")
        metrics = evaluate(
            self.target, drafter, self._share(self.eval_rows), self._share(self.validation) if self.greedy_answers else [],
            self.eval_new_tokens, self.accelerator,
        )  # fmt: skip
        drafter.set_attn_implementation(attention)
        drafter.train()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _share(self, rows: list[dict]) -> list[dict]:
        if self.is_fsdp_enabled:  # its layers are gathered by all processes together
            return rows
        return rows[self.args.process_index :: self.args.world_size]


def evaluate(target, drafter, prompts: list[dict], rows: list[dict], max_new_tokens: int, accelerator=None) -> dict:
    """Figures of one evaluation, over all processes; `acceptance_length` is that of real generation.

    Raises:
        ValueError: a weight of the drafter is not finite.
    """
    check_finite(dict(drafter.named_parameters()), "the drafter to be evaluated")

    def gathered(values: list) -> list:
        return values if accelerator is None or accelerator.num_processes == 1 else gather_object(values)

    real = generate(target, drafter, [row["prompt_ids"] for row in prompts], max_new_tokens)
    replayed, forced, first = replay(target, drafter, rows)
    for speculation in (real, replayed):
        for name in ("acceptance_lengths", "drafted", "accepted"):
            setattr(speculation, name, gathered(getattr(speculation, name)))
    forced, first = gathered(forced), gathered([first] * len(forced))
    figures = {}
    if real.acceptance_lengths:
        figures["acceptance_length"] = real.tau
        figures |= {f"acceptance_position_{k}": share for k, share in enumerate(real.position_acceptance, start=1)}
    if forced:
        figures["replayed_acceptance_length"] = replayed.tau
        figures["teacher_forced_acceptance_length"] = statistics.mean(forced)
        figures["position_1_accuracy"] = statistics.mean(first)
    return {name: round(value, 4) for name, value in figures.items()}
