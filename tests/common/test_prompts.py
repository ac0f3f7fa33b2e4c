"""Prompts as people have them: spellings, rows that are left out, and errors that name a part."""

import json

import pytest
from dflash_hub.common.prompts import read_prompts

USER, ANSWER, NEXT = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
)
SYSTEM = {"role": "system", "content": "s"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "3"}


def written(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


@pytest.mark.parametrize(
    ("row", "own", "kept"),
    (
        ({"messages": [SYSTEM, USER, ANSWER, NEXT, ANSWER]}, [SYSTEM, USER, NEXT], [SYSTEM, USER, ANSWER, NEXT, ANSWER]),
        ({"messages": [ANSWER, USER, ANSWER]}, [ANSWER, USER], [ANSWER, USER, ANSWER]),
        ({"messages": [SYSTEM | {"name": None}, USER | {"tool_calls": None}]}, [SYSTEM, USER], [SYSTEM, USER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, [USER], [USER]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]},
            [USER, NEXT], [USER, ANSWER, NEXT],
        ),
        ({"conversations": [{"from": "human", "value": "a"}], "system": "s"}, [SYSTEM, USER], [SYSTEM, USER]),
        ({"prompt": "a"}, [USER], [USER]),
        ({"prompt": ["a", "c"]}, [USER, NEXT], [USER, NEXT]),
        ({"prompt": [SYSTEM, USER]}, [SYSTEM, USER], [SYSTEM, USER]),
        ({"question": "a", "prompt": None}, [USER], [USER]),
        ({"messages": [USER, CALL, RESULT]}, None, [USER, CALL, RESULT]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                               {"from": "observation", "value": "3"}]},
            None, [USER, CALL, RESULT],
        ),
    ),
)  # fmt: skip
def test_spellings_of_a_prompt(row, own, kept, tmp_path):
    path = written(tmp_path / "p.jsonl", row | {"id": "x"})
    for keep, expected in ((False, own), (True, kept)):
        rows = read_prompts(path, "question", keep)
        assert rows == ([] if expected is None else [{"id": "x", "messages": expected}])


def test_tools_are_kept_also_as_text(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = written(tmp_path / "p.jsonl", {"prompt": "a", "tools": tools}, {"prompt": "c", "tools": json.dumps(tools)})
    assert [row["tools"] for row in read_prompts(path)] == [tools, tools]


def test_rows_without_an_id_get_one_of_their_content_and_blank_lines_and_a_mark_of_the_encoding_are_no_rows(tmp_path):
    lines = ['{"prompt": "a"}', "", "  ", '{"prompt": "c"}\r', '{"prompt": "a"}']
    path = written(tmp_path / "p.jsonl", "\ufeff" + lines[0], *lines[1:])
    left_out = []
    rows = read_prompts(path, left_out=left_out)
    assert [row["messages"] for row in rows] == [[USER], [NEXT]]
    moved = read_prompts(written(tmp_path / "q.jsonl", *lines[:0:-1]))
    assert {row["id"] for row in rows} == {row["id"] for row in moved} and len({row["id"] for row in rows}) == 2
    assert [row["reason"] for row in left_out] == ["the same as a row before it"]


def test_rows_that_cannot_be_answered_are_left_out_and_counted(tmp_path, capsys):
    image = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    rows = [
        {"id": 1, "messages": [USER, CALL, RESULT, ANSWER]}, {"id": 2, "messages": [image]}, {"id": 3, "prompt": " "},
        {"id": 4, "prompt": None}, {"id": 5, "prompt": "a", "tools": "[...]"}, {"id": 6, "messages": [USER, SYSTEM]},
        {"id": 7, "prompt": "a"},
    ]  # fmt: skip
    left_out = []
    assert [row["id"] for row in read_prompts(written(tmp_path / "p.jsonl", *rows), left_out=left_out)] == ["7"]
    assert {row["id"]: row["reason"].split(";")[0] for row in left_out} == {
        "1": "results of tools without the turn that called them", "2": "content that is no text (image)",
        "3": "an empty turn of the user", "4": "empty", "5": "tool definitions that are no JSON",
        "6": "a system turn at the end, which nothing answers",
    }  # fmt: skip
    assert "6 of 7 rows are left out: 1 x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    (
        ('{"messages": [{"role": "critic", "content": "a"}]}', "`messages[0].role`: expected one of .* got 'critic'"),
        ('{"messages": [{"content": "a"}]}', "`messages[0].from`: expected one of .* got {'content': 'a'}"),
        ('{"messages": [{"role": "user", "content": {"a": 1}}]}', "`messages[0].content`: expected text, got {'a': 1}"),
        ('{"conversations": [{"from": "human", "value": 5}]}', "`conversations[0].value`: expected text, got 5"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "`messages`: expected a turn of a user"),
        ('{"text": "a"}', "expected `messages`, `conversations`, .* got the fields"),
        ('{"id": 1.5, "prompt": "a"}', "`id`: expected text or a whole number, got 1.5"),
        ('{"prompt": "a", "b"}', "expected one JSON object, got '.*\"b\"}'"),
        ('[{"prompt": "a"}]', "expected one JSON object, got .*; write each entry of the list on a line of its own"),
    ),
)
def test_an_error_names_file_line_and_rule_and_shows_the_part(line, said, tmp_path):
    path = written(tmp_path / "p.jsonl", '{"prompt": "a"}', "", line)
    with pytest.raises(ValueError, match=r"p\.jsonl, line 3: " + said.replace("[", r"\[").replace("{", r"\{")):
        read_prompts(path)


def test_what_is_no_file_of_prompts_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.jsonl"):
        read_prompts(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match=r"there is no file prompts\.jsonl"):
        read_prompts("prompts.jsonl")
    with pytest.raises(ValueError, match="is a folder; expected a file of prompts"):
        read_prompts(str(tmp_path))
    (tmp_path / "p.jsonl").write_bytes('{"prompt": "ä"}\n'.encode("utf-16"))
    with pytest.raises(ValueError, match=r"p\.jsonl is no text in UTF-8"):
        read_prompts(str(tmp_path / "p.jsonl"))
