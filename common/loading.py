"""Load a target, and read from it what prompts and batches need."""

import accelerate
import torch

from ..configuration_dflash import DFlashConfig
from .chat import choose_template
from .files import in_a_line
from .target_source import TargetSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a name that is not in `DTYPES`."""
    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r} is none of {', '.join(DTYPES)}.")
    return DTYPES[name]


def end_tokens(target) -> set[int]:
    """The tokens that end a text of `target`."""
    ends = target.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def room_for_answer(target, prompt_tokens: int) -> int | None:
    """Tokens that an answer can have; None where the target's config sets no limit.

    Raises:
        ValueError: the prompt leaves none.
    """
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    if prompt_tokens >= positions:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens, and the target has {positions} positions for prompt and answer "
            "together; shorten the prompt."
        )
    return positions - prompt_tokens


def load_target(source: str | TargetSource, dtype: str, chat_template: str | None = None):
    """(target, tokenizer), on the accelerator of this process where there is one.

    Raises:
        ValueError: an unknown dtype, code of the target's own that is not trusted, or see `choose_template`.
    """
    torch_dtype = dtype_of(dtype)
    state = accelerate.PartialState(cpu=not torch.accelerator.is_available())
    target = TargetSource.of(source).model(dtype=torch_dtype, device_map={"": state.device})
    return target.requires_grad_(False).eval(), load_tokenizer(source, chat_template)


def drafter_config(drafter: str) -> DFlashConfig:
    """The config of a drafter's folder or repository; cheap, so that a wrong one is said before a target is loaded.

    Raises:
        OSError: there is none; names the drafter.
    """
    try:
        return DFlashConfig.from_pretrained(drafter)
    except OSError as error:
        raise OSError(f"no drafter can be read at {drafter!r}: {in_a_line(error)}") from error


def load_tokenizer(source: str | TargetSource, chat_template: str | None = None):
    """A target's tokenizer, with the chat template that is asked for; see `choose_template`."""
    tokenizer = TargetSource.of(source).tokenizer()
    choose_template(tokenizer, chat_template)
    return tokenizer


def left_padded(rows: list[list[int]], pad: int, device) -> dict:
    """What `generate` takes for rows of different lengths: ids and mask (rows, longest), and the padding token."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": pad}


def pad_token(target, tokenizer) -> int:
    """The tokenizer's padding token, else an end token, which nothing is generated after."""
    return next(i for i in (tokenizer.pad_token_id, *sorted(end_tokens(target)), 0) if i is not None)


def cut_at_end(ids: list[int], ends: set[int]) -> list[int]:
    """Up to the first end token and with it; what follows in a batch is padding."""
    end = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: end + 1]
