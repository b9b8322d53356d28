"""Groups of episodes: every rollout is one asyncio task, the engine batches them as they come.

There are no lock-step turns: a slow tool or a long answer holds up nobody else. What is sampled depends on the
seeds alone, not on the order in which requests reach the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from rollout.agents import run_agent_episode
from rollout.chat import Chat
from rollout.engine import Engine, Sampling
from rollout.environment import Environment
from rollout.environments.agent import AgentEnvironment
from rollout.environments.trl_rollout import TRLRollout, copy_tokenizer, run_rollout_func_episode
from rollout.episode import request_seed, run_episode
from rollout.gateway import Gateway, GatewaySettings
from rollout.records import Rollout

OnRollout = Callable[[Rollout], None]
RunEpisode = Callable[..., Awaitable[Rollout]]
"""`run_episode`, `run_agent_episode` or `run_rollout_func_episode`, with what all episodes share filled in."""


class Sampler:
    """Runs the episodes of a batch of data rows against one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        make_environment: Callable[[], Environment],
        max_turns: int,
        seed: int,
        gateway: GatewaySettings | None = None,
    ) -> None:
        """gateway: where agents find the model, if the environment is one (`rollout/environments/agent.py`)."""
        self._engine = engine
        self._chat = chat
        self._make_environment = make_environment
        self._max_turns = max_turns
        self._seed = seed
        self._gateway = gateway

    async def collect(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        step: int,
        first_group: int = 0,
        on_rollout: OnRollout = lambda rollout: None,
    ) -> list[Rollout]:
        """`samples_per_prompt` rollouts of every example, in the order prompt by prompt.

        `step` enters the seeds, so that the same prompt is sampled anew in another step. Group ids are prompt indices
        from `first_group` on (a batch that completes an earlier one of the same step), rollout ids are
        `group id x samples_per_prompt + sample index`.

        Raises `EngineError` if the engine dies; the remaining episodes are cancelled.
        """

        async def one(run: RunEpisode, rollout_id: int) -> Rollout:
            group_id = rollout_id // samples_per_prompt
            rollout = await run(
                environment=self._make_environment(),
                example=examples[group_id - first_group],
                sampling=sampling,
                max_turns=self._max_turns,
                rollout_id=rollout_id,
                group_id=group_id,
                seed=request_seed(self._seed, step, rollout_id),
            )
            on_rollout(rollout)
            return rollout

        try:
            async with self._episode_runner(sampling) as run, asyncio.TaskGroup() as group:
                first, count = first_group * samples_per_prompt, len(examples) * samples_per_prompt
                tasks = [group.create_task(one(run, i)) for i in range(first, first + count)]
        except* Exception as failures:
            raise failures.exceptions[0] from None  # the first is the cause; the others are its echo
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def _episode_runner(self, sampling: Sampling) -> AsyncIterator[RunEpisode]:
        """Environments run in this loop; agents talk to a gateway, which lives as long as the batch."""
        environment = self._make_environment()
        if isinstance(environment, TRLRollout):
            yield partial(
                run_rollout_func_episode,
                engine=self._engine,
                chat=self._chat,
                tokenizer=await copy_tokenizer(self._chat),
                slots=asyncio.Semaphore(environment.max_concurrent),
            )
            return
        if not isinstance(environment, AgentEnvironment):
            yield partial(run_episode, engine=self._engine, chat=self._chat)
            return
        slots = asyncio.Semaphore(environment.max_concurrent)
        async with Gateway(engine=self._engine, chat=self._chat, offered=[sampling], settings=self._gateway) as gateway:
            yield partial(run_agent_episode, gateway=gateway, slots=slots)
