"""Environments behind the kit's checks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lockstep.lab.environments.journal import Journal
from lockstep.lab.environments.watched_environment import Watch, watch_environment
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.episode.environment import RunsItself, ShowsImages
from lockstep.rollout.records import image_parts
from tests.fixtures.policies import Policy, play
from tests.fixtures.turns import use


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


async def test_a_tool_behind_the_checks_shows_its_images_to_a_model_that_sees_them():
    row = {"question": "which square is this?", "square": [124, 16, 80, "red", "rows"]}
    for sees_images in (False, True):
        watched = watch_environment(make_environment("squares"), Watch(Journal(), 5.0))
        assert isinstance(watched, ShowsImages)
        assert not isinstance(watched, RunsItself)
        watched.sees_images = sees_images
        await watched.reset(row)
        step = await watched.step(use("zoom", quarter="top right"))
        assert len(image_parts(step.messages[0])) == sees_images
