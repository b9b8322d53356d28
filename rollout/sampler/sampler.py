"""Sampler of groups of episodes: every rollout is one asyncio task, and the engine batches their requests.

Samples depend on the seeds alone, not on the order in which requests reach the engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments.declaration import declaration_of
from lockstep.rollout.environments.drivers import Driver, RunEpisode, Table
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.environments.mixed import AnyEnvironment, environment_of, parts_of
from lockstep.rollout.episode.conversation import request_seed
from lockstep.rollout.episode.environment import Environment, RunsItself
from lockstep.rollout.episode.episode import CALL_TIMEOUT_S, failure_of
from lockstep.rollout.errors import ConfigError, LockstepError, RequestError
from lockstep.rollout.records import Cause, Rollout, RolloutStatus, at_row
from lockstep.rollout.system.user_functions import fault

REISSUES = 2
"""Number of times that an episode is restarted after one of its requests failed in a live engine."""

OnRollout = Callable[[Rollout], None]
OnGroup = Callable[[list[Rollout]], None]


class Sampler:
    """Runs the episodes of a batch of data rows against one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        make_environment: Callable[[], AnyEnvironment],
        max_turns: int,
        seed: int,
        gateway: GatewaySettings | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        prepare: Callable[[Rollout], Rollout] = lambda rollout: rollout,
    ) -> None:
        """gateway: address at which agents find the model (`integrations/environments/agent.py`). call_timeout_s: of
        `run_episode`. prepare: returns what takes the place of a rollout that has ended."""
        self._engine = engine
        self._chat = chat
        self._make_environment = make_environment
        self._max_turns = max_turns
        self._seed = seed
        self._gateway = gateway
        self._call_timeout_s = call_timeout_s
        self._prepare = prepare
        self._faults: Counter[str] = Counter()

    def take_metrics(self) -> dict[str, float]:
        """Return since the last call the restarts of episodes after a request failed, and the groups lost to that."""
        metrics = {f"rollout/{name}": float(self._faults[name]) for name in ("reissued", "groups_lost_to_engine")}
        self._faults.clear()
        return metrics

    def take_faults(self) -> dict[str, int]:
        """Return what `take_metrics` counts, since the last call, for `add_faults` on another rank."""
        faults = dict(self._faults)
        self._faults.clear()
        return faults

    def add_faults(self, faults: Mapping[str, int]) -> None:
        """Add the counts of another rank."""
        self._faults.update(faults)

    async def collect(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        step: int,
        group_ids: Sequence[int] | None = None,
        on_rollout: OnRollout = lambda rollout: None,
        on_group: OnGroup = lambda group: None,
        run: RunEpisode | None = None,
    ) -> list[Rollout]:
        """Sample `samples_per_prompt` rollouts of every example, in the order prompt by prompt.

        A request that fails in a live engine says nothing about the policy, so its episode is restarted with the same
        seeds. If it still fails, all rollouts of its group are FAILED: the mean of a partial group would depend on the
        fault.

        Whatever else an episode raises fails it alone, its environment's constructor included. Raises `EngineError` if
        the engine died, and `ConfigError`; the remaining episodes are canceled.

        step: part of the seeds, so that the same prompt gets other samples in another step.
        group_ids: one per example, in ascending order; None: indices of the examples. Rollout ids are `group id x
        samples_per_prompt + sample index`.
        on_group: receives the rollouts of each prompt, in order, when the last of them has ended.
        run: from `open`, to share a gateway between batches; None: open one for this batch alone.
        """
        example_of = dict(zip(range(len(examples)) if group_ids is None else group_ids, examples, strict=True))
        lost_groups: dict[int, str] = {}
        ended: defaultdict[int, list[Rollout]] = defaultdict(list)

        def end(rollout: Rollout) -> None:
            on_rollout(rollout)
            group = ended[rollout.group_id]
            group.append(rollout)
            if len(group) == samples_per_prompt:
                in_order = sorted(group, key=lambda one: one.rollout_id)
                group[:] = (_without_lost(one, lost_groups) for one in in_order)
                on_group(group)

        def failed(rollout_id: int, reason: str) -> Rollout:
            return Rollout(
                rollout_id=rollout_id,
                group_id=rollout_id // samples_per_prompt,
                calls=(),
                example=example_of[rollout_id // samples_per_prompt],
                status=RolloutStatus.FAILED,
                error=reason,
            )

        async def sample(run: RunEpisode, rollout_id: int) -> None:
            group_id = rollout_id // samples_per_prompt
            example = example_of[group_id]
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
                except ConfigError as error:
                    raise ConfigError(at_row(str(error), example)) from error
                except BaseException as error:  # of an environment's constructor, of a row that it refuses
                    rollout = failed(rollout_id, failure_of(error))
                    break
            else:
                lost_groups[group_id] = reason
                rollout = failed(rollout_id, reason)
            end(self._prepare(rollout))

        shared = self.open(sampling) if run is None else nullcontext(run)
        try:
            async with shared as runner, asyncio.TaskGroup() as group:
                for group_id in example_of:
                    for index in range(samples_per_prompt):
                        group.create_task(sample(runner, group_id * samples_per_prompt + index))
        except* Exception as failures:
            raise failures.exceptions[0] from None  # the first is the cause of the others
        self._faults["groups_lost_to_engine"] += len(lost_groups)
        return [rollout for group_id in sorted(ended) for rollout in ended[group_id]]

    @asynccontextmanager
    async def open(self, sampling: Sampling) -> AsyncIterator[RunEpisode]:
        """Open what episodes share, such as the gateway of agents; yields `run` for `collect`.

        Raises `ConfigError` if a driver does not open.
        """
        table = Table(
            engine=self._engine,
            chat=self._chat,
            sampling=sampling,
            gateway=self._gateway,
            call_timeout_s=self._call_timeout_s,
        )
        played_by: dict[Driver, list[Environment | RunsItself]] = {}
        for part in parts_of(self._make_environment()):
            played_by.setdefault(declaration_of(part).driver, []).append(part)
        async with AsyncExitStack() as stack:
            runs: dict[Driver, RunEpisode] = {}
            for driver, own in played_by.items():
                try:
                    runs[driver] = await stack.enter_async_context(driver(table, own))
                except LockstepError:
                    raise
                except Exception as error:  # of a package's driver
                    names = ", ".join(sorted({type(one).__name__ for one in own}))
                    raise ConfigError(f"the driver of environment {names} did not open: {fault(error)}") from error

            async def run(*, environment: AnyEnvironment, example: Mapping[str, Any], **episode: Any) -> Rollout:
                member = environment_of(environment, example)
                return await runs[declaration_of(member).driver](environment=member, example=example, **episode)

            yield run


def _without_lost(rollout: Rollout, lost_groups: Mapping[int, str]) -> Rollout:
    """Mark the rollout as FAILED if another one of its group was lost to the engine."""
    if rollout.group_id not in lost_groups or rollout.status is RolloutStatus.FAILED:
        return rollout
    reason = f"another rollout of its group failed in the engine: {lost_groups[rollout.group_id]}"
    return replace(rollout, status=RolloutStatus.FAILED, error=reason, cause=Cause.ENGINE)
