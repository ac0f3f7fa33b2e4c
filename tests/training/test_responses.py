"""`dflash-hub regenerate`: the target's own answers, in process and from a server."""

import json
import sys
import threading
import types
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from dflash_hub.common.chat import encode
from dflash_hub.common.identity import identify, same_target
from dflash_hub.common.prompts import read_prompts
from dflash_hub.common.server import Server
from dflash_hub.training.responses import (
    LocalTarget,
    RemoteTarget,
    read_responses,
    regenerate,
    response_settings,
    text_settings,
)
from dflash_hub.training.train import other_text_settings
from helpers.folders import prompts_of, tiny_tokenizer
from helpers.tiny import tiny_target

END = 2  # <end>


@pytest.fixture(scope="module")
def target():
    model = tiny_target("llama")
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(90)


def run(folder, target, tokenizer, prompts, source=None, max_new_tokens=10, sampling=None, batch_size=4, **kwargs):
    sampling = sampling or {"do_sample": False}
    source = source or LocalTarget(target, tokenizer, max_new_tokens, sampling, batch_size)
    generation = {"max_new_tokens": max_new_tokens, **sampling}
    settings = response_settings("tiny", identify(target), tokenizer, None, generation)
    return regenerate(folder, source, tokenizer, prompts, settings, **kwargs)


def test_pitfall_81_answers_are_the_targets_greedy_text_with_exact_ids(tmp_path, target, tokenizer):
    counts = run(tmp_path, target, tokenizer, prompts_of(11))
    rows = read_responses(tmp_path / "responses.jsonl")
    assert counts["answers"] == len(rows) == 11 and counts["failures"] == 0
    assert counts["answer_tokens"] == sum(len(row["response_ids"]) for row in rows)
    ended = 0
    for row in rows:
        prompt = next(p for p in prompts_of(11) if p["id"] == row["id"])
        assert row["prompt_ids"] == encode(tokenizer, prompt, [], None)
        text = target.generate(torch.tensor([row["prompt_ids"]]), max_new_tokens=10, do_sample=False)
        assert text[0, len(row["prompt_ids"]) :].tolist() == row["response_ids"]
        ended += row["response_ids"][-1] == END
        assert END not in row["response_ids"][:-1]
    assert 0 < ended < 11


@pytest.mark.parametrize(
    "fields",
    [{"min_length": 9}, {"no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 3.0}, {"repetition_penalty": 1.5}],
)
def test_padding_is_no_text_to_the_processors_of_the_targets_generation_config(target, tokenizer, fields):
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15, 16], [17]]
    target.generation_config.update(**fields)
    try:
        found = LocalTarget(target, tokenizer, 10, {"do_sample": False}, 4).answer(prompts, 0)
        for prompt, answer in zip(prompts, found, strict=True):
            text = target.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)
            assert text[0, len(prompt) :].tolist() == answer
    finally:
        target.generation_config.update(**dict.fromkeys(fields))


def test_a_target_that_generation_with_a_drafter_refuses_answers_nothing(target, tokenizer):
    target.generation_config.num_beams = 3
    try:
        with pytest.raises(ValueError, match="num_beams=3"):
            LocalTarget(target, tokenizer, 10, {"do_sample": False}, 4).answer([[5, 6]], 0)
    finally:
        target.generation_config.num_beams = None


def test_what_the_targets_generation_config_adds_is_recorded(target):
    assert text_settings(target) == {}
    added = {"repetition_penalty": 1.2, "suppress_tokens": [3], "sequence_bias": [[[4], 2.0]], "min_new_tokens": 2}
    target.generation_config.update(**added, temperature=0.5)
    try:
        assert text_settings(target) == added
        here = text_settings(target)
        assert other_text_settings("a", {"generation": {"generation_config": added}}, here) is None
        note = other_text_settings("a", {"generation": {"generation_config": added | {"suppress_tokens": [5]}}}, here)
        assert "suppress_tokens=[5], here [3]" in note and "min_new" not in note
        assert "repetition_penalty=None, here 1.2" in other_text_settings("a", {"generation": {}}, here)
    finally:
        target.generation_config.update(**dict.fromkeys([*added, "temperature"]))


def test_later_turns_are_answered_on_the_models_own_history(tmp_path, target, tokenizer):
    prompts = prompts_of(3, turns=2)
    run(tmp_path, target, tokenizer, prompts)
    rows = {(row["id"], row["turn"]): row for row in read_responses(tmp_path / "responses.jsonl")}
    assert len(rows) == 6
    for prompt in prompts:
        first, second = rows[prompt["id"], 0], rows[prompt["id"], 1]
        ids = first["response_ids"]
        answer = tokenizer.decode(ids[:-1] if ids[-1] == END else ids)
        history = [prompt["messages"][0], {"role": "assistant", "content": answer}, prompt["messages"][1]]
        expected = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert second["prompt_ids"] == expected


