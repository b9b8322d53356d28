"""Demonstrations of a run: conversations of a data set as exact rows, in training order.

A row of the data set has `messages` in OpenAI's format, and `tools` if the turns call any; saved rollouts have ids
(saved_demonstrations.py). All rows are made at the start, on rank 0, so that one that cannot be trained is reported
before the first update. They are kept in seven bytes a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.environments.prompt import IMAGE_COLUMNS, images_problem, without_nulls
from lockstep.rollout.episode.demonstration import demonstrated_calls
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import DataError, EvidenceError, TemplateError
from lockstep.rollout.records import ImageSpan, TrainingRow
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.datasets import json_or_text, load_rows, rename
from lockstep.trainer.data.reader import Record, Row, every
from lockstep.trainer.data.saved_demonstrations import saved_rows

MESSAGES, TOOLS = "messages", "tools"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenized:
    """A row of a demonstration, small."""

    ids: np.ndarray  # (L,) int32
    loss_mask: np.ndarray  # (L,) bool
    turns: np.ndarray  # (L,) int16
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, row: TrainingRow) -> Tokenized:
        return cls(
            ids=row.ids.astype(np.int32), loss_mask=row.loss_mask, turns=row.turns.astype(np.int16), images=row.images
        )

    def row(self, number: int) -> TrainingRow:
        """Return the training row. number: of its demonstration in the step."""
        length = len(self.ids)
        return TrainingRow(
            ids=self.ids.astype(np.int64),
            loss_mask=self.loss_mask,
            sampling_logprobs=np.zeros(length, dtype=np.float32),
            versions=np.full(length, -1, dtype=np.int32),
            turns=self.turns.astype(np.int32),
            rollout_id=number,
            group_id=number,
            images=self.images,
        )


Demonstration = tuple[Tokenized, ...]
"""Rows of one conversation."""


def load_demonstrations(
    settings: DataSetConfig,
    chat: Chat,
    *,
    max_tokens: int | None,
    min_reward: float | None = None,
    max_images: int | None = None,
    vocab_size: int,
    say: Callable[[str], None],
) -> list[Demonstration]:
    """Load the demonstrations of a data set as rows.

    Args:
        max_tokens: leaves out demonstrations with a longer row; None: none.
        min_reward: leaves out saved rollouts with a lower reward; None: none.
        max_images: of a conversation; None: any number.
        vocab_size: ids of the model.

    Raises `DataError` for a row that cannot be trained, `ConfigError` if the template drops the tools.
    """
    left_out: Counter[str] = Counter()
    if settings.is_saved:
        conversations = saved_rows(settings.path, chat, min_reward=min_reward, vocab_size=vocab_size, left_out=left_out)
    else:
        records = _conversations(settings, chat, say, max_images)
        conversations = (rows for _, rows in every(records, of=settings.path, say=say))
    examples: list[Demonstration] = []
    for rows in conversations:
        if max_tokens is not None and max(map(len, rows)) > max_tokens:
            left_out[f"longer than {max_tokens} tokens"] += 1
        else:
            examples.append(tuple(map(Tokenized.of, rows)))
    causes = ", ".join(f"{count} {cause}" for cause, count in left_out.items())
    if not examples:
        raise DataError(f"{settings.path}: no demonstrations are left without {causes or 'any in the file'}")
    num_tokens = sum(len(row) for rows in examples for row in rows)
    num_trained = sum(int(row.loss_mask.sum()) for rows in examples for row in rows)
    note = f"; {causes} are left out" if causes else ""
    say(f"{settings.path}: {len(examples)} demonstrations, {num_tokens} tokens, {num_trained} of them trained{note}")
    return examples


def _tokenized(row: Row, chat: Chat, place_images: Callable[[Row], list[Any]] | None) -> list[TrainingRow]:
    messages, tools = _parsed(row.get(MESSAGES), MESSAGES), _parsed(row.get(TOOLS) or [], TOOLS)
    if place_images is not None:
        messages = place_images({**row, MESSAGES: messages})
    elif problem := images_problem({name: row.get(name) for name in IMAGE_COLUMNS}, messages):
        raise DataError(problem)
    try:
        rows = rows_from_calls(demonstrated_calls(chat, messages, tools))
    except (TemplateError, EvidenceError) as error:
        raise DataError(f"it cannot be trained: {error}") from error
    if not any(one.num_trained for one in rows):
        raise DataError("it has no turn to train: each assistant message has weight 0")
    return rows


def _parsed(value: Any, column: str) -> list[dict[str, Any]]:
    """Return a list of objects, given as such or as JSON text."""
    objects = json_or_text(value) if isinstance(value, str) else value
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise DataError(
            f"it has no list of objects in column {column!r} (found {type(objects).__name__}); expected messages in "
            f"OpenAI's format; set 'data.columns={{{column}: <column>}}'"
        )
    return objects


def _conversations(
    settings: DataSetConfig, chat: Chat, say: Callable[[str], None], max_images: int | None
) -> Iterator[Record[list[TrainingRow]]]:
    """Yield the place of each row, and a function that makes its training rows."""
    assert settings.split is not None, "resolved by DataConfig.complete"
    rows = load_rows(settings.path, settings.split, settings.subset, say=say)
    # In parquet, a null may stand for an absent key, which a template must not see.
    clean = without_nulls if rows.is_columnar else lambda row: row
    place_images = None
    if chat.images is not None:
        from lockstep.trainer.data import row_images  # runs without images do not load it

        rows = row_images.undecoded(rows)
        place_images = partial(
            row_images.conversation, images=row_images.images_of(settings, chat.images.store), most=max_images
        )

    def training_rows(read: Callable[[], Row]) -> list[TrainingRow]:
        return _tokenized(rename(clean(read()), settings.columns or {}, of=settings.path), chat, place_images)

    for place, read in rows.records():
        yield place, partial(training_rows, read)
