"""A client for OpenAI-compatible servers."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request


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
