"""Check of every row before a run, and the values that rewards receive in every isolation."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rewards.composition import make_reward_set
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.episode.environment import messages_of_row
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message, Rollout
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import heldout_data, load_data_set, training_data
from lockstep.trainer.data.row_check import RowCheck
from tests.unit.trainer.data.test_reader import CELLS, ROWS

USER = {"role": "user", "content": "1+1"}
GOOD = {"prompt": "1+1", "answer": "2"}
TOOL = {"name": "f", "parameters": {}}


def config(environment: str = "single_turn", *rewards: str, **settings: Any) -> Config:
    made = Config()
    made.environment.name, made.environment.settings = environment, settings
    made.reward.functions = list(rewards) or ["exact_match"]
    return made


def check_of(config: Config) -> RowCheck:
    return RowCheck(config.environment, config.reward)


def write(path: Path, rows: list[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": None}, "no messages or prompt or question; it has prompt (empty), answer"),
        ({"prompt": " "}, "no messages or prompt or question; it has prompt (empty), answer"),
        ({"prompt": 5}, "expected a text or a list of messages, found int 5"),
        ({"prompt": []}, "expected a text or a list of messages, found list []"),
        ({"prompt": [{"content": "x"}]}, "expected messages with role and content"),
        ({"prompt": [{"role": "user"}]}, "expected messages with role and content"),
        ({"prompt": [{"role": "user", "content": None}]}, "the last message, which the model answers, is empty"),
        ({"prompt": [USER, {"role": "assistant", "content": "2"}]}, "the conversation ends with an assistant turn"),
        ({"prompt": [{"role": "user", "content": 5}]}, "message 0 has content of type int"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "message 0 has content of type list"),
        ({"prompt": [USER, {"role": "assistant", "content": "", "tool_calls": [{}]}, USER]}, "without a function name"),
        ({"tools": "not JSON"}, "column tools: expected tools as JSON, found 'not JSON'"),
        ({"tools": 3}, "column tools: expected a list of tools"),
        ({"tools": [{"parameters": {}}]}, "column tools: expected tools with a name"),
        ({"answer": None}, "the reward exact_match needs column 'answer', the row has prompt"),
        ({"answer": ""}, "needs column 'answer', the row has prompt, answer (empty); fill it, or leave the row out"),
    ],
)
@pytest.mark.parametrize("place", ["path", "heldout_path"])
def test_a_row_that_an_episode_would_refuse_is_refused_with_its_place_when_it_is_loaded(
    row: dict[str, Any], sentence: str, place: str, tmp_path: Path
) -> None:
    made = config()
    bad = {**GOOD, **row}
    setattr(made.data, place, write(tmp_path / "rows.jsonl", [GOOD, {**GOOD, "tools": [TOOL]}, bad, GOOD, bad]))
    load: Any = training_data if place == "path" else heldout_data
    with pytest.raises(DataError) as error:
        load(made.data if place == "path" else made.heldout_sets(), made.environment, made.reward)
    said = str(error.value)
    assert "rows.jsonl: 2 of 5 rows cannot be used" in said
    assert "\n  line 3: " in said
    assert "\n  line 5: " in said
    assert said.count(sentence) == 2, said


def test_a_nested_column_that_one_row_lacks_is_refused_with_its_place(tmp_path: Path) -> None:
    made = config()
    rows = [{"prompt": "1+1", "meta": {"truth": "2"}}, {"prompt": "1+2", "meta": {}}]
    made.data.path, made.data.columns = write(tmp_path / "rows.jsonl", rows), {"answer": "meta.truth"}
    with pytest.raises(DataError, match=r"line 2: data set .* has no column meta\.truth"):
        training_data(made.data, made.environment, made.reward)


@pytest.mark.parametrize(
    ("reward", "answer", "sentence"),
    [
        ("numeric", "no number", "numeric: column 'answer'"),
        ("numeric", "12:30", "numeric: column 'answer' holds '12:30'"),
        ("numeric", "2^{10}", "numeric: column 'answer' holds '2^{10}'"),
        ("numeric", "3 or 4", "numeric: column 'answer' holds '3 or 4'"),
        ("tool_calls_match", "[{}]", "tool_calls_match: column 'answer'"),
        ("tool_calls_match", "not JSON", "tool_calls_match: column 'answer' is not JSON"),
    ],
)
def test_a_reference_that_a_reward_cannot_read_is_an_error_of_its_row(
    reward: str, answer: str, sentence: str, tmp_path: Path
) -> None:
    made = config("single_turn", reward)
    good = {"prompt": "1+1", "answer": "2" if reward == "numeric" else "[]"}
    made.data.path = write(tmp_path / "rows.jsonl", [good, {**good, "answer": answer}])
    with pytest.raises(DataError) as error:
        training_data(made.data, made.environment, made.reward)
    assert "1 of 2 rows" in str(error.value)
    assert f"line 2: {sentence}" in str(error.value)


@pytest.mark.parametrize(
    ("environment", "settings", "row", "sentence"),
    [
        ("user", {}, {"user_turns": "again"}, "column user_turns: expected a list of texts"),
        ("user", {}, {"user_turns": 5}, "column user_turns: expected a list of texts"),
        ("chain", {}, {"links": [{"key": "a"}]}, "chain: the row has no links"),
        ("trl", {"factory": {"a": object}}, {"environment": "b"}, "trl: column 'environment' says 'b'"),
        ("trl", {"factory": {"a": object}}, {"environment": ["a"]}, "trl: column 'environment' says ['a']"),
        ("trl_rollout", {"rollout_func": lambda prompts, trainer: {}}, {"prompt": []}, "found list []"),
        ("mixed", {"environments": {"tools": {}}}, {"environment": "b"}, "mixed: column 'environment' says 'b'"),
        ("mixed", {"environments": {"tools": {}}, "default": "tools"}, {"prompt": []}, "found list []"),
        ("openenv", {"url": "http://127.0.0.1:9"}, {"prompt": []}, "found list []"),
        ("search", {"url": "http://127.0.0.1:9"}, {"prompt": []}, "found list []"),
    ],
)
def test_every_environment_says_which_rows_it_cannot_use(
    environment: str, settings: dict[str, Any], row: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError) as error:
        check_of(config(environment, "environment_reward", **settings))({"prompt": "1+1", **row})
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("environment", "settings"), [("trl", {"factory": object}), ("openenv", {"url": "http://127.0.0.1:9"})]
)
def test_an_environment_that_writes_the_prompt_needs_none(environment: str, settings: dict[str, Any]) -> None:
    check_of(config(environment, "environment_reward", **settings))({"prompt": "", "seed": 1})


class Own(ToolEnvironment):
    async def reset(self, example: Mapping[str, Any]) -> list[Message]:
        return [{"role": "user", "content": example["task"]}]


def test_a_users_environment_that_begins_in_another_way_is_not_checked_as_its_base() -> None:
    assert list(messages_of_row(Own(), {"task": "x"})) == []
    assert list(messages_of_row(ToolEnvironment(), {"prompt": "x"})) == [{"role": "user", "content": "x"}]


# Values that rewards receive

SEEN = """
from pathlib import Path

