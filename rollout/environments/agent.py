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


class AgentEnvironment(RunsItself):
    def __init__(self, agent: str | Callable[..., Any] | None = None, **limits: Any):
        """agent, limits: `function`, `timeout_s` and `max_concurrent` of `RunsItself`."""
        super().__init__("agent", agent, **limits)
