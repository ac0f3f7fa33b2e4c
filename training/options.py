"""The options of a training run; light to import, since the command line does."""

from dataclasses import dataclass, field


@dataclass
class TrainOptions:
    """Everything that defines a run. `None` where the default depends on the drafter or the machine; resolved in `run.yaml`."""

    target: str
    answers: list[str]  # files or folders of `dflash-hub regenerate`
    output: str
    rehearsal: list[str] = field(default_factory=list)  # further answers, trained on but never held out
    rehearsal_share: float = 0.25  # how many of them at most, as a share of the other rows
    prompts: list[str] = field(default_factory=list)  # for answers that name prompts without repeating them
    drafter: str | None = None  # warm start: repository or folder
    layers: int = 5
    block_size: int = 16
    taps: list[int] | None = None
    mask_token: str | None = None
    from_target_layers: bool = False
    window: int | None = None  # all layers but the last slide
    yarn: float | None = None  # warm start: stretch RoPE by this factor
    loss: str = "dpace"
    gamma: float | None = None  # None: the paper's for this block; 0: uniform weights
    num_anchors: int = 512
    vocabulary: str = "full"  # or "answers"
    negatives: int = 4096
    max_length: int = 3072
    pack_length: int | None = None
    features: str | None = None  # folder of cached features
    held_out: int = 32
    eval_prompts: int = 8
    eval_new_tokens: int = 64
    evaluations: int = 6
    patience: int | None = None  # stop after so many evaluations without a better one
    epochs: float = 6.0
    max_steps: int = -1
    batch_size: int = 4
    accumulate: int = 1
    learning_rate: float = 6e-4
    warmup: float = 0.04
    attention: str | None = None  # None: flex on CUDA, SDPA elsewhere
    dtype: str = "float32"  # of the target
    bf16: bool = False  # autocast of the drafter
    gradient_checkpointing: bool = False
    seed: int = 0
    thinking: bool | None = None
    greedy: bool | None = None  # whether the answers are greedy ones; None: as their settings say
    arguments: dict = field(default_factory=dict)  # further TrainingArguments
