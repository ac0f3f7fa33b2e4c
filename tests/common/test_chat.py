"""Chats: named templates, the turns that a prompt consists of, and the target's own turns in it."""

import pytest
from dflash_hub.common.chat import choose_template, encode, own_turn, turns_of
from dflash_hub.common.identity import has_thinking_modes, template_fingerprint
from dflash_hub.common.loading import load_tokenizer
from helpers.folders import TEMPLATE, tiny_tokenizer

ROLES = (
    "{% for t in tools or [] %}<start>{{ t.name }}<end>{% endfor %}"
    "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
)
SPECIALS = ("<pad>", "<start>", "<end>", "<think>", "</think>", "user", "system", "assistant", "tool", "weather")


def turn(role: str, content: str = "w1", **fields) -> dict:
    return {"role": role, "content": content} | fields


def text_of(tokenizer, row: dict, answers=()) -> str:
    return tokenizer.decode(encode(tokenizer, row, list(answers), None))


def test_of_several_templates_the_default_one_or_a_named_one_is_taken(tmp_path, capsys):
    tokenizer = tiny_tokenizer(90, template={"default": TEMPLATE, "tool_use": ROLES, "rag": "w9{{ enable_thinking }}"})
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates").is_dir()
    taken = load_tokenizer(str(tmp_path))
    assert taken.chat_template == {"default": TEMPLATE, "tool_use": ROLES}
    assert "chat template: default; prompts with tools: tool_use (of default, rag, tool_use" in capsys.readouterr().err
    assert text_of(taken, {"messages": [turn("user")]}) == text_of(
        tiny_tokenizer(90, template=TEMPLATE), {"messages": [turn("user")]}
    )
    named = load_tokenizer(str(tmp_path), "rag")
    assert named.chat_template == "w9{{ enable_thinking }}" and capsys.readouterr().err == ""
    assert has_thinking_modes(named) and not has_thinking_modes(taken)
    assert len({template_fingerprint(t) for t in (taken, named, load_tokenizer(str(tmp_path), "tool_use"))}) == 3
    with pytest.raises(ValueError, match="'chat' is none of the target's chat templates: default, rag, tool_use"):
        load_tokenizer(str(tmp_path), "chat")
    with pytest.raises(ValueError, match="chat templates a, b, and none called default; pass --chat-template NAME"):
        choose_template(tiny_tokenizer(90, template={"a": TEMPLATE, "b": TEMPLATE}))
    with pytest.raises(ValueError, match="has one chat template, which has no name"):
        choose_template(tiny_tokenizer(90), "default")


def test_the_target_answers_each_user_turn_and_the_results_of_tools():
    called = turn("assistant", "", tool_calls=[{"name": "weather"}])
    messages = [
        turn("system"), turn("user", "w2"), called, turn("tool", "w3"), turn("tool", "w4"), turn("assistant", "w5"),
        turn("user", "w6"),
    ]  # fmt: skip
    first, second, third = turns_of(messages)
    assert (first.messages, first.kept) == (messages[:2], [called])
    assert (second.messages, second.kept) == (messages[3:5], [messages[5]])
    assert (third.messages, third.kept) == (messages[6:], [])


def test_system_turns_tools_and_kept_answers_are_part_of_the_prompt():
    tokenizer = tiny_tokenizer(90, SPECIALS, ROLES)
    row = {"messages": [turn("system"), turn("user", "w2"), turn("assistant", "w3"), turn("user", "w4")]}
    assert text_of(tokenizer, row | {"tools": [{"name": "weather"}]}) == (
        "<start> weather <end> <start> system w1 <end> <start> user w2 <end>"
    )
    whole = "<start> system w1 <end> <start> user w2 <end> <start> assistant w3 <end> <start> user w4 <end>"
    assert text_of(tokenizer, row, [None]) == whole
    own = {"messages": [m for m in row["messages"] if m["role"] != "assistant"]}
    assert text_of(tokenizer, own, [tokenizer("w3 <end>").input_ids]) == whole


def test_a_template_that_leaves_a_part_out_is_refused():
    users_only = "{% for m in messages if m.role == 'user' %}<start>{{ m.content }}<end>{% endfor %}"
    tokenizer = tiny_tokenizer(90, SPECIALS, users_only)
    with pytest.raises(ValueError, match="leaves system turns out"):
        encode(tokenizer, {"messages": [turn("system", "w7"), turn("user")]}, [], None)
    with pytest.raises(ValueError, match="leaves tool turns out"):
        encode(tokenizer, {"messages": [turn("user"), turn("assistant"), turn("tool", "w7")]}, [None], None)
    with pytest.raises(ValueError, match="leaves tools out"):
        encode(tokenizer, {"messages": [turn("user")], "tools": [{"name": "weather"}]}, [], None)
    by_default = "{% if messages[0].role != 'system' %}<start>system w1<end>{% endif %}" + ROLES
    row = {"messages": [turn("system", "w1"), turn("user")]}
    assert text_of(tiny_tokenizer(90, SPECIALS, by_default), row).startswith("<start> system w1 <end> <start> user")


def test_the_targets_own_turn_keeps_what_its_special_tokens_mark():
    strips = "{% for m in messages %}<start>{{ m.role }} {{ m.content.split('</think>')[-1] }} {{ m.reasoning }}<end>{% endfor %}"
    tokenizer = tiny_tokenizer(90, SPECIALS, strips)
    answer = tokenizer("<think> w1 </think> w2 <end>").input_ids
    assert own_turn(tokenizer, [turn("user")], answer)["content"] == "<think> w1 </think> w2"
    row = {"messages": [turn("user", "w5"), turn("user", "w6")]}
    assert text_of(tokenizer, row, [answer]) == "<start> user w5 <end> <start> assistant w2 <end> <start> user w6 <end>"

    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<start> assistant",
        "fields": {
            "reasoning": {"open": "<think>", "close": "</think>"},
            "content": {"close": "<end>"},
        },
    }
    parts = own_turn(tokenizer, [turn("user")], answer)
    assert (parts["reasoning"].strip(), parts["content"].strip()) == ("w1", "w2")
    assert "assistant w2 w1 <end>" in text_of(tokenizer, row, [answer])
