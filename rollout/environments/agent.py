"""Somebody else's agent as an environment: a function that knows an OpenAI base URL and a key, and nothing else.

    async def agent(base_url, api_key, example):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...                                         any number of requests, in any order, with any messages
        return {"tests_passed": 3}                  facts for rewards and metrics, or nothing

It may be a plain function too, and may start whatever it likes, as long as its requests go to `base_url` with
`api_key`. How the episode is run: `rollout/sampler/agent_episodes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.episode.environment import RunsItself
from rollout.errors import ConfigError
from rollout.system.user_functions import load_function


class AgentEnvironment(RunsItself):
    """Names the agent."""

    def __init__(
        self, agent: str | Callable[..., Any] | None = None, *, timeout_s: float = 600.0, max_concurrent: int = 64
    ):
        """agent: the function, or `path/to/file.py:function`. The rest as for `RunsItself`.

        Raises:
            ConfigError: no agent is given, or it cannot be loaded.
        """
        if agent is None:
            raise ConfigError("no agent is set; set environment.settings.agent=path/to/file.py:function")
        super().__init__(timeout_s=timeout_s, max_concurrent=max_concurrent)
        self.agent = load_function(agent) if isinstance(agent, str) else agent
