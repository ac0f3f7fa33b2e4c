"""`dflash-hub generate`: a target with its drafter writes one answer, or the turns of a chat, as a Unix tool does."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..common.chat import in_mode, own_turn
from ..common.loading import end_tokens
from ..common.target_source import TargetSource
from ..decode_statistics import Speculation
from ..target_cache import cached_length
from ..target_model import CACHE
from .pair import DraftStreamer, Pair

DRAFTED, RESET = "\x1b[32m", "\x1b[0m"  # of a terminal


@dataclass
class Answer:
    """What one turn gave.

    Args:
        finish_reason: "stop" where the target ended its text, "length" where the limit did.
        reused_tokens: of the prompt, those that the cache of an earlier turn held.
        seconds: of the call of `generate`.
    """

    prompt: str
    text: str
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    seconds: float
    speculation: Speculation

    def as_json(self) -> str:
        """One line; the acceptance length is null where there was no round."""
        fields = asdict(self)
        speculation = fields.pop("speculation")
        fields["tokens_per_second"] = self.new_tokens / self.seconds
        fields["acceptance_length"] = self.speculation.tau if self.speculation.acceptance_lengths[0] else None
        fields |= {name: speculation[name] for name in ("target_passes", "drafter_passes")}
        fields |= {name: speculation[name][0] for name in ("acceptance_lengths", "drafted", "accepted")}
        return json.dumps(fields, ensure_ascii=False)

    def as_line(self) -> str:
        counts = f"{self.new_tokens} tokens in {self.speculation.target_passes} forward passes of the target"
        length = f" (acceptance length {self.speculation.tau:.2f})" if self.speculation.acceptance_lengths[0] else ""
        return f"{counts}{length}, {self.seconds:.2f} s, {self.new_tokens / self.seconds:.1f} tokens/s"


class Conversation:
    """A chat whose turns go on with the target's cache, and the drafter's context that is kept with it.

    The chat's tokens are made by the template each turn. Where they do not begin with those in the cache (a template that
    drops what the model thought, for one), the cache is dropped and all is read again: the text is the same.

    Args:
        raw: the prompt is the text itself, without a chat template; for one turn.
        template: keyword arguments of the chat template, such as `enable_thinking`.
        settings: keyword arguments of `generate`.
    """

    def __init__(self, pair: Pair, system: str | None, raw: bool, template: dict, settings: dict):
        self.pair, self.raw, self.template, self.settings = pair, raw, template, settings
        self.messages = [{"role": "system", "content": system}] if system else []
        self.cache = None
        self.ids = torch.empty(1, 0, dtype=torch.long, device=pair.device)  # (1, text), of the last turn

    def ask(self, prompt: str, streamer: DraftStreamer | None = None) -> Answer:
        """Answer one turn; a turn that fails or is interrupted leaves the chat as it was, without the cache.

        Raises:
            ValueError: an empty prompt, one that leaves the target no position for an answer, or one that its tokenizer
                cannot read.
        """
        if not prompt.strip():
            raise ValueError("the prompt is empty; pass it as an argument, in a --file, or on standard input.")
        messages = [*self.messages, {"role": "user", "content": prompt}]
        inputs = self._read(messages)
        ids = inputs["input_ids"]  # (1, prompt)
        settings = self.pair.fitting(self.settings, inputs)

        cache, self.cache = self.cache, None
        held = cached_length(cache)
        goes_on = 0 < held < ids.shape[1] and torch.equal(ids[:, :held], self.ids[:, :held])
        start = time.perf_counter()
        output = self.pair.target.generate(
            **inputs, **({CACHE: cache} if goes_on else {}), **settings,
            assistant_model=self.pair.drafter, streamer=streamer, return_dict_in_generate=True,
        )  # fmt: skip
        new = output.sequences[0, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - start

        if streamer is not None:
            streamer.finish(output.speculation)
        text = self.pair.tokenizer.decode(new, skip_special_tokens=True)
        if not self.raw:
            self.messages = [*messages, own_turn(self.pair.tokenizer, messages, new, self.pair.settings(self.template))]
        self.cache, self.ids = output[CACHE], output.sequences
        ended = new[-1] in end_tokens(self.pair.target)
        reused = held if goes_on else 0
        return Answer(
            prompt, text, "stop" if ended else "length", ids.shape[1], reused, len(new), seconds, output.speculation
        )

    def _read(self, messages: list[dict[str, str]]):
        try:
            if self.raw:
                return self.pair.tokenizer(messages[-1]["content"], return_tensors="pt").to(self.pair.device)
            return self.pair.encode(messages, **self.template)
        except Exception as error:  # tokenizers raise no narrower class, templates their own
            raise ValueError(f"the target's tokenizer cannot read the prompt: {error}") from error


def run(
    prompts: list[str],
    file: Path | None,
    chat: bool,
    target: TargetSource | None,
    drafter: str | None,
    system: str | None,
    raw: bool,
    thinking: bool | None,
    max_new_tokens: int,
    sampling: dict,
    seed: int,
    dtype: str,
    as_json: bool,
    quiet: bool,
    chat_template: str | None = None,
):
    """Answers on standard output, everything else on standard error."""
    interactive = not prompts and file is None and sys.stdin.isatty()
    if not (chat or interactive):
        prompts = prompts or [_read(file)]
        if not all(prompt.strip() for prompt in prompts):
            raise ValueError("the prompt is empty; pass it as an argument, in a --file, or on standard input.")
    pair = Pair(target, drafter, dtype, chat_template)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": bool(sampling)} | sampling
    conversation = Conversation(pair, system, raw, in_mode(thinking), settings)
    torch.manual_seed(seed)
    if interactive:
        print("Ctrl-D ends, Ctrl-C stops an answer", file=sys.stderr)
    for prompt in _lines(interactive) if chat or interactive else prompts:
        streamer = None if as_json else DraftStreamer(pair.tokenizer, _write)
        try:
            answer = conversation.ask(prompt, streamer)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\nstopped", file=sys.stderr)
            continue
        print(answer.as_json() if as_json else "", flush=True)
        if not quiet and not as_json:
            print(answer.as_line(), file=sys.stderr)


def _read(file: Path | None) -> str:
    return (sys.stdin.read() if file in (None, Path("-")) else file.read_text(encoding="utf-8")).removesuffix("\n")


def _lines(interactive: bool) -> Iterator[str]:
    """Turns of a chat, a line each; blank lines are none."""
    while True:
        try:
            if interactive:
                print("> ", end="", file=sys.stderr, flush=True)  # not among the answers
            line = input()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(file=sys.stderr)
            continue
        if line.strip():
            yield line


def _write(text: str, drafted: bool):
    sys.stdout.write(f"{DRAFTED}{text}{RESET}" if drafted and sys.stdout.isatty() else text)
    sys.stdout.flush()
