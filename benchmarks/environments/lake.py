"""FrozenLake of gymnasium, three by three, for the demo model: the last digit of a turn, modulo 4, is the move."""

from __future__ import annotations

import re

import gymnasium  # type: ignore[import-not-found]

from lockstep.rollout.episode.environment import Step

MAP = ["SFF", "FFF", "FFG"]


class Lake:
    tools = ()

    def __init__(self):
        self.env = gymnasium.make("FrozenLake-v1", desc=MAP, is_slippery=False, max_episode_steps=8)

    async def reset(self, example):
        place, _ = self.env.reset(seed=example["seed"])
        return [{"role": "user", "content": f"compute {place}"}]

    async def step(self, message):
        digits = re.findall(r"\d", message["content"])
        if not digits:
            return Step(done=True, outcome={"invalid": 1})
        place, reward, terminated, cut, _ = self.env.step(int(digits[-1]) % 4)
        observation = {"role": "user", "content": f"compute {place}"}
        over = terminated or cut
        return Step(messages=() if over else (observation,), done=over, outcome={"environment_reward": reward})

    async def conclude(self):
        return {"environment_reward": 0.0}

    async def close(self):
        self.env.close()
