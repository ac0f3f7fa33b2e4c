"""A target with its drafter, loaded once, and the text that the two write, by who chose which part of it."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from ..common.chat import in_mode
from ..common.loading import DTYPES, drafter_config, load_tokenizer, room_for_answer
from ..common.smollm2 import smollm2
from ..common.target_source import TargetSource
from ..decode_statistics import Speculation
from ..modeling_dflash import DFlashDraftModel


class Pair:
    """A target, its tokenizer and its drafter on one device.

    Args:
        target: where it comes from; None takes SmolLM2-135M-Instruct.
        drafter: repository or folder; None takes the shipped one, which was made for that target.
        dtype: a name of `DTYPES`, or "auto" for that of the target's checkpoint.
        chat_template: name of the chat template, where the target has several.

    Raises:
        ValueError: an unknown dtype or chat template.
        OSError: a model that cannot be found; says where it was looked for.
    """

    def __init__(
        self, target: str | TargetSource | None, drafter: str | None, dtype: str, chat_template: str | None = None
    ):
        if dtype not in (*DTYPES, "auto"):
            raise ValueError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}, auto.")
        transformers.utils.logging.disable_progress_bar()
        path, self.source = (target, "") if target else smollm2()
        self.drafter_path = drafter or str(Path(__file__).parent.parent)
        source = TargetSource.of(path).for_drafter(drafter_config(self.drafter_path))
        self.source = self.source or " at ".join(filter(None, (source.path, source.revision)))
        self.tokenizer = load_tokenizer(source, chat_template)
        placed = "auto" if torch.cuda.is_available() else "cpu"
        self.target = source.model(dtype=DTYPES.get(dtype, "auto"), device_map=placed).eval()
        self.device = self.target.device
        self.drafter = DFlashDraftModel.from_pretrained(self.drafter_path, dtype=self.target.dtype)
        self.drafter.to(self.device).eval()

    def encode(self, messages: list[dict[str, str]], **template):
        """Model inputs of a chat, on the pair's device, in the thinking mode that the drafter was made for, unless another is said.

        `template` goes to the tokenizer's chat template.
        """
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **self.settings(template)
        ).to(self.device)

    def settings(self, template: dict) -> dict:
        """Keyword arguments of the chat template, in the drafter's thinking mode where `template` says none."""
        return in_mode(self.drafter.config.target_thinking) | template

    def fitting(self, settings: dict, inputs) -> dict:
        """`settings` of a call with no more new tokens than the target has positions for; see `room_for_answer`."""
        room = room_for_answer(self.target, inputs["input_ids"].shape[1])
        return settings if room is None else settings | {"max_new_tokens": min(settings["max_new_tokens"], room)}


def cleans_up(tokenizer) -> bool:
    """Whether `tokenizer.decode` takes spaces out of its text; transformers ignores the setting for BPE, unless forced."""
    bpe = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return tokenizer.clean_up_tokenization_spaces and (not bpe or getattr(tokenizer, forced))


class DraftedText:
    """Decodes tokens as they come into parts of text, each chosen by the target itself or drafted and accepted.

    The parts, joined, are the text that the tokenizer makes of all tokens together, without special ones. Text that later
    tokens can still change waits for them, or for `finish`; it is marked as the token that settles it. Tokens are decoded
    together with the few before them only, so the work is linear in the text.
    """

    # Tokens before the new ones that are decoded with them: a character has at most four bytes, and a token at least one.
    CONTEXT = 4
    # A single byte, in vocabularies that spell rare characters so. A run of them is broken as a whole where one of its
    # characters is, so it is decoded when it has ended.
    BYTE = re.compile(r"<0x[0-9A-F]{2}>")
    # The end of a text from which clean-up can still take spaces: " ." and " 've" lose the first one, " ' " both.
    OPEN_SPACES = re.compile(r" [ ']*(?:n[ ']*|[vr])?$")

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.cleans_up = cleans_up(tokenizer)
        self.waiting: list[int] = []  # tokens that are not decoded yet
        self.drafted = False  # who chose the newest token
        self.window: list[int] = []  # the newest decoded tokens
        self.shown = 0  # characters of the window's text
        self.uncleaned = ""  # decoded text that ends in open spaces

    def add(self, tokens: list[int], drafted: int) -> list[tuple[str, bool]]:
        """(text, whether it was drafted) of the next tokens, of which the first `drafted` were."""
        parts = []
        for i, token in enumerate(tokens):
            if not self._is_text(token):
                continue
            if not self._is_byte(token):
                parts.append(self._settle())
            self.waiting.append(token)
            self.drafted = i < drafted
            if not self._is_byte(token):
                parts.append(self._settle())
        return _joined(parts)

    def finish(self) -> list[tuple[str, bool]]:
        """What still waited when the text ended: half a character is shown as the tokenizer shows it."""
        return _joined([self._settle(last=True)])

    def _settle(self, last: bool = False) -> tuple[str, bool]:
        """The text that the waiting tokens settle, and who chose the newest of them."""
        if self.waiting or last:
            self.window += self.waiting
            self.waiting = []
            text = self._decode(self.window)
            half = text.endswith("\ufffd") and not last
            end = len(text) - half
            self.uncleaned, self.shown = self.uncleaned + text[self.shown : end], end
            self._move_window(unshown=int(half))
        held = self.OPEN_SPACES.search(self.uncleaned) if self.cleans_up and not last else None
        end = len(self.uncleaned) if held is None else held.start()
        settled, self.uncleaned = self.uncleaned[:end], self.uncleaned[end:]
        return self.tokenizer.clean_up_tokenization(settled) if self.cleans_up else settled, self.drafted

    def _move_window(self, unshown: int):
        """Keep the newest tokens as context; they decode alike from here on, whatever was before them."""
        start = len(self.window) - self.CONTEXT
        while start > 0 and self._is_byte(self.window[start]):
            start -= 1
        if start >= self.CONTEXT:
            self.window = self.window[start:]
            self.shown = len(self._decode(self.window)) - unshown

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _is_text(self, token: int) -> bool:
        """Whether a token can add to the text; special ones do not, nor those that pad the vocabulary."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        skipped = not self._decode([token]) and self.tokenizer.decode([token])
        return name is not None and not skipped

    def _is_byte(self, token: int) -> bool:
        return self.BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or "") is not None


def _joined(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Neighbors of one kind together, without empty ones."""
    groups = itertools.groupby((part for part in parts if part[0]), key=lambda part: part[1])
    return [("".join(text for text, _ in group), drafted) for drafted, group in groups]


class DraftStreamer:
    """A streamer that shows the text as it comes; a piece is one round: draft tokens, then the target's own.

    Only the last round can end on a drafted token, so each piece waits for the next one, and the last for `finish`,
    without which an answer is not complete.

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
            self._show(self.text.add(self.waiting, len(self.waiting) - 1))
        self.waiting = value.flatten().tolist()

    def end(self):
        pass

    def finish(self, speculation: Speculation):
        """Show the rest, given the statistics of the call."""
        self._show(self.text.add(self.waiting, speculation.accepted[0][-1] if speculation.accepted[0] else 0))
        self._show(self.text.finish())

    def _show(self, parts: list[tuple[str, bool]]):
        for text, by_drafter in parts:
            self.show(text, by_drafter)
