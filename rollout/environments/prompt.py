"""Reader of an episode's first messages from a data row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message

PROMPT_COLUMNS = ("messages", "prompt", "question")
"""Columns searched when none is named; the first that the row fills wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Reader of a row's prompt."""

    column: str | None = None
    """Column with a text (one user turn) or a list of messages; None: the first of messages, prompt, question."""
    system: str | None = None
    """System turn for rows without one."""
    template: str = "{prompt}"
    """Text of the user turn around the row's text, for instance with the wanted form of the answer. Rows with messages
    are not changed."""

    @property
    def columns(self) -> tuple[str, ...]:
        return PROMPT_COLUMNS if self.column is None else (self.column,)

    def find(self, example: Mapping[str, Any]) -> str | None:
        """Return the name of the column that holds the row's prompt; None if it has none."""
        return next((name for name in self.columns if example.get(name) is not None), None)

    def messages(self, example: Mapping[str, Any]) -> tuple[Message, ...]:
        """Return the first messages of an episode. Raises `DataError` without messages that a model can answer."""
        name = self.find(example)
        if name is None:
            raise DataError(
                f"no prompt in a data row: expected column {' or '.join(self.columns)}, found "
                f"{', '.join(example) or 'none'}; name the column with environment.prompt_column"
            )
        value = example[name]
        turns = (
            ({"role": "user", "content": self.template.replace("{prompt}", value)},)
            if isinstance(value, str)
            else _read_messages(name, value)
        )
        if self.system is not None and turns[0]["role"] not in ("system", "developer"):
            return ({"role": "system", "content": self.system}, *turns)
        return turns


def _read_messages(name: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"column {name}: expected a text or a list of messages, found {type(value).__name__} {value!r}")
    for turn in value:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str) or "content" not in turn:
            raise DataError(f"column {name}: expected messages with role and content, found {turn!r}")
    if value[-1]["role"] == "assistant":
        raise DataError(
            f"column {name}: the conversation ends with an assistant turn, expected a turn that the model can answer; "
            "drop the last turn from the data, or move it to a column of its own for the reward"
        )
    # Columnar files give every message every key; an empty one would reach the template as a value.
    return tuple({key: item for key, item in turn.items() if item is not None} for turn in value)
