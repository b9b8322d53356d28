"""From a data row to the first messages of an episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import DataError
from rollout.records import Message

# Looked for in this order when no column is named; the first that the row fills wins.
PROMPT_COLUMNS = ("messages", "prompt", "question")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Where a row holds its prompt, and what is said before it."""

    column: str | None = None
    """Column with a text (one user turn) or a list of messages; None: the first of messages, prompt, question."""
    system: str | None = None
    """System turn for rows that bring none of their own."""

    def messages(self, example: Mapping[str, Any]) -> tuple[Message, ...]:
        """The first messages of an episode.

        Raises:
            DataError: the row has no such column, or its value is neither text nor messages that a model can answer.
        """
        name = self._find(example)
        value = example[name]
        turns = ({"role": "user", "content": value},) if isinstance(value, str) else _read_messages(name, value)
        if self.system is not None and turns[0]["role"] not in ("system", "developer"):
            return ({"role": "system", "content": self.system}, *turns)
        return turns

    def _find(self, example: Mapping[str, Any]) -> str:
        names = PROMPT_COLUMNS if self.column is None else (self.column,)
        for name in names:
            if example.get(name) is not None:
                return name
        raise DataError(
            f"no prompt in a data row: expected column {' or '.join(names)}, found {', '.join(example) or 'none'}; "
            "name the column with environment.prompt_column"
        )


def _read_messages(name: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise DataError(f"column {name}: expected a text or a list of messages, found {type(value).__name__} {value!r}")
    for turn in value:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str) or "content" not in turn:
            raise DataError(f"column {name}: expected messages with role and content, found {turn!r}")
    if value[-1]["role"] == "assistant":
        raise DataError(
            f"column {name}: the conversation ends with an assistant turn, so there is nothing to answer; "
            "drop that turn from the data, or keep it in a column of its own for the reward"
        )
    # Columnar files give every message every key; an empty one would reach the template as a value.
    return tuple({key: item for key, item in turn.items() if item is not None} for turn in value)
