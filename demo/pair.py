"""A target with its drafter, loaded once, and the text that the two write, by who chose which part of it."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..decode_statistics import Speculation
from ..modeling_dflash import DFlashDraftModel
from .smollm2 import smollm2

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a name that is not in `DTYPES`."""
    if name not in DTYPES:
        raise ValueError(f"--dtype {name!r} is none of {', '.join(DTYPES)}.")
    return DTYPES[name]


def in_mode(thinking: bool | None) -> dict:
    """Keyword arguments of a chat template for a thinking mode; None leaves the template's default."""
    return {} if thinking is None else {"enable_thinking": thinking}


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


class Pair:
    """A target, its tokenizer and its drafter on one device.

    Args:
        target: repository or folder; None takes SmolLM2-135M-Instruct.
        drafter: repository or folder; None takes the shipped one, which was made for that target.
        dtype: a name of `DTYPES`, or "auto" for that of the target's checkpoint.

    Raises:
        ValueError: an unknown dtype.
        OSError: a model that cannot be found; says where it was looked for.
    """

    def __init__(self, target: str | None, drafter: str | None, dtype: str):
        if dtype not in (*DTYPES, "auto"):
            raise ValueError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}, auto.")
        transformers.utils.logging.disable_progress_bar()
        path, self.source = (target, target) if target else smollm2()
        self.drafter_path = drafter or str(Path(__file__).parent.parent)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        placed = "auto" if torch.cuda.is_available() else "cpu"
        self.target = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES.get(dtype, "auto"), device_map=placed
        ).eval()
        self.device = self.target.device
        self.drafter = DFlashDraftModel.from_pretrained(self.drafter_path, dtype=self.target.dtype)
        self.drafter.to(self.device).eval()

    def encode(self, messages: list[dict[str, str]], **template):
        """Model inputs of a chat, on the pair's device, in the thinking mode that the drafter was made for, unless another is said.

        `template` goes to the tokenizer's chat template.
        """
        template = in_mode(self.drafter.config.target_thinking) | template
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **template
        ).to(self.device)

    def fitting(self, settings: dict, inputs) -> dict:
        """`settings` of a call with no more new tokens than the target has positions for; see `room_for_answer`."""
        room = room_for_answer(self.target, inputs["input_ids"].shape[1])
        return settings if room is None else settings | {"max_new_tokens": min(settings["max_new_tokens"], room)}


class DraftedText:
    """Decodes tokens as they come into parts of text, each chosen by the target itself or drafted and accepted."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = 0  # characters

    def add(self, tokens: list[int], drafted: int) -> list[tuple[str, bool]]:
        """(text, whether it was drafted) of the next tokens, of which the first `drafted` were."""
        parts = []
        for ids, by_drafter in ((tokens[:drafted], True), (tokens[drafted:], False)):
            if not ids:
                continue
            self.tokens += ids
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            # Half a character waits for its other bytes.
            if not text.endswith("\ufffd") and len(text) > self.shown:
                parts.append((text[self.shown :], by_drafter))
                self.shown = len(text)
        return parts


class DraftStreamer:
    """A streamer that shows the text as it comes; a piece is one round: drafted tokens, then the target's own.

    Only the last round can end on a drafted token, so each piece waits for the next one, and the last for `finish`.

    Args:
        show: called with (text, whether it was drafted).
    """

    def __init__(self, tokenizer, show: Callable[[str, bool], None]):
        self.text = DraftedText(tokenizer)
        self.show = show
        self.waiting: list[int] | None = None
        self.prompt_seen = False

    def put(self, value: torch.Tensor):
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        if self.waiting is not None:
            self._show(self.waiting, len(self.waiting) - 1)
        self.waiting = value.flatten().tolist()

    def end(self):
        pass

    def finish(self, speculation: Speculation):
        """Show the last piece, given the statistics of the call."""
        self._show(self.waiting, speculation.accepted[0][-1] if speculation.accepted[0] else 0)

    def _show(self, tokens: list[int], drafted: int):
        for text, by_drafter in self.text.add(tokens, drafted):
            self.show(text, by_drafter)
