"""GuessTheNumber of TextArena for the demo model: short observations, and the last number of a turn is the guess."""

from __future__ import annotations

import re

from lockstep.integrations.environments.textarena import TextArenaEnvironment


class Guess(TextArenaEnvironment):
    async def reset(self, example):
        await super().reset(example)
        return [{"role": "user", "content": "compute 0"}]

    async def step(self, message):
        numbers = re.findall(r"\d+", message["content"])
        step = await super().step({**message, "content": f"[{numbers[-1]}]" if numbers else message["content"]})
        return step if step.done else type(step)(messages=tuple(map(short, step.messages)), outcome=step.outcome)


def short(message):
    return {**message, "content": "compute 1" if "higher" in message["content"] else "compute 2"}
