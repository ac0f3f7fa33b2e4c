"""One row of a prompt file or data set, in any of the spellings that are in use, as a conversation."""

import hashlib
import json

# Columns that hold a conversation or a prompt, in the order in which they are looked for.
COLUMNS = ("messages", "conversations", "conversation", "prompt")
SYSTEM_COLUMNS = ("system", "system_prompt")
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool", "function": "tool",
    "function_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # ShareGPT's roles whose text is a call, as JSON
SHOWN = 120  # characters of a value in an error


class LeftOut(Exception):
    """A row that is right in itself and that no answer can be made for; says why."""


def read_row(row: dict, column: str | None = None, keep_assistant: bool = False) -> dict:
    """{"messages", and "tools" where there are some} of a row.

    Args:
        column: the one with the prompt; by default the first of `COLUMNS` that the row has.
        keep_assistant: keep assistant turns as history; else the target is to answer in their place. Those before the first
            user turn, which nobody could answer, are kept anyway.

    Raises:
        ValueError: a part of another form; names it, says what was expected and shows it.
        LeftOut: it cannot be answered; says why.
    """
    name = next((n for n in (column, *COLUMNS) if n is not None and row.get(n) is not None), None)
    if name is None:
        if column in row or any(n in row for n in COLUMNS):
            raise LeftOut("empty")
        wanted = f"`{column}`" if column else f"{', '.join(f'`{n}`' for n in COLUMNS[:-1])} or `prompt`"
        raise ValueError(f"expected {wanted} with the prompt (--column names another), got the fields {sorted(row)}")
    messages = _messages(row[name], name)
    for system in SYSTEM_COLUMNS:
        if isinstance(row.get(system), str) and row[system].strip() and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": row[system]}, *messages]
    tools = _tools(row.get("tools"))
    if not keep_assistant:
        first = next(i for i, message in enumerate(messages) if message["role"] == "user")
        if any(message["role"] == "tool" for message in messages):
            raise LeftOut("results of tools without the turn that called them; --keep-assistant-turns keeps it")
        messages = messages[:first] + [m for m in messages[first:] if m["role"] != "assistant"]
    if messages[-1]["role"] in ("system", "developer"):
        raise LeftOut(f"a {messages[-1]['role']} turn at the end, which nothing answers")
    return {"messages": messages} | ({"tools": tools} if tools else {})


def content_id(row: dict) -> str:
    """An id for a row without one: of its content, so that it stays when rows are added or moved."""
    text = json.dumps([row["messages"], row.get("tools")], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _messages(value, name: str) -> list[dict]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise wrong(name, "text, or a list of turns", value)
    messages = [_message(turn, f"{name}[{i}]") for i, turn in enumerate(value)]
    users = [message["content"] for message in messages if message["role"] == "user"]
    if not users:
        raise wrong(name, "a turn of a user among them", value)
    if not all(text.strip() for text in users):
        raise LeftOut("an empty turn of the user")
    return messages


def _message(turn, place: str) -> dict:
    if isinstance(turn, str):
        return {"role": "user", "content": turn}
    if not isinstance(turn, dict):
        raise wrong(place, 'a turn such as {"role": "user", "content": "..."}', turn)
    role_key = "role" if "role" in turn else "from"
    role = turn.get(role_key)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise wrong(f"{place}.{role_key}", f"one of {', '.join(ROLES)}", turn if role is None else role)
    role = role.lower()
    text_key = next((key for key in ("content", "value", "text") if key in turn), "content")
    content = turn.get(text_key)
    # Data sets give every turn the fields of all others, without a value.
    rest = {k: v for k, v in turn.items() if k not in (role_key, text_key) and v is not None}
    if role in CALLS:
        return {"role": "assistant", "content": "", "tool_calls": [_call(content)]}
    if isinstance(content, list):
        content = _joined(content, f"{place}.{text_key}")
    if content is None and ROLES[role] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise wrong(f"{place}.{text_key}", "text", turn if text_key not in turn else content)
    return {"role": ROLES[role], "content": content} | rest


def _joined(parts: list, place: str) -> str:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise LeftOut(f"content that is no text ({kind})")
        if kind is None or not isinstance(part.get("text"), str):
            raise wrong(f"{place}[{i}]", 'a part such as {"type": "text", "text": "..."}', part)
    return "".join(part["text"] for part in parts)


def _call(text) -> dict:
    try:
        call = json.loads(text)
        return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    except (TypeError, ValueError, KeyError):
        raise LeftOut('a call of a tool that is no JSON with "name" and "arguments"') from None


def _tools(value) -> list[dict] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise LeftOut("tool definitions that are no JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise LeftOut("tool definitions that are no list of objects")
    return value


def wrong(place: str, expected: str, found) -> ValueError:
    shown = repr(found)
    return ValueError(f"`{place}`: expected {expected}, got {shown[:SHOWN]}{'...' if len(shown) > SHOWN else ''}")
