"""Python functions as tools: schemas from their signatures, arguments of the types that they name, results as content.

Covered: the types of JSON, and what pydantic makes of JSON: enums, dates, paths, UUIDs, decimals, sets, tuples, typed
dicts, named tuples, dataclasses and pydantic models. A function with a parameter of another type is refused.

A text is the result as it stands; the others are JSON: numbers, lists and mappings, records as mappings, iterators and
arrays as lists, data frames as lists of rows, bytes as UTF-8, and other objects by the text that their class
defines. An image of PIL, alone or in a list with texts, is a part of the content.

Not covered: recursive types, iterators without end inside of a result.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import typing_extensions
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.deadline import function_name, is_async

MAX_ITEMS = 100_000
"""Most items of an iterator that a tool returns: one may have no end."""
_ANY = TypeAdapter(Any)
Content = str | list[dict[str, Any]]
"""Content of a message: a text, or a list of parts of type text or image."""


class BadArgumentsError(Exception):
    """Arguments that do not fit the schema, or the type, as a date of 30 February. The text follows a tool's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSignature:
    """Signature of a function that is a tool."""

    schema: Mapping[str, Any]
    """In the OpenAI form, as the model sees it."""
    arguments: Mapping[str, Any]
    """JSON schema of the arguments of a call."""
    adapters: Mapping[str, TypeAdapter[Any]]
    """By name: the parameters whose values JSON cannot hold, and their conversion."""

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, sync or async as it is, with arguments from JSON by keyword, and its result as content.

        It raises `BadArgumentsError`, what the function raises, and what `result_text` raises.
        """
        if is_async(function):

            @functools.wraps(function)
            async def call_async(**arguments: Any) -> Content:
                return result_content(await function(**self._converted(arguments)))

            return call_async

        @functools.wraps(function)
        def call(**arguments: Any) -> Content:
            return result_content(function(**self._converted(arguments)))

        return call

    def _converted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(arguments)
        for name in self.adapters.keys() & arguments.keys():
            try:
                values[name] = self.adapters[name].validate_json(json.dumps(arguments[name]), strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                raise BadArgumentsError(f" ({'.'.join(map(str, (name, *first['loc'])))}): {first['msg']}") from error
        return values


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@functools.lru_cache(maxsize=256)
def describe(function: Callable[..., Any]) -> ToolSignature:
    """Return the signature of a function with type hints and a Google-style docstring.

    A parameter whose default is None takes null. Raises `ConfigError`: type hints or the docstring are missing, or a
    parameter has a type that JSON cannot be converted to.
    """
    # The import takes seconds on a busy machine; naming an environment, as the checks of the settings do, needs none.
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    where, signature = f"tool {function_name(function)}", inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where}: a model cannot name parameter {parameter}; use plain parameters")
    try:
        hints = get_type_hints(function, include_extras=True)
        for name, parameter in signature.parameters.items():
            if name in hints and parameter.default is None and not _takes_null(hints[name]):
                hints[name] = hints[name] | None
        return_hint = hints.pop("return", Any)
        conversions = {name: _adapter(where, name, hint) for name, hint in hints.items() if not _is_json(hint)}
        schema = get_json_schema(_stand_in(function, signature, hints, return_hint))
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError) as error:
        raise ConfigError(
            f"{where}: {str(error).rstrip('.!')}. A tool needs type hints and a docstring with an Args: section that "
            "describes every argument"
        ) from error
    parameters = schema["function"]["parameters"]
    for name, (_, parameter_schema) in conversions.items():
        if not _is_json(hints[name], or_tuple=True):
            parameters["properties"][name] = {**parameter_schema, **parameters["properties"][name]}
    arguments = {**_with_null(parameters), "additionalProperties": False}
    adapters = {name: adapter for name, (adapter, _) in conversions.items()}
    return ToolSignature(schema=schema, arguments=arguments, adapters=adapters)


def result_content(value: Any) -> Content:
    """Return the result of a tool as the content of a message: a text, or parts for an image, alone or in a list.

    Images are those of PIL. Raises as `result_text`.
    """
    pil = sys.modules.get("PIL.Image")  # a tool that returns an image has imported it
    parts = value if isinstance(value, list | tuple) else (value,)
    if pil is None or not any(isinstance(part, pil.Image) for part in parts):
        return result_text(value)
    return [
        {"type": "image", "image": part} if isinstance(part, pil.Image) else {"type": "text", "text": result_text(part)}
        for part in parts
    ]


def result_text(value: Any) -> str:
    """Return the result of a tool as text. Raises `TypeError` if it is not JSON, or what its conversion raises."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # their order differs between processes
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, MAX_ITEMS + 1))
        if len(value) > MAX_ITEMS:
            raise TypeError(f"the tool returned an iterator of more than {MAX_ITEMS} items; return a list")
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return json.dumps(_ANY.dump_python(value, mode="json", fallback=_plain_value), ensure_ascii=False)