def test_an_interrupted_run_continues_and_loses_no_row(tmp_path, target, tokenizer):
    class Interrupted(LocalTarget):
        calls = 0

        def answer(self, prompts, seed):
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().answer(prompts, seed)

    source = Interrupted(target, tokenizer, 10, {"do_sample": False}, 4)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, target, tokenizer, prompts_of(16), source)
    path = tmp_path / "responses.jsonl"
    assert len(read_responses(path)) == 8
    path.write_text(path.read_text() + '{"id": "p-9", "answer_')  # a line that was cut
    before = path.read_bytes()
    assert len(read_responses(path)) == 8 and path.read_bytes() == before, "a reader changes nothing"
    counts = run(tmp_path, target, tokenizer, prompts_of(16))
    assert counts["answers"] == 16 and len(read_responses(path)) == 16
    run(tmp_path / "whole", target, tokenizer, prompts_of(16))
    whole = {row["id"]: row["response_ids"] for row in read_responses(tmp_path / "whole" / "responses.jsonl")}
    assert {row["id"]: row["response_ids"] for row in read_responses(path)} == whole


def test_other_settings_and_repeated_ids_are_refused(tmp_path, target, tokenizer):
    run(tmp_path, target, tokenizer, prompts_of(2))
    with pytest.raises(ValueError, match=r"answers made with other generation.*pass another --output"):
        run(tmp_path, target, tokenizer, prompts_of(2), max_new_tokens=11)
    with pytest.raises(ValueError, match="other identity"):
        other = tiny_target("llama", seed=5)
        other.generation_config.eos_token_id = END
        run(tmp_path, other, tokenizer, prompts_of(2))
    with pytest.raises(ValueError, match="several prompts have the id 'p-0'"):
        run(tmp_path / "x", target, tokenizer, prompts_of(1) * 2)
    moved = response_settings(
        "elsewhere",
        identify(target) | {"name": "elsewhere"},
        tokenizer,
        None,
        {"max_new_tokens": 10, "do_sample": False},
    )
    source = LocalTarget(target, tokenizer, 10, {"do_sample": False}, 4)
    assert (
        regenerate(tmp_path, source, tokenizer, prompts_of(2), moved)["answers"] == 2
    )  # another path to the same target
    edited = prompts_of(2)
    edited[1]["messages"][0]["content"] += " w7"
    with pytest.raises(ValueError, match="holds an answer to another prompt with the id 'p-1'"):
        run(tmp_path, target, tokenizer, edited)


def test_failures_are_counted_and_listed(tmp_path, target, tokenizer):
    prompts = prompts_of(5)
    counts = run(tmp_path, target, tokenizer, prompts, max_prompt_tokens=6)
    failures = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert counts["failures"] == len(failures) > 0 and counts["answers"] + counts["failures"] == 5
    assert "prompt tokens, over the limit of 6" in failures[0]["reason"]
    assert run(tmp_path, target, tokenizer, prompts)["failures"] == 0
    assert (tmp_path / "failures.jsonl").read_text() == ""


def test_sampled_answers_differ_from_greedy_and_repeat_with_the_seed(tmp_path, target, tokenizer):
    sampling = {"do_sample": True, "temperature": 1.5}
    texts = []
    for name in ("a", "b"):
        run(tmp_path / name, target, tokenizer, prompts_of(6), sampling=sampling)
        texts.append((tmp_path / name / "responses.jsonl").read_text())
    run(tmp_path / "greedy", target, tokenizer, prompts_of(6))
    assert texts[0] == texts[1] != (tmp_path / "greedy" / "responses.jsonl").read_text()


def test_answers_without_prompts_are_joined_with_them_by_id(tmp_path, target, tokenizer):
    run(tmp_path, target, tokenizer, prompts_of(4))
    rows = read_responses(tmp_path / "responses.jsonl")
    compact = tmp_path / "compact.jsonl"
    compact.write_text("".join(json.dumps({"id": r["id"], "response_ids": r["response_ids"]}) + "\n" for r in rows))
    joined = read_responses(compact, {row["id"]: row for row in prompts_of(4)}, tokenizer)
    assert [row | {"messages_sha256": r["messages_sha256"]} for row, r in zip(joined, rows, strict=True)] == rows
    with pytest.raises(ValueError, match=r"compact.jsonl, line 1: row 'p-\d' has no `prompt_ids`"):
        read_responses(compact)
    compact.write_text('{"id": "p-0"}\n')
    with pytest.raises(ValueError, match="line 1: expected a row with `id` and `response_ids`"):
        read_responses(compact)
    compact.write_text(
        (tmp_path / "responses.jsonl").read_text().rstrip("\n")
    )  # complete, without a newline at the end
    assert read_responses(compact) == rows


def test_prompts_from_files_and_data_sets(tmp_path, monkeypatch):
    class Columns(list):
        column_names = ["question", "messages"]

    rows = [{"question": "a b", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}]
    fake = types.SimpleNamespace(load_dataset=lambda name, split: Columns(rows))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_prompts("org/set:train[:1]", "question") == [
        {"id": "org/set:train[:1]:question:0", "messages": [{"role": "user", "content": "a b"}]}
    ]
    assert read_prompts("org/set")[0]["messages"] == [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="has no column 'text' but"):
        read_prompts("org/set", "text")
    rows.append({"question": 5, "messages": [{"role": "assistant", "content": "y"}]})
    for column, rule in (("question", "`question`: expected text"), (None, "`messages`: expected a turn of a user")):
        with pytest.raises(ValueError, match=f"'org/set', row 1: {rule}"):
            read_prompts("org/set", column)


