"""Environment `agent`: a user's agent, a function of an OpenAI base URL and a key.

    async def agent(base_url, api_key, example):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...                                         any number of requests, in any order, with any messages
        return {"tests_passed": 3}                  facts for rewards and metrics, or nothing

It may be a plain function and may start other programs, as long as its requests go to `base_url` with `api_key`.
`rollout/sampler/agent_episodes.py` runs its episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.deadline import is_async


class AgentEnvironment(RunsItself):
    def __init__(self, agent: str | Callable[..., Any] | None = None, *, shared_loop: bool = False, **limits: Any):
        """agent, limits: `function`, `timeout_s` and `max_concurrent` of `RunsItself`.

        shared_loop: run all episodes of an async agent in one event loop, for clients that it keeps between episodes;
        a call that blocks then blocks them all. False: each episode has a thread and an event loop of its own.

        Raises `ConfigError` as `RunsItself` does, and for a shared loop of an agent that is not async.
        """
        super().__init__("agent", agent, **limits)
        if shared_loop and not is_async(self.function):
            raise ConfigError(
                "environment.settings.shared_loop=true, but the agent is no `async def` function, so it has no event "
                "loop; leave shared_loop out"
            )
        self.shared_loop = shared_loop
