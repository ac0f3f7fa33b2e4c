"""The options of a training run, each stated once: `dflash-hub train` and `align` take them from here. Light to import."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from typer import Option

from ..common.target_source import TargetName, TargetRevision, TargetSource, TrustRemoteCode

FRESH = {"layers": 5, "block_size": 16, "method": "dflash"}
# Options by the names that they had in 0.1.0, whose files are still read.
RENAMED = {"answers": "responses", "taps": "target_layers", "held_out": "validation", "greedy": "greedy_responses"}
ATTENTION = ("sdpa", "eager", "flex_attention")

ChatTemplate = Annotated[
    str | None, Option(help="Name of the target's chat template, where it has several. Default: default.")
]


@dataclass
class TrainOptions:
    """Everything that defines a run. `None` where the default depends on the drafter or the machine; resolved in `run.yaml`.

    A field with an `Option` is an option of the command as it stands. The others are spelled otherwise on a command line,
    and the command says how.
    """

    target: str
    responses: Annotated[list[str], Option(help="Folder or file of `dflash-hub regenerate`; repeatable.")]
    output: Annotated[str, Option(help="Folder of the run.")]
    target_revision: TargetRevision = None
    trust_remote_code: TrustRemoteCode = False
    target_name: TargetName = None
    rehearsal: Annotated[
        list[str], Option(help="Further responses, trained on but never used for validation; repeatable.")
    ] = field(default_factory=list)
    rehearsal_share: Annotated[float, Option(min=0.0, help="At most so many of them, as a share of the others.")] = 0.25
    prompts: Annotated[list[str], Option(help="JSONL of prompts, for responses that do not repeat them.")] = field(
        default_factory=list
    )
    column: Annotated[str | None, Option(help="Column of a data set with the prompt's text. Default: messages.")] = None
    drafter: Annotated[str | None, Option(help="Warm start: a drafter's repository or folder, kept as configured.")] = (
        None
    )
    layers: Annotated[int | None, Option(min=1, help=f"Depth of a fresh drafter. Default: {FRESH['layers']}.")] = None
    block_size: Annotated[
        int | None, Option(min=2, help=f"Block of a fresh drafter. Default: {FRESH['block_size']}.")
    ] = None
    method: Annotated[str | None, Option(help="Method of a fresh drafter: dflash, or dflash2. Default: dflash.")] = None
    target_layers: list[int] | None = None
    mask_token: Annotated[str | None, Option(help="Id or text of the mask token of a fresh drafter.")] = None
    from_target_layers: Annotated[bool, Option(help="Start a fresh drafter from the target's last layers.")] = False
    window: Annotated[
        int | None, Option(min=2, help="Sliding window of all layers but the last. Default: full attention.")
    ] = None
    yarn: Annotated[float | None, Option(min=1.0, help="Stretch the RoPE of --drafter by this factor.")] = None
    trained_length: Annotated[
        int | None,
        Option(min=2, help="Length that --yarn stretches from. Default: the longest example of the drafter's record."),
    ] = None
    loss: Annotated[str, Option(help="ce, dpace, kl or tv.")] = "dpace"
    gamma: Annotated[
        float | None, Option(min=0.0, help="Decay of the weights by draft position; 0: uniform. Default: the paper's.")
    ] = None
    selector_loss: Annotated[
        float, Option(min=0.0, help="Factor of the loss of DFlash 2's selector, beside the block's.")
    ] = 1.0
    missing_gold: Annotated[
        str, Option(help="For the selector, where the right token is no candidate: leave-out, or insert.")
    ] = "leave-out"
    num_anchors: Annotated[int, Option(min=1, help="Anchors per example and step, at most.")] = 512
    draft_vocab_size: Annotated[
        int | None,
        Option(
            min=1,
            help="Draft from so many tokens, the most frequent of the responses, and those of the text at hand. Default: all, or the "
            "list of --drafter.",
        ),
    ] = None
    max_length: Annotated[int, Option(min=4, help="Tokens of prompt and response; longer examples are cut.")] = 3072
    pack_length: Annotated[int | None, Option(min=4, help="Pack examples into sequences of up to this length.")] = None
    features: Annotated[
        str | None,
        Option(help="Folder to cache the target's hidden states in. Default: computed in each step."),
    ] = None
    validation: Annotated[int, Option(min=1, help="Prompts kept for validation.")] = 32
    eval_prompts: Annotated[int, Option(min=0, help="Of these, how many are generated for in an evaluation.")] = 8
    eval_new_tokens: Annotated[int, Option(min=2, help="Tokens generated for each.")] = 64
    evaluations: Annotated[int, Option(min=1, help="Evaluations and checkpoints of the run.")] = 6
    patience: Annotated[
        int | None, Option(min=1, help="Stop after so many evaluations without a better one. Default: never.")
    ] = None
    epochs: Annotated[float, Option(min=0.0, help="How often each response is trained on.")] = 6.0
    max_steps: Annotated[int, Option(help="Optimizer steps instead of epochs; -1: epochs.")] = -1
    batch_size: Annotated[int, Option(min=1, help="Sequences per step and process.")] = 4
    accumulate: Annotated[int, Option(min=1, help="Batches per optimizer step.")] = 1
    optimizer: Annotated[str, Option(help="muon (AdamW for the norms), or adamw.")] = "muon"
    learning_rate: Annotated[float, Option(min=0.0, help="Peak of a cosine schedule.")] = 1e-3
    warmup: Annotated[float, Option(min=0.0, max=1.0, help="Share of steps.")] = 0.04
    attention: Annotated[str | None, Option(help="sdpa, eager or flex_attention. Default: flex on CUDA.")] = None
    dtype: Annotated[str, Option(help="Of the target: float32, bfloat16 or float16.")] = "float32"
    bf16: Annotated[bool, Option("--bf16", help="Autocast; the drafter's weights stay float32.")] = False
    gradient_checkpointing: Annotated[
        bool, Option("--gradient-checkpointing", help="Recompute activations: less memory, more time.")
    ] = False
    seed: Annotated[int, Option(help="Of everything drawn at random.")] = 0
    thinking: Annotated[
        bool | None, Option(help="Thinking mode of the responses, where the target's template has one.")
    ] = None
    chat_template: ChatTemplate = None
    greedy_responses: Annotated[
        bool | None,
        Option("--greedy-responses/--sampled-responses", help="Where the settings of the responses do not say it."),
    ] = None
    arguments: dict = field(default_factory=dict)

    @property
    def source(self) -> TargetSource:
        """Where the target comes from."""
        return TargetSource(self.target, self.target_revision, self.trust_remote_code, self.target_name)

    def with_source(self, source: TargetSource) -> "TrainOptions":
        """Return the options with another source of the target."""
        return replace(
            self, target=source.path, target_revision=source.revision, trust_remote_code=source.trust_remote_code,
            target_name=source.name,
        )  # fmt: skip


def resolved(options: TrainOptions) -> TrainOptions:
    """With the shape of a fresh drafter filled in; a warm start has its own.

    Raises:
        ValueError: options that contradict each other, or a value that none of them has.
    """
    if options.attention not in (None, *ATTENTION):
        raise ValueError(f"--attention {options.attention!r} is none of {', '.join(ATTENTION)}.")
    if options.gamma is not None and options.loss == "dpace":
        raise ValueError("--gamma is the decay of ce, kl and tv; dpace has weights of its own.")
    if options.patience is not None and not options.eval_prompts:
        raise ValueError("--patience needs evaluations: raise --eval-prompts above 0.")
    if options.missing_gold not in ("leave-out", "insert"):
        raise ValueError(f"--missing-gold {options.missing_gold!r} is neither leave-out nor insert.")
    if options.optimizer not in ("muon", "adamw"):
        raise ValueError(f"--optimizer {options.optimizer!r} is neither muon nor adamw.")
    if options.trained_length is not None and options.yarn is None:
        raise ValueError("--trained-length says from where --yarn stretches: pass both.")
    if options.drafter is None:
        if options.yarn is not None:
            raise ValueError("--yarn stretches the RoPE of a trained drafter: pass it with --drafter.")
        return replace(options, **{name: getattr(options, name) or value for name, value in FRESH.items()})
    shape = ("layers", "block_size", "method", "target_layers", "mask_token", "from_target_layers")
    given = ["--" + name.replace("_", "-") for name in shape if getattr(options, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)} shape a fresh drafter; --drafter keeps its own: leave out one or the other."
        )
    return options


def with_new_names(stated: dict) -> dict:
    """Return the options of a YAML file under today's names.

    Raises:
        ValueError: one has no successor that says the same.
    """
    stated = {RENAMED.get(name, name): value for name, value in stated.items()}
    if stated.pop("vocabulary", "full") != "full":
        raise ValueError(
            "`vocabulary: answers` of 0.1.0 is no more: state `draft_vocab_size`, a number of tokens that the drafter drafts from."
        )
    stated.pop("negatives", None)
    return stated