class FakeEngine(BaseHTTPRequestHandler):
    """OpenAI's completions over token ids, with and without ids in the answer; one prompt fails."""

    token_ids = True
    odd = []

    def log_message(self, *args):
        pass

    def _send(self, body: dict, status: int = 200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._send({"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0.0 and body["max_tokens"] == 10
        assert self.headers["Authorization"] == "Bearer sesame"
        if len(body["prompt"]) == 4:
            return self._send({"error": "too short"}, 500)
        if type(self).odd:
            return self._send(type(self).odd.pop())
        choice = {"text": "w5 w6", "finish_reason": "stop"}
        if type(self).token_ids:
            choice["token_ids"] = [8, 9, END]
        return self._send({"choices": [choice]})


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]):
    """A server on this machine; yields its address."""
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


@pytest.mark.parametrize("token_ids", [True, False])
def test_a_server_answers_with_ids_or_text(tmp_path, target, tokenizer, token_ids, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    FakeEngine.token_ids = token_ids
    with serving(FakeEngine) as url:
        engine = Server(url, None)
        source = RemoteTarget(engine, tokenizer, 10, {"do_sample": False}, 3)
        counts = run(tmp_path, target, tokenizer, prompts_of(7), source)
    rows = read_responses(tmp_path / "responses.jsonl")
    assert {tuple(row["response_ids"]) for row in rows} == {(8, 9, END)}
    assert source.retokenized == (0 if token_ids else len(rows))
    assert counts["failures"] == 7 - len(rows) == 2
    assert "answered 500" in (tmp_path / "failures.jsonl").read_text()


def test_odd_answers_of_a_server_are_failures_of_their_rows(tmp_path, target, tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    FakeEngine.token_ids = True
    monkeypatch.setattr(FakeEngine, "odd", [{"choices": None}, {"choices": [{"text": None}]}, {"choices": [3]}, {}])
    with serving(FakeEngine) as url:
        engine = Server(url, None)
        source = RemoteTarget(engine, tokenizer, 10, {"do_sample": False}, 3)
        counts = run(tmp_path, target, tokenizer, prompts_of(8), source)
        odd = (tmp_path / "failures.jsonl").read_text().count("without a choice that has a text")
        assert odd == 4 and counts["answers"] == 8 - counts["failures"] > 0
        again = run(tmp_path, target, tokenizer, prompts_of(8), source)
    assert again["answers"] == counts["answers"] + 4


def test_lines_end_where_a_newline_is(tmp_path):
    """A JSON string may hold other separators as they are."""
    row = {"id": 7, "messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(str(tmp_path / "p.jsonl")) == [row | {"id": "7"}]
    answer = {"id": 7, "turn": 0, "prompt_ids": [1], "response_ids": [2, 3], "note": "\u2028"}
    (tmp_path / "a.jsonl").write_text(json.dumps(answer, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_responses(tmp_path / "a.jsonl") == [answer | {"id": "7"}]


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [("abc", "'abc'"), ([1, "2"], "'2' at place 1"), ([-3], "-3 at place 0"), ([1.0], "1.0 at place 0")],
)
def test_answers_that_are_no_token_ids_are_named(tmp_path, field, value, shown):
    row = {"id": "a", "turn": 0, "prompt_ids": [1], "response_ids": [2, 3]} | {field: value}
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(row) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=rf"a.jsonl, line 2: `{field}` must be token ids, got {shown}"):
        read_responses(tmp_path / "a.jsonl")


def test_empty_answers_and_blank_lines_are_read_and_broken_lines_shown(tmp_path):
    rows = [{"id": str(i), "turn": 0, "prompt_ids": [1], "response_ids": ids} for i, ids in enumerate(([2, 3], []))]
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff\n" + "\n\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert read_responses(path) == rows  # the empty one is left out of training, and counted, see `usable_rows`
    path.write_text(json.dumps(rows[0]) + '\n{"id": "b", "response_ids": [4, 5, }\n' + json.dumps(rows[0]) + "\n")
    with pytest.raises(
        ValueError, match=r"a.jsonl, line 2: expected a row of JSON, got '.*\[4, 5, }' \(Expecting value\)"
    ):
        read_responses(path)


def test_a_target_is_known_by_its_weights_and_its_rope():
    target = tiny_target("llama")
    stretched = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    other = tiny_target("llama", rope_parameters=stretched)
    other.load_state_dict(target.state_dict())
    assert same_target(identify(target), identify(tiny_target("llama")))
    assert identify(target)["weights"] == identify(other)["weights"] and not same_target(
        identify(target), identify(other)
    )
    older = {name: value for name, value in identify(target).items() if name != "buffers"}
    assert same_target(older, identify(target))


def test_a_server_that_answers_no_json_is_named():
    class Page(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

    with serving(Page) as url:
        with pytest.raises(ValueError, match=r"http://127.0.0.1:\d+/v1/models answered no JSON: '<html>hello"):
            Server(url, None)
