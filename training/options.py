"""The options of a training run; light to import, since the command line does."""

from dataclasses import dataclass, field, replace

FRESH = {"layers": 5, "block_size": 16}
# Options by the names that they had in 0.1.0, whose files are still read.
RENAMED = {"answers": "responses", "taps": "target_layers", "held_out": "validation", "greedy": "greedy_responses"}
ATTENTION = ("sdpa", "eager", "flex_attention")


@dataclass
class TrainOptions:
    """Everything that defines a run. `None` where the default depends on the drafter or the machine; resolved in `run.yaml`."""

    target: str
    responses: list[str]  # files or folders of `dflash-hub regenerate`
    output: str
    rehearsal: list[str] = field(default_factory=list)  # further answers, trained on but never held out
    rehearsal_share: float = 0.25  # how many of them at most, as a share of the other rows
    prompts: list[str] = field(default_factory=list)  # for answers that name prompts without repeating them
    column: str | None = None  # of a data set among them, with the prompt's text
    drafter: str | None = None  # warm start: repository or folder
    layers: int | None = None  # of a fresh drafter, as the next four; None: as in `FRESH`
    block_size: int | None = None
    target_layers: list[int] | None = None
    mask_token: str | None = None
    from_target_layers: bool = False
    window: int | None = None  # all layers but the last slide
    yarn: float | None = None  # warm start: stretch RoPE by this factor
    trained_length: int | None = None  # from this length; None: as its record says
    loss: str = "dpace"
    gamma: float | None = None  # None: the paper's for this block; 0: uniform weights
    num_anchors: int = 512
    vocabulary: str = "full"  # or "answers"
    negatives: int = 4096
    max_length: int = 3072
    pack_length: int | None = None
    features: str | None = None  # folder of cached features
    validation: int = 32
    eval_prompts: int = 8
    eval_new_tokens: int = 64
    evaluations: int = 6
    patience: int | None = None  # stop after so many evaluations without a better one
    epochs: float = 6.0
    max_steps: int = -1
    batch_size: int = 4
    accumulate: int = 1
    optimizer: str = "muon"  # or "adamw"
    learning_rate: float = 1e-3
    warmup: float = 0.04
    attention: str | None = None  # None: flex on CUDA, SDPA elsewhere
    dtype: str = "float32"  # of the target
    bf16: bool = False  # autocast of the drafter
    gradient_checkpointing: bool = False
    seed: int = 0
    thinking: bool | None = None
    greedy_responses: bool | None = None  # whether the answers are greedy ones; None: as their settings say
    arguments: dict = field(default_factory=dict)  # further TrainingArguments


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
    if options.optimizer not in ("muon", "adamw"):
        raise ValueError(f"--optimizer {options.optimizer!r} is neither muon nor adamw.")
    if options.vocabulary not in ("full", "answers"):
        raise ValueError(f"--vocabulary {options.vocabulary!r} is neither full nor answers.")
    if options.trained_length is not None and options.yarn is None:
        raise ValueError("--trained-length says from where --yarn stretches: pass both.")
    if options.drafter is None:
        if options.yarn is not None:
            raise ValueError("--yarn stretches the RoPE of a trained drafter: pass it with --drafter.")
        return replace(options, **{name: getattr(options, name) or value for name, value in FRESH.items()})
    shape = ("layers", "block_size", "target_layers", "mask_token", "from_target_layers")
    given = ["--" + name.replace("_", "-") for name in shape if getattr(options, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)} shape a fresh drafter; --drafter keeps its own: leave out one or the other."
        )
    return options


def with_new_names(stated: dict) -> dict:
    """Return the options of a YAML file under today's names."""
    return {RENAMED.get(name, name): value for name, value in stated.items()}
