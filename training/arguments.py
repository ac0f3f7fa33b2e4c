"""Values of `--argument NAME=VALUE`, read by the type that transformers' `TrainingArguments` gives the field."""

import contextlib
import types
import typing

from transformers import TrainingArguments

from ..common.files import read_yaml


def read_field(name: str, value):
    """Read one value: `no` is text where the field holds text, 1e-4 a number where it holds a number.

    Args:
        value: text, as on the command line; or what Python or a YAML file states.

    Raises:
        ValueError: the value is none that the field can hold; says what it holds.
    """
    hint = typing.get_type_hints(TrainingArguments)[name]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = {typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if union else (hint,))}
    if isinstance(value, str):
        value = _read_text(name, value, kinds)
    if value is None or not kinds <= {bool, int, float, types.NoneType}:
        return value
    number = next((kind for kind in (float, int) if kind in kinds), None)
    if number is None and not isinstance(value, bool):
        raise ValueError(
            f"--argument {name}={value} is neither true nor false; this field of TrainingArguments is a switch."
        )
    if number is not None and (isinstance(value, bool) or not isinstance(value, (int, number))):
        raise ValueError(f"--argument {name}={value} is no number; this field of TrainingArguments is one.")
    return value


def _read_text(name: str, text: str, kinds: set):
    if text == "null" and types.NoneType in kinds:
        return None
    if kinds & {dict, list} and text.startswith(("{", "[")):
        return read_yaml(text, f"--argument '{name}={text}'")
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in kinds:
            with contextlib.suppress(ValueError):
                return number(text)
    return text
