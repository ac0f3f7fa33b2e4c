"""Options of commands that are the fields of a dataclass, and where a target comes from."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, get_origin

from typer import Option

from ..common.target_source import TargetSource

License = Annotated[
    str | None, Option(help="License of the drafter for its card, as the Hub spells it: apache-2.0, mit, ...")
]


def target_source(
    target: str | None, revision: str | None = None, trust_remote_code: bool = False, name: str | None = None
) -> TargetSource | None:
    """Return where `--target` comes from; None where it is not passed.

    Raises:
        ValueError: what belongs to `--target` is passed without it.
    """
    if target is not None:
        return TargetSource(target, revision, trust_remote_code, name)
    if revision or name:
        raise ValueError(f"--target-{'revision' if revision else 'name'} says more of --target: pass both.")
    return None


def source_or_default(*arguments) -> TargetSource:
    """As `target_source`, with SmolLM2-135M-Instruct where `--target` is not passed."""
    from ..common.smollm2 import default_target

    return target_source(*arguments) or default_target()


def takes_fields(options: type, *names: str, **defaults) -> Callable:
    """Give a command the fields of a dataclass as options, in the place of its `**` parameter.

    Args:
        options: the dataclass; a field is an option of the command if its type is `Annotated` with a `typer.Option`.
        names: the fields, or none for all that are options. Those that the command states itself are its own.
        defaults: further fields, with other defaults than the dataclass has.
    """

    def decorate(command: Callable) -> Callable:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        stated = {parameter.name for parameter in own}
        taken = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, annotation=field.type, default=default_of(field, defaults)
            )
            for field in dataclasses.fields(options)
            if get_origin(field.type) is Annotated
            and field.name not in stated
            and (not names or field.name in (*names, *defaults))
        ]
        parameters = [*(p.replace(kind=p.KEYWORD_ONLY) for p in own), *taken]
        # Those that must be passed come first in the help.
        command.__signature__ = inspect.Signature(sorted(parameters, key=lambda p: p.default is not p.empty))
        return command

    return decorate


def default_of(field: dataclasses.Field, defaults: dict):
    """Return what an option is without being passed; `inspect.Parameter.empty` where it must be."""
    if field.name in defaults:
        return defaults[field.name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
