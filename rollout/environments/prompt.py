"""Reader of an episode's first messages from a data row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message, image_parts, is_image_part, is_stored_image

PROMPT_COLUMNS = ("messages", "prompt", "question")
"""Columns searched when none is named; the first that the row fills wins."""

IMAGE_COLUMNS = ("images", "image")
"""Columns with the images of the prompt."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
SEES_IMAGES = "model.images.max_per_prompt=<the most images of a row> with a model that sees images"

OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}
"""Roles of other formats, by ours. A template may write them, but no judge would see a question."""


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
        """Return the name of the column that holds the row's prompt; None if all are absent or empty."""
        return next((name for name in self.columns if not is_empty(example.get(name))), None)

    def opening(self, example: Mapping[str, Any]) -> tuple[Message, ...]:
        """Return `messages`, or an empty user turn for an environment that writes the prompt of rows without one."""
        if self.find(example) is None:
            return self._with_system(({"role": "user", "content": ""},))
        return self.messages(example)

    def messages(self, example: Mapping[str, Any]) -> tuple[Message, ...]:
        """Return the first messages of an episode. Raises `DataError` without messages that a model can answer."""
        name = self.find(example)
        if name is None:
            there = [f"{column} (empty)" if is_empty(value) else column for column, value in example.items()]
            hint = next((column for column, value in example.items() if isinstance(value, str | list)), "<column>")
            remedy = f"set 'data.columns={{prompt: {hint}}}' with the column that holds the prompt"
            if not example.keys().isdisjoint(self.columns):
                remedy = "fill it, or leave the row out"
            raise DataError(
                f"no prompt in a data row: no {' or '.join(self.columns)}; it has {', '.join(there) or 'nothing'}; "
                f"{remedy}"
            )
        value = example[name]
        if isinstance(value, str):
            if _is_chat(value):
                raise DataError(
                    f"column {name}: found the JSON text of messages, {value!r:.80}, which the model would read as one "
                    "turn of a user; expected the list itself, in a JSONL, JSON or parquet file"
                )
            turns: tuple[Message, ...] = ({"role": "user", "content": self.template.replace("{prompt}", value)},)
        else:
            turns = _read_messages(name, value)
        images = example.get("images")
        if isinstance(images, list) and all(map(is_stored_image, images)):
            from lockstep.rollout.media.placement import placed  # rows without images do not load it

            turns = placed(turns, images)
        return self._with_system(turns)

    def _with_system(self, turns: tuple[Message, ...]) -> tuple[Message, ...]:
        if self.system is not None and turns[0]["role"] not in ("system", "developer"):
            return ({"role": "system", "content": self.system}, *turns)
        return turns


def is_empty(value: Any) -> bool:
    """True for null and for a text of spaces, the empty cell of CSV."""
    return value is None or (isinstance(value, str) and not value.strip())


def image_values(value: Any) -> list[Any]:
    """Return the images of a column of images; none for an empty one."""
    return list(value) if isinstance(value, list | tuple) else [] if is_empty(value) else [value]


def is_image(value: Any) -> bool:
    """True for an image as `datasets` gives it."""
    return isinstance(value, Mapping) and value.keys() == {"bytes", "path"}


def is_image_file(value: Any) -> bool:
    """True for bytes, a data URL, or the path of an image; a column `image` may also name that of a container."""
    return isinstance(value, bytes) or (
        isinstance(value, str) and (value.startswith("data:image/") or value.lower().endswith(IMAGE_SUFFIXES))
    )


def num_images(messages: Sequence[Message]) -> int:
    """Count the images of messages, and their places."""
    return sum(len(image_parts(message)) for message in messages)


def too_many_images(count: int, most: int) -> str:
    """Return a sentence for a row with more images than `most`."""
    return (
        f"the prompt has {count} images, model.images.max_per_prompt={most}; set "
        f"model.images.max_per_prompt={count}, or leave the row out"
    )


def images_problem(row: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
    """Return a sentence for a row with images in a run that sees none; None without images."""
    for name, value in row.items():
        values = image_values(value)
        if values and (
            is_image(values[0]) or is_image_part(values[0]) or (name in IMAGE_COLUMNS and is_image_file(values[0]))
        ):
            return of_unread_column(name)
    if num_images(messages):
        return f"its messages hold images; set {SEES_IMAGES}, or leave the row out"
    return None


def of_unread_column(name: str) -> str:
    """Return a sentence for a column of images in a run that sees none."""
    also = "" if name in (*IMAGE_COLUMNS, *PROMPT_COLUMNS) else f" and 'data.columns={{images: {name}}}'"
    return f"column {name} holds images; set {SEES_IMAGES}{also}, or leave it out: set 'data.columns={{{name}: null}}'"


def without_nulls(value: Any) -> Any:
    """Return a value of a columnar file without keys that are null, which may stand for absent ones."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _is_chat(text: str) -> bool:
    """True for the JSON text of messages."""
    try:
        turns = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(turns, list) and any(isinstance(turn, dict) and "role" in turn for turn in turns)


def _read_messages(name: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise DataError(
            f"column {name}: expected a text or a list of messages, found {type(value).__name__} {value!r:.80}"
        )
    for turn in value:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str) or "content" not in turn:
            raise DataError(f"column {name}: expected messages with role and content, found {turn!r:.200}")
        if turn["role"] in OTHER_ROLES:
            raise DataError(
                f"column {name}: found the role {turn['role']!r}, expected {OTHER_ROLES[turn['role']]!r}: rewards and "
                "templates read the roles system, user, assistant and tool"
            )
    if value[-1]["role"] == "assistant":
        raise DataError(
            f"column {name}: the conversation ends with an assistant turn, expected a turn that the model can answer; "
            "drop the last turn from the data, or move it to a column of its own for the reward"
        )
    if value[-1]["role"] == "user" and is_empty(value[-1]["content"]):
        raise DataError(f"column {name}: the last message, which the model answers, is empty")
    # Columnar files give every message every key; an empty one would reach the template as a value.
    return tuple({key: item for key, item in turn.items() if item is not None} for turn in value)
