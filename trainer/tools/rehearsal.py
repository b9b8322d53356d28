"""An episode without a model: a data row is played through its environment by somebody who knows the answer.

The prompt, the chat template, the environment and its tools are the run's own. The turns are not sampled; where they
come from is said with each (`Rehearsal.player`):

* the first column of the row that can be an answer (`ANSWER_COLUMNS`), as the only turn;
* rows without one: a placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.chat.chat import Chat
from rollout.engine.protocol import Sampling
from rollout.episode.environment import Environment
from rollout.episode.episode import run_episode
from rollout.records import Rollout
from trainer.tools.scripted import ScriptedEngine

ANSWER_COLUMNS = ("answer", "solution", "completion", "response", "target", "ground_truth", "chosen")
PLACEHOLDER = "(here stands what the model answers)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    rollout: Rollout
    player: str
    """Who spoke for the model, in words."""


async def rehearse(
    example: Mapping[str, Any],
    *,
    environment: Environment,
    chat: Chat,
    sampling: Sampling,
    max_turns: int,
    max_model_len: int,
    rollout_id: int,
) -> Rehearsal:
    """Play one row. Raises `DataError` if the environment cannot use it, `TemplateError` if it cannot be rendered."""
    text, player = _answer(example)
    rollout = await run_episode(
        engine=ScriptedEngine(chat, lambda: text, max_model_len=max_model_len),
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


def _answer(example: Mapping[str, Any]) -> tuple[str, str]:
    """What stands in for the model's turn, and where it is from."""
    for column in ANSWER_COLUMNS:
        value = example.get(column)
        if isinstance(value, str | int | float) and str(value):
            return str(value), f"the row's column {column!r}"
    return PLACEHOLDER, "a placeholder: no column of the row can be an answer"
