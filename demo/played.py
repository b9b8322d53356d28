"""Conversations of a task's scripted player, in the format of demonstrations (docs/sft.md).

They are played without noise in the task's real environment, on the training rows and the held-out rows of the demo.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from lockstep.demo.make import make_rows
from lockstep.demo.tasks import TASKS, DemoTask, Row
from lockstep.rollout.chat.tool_calls import parse_hermes
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.mixed import environment_of
from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Message

FILES = {"train.jsonl": "demonstrations.jsonl", "heldout.jsonl": "demonstrations_heldout.jsonl"}
"""Names of the files with conversations, by the file of their rows."""


def write_demonstrations(task: str, directory: Path, *, seed: int, count: int) -> list[Path]:
    """Write at most `count` conversations per file to `directory`, and return the files.

    Raises `ConfigError` for an unknown task.
    """
    if task not in TASKS:
        raise ConfigError(f"unknown demo task {task!r}; expected one of {', '.join(TASKS)}")
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    rows, paths = make_rows(TASKS[task], seed), []
    for source, name in FILES.items():
        lines = [json.dumps(conversation(TASKS[task], row, rng)) + "\n" for row in rows[source][:count]]
        paths.append(directory / name)
        paths[-1].write_text("".join(lines), encoding="utf-8")
    return paths


def conversation(task: DemoTask, row: Row, rng: random.Random) -> dict[str, Any]:
    """Play a row to its end, and return its messages and the tools of its environment."""
    return asyncio.run(_play(task, row, rng))


async def _play(task: DemoTask, row: Row, rng: random.Random) -> dict[str, Any]:
    environment = environment_of(make_environment(task.name), row)
    assert not isinstance(environment, RunsItself), "tasks of the demo have turns to play"
    messages: list[Message] = list(await environment.reset(row))
    player = task.play(row, rng, False)
    turn = next(player)
    while True:
        messages.append(parse_hermes(turn).message(sampled_ids=()))
        step = await environment.step(messages[-1])
        messages += step.messages
        try:
            turn = player.send(str(step.messages[-1]["content"]) if step.messages else "")
        except StopIteration:
            return {"messages": messages, **({"tools": list(environment.tools)} if environment.tools else {})}