def _plain_value(value: Any) -> Any:
    """Return an object that pydantic does not know as one that it does."""
    pandas, torch = sys.modules.get("pandas"), sys.modules.get("torch")  # a tool that returns one has imported it
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return value.to_dict(orient="records")
    if isinstance(value, np.ndarray | np.generic) or (torch is not None and isinstance(value, torch.Tensor)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    if type(value).__str__ is not object.__str__:
        return str(value)
    raise TypeError(
        f"the tool returned an object of class {type(value).__name__}, which is not JSON; return a text, numbers, "
        "lists, mappings or dataclasses"
    )


def _is_json(hint: Any, *, or_tuple: bool = False) -> bool:
    """Return True if values of a type come from JSON as they are, as transformers describes them.

    or_tuple: also for types that transformers describes and JSON does not hold: tuples, and keys other than texts.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(type(arg) in (str, int, float, bool, NoneType) for arg in args)
    if origin is dict and args and args[0] is not str:
        return or_tuple and all(_is_json(arg, or_tuple=True) for arg in args)
    if origin is tuple and (len(args) == 1 or Ellipsis in args):
        return False
    if origin in (Union, UnionType, list, dict, tuple):
        return (or_tuple or origin is not tuple) and all(_is_json(arg, or_tuple=or_tuple) for arg in args)
    return hint in (int, float, str, bool, NoneType, list, dict, Any) or (or_tuple and hint is tuple)


def _takes_null(hint: Any) -> bool:
    return hint in (Any, NoneType, object) or NoneType in get_args(hint) or None in get_args(hint)


def _adapter(where: str, name: str, hint: Any) -> tuple[TypeAdapter[Any], Mapping[str, Any]]:
    """Return the conversion of a parameter and its schema, with definitions in their places: templates know no other.

    Raises `ConfigError`.
    """
    try:
        adapter = TypeAdapter(_for_pydantic(hint))
        schema = adapter.json_schema(schema_generator=_WithoutTitles)
        if not schema and hint is not object:
            raise PydanticUserError(f"pydantic does not describe {hint}", code=None)
        return adapter, _inlined(schema, schema.pop("$defs", {}))
    except (PydanticUserError, RecursionError) as error:
        reason = "its type is recursive" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
        raise ConfigError(
            f"{where}: a model cannot write parameter {name} as JSON: {reason}; use str, int, float, bool, list, dict, "
            "Literal, an Enum, a date, a dataclass or a pydantic model"
        ) from error


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by their definitions. Raises `RecursionError` for a recursive one."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    target, reference = {}, schema.get("$ref")
    if isinstance(reference, str):
        target = _inlined(definitions[reference.removeprefix("#/$defs/")], definitions)
    unused = {"$ref"} if target else {"discriminator"} if "oneOf" in schema else set()
    return target | {key: _inlined(value, definitions) for key, value in schema.items() if key not in unused}


def _for_pydantic(hint: Any) -> Any:
    """Return a type with those typed dicts that pydantic refuses before Python 3.12 as those that it takes."""
    if is_typeddict(hint) and sys.version_info < (3, 12):
        fields = {name: _for_pydantic(field) for name, field in get_type_hints(hint, include_extras=True).items()}
        fields |= {name: typing_extensions.NotRequired[fields[name]] for name in hint.__optional_keys__}
        return typing_extensions.TypedDict(hint.__name__, fields)  # pyright: ignore
    args = get_args(hint)
    if any(isinstance(arg, Enum) for arg in args):  # of a Literal: pydantic would take the members, not their values
        members = [arg for arg in args if isinstance(arg, Enum)]
        return Annotated[
            hint, BeforeValidator(lambda value: next((one for one in members if one.value == value), value))
        ]
    if not args or get_origin(hint) in (Literal, Annotated):
        return hint
    types = tuple(map(_for_pydantic, args))
    return functools.reduce(operator.or_, types) if get_origin(hint) in (Union, UnionType) else get_origin(hint)[types]


def _stand_in(
    function: Callable[..., Any], signature: inspect.Signature, hints: Mapping[str, Any], returned: Any
) -> Callable[..., Any]:
    """Return a function that transformers describes: `Any` stands for the types that it does not know."""

    def stand_in() -> None:
        pass

    types = {name: hint if _is_json(hint, or_tuple=True) else Any for name, hint in hints.items()}
    if get_origin(returned) is None or _is_json(returned, or_tuple=True):
        types["return"] = returned
    stand_in.__name__, stand_in.__doc__, stand_in.__annotations__ = function.__name__, inspect.getdoc(function), types
    stand_in.__signature__ = signature  # type: ignore[attr-defined]
    return stand_in


def _with_null(schema: Any) -> Any:
    """Replace `nullable` (OpenAPI's keyword, which transformers writes for Optional) by JSON schema's anyOf."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _with_null(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain
