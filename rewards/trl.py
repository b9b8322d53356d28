"""Reward functions with TRL's signature: `fn(prompts, completions, **columns) -> list[float | None]`.

    prompts, completions    messages, or texts where the row's prompt is a text, as in TRL's two formats of data
    completion_ids          sampled ids of all turns
    trainer_state           `global_step` and `max_steps`, counted in optimizer updates
    log_extra, log_metric   columns of the saved rollouts, and metrics `reward/<function>/metric/<name>`
    others                  columns of the data rows, and facts that the environment reports, as lists

Images are PIL images, in columns `images` and `image` and in parts `{"type": "image", "image": ...}` of messages.

Not covered: `environments`, TRL's instances of environments.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

from lockstep.rewards.batches import BatchReward, plain
from lockstep.rewards.meter import METRIC, Meter, current
from lockstep.rewards.outcomes import MAX_DETAIL_CHARS, logged_value
from lockstep.rollout.chat.messages import normalize_messages
from lockstep.rollout.environments.prompt import IMAGE_COLUMNS, PromptReader
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Message, Rollout, content_text, is_stored_image
from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.system.deadline import function_name

_RENAMED = ("prompt", "completion", "completion_ids")
"""Keys of a data row that TRL passes under other names."""


def from_trl(function: Callable[..., Any], *, conversational: bool | None = None, **settings: Any) -> BatchReward:
    """Adapt an unchanged TRL reward function, sync or async, which is called with keywords.

    A function without `**kwargs` gets those that it names. All of them are copies.
    conversational: pass messages or texts; None: texts where the row's prompt is a text. Raises `ConfigError` for a
    setting that the function does not take.
    """
    parameters = signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_all else [key for key in settings if key not in parameters]
    if unknown:
        name = function_name(function)
        raise ConfigError(
            f"reward {name} does not take {unknown[0]!r}, it takes {', '.join(parameters)}: leave out "
            f"reward.settings.{name}.{unknown[0]}"
        )

    def arguments(rollouts: Sequence[Rollout]) -> Mapping[str, Any]:
        rows = [{**rollout.outcome, **rollout.example} for rollout in rollouts]
        columns = sorted({key for row in rows for key in row if key not in _RENAMED})
        halves = [_halves(rollout, conversational) for rollout in rollouts]
        spans = [span for rollout in rollouts for call in rollout.calls for span in call.version_spans]
        updates, meter = max((span.version for span in spans), default=0), current()
        everything = {
            **{column: [_column(column, row.get(column)) for row in rows] for column in columns},
            "prompts": [prompt for prompt, _ in halves],
            "completions": [completion for _, completion in halves],
            "completion_ids": [[token for call in rollout.calls for token in call.sampled_ids] for rollout in rollouts],
            "trainer_state": SimpleNamespace(global_step=updates, max_steps=meter.num_updates),
            "log_extra": partial(log_column, meter, len(rollouts)),
            "log_metric": partial(_log_metric, meter),
            **settings,
        }
        return keyword_arguments(parameters, everything, columns)

    return BatchReward(function=function, arguments=arguments)


def keyword_arguments(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any], columns: Iterable[str]
) -> Mapping[str, Any]:
    """Return the arguments that a function takes by name. Raises `DataError` for a column that no row has."""
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if parameter.default is Parameter.empty and name not in values and not str(parameter).startswith("*"):
            raise DataError(
                f"the function needs column {name!r} of the data row, found {', '.join(columns) or 'none'}; set "
                f"'data.columns={{{name}: <column>}}'"
            )
    return {key: value for key, value in values.items() if takes_all or key in parameters}


def sampled_text(rollout: Rollout) -> str:
    """Return the text of all sampled turns, with reasoning and tool calls as models of the Qwen family write them."""
    texts = []
    for turn in normalize_messages(rollout.sampled_turns):
        functions = (call["function"] for call in turn.get("tool_calls", ()))
        calls = (f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in functions)
        texts += filter(None, (_content(turn), *calls))
    return "\n".join(texts)


def _content(turn: Message) -> str:
    reasoning, content = turn.get("reasoning_content"), str(turn.get("content") or "")
    return content if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n{content}"


def _halves(rollout: Rollout, conversational: bool | None) -> tuple[Any, Any]:
    """Return prompt and completion: texts, or messages with arguments as objects.

    As in TRL, reasoning is part of the content unless the completion calls tools, and prompts with images are messages.
    """
    question, column = (rollout.prompt or ({},))[-1].get("content"), PromptReader().find(rollout.example)
    values = rollout.example.values() if column is None else [rollout.example[column]]
    is_text = any(isinstance(value, str) and (column is not None or value == question) for value in values)
    is_text = is_text and not any(map(_has_images, rollout.prompt))
    if is_text if conversational is None else not conversational:
        return content_text({"content": question}), sampled_text(rollout)
    turns = normalize_messages(rollout.completion, sees_images=True)
    if not any(turn.get("tool_calls") for turn in turns):
        turns = [{**turn, "content": _content(turn)} if isinstance(turn["content"], str) else turn for turn in turns]
    return [_opened(copy.deepcopy(dict(message))) for message in rollout.prompt], [_opened(turn) for turn in turns]


def _has_images(message: Message) -> bool:
    """True for a message with images of the run."""
    content = message.get("content")
    return isinstance(content, list | tuple) and any(map(is_stored_image, content))


def _opened(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the pixels of its images. Raises `DataError`."""
    if not _has_images(message):
        return message
    parts = [
        {"type": "image", "image": _pixels(part)} if is_stored_image(part) else part for part in message["content"]
    ]
    return {**message, "content": parts}


def _column(name: str, value: Any) -> Any:
    """Return a copy of a value of a row, for columns of images with their pixels. Raises `DataError`."""
    if name in IMAGE_COLUMNS:
        if isinstance(value, list | tuple):
            return [_column(name, item) for item in value]
        if is_stored_image(value):
            return _pixels(value)
    return copy.deepcopy(value)


def _pixels(part: Mapping[str, Any]) -> Any:
    from lockstep.rollout.media.run_images import open_image  # functions of texts do not load it

    return open_image(part)


def log_column(meter: Meter, count: int, column: str, values: Sequence[Any]) -> None:
    """Record a value for each rollout of a call. Raises ValueError for another number of values."""
    items = plain(values)
    if not isinstance(items, list) or len(items) != count:
        raise ValueError(f"log_extra({column!r}): expected a list with one value for each of {count} rollouts")
    meter.columns[safe_text(str(column), MAX_DETAIL_CHARS)] = [logged_value(item) for item in items]


def _log_metric(meter: Meter, name: str, value: Any) -> None:
    number = plain(value)
    if not isinstance(number, int | float):
        raise TypeError(f"log_metric({name!r}): found a {type(value).__name__}, expected a number")
    measure = METRIC + safe_text(str(name), MAX_DETAIL_CHARS)
    meter.sums[measure] += number
    meter.counts[measure] += 1
