"""Environments behind the kit's checks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lockstep.lab.environments.journal import Journal
from lockstep.lab.environments.watched_environment import Watch, watch_environment
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.tools import ToolEnvironment
from tests.fixtures.policies import Policy, play


def test_an_environment_with_another_driver_is_played_by_it() -> None:
    environment = type("Driven", (), {"declaration": Declaration(driver=lambda table, own: nullcontext())})()
    assert watch_environment(environment, Watch(Journal(), 5.0)) is environment


async def test_what_an_environment_holds_is_let_go_also_after_a_fault():
    closed: list[str] = []

    class Holds(ToolEnvironment):
        def __init__(self, name: str):
            self.name = name
            super().__init__()

        async def reset(self, example: Any):
            if self.name == "broken":
                raise RuntimeError("it is")
            return await super().reset(example)

        async def close(self) -> None:
            closed.append(self.name)

    for name in ("whole", "broken"):
        watched = watch_environment(Holds(name), Watch(Journal(), 5.0))
        await play(watched, Policy(lambda prompt: "Done."))
    assert closed == ["whole", "broken"]
