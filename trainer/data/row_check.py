"""Check of a data row by what will read it: the environment, the chat messages, and built-in rewards with a reference.

Not covered: rewards of user files, and environments without `read_row`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.rewards.functions import FUNCTIONS, GYM_COLUMN, ISOLATED
from lockstep.rollout.chat.messages import normalize_messages
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.mixed import environment_of
from lockstep.rollout.environments.prompt import images_problem, is_empty, num_images, too_many_images
from lockstep.rollout.episode.environment import messages_of_row
from lockstep.rollout.errors import DataError, TemplateError
from lockstep.rollout.records import Message, Rollout
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig, RewardConfig

WITH_FIXED_COLUMN = {"demo_answer": "answer", GYM_COLUMN: GYM_COLUMN}
"""Columns of built-in rewards that have no setting for theirs."""


class RowCheck:
    """Check of the rows of a run. One environment reads all of them, and plays none."""

    def __init__(self, environment: EnvironmentConfig, reward: RewardConfig, *, max_images: int = 0) -> None:
        """max_images: of a prompt; 0: the run sees none."""
        self.max_images = max_images
        self._environment = make_environment(environment.name, **environment.settings)
        settings_by_name = {name: dict(reward.settings.get(name) or {}) for name in reward.functions}
        self._rewards = [
            (name, column, own) for name, own in settings_by_name.items() if (column := _column(name, own))
        ]

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Raise `DataError` for a row that cannot be used."""
        if problems := "; ".join(self.problems(row)):
            raise DataError(problems)

    def problems(self, row: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence if the environment cannot use the row, and one per reward that cannot."""
        try:
            messages = messages_of_row(environment_of(self._environment, row), row)
            if problem := self._images_problem(row, messages):
                yield problem
            else:
                normalize_messages(messages, sees_images=self.max_images > 0)
        except (DataError, TemplateError) as error:
            yield str(error)
        for name, column, settings in self._rewards:
            if is_empty(row.get(column)):
                there = ", ".join(f"{key} (empty)" if is_empty(value) else key for key, value in row.items())
                other = "" if name in WITH_FIXED_COLUMN else f", or reward.settings.{name}.column=<column>"
                remedy = f"set 'data.columns={{{column}: <column>}}'{other}"
                remedy = "fill it, or leave the row out" if column in row else remedy
                yield f"the reward {name} needs column {column!r}, the row has {there or 'none'}; {remedy}"
            elif name not in ISOLATED:
                try:
                    FUNCTIONS[name](Rollout(rollout_id=0, group_id=0, calls=(), example=row), **settings)
                except DataError as error:  # a reference that it cannot read
                    yield str(error)

    def _images_problem(self, row: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
        if not self.max_images:
            return images_problem(row, messages)
        count = max(len(row["images"]), num_images(messages))
        return too_many_images(count, self.max_images) if count > self.max_images else None


def _column(reward: str, settings: Mapping[str, Any]) -> str | None:
    """Return the column that a built-in reward reads; None for other rewards."""
    parameter = inspect.signature(FUNCTIONS[reward]).parameters.get("column") if reward in FUNCTIONS else None
    return WITH_FIXED_COLUMN.get(reward) if parameter is None else settings.get("column", parameter.default)
