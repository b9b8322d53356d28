"""Tasks of the real verifiers 0.4, played in its own interpreter by its own agents, with a scripted engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from lockstep.integrations.environments import verifiers_tasks
from lockstep.integrations.environments.verifiers import evaluation_rows
from lockstep.integrations.environments.verifiers_tasks import PROGRAM, position
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.hosts.process import host
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.interpreters import python_with
from tests.fixtures.paths import FIXTURES
from tests.fixtures.policies import CHAT, TOKENIZER, sampling

pytestmark = pytest.mark.long

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*2"}}\n</tool_call><|im_end|>'
RIGHT, WRONG = "The answer is 6<|im_end|>", "The answer is 7<|im_end|>"


@pytest.fixture(scope="module")
def python() -> Any:
    """The interpreter with verifiers 0.4; its host finds the environments of the tests."""
    python = python_with("verifiers 0.4", "verifiers.v1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FIXTURES / "verifiers_tasksets"), prepend=os.pathsep)
        yield python
    host(python, PROGRAM).end()


async def play(
    python: str,
    turns: Sequence[str],
    rows: Sequence[dict[str, Any]],
    *,
    max_turns: int = 4,
    **settings: Any,
) -> list[Rollout]:
    sampler = Sampler(
        engine=ScriptedEngine(says(TOKENIZER, *turns)),
        chat=CHAT,
        make_environment=partial(make_environment, "verifiers", **{"python": python, **settings}),
        max_turns=max_turns,
        seed=0,
    )
    return await sampler.collect(rows, samples_per_prompt=1, sampling=sampling(), step=0)


async def test_the_score_of_a_task_of_one_turn_is_the_reward_and_its_sampled_tokens_are_trained(python: str):
    rollouts = await play(python, ["two it is<|im_end|>"], [{"idx": 0}, {"idx": 1}], env_id="word-tasks")
    assert [rollout.error for rollout in rollouts] == [None, None]
    assert [rollout.outcome["environment_reward"] for rollout in rollouts] == [0.0, 1.0]
    assert [rollout.outcome["verifiers_turns"] for rollout in rollouts] == [1.0, 1.0]
    for rollout in rollouts:
        (row,) = rows_from_calls(rollout.calls)
        assert row.num_trained == rollout.num_sampled > 0


async def test_a_task_with_a_tool_server_is_one_row_of_exact_tokens(python: str):
    (rollout,) = await play(python, [CALL, RIGHT], [{"seed": 0}], env_id="tool-tasks")
    assert (rollout.error, rollout.outcome["environment_reward"]) == (None, 1.0)
    assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["6"]
    first, second = rollout.calls
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.sampled_ids)] == first.prompt_ids + first.sampled_ids
    (row,) = rows_from_calls(rollout.calls)
    assert row.num_trained == len(first.sampled_ids) + len(second.sampled_ids)


async def test_an_episode_at_the_limit_of_turns_is_kept_and_one_of_an_unknown_task_fails(python: str):
    (limited,) = await play(python, [CALL], [{"idx": 0}], env_id="tool-tasks", max_turns=1)
    assert (limited.status, len(limited.calls)) == (RolloutStatus.MAX_TURNS, 1)
    (unknown,) = await play(python, [WRONG], [{"idx": 7}], env_id="word-tasks")
    assert unknown.status is RolloutStatus.FAILED
    assert "rows name the tasks from 0 to 2" in (unknown.error or "")


async def test_an_episode_beyond_its_deadline_fails_and_its_host_lives_on(python: str):
    (late,) = await play(python, [WRONG], [{"idx": 0}], env_id="word-tasks", timeout_s=0.01)
    assert late.status is RolloutStatus.FAILED
    assert "no end in 0.01 s" in (late.error or "")
    assert host(python, PROGRAM).is_alive


def test_an_unknown_environment_is_refused_when_it_is_made(python: str):
    with pytest.raises(ConfigError, match=r"'owner/no-such-tasks' is not installed"):
        make_environment("verifiers", env_id="owner/no-such-tasks", python=python)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_environment("verifiers", env_id="word-tasks", python=python, args={"no_such_field": 1})
    with pytest.raises(DataError, match="no evaluation data of its own"):
        evaluation_rows("word-tasks", python=python)


def test_an_interpreter_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch):
    bare = "/usr/bin/python3" if shutil.which("/usr/bin/python3") else "python3"
    with pytest.raises(ConfigError, match=r"settings\.python="):
        make_environment("verifiers", env_id="word-tasks", python=bare)
    with pytest.raises(ConfigError, match="is not a program"):
        make_environment("verifiers", env_id="word-tasks", python="/no/such/python")


@pytest.mark.parametrize("row", [{}, {"idx": -1}, {"idx": "0"}, {"seed": True}])
def test_a_row_that_names_no_task_is_refused(row: dict[str, Any]):
    with pytest.raises(DataError, match="idx or seed"):
        position(row)
    assert verifiers_tasks.position({"idx": 3, "seed": 4}) == 3
