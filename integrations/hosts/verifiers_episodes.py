"""Program of a host that plays environments of verifiers 0.4: a taskset, the agents that play it, and their scoring.

The agents are programs of the package, its harnesses, and reach the model through an address and a key, those of one
episode. After `EPISODES_PER_SERVICE` episodes an environment gets other interception and tool servers, because the
package keeps a client for each key until its servers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

EPISODES_PER_SERVICE = 256
OLDEST = (0, 4)
"""Lowest version whose interface this file uses."""
HARNESS = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Agents without settings: a loop of model and tools, without a shell, in processes of this machine."""
_keys = itertools.count()
_environments: dict[str, Environment] = {}


class WrongSetting(Exception):
    """A setting that no episode can be played with."""


class Service:
    """One environment while it is served. It is entered and left in one task, as its servers need."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.started = self.running = 0
        self.is_retired = False
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    @contextlib.asynccontextmanager
    async def episode(self) -> AsyncIterator[Any]:
        self.started += 1
        self.running += 1
        try:
            await asyncio.shield(self._ready)
            yield self.environment
        finally:
            self.running -= 1
            self.retire(self.is_retired)

    def retire(self, is_retired: bool = True) -> None:
        """End the servers as soon as no episode uses them."""
        self.is_retired = is_retired
        if is_retired and not self.running:
            self._idle.set()

    async def _serve(self) -> None:
        try:
            async with self.environment.serving():
                self._ready.set_result(None)
                await self._idle.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self.is_retired = True
            self._ready.set_exception(error)


class Environment:
    """A configured environment and its tasks, read as far as they were asked for."""

    def __init__(self, env_id: str, args: dict[str, Any]) -> None:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._load = loaders.load_environment
        try:
            raw = {**args, "taskset": {"id": env_id, **args.get("taskset", {})}}
            kind = loaders.env_config_type(raw["taskset"]["id"], raw.get("id") or "")
            seat = importlib.import_module("verifiers.v1").AgentConfig
            for name in (name for name, field in kind.model_fields.items() if isinstance(field.default, seat)):
                raw[name] = {**HARNESS, **raw.get(name, {})}
            self._config = loaders.resolve_env_config(raw)
            self._taskset = self._load(self._config).taskset
        except ModuleNotFoundError as error:
            raise WrongSetting(f"the environment {env_id!r} is not installed: {error}") from error
        except Exception as error:  # a user's module may raise anything
            raise WrongSetting(f"the environment {env_id!r} cannot be loaded: {error}") from error
        self._unread: Iterator[Any] = iter(self._taskset)
        self._tasks: list[Any] = []
        self._service: Service | None = None

    def task(self, index: int) -> Any:
        self._tasks += itertools.islice(self._unread, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            raise ValueError(
                f"task {index} of {len(self._tasks)}; rows name the tasks from 0 to {len(self._tasks) - 1}, held-out "
                "ones by column idx of a file"
            )
        return self._tasks[index]

    def service(self) -> Service:
        if self._service is None or self._service.is_retired or self._service.started >= EPISODES_PER_SERVICE:
            if self._service is not None:
                self._service.retire()
            self._service = Service(self._load(self._config))
        return self._service


def environment(env_id: str, args: dict[str, Any]) -> Environment:
    name = json.dumps([env_id, args], sort_keys=True)
    if name not in _environments:
        _environments[name] = Environment(env_id, args)
    return _environments[name]


async def play(
    env_id: str, args: dict[str, Any], *, index: int, base_url: str, api_key: str, limit_s: float
) -> dict[str, Any]:
    """Play and score one task. Raises any error of the episode, also `TimeoutError`."""
    v1 = importlib.import_module("verifiers.v1")
    variable = f"LOCKSTEP_API_KEY_{next(_keys)}"  # programs of agents inherit no variable with API_KEY in its name
    os.environ[variable] = api_key
    env = environment(env_id, args)
    model = v1.ModelContext(
        model="policy", client=v1.EvalClientConfig(base_url=base_url, api_key_var=variable), sampling=v1.Sampling()
    )
    try:
        async with asyncio.timeout(limit_s), env.service().episode() as runner:
            (slot,) = runner.slots(env.task(index))
            episode = await runner.run_slot(slot, model)
    except TimeoutError:
        raise TimeoutError(f"no end in {limit_s:g} s") from None
    finally:
        del os.environ[variable]
    return score(episode, base_url)


def score(episode: Any, base_url: str) -> dict[str, Any]:
    """Return the mean reward of the agents, and their metrics."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == base_url:
            raise RuntimeError(
                f"its agent {trace.agent.name!r} is not to be trained, but uses the policy; give it a model of its own "
                f"with environment.settings.args={{{trace.agent.name}: {{model: ..., client: {{base_url: ...}}}}}}"
            )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise RuntimeError("no agent of the episode is to be trained")
    metrics: dict[str, list[float]] = {}
    for trace in traces:
        for name, value in (
            *trace.metrics.items(),
            *((name, one and one.score) for name, one in trace.rewards.items()),
        ):
            if value is not None:
                metrics.setdefault(name, []).append(float(value))
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "metrics": {name: sum(values) / len(values) for name, values in metrics.items()},
    }


def check(env_id: str, args: dict[str, Any]) -> str:
    """Load an environment. Return the package's version."""
    try:
        version = importlib.import_module("verifiers").__version__
    except ModuleNotFoundError as error:
        raise WrongSetting("the verifiers package is not installed there") from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise WrongSetting(f"found verifiers {version}, expected 0.4")
    environment(env_id, args)
    return version


def answer(do: str, **arguments: Any) -> Any:
    if do == "check":
        return check(**arguments)
    if do == "play":
        return play(**arguments)
    raise ValueError(f"unknown request {do!r}")
