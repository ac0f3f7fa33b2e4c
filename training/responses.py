"""`dflash-hub regenerate`: the target answers prompts in its own words, which are what a drafter has to learn.

A folder of responses holds `settings.json` (which target, template, thinking mode and sampling), `responses.jsonl` and, where
there are some, `failures.jsonl`. 0.1.0 named file and field `answers.jsonl` and `answer_ids`; both are read. A row is one response:

    {"id": "gsm8k-17", "turn": 0, "prompt_ids": [...], "response_ids": [...], "messages_sha256": "..."}

with the exact token ids, so the boundary between prompt and answer is exact. `prompt_ids` of a later turn hold the whole
conversation so far, the target's own answers in it. An answer that does not end with an end token was cut at the limit.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from transformers import Cache, GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from ..common.chat import encode, turns_of
from ..common.console import SteadyProgress
from ..common.files import json_lines, read_json, repeated
from ..common.identity import same_target, template_fingerprint
from ..common.loading import cut_at_end, end_tokens, left_padded, pad_token
from ..common.server import Server
from ..decode_choice import SCORES_ONLY
from ..decode_settings import refuse_unsupported, resolve_generation_config
from ..hub_files import write_text
from ..target_model import CACHE, contiguous_head
from .forecast import forecast_answers


@dataclass
class PreparedCall:
    """What `generate` makes of a call and the target's generation config, before its first forward pass."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    cache: Cache | None

    @classmethod
    @torch.no_grad()
    def of(cls, target, prompts: list[list[int]], pad: int = 0, **settings) -> "PreparedCall":
        """Prepare `target.generate(**settings)` for `prompts`, left-padded.

        Raises:
            ValueError: what generation with a drafter refuses, so that its rounds could not give such an answer.
        """
        call = settings | left_padded(prompts, pad, target.device)
        refuse_unsupported(target, *resolve_generation_config(target, target.generate, call), call)

        def prepared(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            return cls(logits_processor, stopping_criteria, generation_config, model_kwargs.get(CACHE))

        return target.generate(**call, custom_generate=prepared)


# Fields of a generation config that decide a greedy text, beside its end tokens, and the values that change nothing.
TEXT_FIELDS = {
    "repetition_penalty": (None, 1.0), "encoder_repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0), "bad_words_ids": (None,), "sequence_bias": (None,), "min_length": (None, 0),
    "min_new_tokens": (None, 0), "forced_bos_token_id": (None,), "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,), "suppress_tokens": (None, []), "begin_suppress_tokens": (None, []),
    "guidance_scale": (None, 1), "watermarking_config": (None,), "remove_invalid_values": (None, False),
}  # fmt: skip


def text_settings(target) -> dict:
    """What the target's generation config adds to greedy decoding, by field; as JSON gives it back."""
    stated = json.loads(target.generation_config.to_json_string(use_diff=False))
    return {name: stated[name] for name, neutral in TEXT_FIELDS.items() if stated.get(name) not in neutral}


class LocalTarget:
    """Answers by the target in this process, in left-padded batches.

    Where a logits processor looks at the text (`no_repeat_ngram_size`, `min_length`), padding would be text to it, so
    prompts of one length are answered together.

    Args:
        sampling: arguments of `generate`, such as `{"do_sample": False}`.
    """

    def __init__(self, target, tokenizer, max_new_tokens: int, sampling: dict, batch_size: int):
        self.target = target
        self.batch_size = batch_size
        self.settings, self.limit = {"max_new_tokens": max_new_tokens, **sampling}, max_new_tokens
        self.ends, self.pad = end_tokens(target), pad_token(target, tokenizer)

    @torch.no_grad()
    def tokens_per_second(self, prompts: list[list[int]], tokens: int) -> float:
        """Measure how fast prompts are answered, the prefill included, on at most so many tokens for each."""
        inputs = left_padded(prompts, self.pad, self.target.device)
        start = time.perf_counter()
        output = self.target.generate(**inputs, **self.settings | {"max_new_tokens": min(tokens, self.limit)})
        new = output[:, inputs["input_ids"].shape[1] :].tolist()  # also waits for the device
        return sum(len(cut_at_end(row, self.ends)) for row in new) / (time.perf_counter() - start)

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], seed: int) -> list[list[int] | Exception]:
        """Answer ids of each prompt, the end token included where the target wrote one.

        Raises:
            ValueError: the target's generation config asks for what generation with a drafter refuses.
        """
        call = PreparedCall.of(self.target, prompts, self.pad, **self.settings)
        alone = not all(type(processor) in SCORES_ONLY for processor in call.processors)
        torch.manual_seed(seed)
        answers = {}
        for length in sorted(set(map(len, prompts))) if alone else [None]:
            chosen = [i for i, prompt in enumerate(prompts) if length in (None, len(prompt))]
            inputs = left_padded([prompts[i] for i in chosen], self.pad, self.target.device)
            with contiguous_head(self.target):
                output = self.target.generate(**inputs, **self.settings)
            new = output[:, inputs["input_ids"].shape[1] :].tolist()
            answers |= {i: cut_at_end(row, self.ends) for i, row in zip(chosen, new)}
        return [answers[i] for i in range(len(prompts))]


class RemoteTarget:
    """Answers by any OpenAI-compatible server, from token ids and, where the server gives them, to token ids.

    `retokenized` counts the answers that came as text only: their ids are the tokenizer's reading of that text.
    """

    def __init__(self, server: Server, tokenizer, max_new_tokens: int, sampling: dict, batch_size: int):
        self.server, self.tokenizer, self.batch_size = server, tokenizer, batch_size
        self.limit = max_new_tokens
        self.settings = {"max_tokens": max_new_tokens, "temperature": sampling.get("temperature", 0.0)}
        self.settings |= {name: sampling[name] for name in ("top_p", "top_k") if name in sampling}
        self.retokenized = 0

    def tokens_per_second(self, prompts: list[list[int]], tokens: int) -> None:
        """A server is not asked for what nobody wants to keep."""

    def answer(self, prompts: list[list[int]], seed: int) -> list[list[int] | Exception]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self._one(ids, seed), prompts))

    def _one(self, prompt_ids: list[int], seed: int) -> list[int] | Exception:
        body = {
            "model": self.server.model, "prompt": prompt_ids, "seed": seed, "return_token_ids": True, **self.settings
        }  # fmt: skip
        try:
            answer = self.server.request("/v1/completions", body)
            choice = answer["choices"][0]
            if choice.get("token_ids"):
                return [int(token) for token in choice["token_ids"]]
            text = choice["text"]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, OSError, HTTPException) as error:
            return error
        except (KeyError, IndexError, TypeError, AttributeError):
            return ValueError(f"the server answered {str(answer)[:200]}, without a choice that has a text")
        self.retokenized += 1
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        end = self.tokenizer.eos_token_id
        ended = choice.get("finish_reason") == "stop" and end is not None and ids[-1:] != [end]
        return ids + [end] * ended


def regenerate(
    output: Path,
    source: LocalTarget | RemoteTarget,
    tokenizer,
    prompts: list[dict],
    settings: dict,
    thinking: bool | None = None,
    max_prompt_tokens: int = 2048,
    seed: int = 0,
    left_out: list[dict] = (),
) -> dict:
    """Answer what `output` does not hold yet, turn by turn; safe to interrupt at any time.

    Args:
        prompts: rows {"id", "messages", "tools" where there are some}.
        settings: what defines the answers; a folder made with others is refused.
        left_out: rows {"id", "turn", "reason"} that are not among the prompts, to be listed with those that fail.

    Returns:
        Counts: answers, answer tokens, failures.
    """
    if not prompts:
        raise ValueError("there is no prompt to answer.")
    if again := repeated(row["id"] for row in prompts):
        raise ValueError(f"several prompts have the id {again[0]!r}, so their answers could not be told apart.")
    _open_folder(output, settings)
    path = responses_file(output)
    drop_cut_line(path)
    kept = read_responses(path)
    answers = {(row["id"], row["turn"]): row["response_ids"] for row in kept}
    turns = {row["id"]: turns_of(row["messages"]) for row in prompts}
    check_same_prompts(output, kept, prompts, turns)
    failures = list(left_out)
    rows = list(prompts)
    random.Random(seed).shuffle(rows)  # so that an interrupted run holds a fair sample

    first = due_prompts(rows, turns, 0, answers, tokenizer, thinking, max_prompt_tokens, [])
    if first:
        batches = [[ids for _, ids in batch] for batch in batches_by_length(first, source.batch_size)]
        print(forecast_answers(source, batches, output), flush=True)

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "[{task.fields[speed]:.0f} tokens/s]",
               TimeRemainingColumn())  # fmt: skip
    with (
        path.open("a", encoding="utf-8") as file,
        SteadyProgress(*[TextColumn(c) if isinstance(c, str) else c for c in columns]) as bar,
    ):
        for turn in range(max(map(len, turns.values()))):
            due = due_prompts(rows, turns, turn, answers, tokenizer, thinking, max_prompt_tokens, failures)
            task = bar.add_task(f"turn {turn + 1}", total=len(due), speed=0.0)
            tokens = 0
            for batch in batches_by_length(due, source.batch_size):
                results = source.answer([ids for _, ids in batch], seed + len(answers))
                for (prompt, prompt_ids), ids in zip(batch, results):
                    row_id = prompt["id"]
                    if isinstance(ids, Exception) or not ids:
                        failures.append({"id": row_id, "turn": turn, "reason": f"no answer: {ids}"})
                        continue
                    answers[row_id, turn] = ids
                    tokens += len(ids)
                    row = {"id": row_id, "turn": turn, "prompt_ids": prompt_ids, "response_ids": ids}
                    row["messages_sha256"] = messages_digest(prompt, turn)
                    file.write(json.dumps(row, separators=(",", ":")) + "\n")
                file.flush()
                bar.update(task, speed=tokens / max(bar.tasks[task].elapsed or 0, 1e-9))
                bar.advance(task, len(batch))
    if failures or (output / "failures.jsonl").exists():
        write_text(output / "failures.jsonl", "".join(json.dumps(failure) + "\n" for failure in failures))
    return {
        "answers": len(answers), "answer_tokens": sum(len(ids) for ids in answers.values()), "failures": len(failures)
    }  # fmt: skip


