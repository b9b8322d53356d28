"""A taskset of verifiers 0.4 for the demo model: the last digit of the answer, divided by 9, is its reward."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf  # type: ignore[import-not-found]

__all__ = ["DigitTasks"]


class DigitTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def last_digit(self, trace) -> float:
        digits = [sign for sign in trace.nodes[-1].message.content or "" if sign in "0123456789"]
        return int(digits[-1]) / 9 if digits else 0.0


class DigitTasks(vf.Taskset[DigitTask]):
    def load(self) -> Iterable[DigitTask]:
        for index in range(1000):
            yield DigitTask(vf.TaskData(prompt=f"compute {index}"), self.config.task)
