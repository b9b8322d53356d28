"""Tools with arguments and results of all types: described and converted, or refused with the parameter's name."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import itertools
import json
import pathlib
import types
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, TypedDict, Union

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, field_validator
from transformers.utils.chat_template_utils import get_json_schema

from lockstep.rollout.chat.tool_functions import MAX_ITEMS, describe
from lockstep.rollout.environments.toolbox import Toolbox, ToolFault, ToolResult
from lockstep.rollout.errors import ConfigError

pandas = pytest.importorskip("pandas")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    x: int
    y: float = 0.0
    when: datetime.date | None = None

    @field_validator("x")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


@dataclasses.dataclass
class Trip:
    start: Point
    stops: list[Point] = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    left: int
    right: str = "r"


class Options(TypedDict, total=False):
    color: Color
    limits: dict[str, int]


class Node(BaseModel):
    children: list[Node] = []


class Opaque:
    pass


class Worded:
    def __str__(self) -> str:
        return "in words"


UserId = NewType("UserId", int)


def tool(hint: Any, **default: Any) -> Callable[..., Any]:
    """Return a tool with a parameter of a type, which says what it got."""

    def take(value: Any = ..., **_: Any) -> str:
        return f"{type(value).__name__} {value!r}"

    def made(value):
        """Take a value.

        Args:
            value: what to take
        """
        return take(value)

    made.__annotations__ = {"value": hint, "return": str}
    if default:
        made.__defaults__ = (default["default"],)
    return made


async def call(function: Callable[..., Any], **arguments: Any) -> ToolResult:
    toolbox = Toolbox([function])
    made = {"id": "1", "function": {"name": function.__name__, "arguments": json.dumps(arguments)}}
    (result,) = await toolbox.answer({"role": "assistant", "tool_calls": [made]})
    return result


SEEN = datetime.date(2024, 1, 5)
ID = "12345678-1234-5678-1234-567812345678"
TYPES: list[tuple[Any, Any, Any, Any]] = [
    # type, value in JSON, value that the function gets, a value that it must not get
    (Color, "red", Color.RED, "green"),
    (Level, 2, Level.HIGH, 3),
    (Level, 2, Level.HIGH, "2"),
    (datetime.date, "2024-01-05", SEEN, "2024-02-30"),
    (datetime.date, "2024-01-05", SEEN, 1704412800),
    (datetime.datetime, "2024-01-05T10:00:00", datetime.datetime(2024, 1, 5, 10), "soon"),
    (datetime.time, "10:30", datetime.time(10, 30), "25:00"),
    (datetime.timedelta, "PT90S", datetime.timedelta(seconds=90), "long"),
    (pathlib.Path, "a/b", pathlib.Path("a/b"), 3),
    (uuid.UUID, ID, uuid.UUID(ID), "12"),
    (decimal.Decimal, "1.10", decimal.Decimal("1.10"), "x"),
    (decimal.Decimal, 2, decimal.Decimal(2), True),
    (bytes, "ab", b"ab", 1),
    (Point, {"x": 2, "when": "2024-01-05"}, Point(x=2, when=SEEN), {"y": 1.0}),
    (Point, {"x": 2}, Point(x=2), {"x": "2"}),
    (Point, {"x": 2}, Point(x=2), {"x": 3}),
    (Trip, {"start": {"x": 2}, "stops": [{"x": 4}]}, Trip(Point(x=2), [Point(x=4)]), {"start": 2}),
    (Pair, [1, "b"], Pair(1, "b"), ["1", "b"]),
    (Options, {"color": "blue"}, {"color": Color.BLUE}, {"color": "green"}),
    (list[Options], [{"limits": {"a": 1}}], [{"limits": {"a": 1}}], [{"limits": {"a": "1"}}]),
    (Optional[Options], None, None, {"color": 1}),  # noqa: UP045
    (list[Color], ["red", "blue"], [Color.RED, Color.BLUE], ["red", 1]),
    (dict[str, Point], {"a": {"x": 2}}, {"a": Point(x=2)}, {"a": {"x": "2"}}),
    (dict[int, str], {"1": "a"}, {1: "a"}, {"one": "a"}),
    (Mapping[Color, int], {"red": 1}, {Color.RED: 1}, {"green": 1}),
    (Color | None, None, None, "green"),
    (Optional[Color], "red", Color.RED, 1),  # noqa: UP045
    (Union[int, Point], {"x": 2}, Point(x=2), "2"),  # noqa: UP007
    (Union[datetime.date, int], 5, 5, "5"),  # noqa: UP007
    (Literal[Color.RED], "red", Color.RED, "blue"),
    (Annotated[int, Field(ge=1, le=3)], 2, 2, 4),
    (Annotated[Color, "a color"], "red", Color.RED, "green"),
    (UserId, 3, 3, "3"),
    (set[int], [1, 2], {1, 2}, [1, "2"]),
    (frozenset[Color], ["red"], frozenset({Color.RED}), ["green"]),
    (tuple[int, str], [1, "a"], (1, "a"), [1]),
    (tuple[int, ...], [1, 2, 3], (1, 2, 3), [1, "2"]),
    (tuple, [1, "a"], (1, "a"), 5),
    (Sequence[int], [1, 2], [1, 2], ["1"]),
    (list[tuple[int, int]], [[1, 2]], [(1, 2)], [[1]]),
    # Types of JSON.
    (int, 5, 5, "5"),
    (int, 5, 5, None),
    (float, 5, 5, "5"),
    (bool, True, True, 1),
    (str | None, None, None, 5),
    (Optional[int], None, None, "5"),  # noqa: UP045
    (Literal["a", 1], "a", "a", "b"),
    (list[int], [1], [1], ["1"]),
    (dict[str, list[int]], {"a": [1]}, {"a": [1]}, {"a": [None]}),
    (Any, {"a": [None]}, {"a": [None]}, ...),
    (list, [1, "a"], [1, "a"], {}),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "value", "expected", "wrong"), TYPES)
async def test_an_argument_comes_as_its_type_or_not_at_all(hint: Any, value: Any, expected: Any, wrong: Any) -> None:
    function = tool(hint)
    result = await call(function, value=value)
    assert result.fault is None, result.content
    assert result.content == f"{type(expected).__name__} {expected!r}"
    if wrong is not ...:
        result = await call(function, value=wrong)
        assert result.fault is ToolFault.BAD_ARGUMENTS, result.content
        assert result.content.startswith("error: wrong arguments for made")


@pytest.mark.parametrize("hint", [hint for hint, *_ in TYPES])
def test_the_model_sees_a_schema_that_takes_the_value_and_has_no_references(hint: Any) -> None:
    shown = describe(tool(hint)).schema["function"]["parameters"]["properties"]["value"]
    text = json.dumps(shown)
    assert "$ref" not in text
    assert shown["description"] == "what to take"
    if hint is not Any:
        assert shown.keys() & {"type", "enum", "anyOf", "const"}, "the type is described"
    for value in (value for other, value, *_ in TYPES if other is hint and value is not None):
        assert Draft202012Validator(shown).is_valid(value)


def test_types_are_described_by_their_values_and_fields() -> None:
    def shown(hint: Any) -> dict[str, Any]:
        schema = describe(tool(hint)).schema["function"]["parameters"]["properties"]["value"]
        return {key: value for key, value in schema.items() if key != "description"}

    assert shown(Color) == {"title": "Color", "type": "string", "enum": ["red", "blue"]}
    assert shown(datetime.date) == {"type": "string", "format": "date"}
    assert shown(Annotated[int, Field(ge=1)]) == {"type": "integer", "minimum": 1}
    assert shown(Trip)["properties"]["start"]["properties"]["x"] == {"type": "integer"}
    assert shown(Trip)["required"] == ["start"]
    assert shown(list[Color])["items"]["enum"] == ["red", "blue"]
    assert shown(dict[str, Point])["additionalProperties"]["required"] == ["x"]


def plain(a: int, b: str = "x", c: float | None = None, *, d: list[int], e: dict[str, Any], f: Literal["u", 2]) -> dict:
    """Do it.

    Args:
        a: the first
        b: the second (choices: ["x", "y"])
        c: the third
        d: the fourth
        e: the fifth
        f: the sixth

    Returns:
        something
    """
    return {}


def tuples(a: tuple[int, str], b: tuple, c: dict[int, str], d: Union[int, str, None], e: bool) -> Opaque:  # noqa: UP007
    """Do it.

    Args:
        a: the first
        b: the second
        c: the third
        d: the fourth
        e: the fifth
    """
    return Opaque()


@pytest.mark.parametrize("function", [plain, tuples])
def test_the_schema_of_plain_types_is_that_of_transformers(function: Callable[..., Any]) -> None:
    assert json.dumps(describe(function).schema) == json.dumps(get_json_schema(function))


@pytest.mark.parametrize("hint", [int, str, Color, list[int], Point])
async def test_a_parameter_whose_default_is_none_takes_null(hint: Any) -> None:
    function = tool(hint, default=None)
    assert (await call(function, value=None)).content == "NoneType None"
    assert (await call(function)).content == "NoneType None"
    shown = describe(function).schema["function"]["parameters"]["properties"]["value"]
    assert shown.get("nullable") is True or {"type": "null"} in shown["anyOf"]


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (Opaque, "Opaque"),
        (np.ndarray, "ndarray"),
        (list[np.ndarray], "ndarray"),
        (torch.Tensor, "Tensor"),
        (pandas.DataFrame, "DataFrame"),
        (Callable[[int], int], "Callable"),
        (type[int], "type"),
        (dict[str, Opaque], "Opaque"),
        (Optional[Opaque], "Opaque"),  # noqa: UP045
        (Node, "recursive"),
        (types.ModuleType, "module"),
    ],
)
def test_a_type_that_json_cannot_hold_is_refused_with_tool_and_parameter(hint: Any, says: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"tool made: a model cannot write parameter value as JSON: .*{says}.*use str"
    ):
        Toolbox([tool(hint)])


def returning(make: Callable[[], Any], *, is_async: bool = False) -> Callable[..., Any]:
    def produce():
        """Produce it."""
        return make()

    async def produce_async():
        """Produce it."""
        return make()

    return produce_async if is_async else produce


def squares() -> Iterator[int]:
    yield from (0, 1, 4)


FRAME = {"a": [1, 2], "b": ["x", None]}
RESULTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: "as it is", "as it is"),
    (lambda: {"a": (1, 2.5, None, True), "é": {}}, '{"a": [1, 2.5, null, true], "é": {}}'),
    (lambda: None, "null"),
    (squares, "[0, 1, 4]"),
    (lambda: map(str, [1]), '["1"]'),
    (lambda: {"a": squares()}, '{"a": [0, 1, 4]}'),
    (lambda: range(3), "[0, 1, 2]"),
    (lambda: {"a": 1}.keys(), '["a"]'),
    (lambda: np.int64(3), "3"),
    (lambda: np.float64(0.5), "0.5"),
    (lambda: np.bool_(True), "true"),
    (lambda: np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
    (lambda: {"a": np.float32(1.5), "b": [np.arange(2)]}, '{"a": 1.5, "b": [0, 1]}'.replace("[0, 1]", "[[0, 1]]")),
    (lambda: torch.tensor([1, 2]), "[1, 2]"),
    (lambda: pandas.DataFrame(FRAME), '[{"a": 1, "b": "x"}, {"a": 2, "b": null}]'),
    (lambda: pandas.Series([1, 2]), "[1, 2]"),
    (lambda: Point(x=2), '{"x": 2, "y": 0.0, "when": null}'),
    (lambda: [Trip(Point(x=2))], '[{"start": {"x": 2, "y": 0.0, "when": null}, "stops": []}]'),
    (lambda: Pair(1), '[1, "r"]'),
    (lambda: Color.RED, '"red"'),
    (lambda: SEEN, '"2024-01-05"'),
    (lambda: {SEEN: 1, Color.RED: 2}, '{"2024-01-05": 1, "red": 2}'),
    (lambda: b"caf\xc3\xa9", "café"),
    (lambda: {"b", "a"}, '["a", "b"]'),
    (lambda: decimal.Decimal("1.10"), '"1.10"'),
    (lambda: uuid.UUID(ID), f'"{ID}"'),
    (lambda: pathlib.Path("/x"), '"/x"'),
    (lambda: types.MappingProxyType({"a": 1}), '{"a": 1}'),
    (lambda: collections.deque([1]), "[1]"),
    (lambda: collections.Counter("aab"), '{"a": 2, "b": 1}'),
    (lambda: Worded(), '"in words"'),
]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("make", "text"), RESULTS)
async def test_a_result_is_a_text_or_json(make: Callable[[], Any], text: str, is_async: bool) -> None:
    result = await call(returning(make, is_async=is_async))
    assert (result.content, result.fault) == (text, None)


async def later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Opaque, "TypeError: the tool returned an object of class Opaque, which is not JSON"),
        (lambda: [Opaque()], "an object of class Opaque"),
        (lambda: squares, "an object of class function"),
        (lambda: later(), "an object of class async_generator"),
        (lambda: b"\xff", "UnicodeDecodeError"),
        (lambda: itertools.count(), f"an iterator of more than {MAX_ITEMS} items"),
        (lambda: collections.UserDict({Opaque(): 1}), "an object of class Opaque"),
    ],
)
async def test_a_result_that_is_not_json_is_an_error_of_its_call(make: Callable[[], Any], says: str) -> None:
    result = await call(returning(make))
    assert result.fault is ToolFault.EXCEPTION
    assert result.content.startswith("error: ")
    assert says in result.content


async def test_a_tool_may_name_the_type_of_any_result() -> None:
    def produce() -> Iterator[Annotated[int, "a square"]]:
        """Produce it."""
        return squares()

    assert (await call(produce)).content == "[0, 1, 4]"


class Shelf:
    def find(self, color: Color, when: datetime.date = SEEN) -> Color:
        """Find it.

        Args:
            color: of what color
            when: the day
        """
        assert isinstance(color, Color)
        assert when == SEEN
        return color


async def test_methods_are_described_and_converted_too() -> None:
    assert (await call(Shelf().find, color="red")).content == '"red"'