def check_same_prompts(output: Path, kept: list[dict], prompts: list[dict], turns: dict[str, list]):
    """Refuse a folder that holds an answer to another prompt under the id of one of these.

    Raises:
        ValueError: names the id.
    """
    by_id = {row["id"]: row for row in prompts}
    for row in kept:
        if row["turn"] >= len(turns.get(row["id"], [])):
            continue
        if row.get("messages_sha256") not in (None, messages_digest(by_id[row["id"]], row["turn"])):
            raise ValueError(
                f"{output} holds an answer to another prompt with the id {row['id']!r}; pass another --output, or "
                "give the prompts ids of their own."
            )


def due_prompts(
    rows: list[dict], turns: dict[str, list], turn: int, answers: dict, tokenizer, thinking: bool | None,
    max_prompt_tokens: int, failures: list[dict],
) -> list[tuple[dict, list[int]]]:  # fmt: skip
    """List the prompts without an answer to this turn, each with its token ids; what cannot be asked is added to `failures`."""
    due = []
    for row in rows:
        if turn >= len(turns[row["id"]]) or (row["id"], turn) in answers:
            continue
        earlier = [None if before.kept else (row["id"], t) for t, before in enumerate(turns[row["id"]][:turn])]
        if not all(key is None or key in answers for key in earlier):
            failures.append({"id": row["id"], "turn": turn, "reason": "an earlier turn has no answer"})
            continue
        try:
            history = [None if key is None else answers[key] for key in earlier]
            prompt_ids = encode(tokenizer, row, history, thinking)
        except Exception as error:  # templates raise what they like; the row is listed and the others go on
            failures.append({"id": row["id"], "turn": turn, "reason": f"{type(error).__name__}: {error}"})
            continue
        if len(prompt_ids) > max_prompt_tokens:
            failures.append(
                {"id": row["id"], "turn": turn, "reason": f"{len(prompt_ids)} prompt tokens, over the limit of "
                 f"{max_prompt_tokens}"}
            )  # fmt: skip
            continue
        due.append((row, prompt_ids))
    return due


