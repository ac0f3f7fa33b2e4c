"""Measure a running engine (vLLM, SGLang, anything with OpenAI's API) at several concurrencies, by streaming requests."""

import http.client
import json
import os
import re
import statistics
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..hub_files import write_text
from .bench import environment, progress_bar

# Counters that say how much was accepted: tokens accepted and drafts made, by engine.
COUNTERS = {
    "vllm": ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"),
}
# SGLang exports the mean acceptance length itself.
GAUGES = ("sglang:spec_accept_length",)


class Server:
    """An OpenAI-compatible server.

    Args:
        url: with or without `/v1`.
        model: the name it serves; None asks the server, which must serve one.
    """

    def __init__(self, url: str, model: str | None, timeout: float = 600):
        self.root = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self.model = model or self._only_model()

    def _open(self, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.root + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"{self.root}{path} answered {error.code}: {error.read()[:300].decode(errors='replace')}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"no server answers at {self.root}: {error}") from None

    def request(self, path: str, body: dict | None = None) -> dict:
        """The server's JSON answer; ValueError says what it answered instead."""
        with self._open(path, body) as response:
            text = response.read()
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(f"{self.root}{path} answered no JSON: {text[:300].decode(errors='replace')!r}") from None

    def _only_model(self) -> str:
        answer = self.request("/v1/models")
        try:
            names = [entry["id"] for entry in answer["data"]]
        except (KeyError, TypeError):
            raise ValueError(f"{self.root}/v1/models lists no models: {str(answer)[:300]}") from None
        if len(names) != 1:
            raise ValueError(f"{self.root} serves {names}; say which with --model.")
        return names[0]

    def complete(self, messages: list[dict], max_new_tokens: int, temperature: float) -> tuple[int, float, float]:
        """(new tokens, seconds, seconds to the first) of one streamed answer."""
        body = {
            "model": self.model, "messages": messages, "max_tokens": max_new_tokens, "temperature": temperature,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        start, first, tokens = time.perf_counter(), None, None
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[5:])
                if first is None and any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
                    first = time.perf_counter() - start
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        if tokens is None:
            raise ValueError(f"{self.root} reports no usage for streams, so tokens cannot be counted.")
        return tokens, time.perf_counter() - start, first if first is not None else float("nan")

    def metrics(self) -> dict[str, float]:
        """The server's Prometheus metrics, summed over labels; empty where it offers none."""
        try:
            with self._open("/metrics") as response:
                text = response.read().decode(errors="replace")
        except ValueError:
            return {}
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})?\s+([-+.\deE]+)\s*$", text, re.M):
            found[name] = found.get(name, 0.0) + float(value)
        return found


def acceptance_length(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Mean acceptance length between two readings, the target's own token included; None where the server does not say."""
    for accepted, drafts in COUNTERS.values():
        rounds = after.get(drafts, 0) - before.get(drafts, 0)
        if rounds > 0:
            return 1 + (after.get(accepted, 0) - before.get(accepted, 0)) / rounds
    return next((after[name] for name in GAUGES if name in after), None)


def measure_server(
    output: Path,
    server: Server,
    sets: list,
    concurrency: list[int],
    max_new_tokens: int,
    temperature: float,
    command: str,
) -> str:
    """Run every set at every concurrency; writes `server.json` and `server.md`, returns the table.

    Each level starts with as many warm-up requests as it has slots, which are not counted.
    """
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("requests", total=len(concurrency) * sum(len(prompts) for _, prompts in sets))
        for name, level, prompts in [(name, level, prompts) for name, prompts in sets for level in concurrency]:
            bar.update(task, description=f"{name}, {level} at a time"[:40])
            messages = [row["messages"][:1] for row in prompts]

            def answer(message):
                done = server.complete(message, max_new_tokens, temperature)
                bar.advance(task)
                return done

            with ThreadPoolExecutor(level) as pool:
                list(pool.map(lambda m: server.complete(m, 8, temperature), (messages * level)[:level]))
                before, start = server.metrics(), time.perf_counter()
                answers = list(pool.map(answer, messages))
                seconds = time.perf_counter() - start
            tokens = sum(answer[0] for answer in answers)
            rows.append(
                {
                    "set": name, "concurrency": level, "requests": len(answers), "tokens": tokens,
                    "tokens_per_second": tokens / seconds, "first_token": statistics.median(a[2] for a in answers),
                    "acceptance_length": acceptance_length(before, server.metrics()),
                }
            )  # fmt: skip
    lines = [
        "| set | concurrency | requests | tokens/s | first token, median | acceptance length |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        length = "not reported" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
        lines.append(
            f"| {row['set']} | {row['concurrency']} | {row['requests']} | {row['tokens_per_second']:.1f} | "
            f"{row['first_token']:.3f} s | {length} |"
        )
    # Of the client; what the server runs, only the server knows.
    origin = {"command": command, "server": server.root, "model": server.model, **environment()}
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "server.json", json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n")
    text = "\n".join(lines) + (
        f"\n\n`{command}`, {server.model} at {server.root}, {origin['date']}; client: commit {origin['commit']}, Python "
        f"{origin['python']}, {origin['device']}\n"
    )
    write_text(output / "server.md", text)
    return text