def seen(rollout, *, directory):
    Path(directory, str(rollout.rollout_id)).write_text(repr(rollout.example), errors="surrogatepass")
    return 1.0
"""


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_reward_receives_the_values_of_the_file_in_every_isolation(mode: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SEEN)
    rewards = make_reward_set(
        [f"{tmp_path}/own.py:seen"],
        settings={"seen": {"directory": str(tmp_path)}},
        isolation=Isolation(mode=mode, workers=1),
    )

    def received(path: Path) -> list[str]:
        data = load_data_set(DataSetConfig(path=str(path), split="train"))
        rollouts = [Rollout(rollout_id=i, group_id=i, calls=(), example=row) for i, row in enumerate(data)]
        scored = asyncio.run(rewards.score(rollouts))
        assert [one.error for one in scored] == [None] * len(scored)
        return [(tmp_path / str(i)).read_text(errors="surrogatepass") for i in range(len(rollouts))]

    @settings(max_examples=40)
    @given(rows=ROWS)
    def check_json(rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rows.jsonl").write_text(text)
        assert received(tmp_path / "rows.jsonl") == [repr(json.loads(line)) for line in text.splitlines()]

    @settings(max_examples=20)
    @given(cells=st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1, max_size=4))
    def check_csv(cells: list[list[str]]) -> None:
        written = io.StringIO(newline="")
        csv.writer(written).writerows([["prompt", "answer"], *cells])
        (tmp_path / "rows.csv").write_text(written.getvalue(), newline="")
        expected = csv.DictReader(io.StringIO(written.getvalue(), newline=""))
        assert received(tmp_path / "rows.csv") == list(map(repr, expected))

    try:
        check_json()
        check_csv()
    finally:
        rewards.close()
