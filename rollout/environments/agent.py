"""Somebody else's agent as an environment: a function that knows an OpenAI base URL and a key, and nothing else.

    async def agent(base_url, api_key, example):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...                                         any number of requests, in any order, with any messages
        return {"tests_passed": 3}                  facts for rewards and metrics, or nothing

It may be a plain function too, and may start whatever it likes, as long as its requests go to `base_url` with
`api_key`. How the episode is run: `rollout/agents.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.environment import Step
from rollout.errors import ConfigError
from rollout.loading import load_function
from rollout.records import Message


class AgentEnvironment:
    """Names the agent. It drives the episode itself, so there is nothing to reset and no turn to answer."""

    def __init__(
        self, agent: str | Callable[..., Any] | None = None, *, timeout_s: float = 600.0, max_concurrent: int = 64
    ):
        """agent: the function, or `path/to/file.py:function`. timeout_s: of one episode, by the clock. max_concurrent:
        episodes that run at once (each takes a thread and a few sockets); the others wait.

        Raises:
            ConfigError: no agent is given, or it cannot be loaded.
        """
        if agent is None:
            raise ConfigError("no agent is set; set environment.settings.agent=path/to/file.py:function")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s} must be greater than 0; set environment.settings.timeout_s=600")
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent} must be at least 1")
        self.agent = load_function(agent) if isinstance(agent, str) else agent
        self.timeout_s = timeout_s
        self.max_concurrent = max_concurrent

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """None: an agent sends its own with each request."""
        return ()

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        raise NotImplementedError("an agent runs its own episodes: run_agent_episode, as rollout/sampler.py does")

    async def step(self, message: Message) -> Step:
        raise NotImplementedError("an agent runs its own episodes: run_agent_episode, as rollout/sampler.py does")