def messages_digest(row: dict, turn: int) -> str:
    """Of what the data has up to a turn; a template may write more, such as the date."""
    said = [m for past in turns_of(row["messages"])[: turn + 1] for m in (*past.messages, *past.kept)]
    plain = all(message.keys() == {"role", "content"} and message["role"] == "user" for message in said)
    parts = [message["content"] for message in said] if plain and not row.get("tools") else [said, row.get("tools")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def batches_by_length(rows: list[tuple], batch_size: int):
    """Batches of rows with prompts of similar length, so that little is padding; the order stays random at large."""
    window = 8 * batch_size
    for start in range(0, len(rows), window):
        part = sorted(rows[start : start + window], key=lambda row: len(row[1]))
        for first in range(0, len(part), batch_size):
            yield part[first : first + batch_size]


def responses_file(folder: Path) -> Path:
    """Return the file of responses in a folder of `regenerate`; one of 0.1.0 goes on under its name."""
    earlier = folder / "answers.jsonl"
    return earlier if earlier.exists() else folder / "responses.jsonl"


def responses_at(source: str) -> Path:
    """Return the file of responses that a folder of `regenerate`, or the file itself, stands for."""
    path = Path(source)
    return responses_file(path) if path.is_dir() else path


def read_responses(path: Path, prompts: dict[str, dict] | None = None, tokenizer=None, thinking=None) -> list[dict]:
    """All rows of a file of answers, see `iterate_responses`; none where there is no file."""
    return list(iterate_responses(path, prompts, tokenizer, thinking)) if path.exists() else []


def iterate_responses(
    path: Path, prompts: dict[str, dict] | None = None, tokenizer=None, thinking=None, with_prompts: bool = True
) -> Iterator[dict]:
    """Rows of a file of answers, one at a time. The last line may have been cut by an interruption, or be in the writing: it is left out.

    Args:
        prompts: rows by id, for files that name prompts without repeating them; with the target's tokenizer.
        with_prompts: False where only the responses are looked at, so that their prompts may be nowhere.

    Raises:
        ValueError: a row of another form, or a prompt that is nowhere; names the line.
    """
    lines = json_lines(path)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if next(lines, None) is None:  # an interruption, or somebody who writes just now
                break
            around = line[max(0, error.pos - 40) : error.pos + 40]
            raise ValueError(f"{path}, line {number}: expected a row of JSON, got {around!r} ({error.msg}).") from None
        if isinstance(row, dict) and "answer_ids" in row:  # as 0.1.0 wrote it
            row.setdefault("response_ids", row.pop("answer_ids"))
        if not isinstance(row, dict) or "id" not in row or "response_ids" not in row:
            found = f"the fields {sorted(row)}" if isinstance(row, dict) else repr(line[:80])
            raise ValueError(f"{path}, line {number}: expected a row with `id` and `response_ids`, got {found}.")
        row["id"] = str(row["id"])
        row.setdefault("turn", 0)
        if "prompt_ids" not in row and with_prompts:
            if prompts is None or row["id"] not in prompts or row["turn"]:
                raise ValueError(
                    f"{path}, line {number}: row {row['id']!r} has no `prompt_ids`, and its prompt is not among --prompts; "
                    "pass the file that it came from."
                )
            row["prompt_ids"] = encode(tokenizer, prompts[row["id"]], [], thinking)
        for name in ("prompt_ids", "response_ids") if with_prompts else ("response_ids",):
            # An empty response is one that is left out of training, and counted there.
            if (wrong := not_ids(row[name])) and (name, row[name]) != ("response_ids", []):
                raise ValueError(f"{path}, line {number}: `{name}` must be token ids, got {wrong}.")
        yield row


def not_ids(value) -> str | None:
    """Say what keeps a value from being token ids, None where it is some."""
    if not isinstance(value, list) or not value:
        return repr(value)[:80]
    odd = next((i for i, token in enumerate(value) if type(token) is not int or token < 0), None)
    return None if odd is None else f"{repr(value[odd])[:80]} at place {odd}"


def drop_cut_line(path: Path):
    """Remove what an interruption left of a line, so that the next one is not glued to it. For the writer only."""
    text = path.read_bytes() if path.exists() else b""
    if text and not text.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)


def response_settings(target: str, identity: dict | None, tokenizer, thinking: bool | None, generation: dict) -> dict:
    """What defines a folder of answers."""
    return {
        "target": target,
        "identity": identity,
        "template": template_fingerprint(tokenizer),
        "thinking": thinking,
        "generation": generation,
    }


def _open_folder(output: Path, settings: dict):
    path = output / "settings.json"
    settings = json.loads(json.dumps(settings))
    if path.exists():
        before = read_json(path)
        changed = [name for name in settings if before.get(name) != settings[name]]
        if before.get("identity") and settings["identity"] and same_target(before["identity"], settings["identity"]):
            changed = [name for name in changed if name not in ("identity", "target")]  # another path to it
        if changed:
            raise ValueError(
                f"{output} holds answers made with other {', '.join(changed)}: found {[before.get(n) for n in changed]}, now "
                f"{[settings[n] for n in changed]}. Resume with the same, or pass another --output."
            )
        return
    output.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(settings, indent=1) + "\n")
