"""Reference of a data row as an answer that a model could give."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.lab.environments.subject import Answer, Options, Player, Subject, reward_of
from lockstep.rewards.functions import FUNCTIONS
from lockstep.rewards.functions.answers import ANSWER_COLUMNS
from lockstep.rollout.environments.prompt import PROMPT_COLUMNS
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message, Rollout
from lockstep.rollout.system.deadline import call_with_deadline
from lockstep.rollout.system.user_functions import load_function
from lockstep.trainer.config.groups.task_settings import RewardConfig
from lockstep.trainer.data.prompts import DATASET, Row

FORMS = (
    "{answer}",
    "The answer is {answer}",
    "<answer>{answer}</answer>",
    "<think>\nI know this.\n</think>\n\n{answer}",
    "<think>\nI know this.\n</think>\n\n<answer>{answer}</answer>",
    "\\boxed{{answer}}",
    "#### {answer}",
)
"""Usual texts around an answer, tried in this order."""
TRIED_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Way to answer rows correctly, as far as the data says it."""

    column: str | None
    """Column with the reference; None: the data has none."""
    form: str = "{answer}"
    player: str | None = None

    @property
    def is_known(self) -> bool:
        return self.column is not None or self.player is not None

    @property
    def source(self) -> str:
        if self.player is not None:
            return f"played by {self.player}"
        return f"column {self.column}" + ("" if self.form == "{answer}" else f" as {self.form!r}")

    def answer(self, row: Row) -> Answer:
        """Return the reference of a row as an answer."""
        return in_form(row.get(self.column or ""), self.form)

    def play_of(self, row: Row) -> Player:
        """Return the player that answers a row correctly."""
        if self.player is None:
            answer = self.answer(row)

            async def say(messages: Sequence[Message]) -> Answer:
                return answer

            return say
        return partial(_ask, self.player, row)


async def _ask(player: str, row: Row, messages: Sequence[Message]) -> Answer:
    result = await call_with_deadline(load_function(player), list(messages), dict(row), timeout_s=10.0)
    if result.error is not None:
        raise DataError(f"--player {player} failed: {type(result.error).__name__}: {result.error}")
    if not isinstance(result.value, str | Mapping):
        raise DataError(f"--player {player} returned {type(result.value).__name__}; expected a text or a message")
    return result.value


def in_form(value: Any, form: str) -> Answer:
    """Return a reference as an answer: tool calls as such, anything else as text in a form."""
    calls = _calls(value)
    if calls is not None:
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return form.replace("{answer}", text_of(value))


def text_of(value: Any) -> str:
    """Return a reference as text; the first one of a list of texts."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], str):
        value = value[0]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def find_column(reward: RewardConfig, options: Options, row: Row) -> str | None:
    """Return the column of the reference answer: the given one, that of a built-in reward, or one by a usual name.

    Raises `DataError` if the given one is missing.
    """
    if options.reference is not None:
        if row.get(options.reference) is None:
            raise DataError(f"--reference {options.reference}: the first row has {', '.join(row) or 'no columns'}")
        return options.reference
    for function in reward.functions:
        settings = reward.settings.get(function.rpartition(":")[2]) or {}
        column = settings.get("column")
        if column is None and function in FUNCTIONS:
            parameter = inspect.signature(FUNCTIONS[function]).parameters.get("column")
            column = None if parameter is None else parameter.default
        if isinstance(column, str) and row.get(column) is not None:
            return column
    return next((name for name in ANSWER_COLUMNS if row.get(name) is not None), None)


async def find_reference(subject: Subject) -> Reference:
    """Return the reference in the form that earns most on the first rows.

    Without a column of a usual name, it is the column whose values earn most as answers, if any earns something.
    """
    options, first = subject.options, subject.rows[0]
    column = find_column(subject.config.reward, options, first)
    if options.player is not None:
        return Reference(column=column, player=options.player)
    columns = [column] if column is not None else unrelated_columns(subject, None)
    rows = subject.rows[:TRIED_ROWS]
    best, most = Reference(column=column), float("-inf") if column is not None else 0.0
    for name in columns:
        for form in options.forms or FORMS:
            candidate = Reference(column=name, form=form)
            total = sum(reward_of(one) or 0.0 for one in await earn_reference(subject, candidate, rows))
            if total > most + 1e-9:
                best, most = candidate, total
    return best


def prompt_columns(subject: Subject) -> set[str]:
    """Return columns from which the prompt is made."""
    column = subject.config.environment.settings.get("prompt_column")
    return {column} if isinstance(column, str) else set(PROMPT_COLUMNS)


def unrelated_columns(subject: Subject, reference: str | None) -> list[str]:
    """Return the columns that neither the prompt nor the reward is known to read."""
    related_columns = {
        *prompt_columns(subject),
        *PROMPT_COLUMNS,
        *subject.options.reads,
        reference,
        DATASET,
        "environment",
    }
    return [column for column in subject.rows[0] if column not in related_columns]


async def earn_reference(subject: Subject, reference: Reference, rows: Sequence[Row]) -> list[Rollout]:
    """Play the reference on rows and score the episodes."""
    return await subject.score([await subject.play(row, reference.play_of(row)) for row in rows])


def _calls(value: Any) -> list[dict[str, Any]] | None:
    """Return tool calls in the OpenAI form from a list of {name, arguments} or its JSON text; None for others."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list | tuple) or not value:
        return None
    calls = []
    for entry in value:
        call = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return None
        arguments = call["arguments"]
        if isinstance(arguments, Mapping):  # columnar files give every call the arguments of all calls
            arguments = {key: item for key, item in arguments.items() if item is not None}
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return calls
