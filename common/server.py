"""A client for OpenAI-compatible servers."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field


@dataclass
class Continuation:
    """How a server continued a text; times are seconds on the client's clock.

    Attributes:
        ids: the new tokens, None where the server returns text alone.
        counted: tokens by the server's count.
        timings: what llama.cpp reports of the request: tokens, draft tokens, accepted ones.
    """

    text: str = ""
    ids: list[int] | None = None
    counted: int | None = None
    seconds: float = 0.0
    first_token: float = float("nan")
    timings: dict = field(default_factory=dict)


class Server:
    """An OpenAI-compatible server.

    Args:
        url: with or without `/v1`.
        model: the name it serves; None asks the server, which must serve one.
    """

    def __init__(self, url: str, model: str | None, timeout: float = 600):
        self.root = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        served = self._served()
        self.is_llamacpp = any(entry.get("owned_by") == "llamacpp" for entry in served)
        self.model = model or self._only([entry["id"] for entry in served])

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

    def _served(self) -> list[dict]:
        answer = self.request("/v1/models")
        served = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(served, list) or not all(isinstance(entry, dict) and "id" in entry for entry in served):
            raise ValueError(f"{self.root}/v1/models lists no models: {str(answer)[:300]}")
        return served

    def _only(self, names: list[str]) -> str:
        if len(names) != 1:
            raise ValueError(f"{self.root} serves {names}; say which with --model.")
        return names[0]

    def _events(self, path: str, body: dict):
        """Yield the JSON objects of a streamed answer."""
        with self._open(path, body) as response:
            for line in response:
                if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[5:])

    def continue_ids(self, ids: list[int], max_new_tokens: int) -> Continuation:
        """Continue a text greedily, given as tokens: nothing depends on the server's tokenizer or template then.

        llama.cpp's own endpoint returns tokens and timings; it is told not to take the prompt from its cache, since every
        method pays for its prefill.
        """
        body = {"prompt": ids, "temperature": 0.0, "stream": True}
        if self.is_llamacpp:
            path = "/completion"
            body |= {"n_predict": max_new_tokens, "return_tokens": True, "cache_prompt": False}
        else:
            path = "/v1/completions"
            body |= {"model": self.model, "max_tokens": max_new_tokens, "stream_options": {"include_usage": True}}
        done, start = Continuation(ids=[] if self.is_llamacpp else None), time.perf_counter()
        for event in self._events(path, body):
            if "error" in event:
                raise ValueError(f"{self.root}{path}: {str(event['error'])[:300]}")
            piece = (
                event["content"] if self.is_llamacpp else "".join(c.get("text") or "" for c in event.get("choices", []))
            )
            if (piece or event.get("tokens")) and done.first_token != done.first_token:
                done.first_token = time.perf_counter() - start
            done.text += piece
            if self.is_llamacpp:
                done.ids += event.get("tokens") or []
                done.timings = event.get("timings") or done.timings
            elif event.get("usage"):
                done.counted = event["usage"]["completion_tokens"]
        done.seconds = time.perf_counter() - start
        done.counted = done.timings.get("predicted_n", done.counted)
        if done.counted is None:
            raise ValueError(f"{self.root} reports no usage for streams, so tokens cannot be counted.")
        return done

    def complete(
        self, messages: list[dict], max_new_tokens: int, temperature: float, tools: list[dict] | None = None
    ) -> tuple[int, float, float]:
        """(new tokens, seconds, seconds to the first) of one streamed answer."""
        body = {
            "model": self.model, "messages": messages, "max_tokens": max_new_tokens, "temperature": temperature,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body |= {"tools": tools} if tools else {}
        start, first, tokens = time.perf_counter(), None, None
        for event in self._events("/v1/chat/completions", body):
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
