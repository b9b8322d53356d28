"""Settings of a user's loss or advantage, read from its signature, and their types."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from lockstep.trainer.objective.declare import Argument
from lockstep.trainer.setting import Setting, typed

_WORDS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text", NoneType: "null"}


def own_arguments(function: Callable[..., Any], *, num_inputs: int) -> dict[str, Argument]:
    """Return the keyword-only arguments: `Annotated[<type>, Setting(...)]`, or a type or nothing, with a default.

    Raises TypeError with a phrase: the function takes other inputs, or an argument cannot be a setting.
    """
    parameters = inspect.signature(function).parameters.values()
    inputs = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(inputs) != num_inputs:
        names = ", ".join(parameter.name for parameter in inputs) or "none"
        raise TypeError(f"it takes {num_inputs} positional argument(s), found {names}; write a `*` before its settings")
    keywords = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return {parameter.name: _argument(parameter, function) for parameter in keywords}


def _argument(parameter: inspect.Parameter, function: Callable[..., Any]) -> Argument:
    name, annotation, default = parameter.name, _evaluated(parameter.annotation, function), parameter.default
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        if len(metadata) == 1 and isinstance(metadata[0], Setting):
            return _checked(name, Argument(type=kind, setting=metadata[0]))
        annotation = kind
    if default is parameter.empty:
        raise TypeError(f"its argument {name} has no default; write for example `{name}: float = 1.0`")
    kind = type(default) if annotation is parameter.empty else annotation
    return _checked(name, Argument(type=kind, setting=Setting(default=default, description="")))


def _evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
    """Evaluate an annotation that `from __future__ import annotations` has made a text."""
    if not isinstance(annotation, str):
        return annotation
    try:
        holder = type("Holder", (), {"__annotations__": {"argument": annotation}})
        return get_type_hints(holder, inspect.unwrap(function).__globals__, include_extras=True)["argument"]
    except NameError as error:
        raise TypeError(
            f"its annotation {annotation} cannot be read ({error}); import that name in the file"
        ) from error


def _checked(name: str, argument: Argument) -> Argument:
    if in_words(argument.type) is None:
        raise TypeError(
            f"its argument {name} has the type {argument.type}, which no setting can have; use bool, int, float, str, "
            "a list of one of them, or `| None`"
        )
    if not fits(argument.setting.default, argument.type):
        default = typed(argument.setting.default)
        raise TypeError(f"the default of its argument {name} is {default}, expected {in_words(argument.type)}")
    return argument


def in_words(kind: Any) -> str | None:
    """Return the values of a type in words, or None for one that no setting has."""
    if get_origin(kind) in (Union, UnionType):
        parts = [in_words(part) for part in get_args(kind)]
        return None if None in parts else " or ".join(str(part) for part in parts)
    if get_origin(kind) is list:
        (of,) = get_args(kind)
        return f"a list, each {in_words(of)}" if in_words(of) else None
    return _WORDS.get(kind)


def fits(value: Any, kind: Any) -> bool:
    """Return True if a value of a configuration has the type; an integer is a number, a boolean is not."""
    if get_origin(kind) in (Union, UnionType):
        return any(fits(value, part) for part in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(entry, get_args(kind)[0]) for entry in value)
    return type(value) is kind or (kind is float and type(value) is int)
