"""Chats: which template writes them, where the target answers in them, and how an answer becomes a part of them."""

import sys
from dataclasses import dataclass, field

# Turns that are part of a prompt and that some templates leave out, without a word.
SILENTLY_LEFT_OUT = ("system", "developer", "tool")


def in_mode(thinking: bool | None) -> dict:
    """Keyword arguments of a chat template for a thinking mode; None leaves the template's default."""
    return {} if thinking is None else {"enable_thinking": thinking}


def choose_template(tokenizer, wanted: str | None = None):
    """Leave a tokenizer with several named chat templates the one that is wanted, or those that transformers takes by default.

    Says on standard error which it is.

    Args:
        wanted: a name; None takes `default`, and `tool_use` for prompts with tools, as `apply_chat_template` does.

    Raises:
        ValueError: there is no such template, or none is called `default`; names those that there are.
    """
    found = tokenizer.chat_template
    if not isinstance(found, dict):
        if wanted is not None:
            has = "no chat template" if found is None else "one chat template, which has no name"
            raise ValueError(f"--chat-template {wanted!r}: the target's tokenizer has {has}; leave the option out.")
        return
    names = ", ".join(sorted(found))
    if wanted is not None and wanted not in found:
        raise ValueError(f"--chat-template {wanted!r} is none of the target's chat templates: {names}.")
    if wanted is None and "default" not in found:
        raise ValueError(
            f"the target has the chat templates {names}, and none called default; pass --chat-template NAME."
        )
    by_default = {name: found[name] for name in ("default", "tool_use") if name in found}
    tokenizer.chat_template = by_default if wanted is None and len(by_default) > 1 else found[wanted or "default"]
    if wanted is None:
        tools = "; prompts with tools: tool_use" if "tool_use" in found else ""
        print(f"chat template: default{tools} (of {names}; --chat-template takes another)", file=sys.stderr)


@dataclass
class Turn:
    """What the target answers to: `messages` since its last answer. `kept` are the data's assistant turns in its place."""

    messages: list[dict] = field(default_factory=list)
    kept: list[dict] = field(default_factory=list)


def turns_of(messages: list[dict]) -> list[Turn]:
    """Split a conversation where the target answers: after each user turn, and after the results of its tools."""
    turns, open_turn = [], Turn()
    for message, following in zip(messages, [*messages[1:], None]):
        if message["role"] == "assistant" and turns and not open_turn.messages:
            turns[-1].kept.append(message)
            continue
        open_turn.messages.append(message)
        more_results = following is not None and following["role"] == "tool"
        if message["role"] == "user" or (message["role"] == "tool" and not more_results):
            turns.append(open_turn)
            open_turn = Turn()
    return turns


def first_turn(row: dict) -> list[dict]:
    """The messages of a prompt that the target answers first."""
    return turns_of(row["messages"])[0].messages


def encode(tokenizer, row: dict, answers: list[list[int] | None], thinking: bool | None) -> list[int]:
    """Token ids of a prompt's conversation up to turn `len(answers)`.

    Args:
        row: {"messages", and "tools" where it has some}. Assistant turns in it are history; where it has none, the
            target's own answers are.
        answers: token ids of the target's answers to the turns before; None where the row has its own.

    Raises:
        ValueError: the chat template leaves a system turn, tools or their results out.
    """
    turns, settings = turns_of(row["messages"]), in_mode(thinking)
    if row.get("tools"):
        settings["tools"] = row["tools"]
    messages = []
    for turn, ids in zip(turns, answers):
        messages += turn.messages
        messages += turn.kept or [own_turn(tokenizer, messages, ids, settings)]
    messages += turns[len(answers)].messages
    check_written(tokenizer, messages, settings)
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **settings)
    return list(encoded["input_ids"])


def own_turn(tokenizer, messages: list[dict], ids: list[int], settings: dict | None = None) -> dict:
    """The target's answer to `messages` as a turn of the chat, for the template to write.

    A tokenizer that describes its answers (`response_template`) takes them apart, into reasoning, calls of tools and text.
    Else the text keeps its special tokens, all but the end: templates find by them what is reasoning.

    Args:
        settings: keyword arguments of the chat template.
    """
    if getattr(tokenizer, "response_template", None) is not None:
        settings = settings or {}
        prefix = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **settings)
        return {"role": "assistant"} | tokenizer.parse_response(ids, prefix=prefix, tools=settings.get("tools"))
    end = len(ids)
    while (
        end
        and tokenizer.decode(ids[end - 1 : end])
        and not tokenizer.decode(ids[end - 1 : end], skip_special_tokens=True)
    ):
        end -= 1
    return {"role": "assistant", "content": tokenizer.decode(ids[:end])}


def check_written(tokenizer, messages: list[dict], settings: dict):
    """Refuse a prompt of which the chat template leaves a part out.

    Raises:
        ValueError: the text is the same without the system turns, the results of tools, or the tools; says which.
    """
    found = [role for role in SILENTLY_LEFT_OUT if any(message["role"] == role for message in messages)]
    if not found and "tools" not in settings:
        return

    def written(messages: list[dict], settings: dict) -> str | None:
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **settings)
        except Exception:  # templates raise what they like; this one looks at what was taken away
            return None

    text = written(messages, settings)
    if text is None:
        return  # what it raises for the whole prompt says more
    for role in found:
        # A system turn that says what the template says by default is no loss.
        shown = all(str(m.get("content") or "").strip() in text for m in messages if m["role"] == role)
        if not shown and written([message for message in messages if message["role"] != role], settings) == text:
            raise ValueError(f"the chat template leaves {role} turns out, so the target would not see them.")
    without = {name: value for name, value in settings.items() if name != "tools"}
    if "tools" in settings and written(messages, without) == text:
        raise ValueError("the chat template leaves tools out, so the target would not see them.")
