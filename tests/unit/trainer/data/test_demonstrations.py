"""Demonstrations of files: exact rows, columns, limits, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.episode.demonstration import demonstrated_calls
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import DataError
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.demonstrations import Demonstration, load_demonstrations
from tests.fixtures.conversations import USER, WEATHER
from tests.fixtures.tokenizers import chat_tokenizer

CHAT = Chat(chat_tokenizer("qwen3"))
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
WITH_CALL = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "assistant", "content": "it rains"},
]
PLAIN = [USER, {"role": "assistant", "content": "no idea"}]


def load(path: Path, rows: list[Any], *, max_tokens: int | None = None, **settings: Any) -> list[Demonstration]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if path.suffix == ".jsonl" else json.dumps(rows))
    data_set = DataSetConfig(path=str(path), split="train", **settings)
    return load_demonstrations(data_set, CHAT, max_tokens=max_tokens, vocab_size=10**6, say=lambda text: None)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("as_text", [False, True])
def test_rows_are_those_of_the_messages_in_every_format(suffix: str, as_text: bool, tmp_path: Path) -> None:
    """Arrow adds null keys to the rows of JSON: no template may see them."""
    rows = [{"messages": WITH_CALL, "tools": [WEATHER]}, {"messages": PLAIN}]
    written = [{name: json.dumps(value) for name, value in row.items()} for row in rows] if as_text else rows
    found = load(tmp_path / f"rows{suffix}", written)
    for demonstration, row in zip(found, rows, strict=True):
        expected = rows_from_calls(demonstrated_calls(CHAT, row["messages"], row.get("tools", ())))
        for one, other in zip(demonstration, expected, strict=True):
            again = one.row(3)
            np.testing.assert_array_equal(again.ids, other.ids)
            np.testing.assert_array_equal(again.loss_mask, other.loss_mask)
            np.testing.assert_array_equal(again.turns, other.turns)
            assert again.rollout_id == 3


def test_columns_are_renamed_and_long_conversations_left_out(tmp_path: Path) -> None:
    long = [USER, {"role": "assistant", "content": "word " * 200}]
    rows = [{"talk": PLAIN}, {"talk": long}]
    found = load(tmp_path / "rows.jsonl", rows, max_tokens=100, columns={"messages": "talk"})
    assert len(found) == 1
    with pytest.raises(DataError, match="no demonstrations are left without 2 longer than 5 tokens"):
        load(tmp_path / "rows.jsonl", rows, max_tokens=5, columns={"messages": "talk"})


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": "hello"}, "line 2: it has no list of objects in column 'messages' .found str"),
        ({"text": "x"}, "line 2: it has no list of objects in column 'messages' .found NoneType"),
        ({"messages": [USER]}, "line 2: it cannot be trained: there is no assistant turn"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "weight": 0}]}, "line 2: it has no turn to train"),
    ],
)
def test_a_row_that_cannot_be_trained_is_named(row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        load(tmp_path / "rows.jsonl", [{"messages": PLAIN}, row])
