"""Groups of episodes: every rollout is one asyncio task, the engine batches them as they come.

There are no lock-step turns: a slow tool or a long answer holds up nobody else. What is sampled depends on the
seeds alone, not on the order in which requests reach the engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.chat.chat import Chat
from rollout.engine.protocol import Engine, Sampling
from rollout.environments.agent import AgentEnvironment
from rollout.environments.mixed import Mixed, environment_of
from rollout.environments.trl_rollout import TRLRollout, copy_tokenizer, run_rollout_func_episode
from rollout.episode.environment import Environment, RunsItself
from rollout.episode.episode import request_seed, run_episode
from rollout.errors import RequestError
from rollout.gateway import Gateway, GatewaySettings
from rollout.records import Rollout, RolloutStatus
from rollout.sampler.agent_episodes import run_agent_episode

REISSUES = 2
"""Times that an episode is begun again when one of its requests failed in an engine that lives."""

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
        make_environment: Callable[[], Environment | RunsItself],
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
        self._faults: Counter[str] = Counter()

    def take_metrics(self) -> dict[str, float]:
        """Since the last call of this method: episodes that were begun again because a request failed in the engine,
        and groups that are not trained because one of theirs failed every time."""
        metrics = {f"rollout/{name}": float(self._faults[name]) for name in ("reissued", "groups_lost_to_engine")}
        self._faults.clear()
        return metrics

    async def collect(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        step: int,
        first_group: int = 0,
        on_rollout: OnRollout = lambda rollout: None,
        run: RunEpisode | None = None,
    ) -> list[Rollout]:
        """`samples_per_prompt` rollouts of every example, in the order prompt by prompt.

        `step` enters the seeds, so that the same prompt is sampled anew in another step. Group ids are prompt indices
        from `first_group` on (a batch that completes an earlier one of the same step), rollout ids are
        `group id x samples_per_prompt + sample index`.

        A request that fails in an engine that lives is no evidence about the policy: its episode is begun again with
        the same seeds, and where that does not help, all rollouts of its group are FAILED, because a group that is
        trained in part would be compared with a mean that the fault has chosen.

        run: from `open`, where what episodes share outlives this batch; None: it is made for this batch alone.
        Raises `EngineError` if the engine dies; the remaining episodes are cancelled.
        """
        lost_groups: dict[int, str] = {}

        async def one(run: RunEpisode, rollout_id: int) -> Rollout:
            group_id = rollout_id // samples_per_prompt
            example = examples[group_id - first_group]
            reason = ""
            for attempt in range(1 + REISSUES):
                try:
                    rollout = await run(
                        environment=self._make_environment(),
                        example=example,
                        sampling=replace(sampling, affinity=(step, group_id)),
                        max_turns=self._max_turns,
                        rollout_id=rollout_id,
                        group_id=group_id,
                        seed=request_seed(self._seed, step, rollout_id),
                    )
                    break
                except RequestError as error:
                    self._faults["reissued"] += attempt < REISSUES
                    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                lost_groups[group_id] = reason
                rollout = Rollout(
                    rollout_id=rollout_id,
                    group_id=group_id,
                    calls=(),
                    example=example,
                    status=RolloutStatus.FAILED,
                    error=reason,
                )
            on_rollout(rollout)
            return rollout

        shared = self.open(sampling) if run is None else nullcontext(run)
        try:
            async with shared as runner, asyncio.TaskGroup() as group:
                first, count = first_group * samples_per_prompt, len(examples) * samples_per_prompt
                tasks = [group.create_task(one(runner, i)) for i in range(first, first + count)]
        except* Exception as failures:
            raise failures.exceptions[0] from None  # the first is the cause; the others are its echo
        self._faults["groups_lost_to_engine"] += len(lost_groups)
        return [_without_lost(task.result(), lost_groups) for task in tasks]

    @asynccontextmanager
    async def open(self, sampling: Sampling) -> AsyncIterator[RunEpisode]:
        """What episodes share, for `collect`: a gateway where they are agents, which lives as long as this context."""
        environment = self._make_environment()

        async def turns(**episode: Any) -> Rollout:
            return await run_episode(engine=self._engine, chat=self._chat, **episode)

        drivers: dict[type[RunsItself], RunEpisode] = {}
        async with AsyncExitStack() as stack:
            for part in environment.parts if isinstance(environment, Mixed) else (environment,):
                if isinstance(part, TRLRollout):
                    drivers[TRLRollout] = partial(
                        run_rollout_func_episode,
                        engine=self._engine,
                        chat=self._chat,
                        tokenizer=await copy_tokenizer(self._chat),
                        slots=asyncio.Semaphore(part.max_concurrent),
                    )
                elif isinstance(part, AgentEnvironment):
                    gateway = Gateway(engine=self._engine, chat=self._chat, offered=[sampling], settings=self._gateway)
                    drivers[AgentEnvironment] = partial(
                        run_agent_episode,
                        gateway=await stack.enter_async_context(gateway),
                        slots=asyncio.Semaphore(part.max_concurrent),
                    )

            async def run(
                *, environment: Environment | RunsItself, example: Mapping[str, Any], **episode: Any
            ) -> Rollout:
                own = environment_of(environment, example)
                driver = next((driver for kind, driver in drivers.items() if isinstance(own, kind)), turns)
                return await driver(environment=own, example=example, **episode)

            yield run


def _without_lost(rollout: Rollout, lost_groups: Mapping[int, str]) -> Rollout:
    """The rollout; FAILED if another one of its group was lost to the engine."""
    if rollout.group_id not in lost_groups or rollout.status is RolloutStatus.FAILED:
        return rollout
    reason = f"another rollout of its group failed in the engine: {lost_groups[rollout.group_id]}"
    return replace(rollout, status=RolloutStatus.FAILED, error=reason)
