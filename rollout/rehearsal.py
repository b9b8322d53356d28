"""An episode without a model: a data row is played through its environment by somebody who knows the answer.

The prompt, the chat template, the environment and its tools are the run's own. The turns are not sampled; where they
come from is said with each (`Rehearsal.player`):

* demo tasks: their scripted player, which uses the tool and answers right;
* other data: the first column that can be an answer (`ANSWER_COLUMNS`), as the only turn;
* rows without one: a placeholder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.chat import Chat
from rollout.demo.tasks import TASKS
from rollout.engine import Sampling
from rollout.environment import Environment, Step, Tools
from rollout.episode import run_episode
from rollout.records import Message, Rollout
from rollout.scripted import ScriptedEngine

ANSWER_COLUMNS = ("answer", "solution", "completion", "response", "target", "ground_truth", "chosen")
PLACEHOLDER = "(here stands what the model answers)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    rollout: Rollout
    player: str
    """Who spoke for the model, in words."""


class _Heard:
    """An environment that remembers the last thing it said, for a player that reacts to it."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.last = ""

    @property
    def tools(self) -> Tools:
        return self._environment.tools

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return await self._environment.reset(example)

    async def step(self, message: Message) -> Step:
        step = await self._environment.step(message)
        if step.messages:
            self.last = str(step.messages[-1]["content"])
        return step


async def rehearse(
    example: Mapping[str, Any],
    *,
    environment_name: str,
    environment: Environment,
    chat: Chat,
    sampling: Sampling,
    max_turns: int,
    max_model_len: int,
    rollout_id: int,
) -> Rehearsal:
    """Play one row. Raises `DataError` if the environment cannot use it, `TemplateError` if it cannot be rendered."""
    if environment_name in TASKS and "question" in example and "answer" in example:
        environment = heard = _Heard(environment)
        next_turn = _demo_player(environment_name, example, heard)
        player = "the demo's scripted player"
    else:
        text, player = _answer(example)
        next_turn = lambda: text  # noqa: E731  # a function of a line, which a def would make three
    rollout = await run_episode(
        engine=ScriptedEngine(chat, next_turn, max_model_len=max_model_len),
        chat=chat,
        environment=environment,
        example=example,
        sampling=sampling,
        max_turns=max_turns,
        rollout_id=rollout_id,
        group_id=rollout_id,
        seed=0,
    )
    return Rehearsal(rollout=rollout, player=player)


def _demo_player(task: str, example: Mapping[str, Any], heard: _Heard) -> Callable[[], str]:
    player = TASKS[task].play(dict(example), random.Random(0), False)
    turns: list[str] = []

    def next_turn() -> str:
        turns.append(player.send(heard.last) if turns else next(player))
        return turns[-1]

    return next_turn


def _answer(example: Mapping[str, Any]) -> tuple[str, str]:
    """What stands in for the model's turn, and where it is from."""
    for column in ANSWER_COLUMNS:
        value = example.get(column)
        if isinstance(value, str | int | float) and str(value):
            return str(value), f"the row's column {column!r}"
    return PLACEHOLDER, "a placeholder: no column of the row can be an answer"
