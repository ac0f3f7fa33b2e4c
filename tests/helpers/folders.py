"""Folders of tiny targets with a tokenizer, and the command line as users start it."""

import json
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny import tiny_target

TEMPLATE = "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}"


def tiny_tokenizer(words: int, specials=("<pad>", "<start>", "<end>"), template: str | None = TEMPLATE):
    vocabulary = {token: i for i, token in enumerate([*specials, *(f"w{i}" for i in range(words - len(specials)))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", additional_special_tokens=list(specials[1:]), eos_token="<end>"
    )
    wrapped.chat_template = template
    return wrapped


def save_target(folder: Path, family: str = "llama", words: int = 90, tokenizer=None, **overrides):
    target = tiny_target(family, num_hidden_layers=8, **overrides)
    target.save_pretrained(folder)
    (tokenizer or tiny_tokenizer(words)).save_pretrained(folder)
    return target


def dflash_hub(*arguments, cwd=None):
    command = [sys.executable, "-m", "dflash_hub", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


def prompts_of(count: int, turns: int = 1) -> list[dict]:
    return [
        {
            "id": f"p-{i}",
            "messages": [{"role": "user", "content": " ".join(f"w{(7 * i + j + t) % 80}" for j in range(2 + i % 5))} for t in range(turns)],
        }
        for i in range(count)
    ]  # fmt: skip


def write_prompts(path, count: int):
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts_of(count)))
    return path
