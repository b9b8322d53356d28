"""Environment `sandbox`: the model runs Python and shell programs behind walls, until it answers without a call.

    lockstep train environment=sandbox environment.settings.timeout_s=5 ...

All calls of an episode share one sandbox, which is opened by the first: files stay, processes do not. A turn's calls
run in their order. What a program does, its time, memory and output included, is a result that the model reads. A
sandbox that is lost costs its rollout (`EnvironmentFault`), because the model's files are lost with it.

Not covered: packages for programs (local: those of the interpreter; docker: those of the image); input for programs
that run; images.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.integrations.sandbox.sandbox_settings import SHOWN, SandboxSettings
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, EnvironmentFault, SandboxError
from lockstep.rollout.records import Message
from lockstep.rollout.sandbox.execution import Ended, Execution, Language, Sandbox

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


class SandboxEnvironment(ToolEnvironment):
    """`ToolEnvironment` with the tools `python` and `shell`."""

    declaration = Declaration(
        reads="prompt", max_turns=8, opens="a sandbox", runs_programs=True, is_deterministic=False
    )

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("python", "shell"),
        episode_timeout_s: float = 120.0,
        max_concurrent: int = 64,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        **sandbox: Any,
    ):
        """tools: those that are offered. episode_timeout_s: of all calls of an episode together. max_concurrent:
        sandboxes at once; other episodes wait with their first call. sandbox: arguments of `SandboxSettings.of`.

        Raises `ConfigError`: a setting is wrong.
        """
        self._settings = SandboxSettings.of(**sandbox)
        limits = self._settings.limits
        names = tuple(Language)
        if isinstance(tools, str) or not tools or any(name not in names for name in tools):
            raise ConfigError(
                f"{SHOWN}.tools={tools!r} must be one or both of {', '.join(names)}; set {SHOWN}.tools=[python]"
            )
        is_number = isinstance(episode_timeout_s, int | float) and not isinstance(episode_timeout_s, bool)
        if not is_number or not episode_timeout_s >= limits.timeout_s:
            raise ConfigError(
                f"{SHOWN}.episode_timeout_s={episode_timeout_s!r} must be at least timeout_s="
                f"{limits.timeout_s}, the time of one call; set {SHOWN}.episode_timeout_s={12 * limits.timeout_s:g}"
            )
        if not isinstance(max_concurrent, int) or max_concurrent < 1:
            raise ConfigError(f"{SHOWN}.max_concurrent={max_concurrent!r} must be an integer from 1 on; leave it out")
        self._languages = tuple(Language(name) for name in dict.fromkeys(tools))
        self._timeout_s, self._left_s, self._episode_timeout_s = limits.timeout_s, episode_timeout_s, episode_timeout_s
        self._max_concurrent = max_concurrent
        self._sandbox: Sandbox | None = None
        self._place: asyncio.Semaphore | None = None
        self._turn = asyncio.Lock()  # serves those who wait in their order
        self._fault: SandboxError | None = None
        self._facts: dict[str, int] = {}
        # The sandbox has deadlines of its own, and calls wait for each other; `output_bytes` limits results.
        super().__init__(
            [{Language.PYTHON: self.python, Language.SHELL: self.shell}[language] for language in self._languages],
            tool_timeout_s=math.inf, max_result_chars=2 * limits.output_bytes + 500, prompt_column=prompt_column,
            system_prompt=system_prompt,
        )  # fmt: skip

    async def problem(self) -> str | None:
        return await self._settings.problem(self._languages)

    async def python(self, code: str) -> str:
        """Run a Python program and return its exit status and what it printed. Files stay for later calls.

        Args:
            code: program text; only what it prints is returned
        """
        return await self._run(Language.PYTHON, code)

    async def shell(self, command: str) -> str:
        """Run shell commands and return their exit status and output. Files stay for later calls, processes do not.

        Args:
            command: one or more lines for sh
        """
        return await self._run(Language.SHELL, command)

    async def step(self, message: Message) -> Step:
        """Run the calls of a turn. Raises `EnvironmentFault` if the sandbox cannot be opened, or is lost."""
        self._facts = {"programs_failed": 0, "programs_timed_out": 0}
        step = await super().step(message)
        if self._fault is not None:
            raise EnvironmentFault(f"sandbox: {self._fault}") from self._fault
        return Step(messages=step.messages, done=step.done, outcome={**step.outcome, **self._facts})

    async def close(self) -> None:
        """End the sandbox with everything inside."""
        sandbox, place = self._sandbox, self._place
        self._sandbox = self._place = None
        try:
            if sandbox is not None:
                await sandbox.close()
        finally:
            if place is not None:
                place.release()

    async def _run(self, language: Language, text: str) -> str:
        async with self._turn:
            timeout_s = min(self._timeout_s, self._left_s)
            if timeout_s <= 0:
                raise TimeoutError(f"the programs of this episode have used their {self._episode_timeout_s:g} s")
            if self._fault is not None:
                raise self._fault
            try:
                sandbox = await self._opened()
                start = time.monotonic()
                result = await sandbox.run(language, text, timeout_s=timeout_s)
            except SandboxError as error:
                self._fault = error
                raise
            self._left_s -= time.monotonic() - start
            self._facts["programs_failed"] += result.status != 0
            self._facts["programs_timed_out"] += result.ended is Ended.TIMEOUT
            return result_text(result, timeout_s)

    async def _opened(self) -> Sandbox:
        if self._sandbox is None:
            places = _places.setdefault(asyncio.get_running_loop(), {})
            place = places.setdefault(self._max_concurrent, asyncio.Semaphore(self._max_concurrent))
            await place.acquire()
            self._place = place
            self._sandbox = await self._settings.open()
        return self._sandbox


def result_text(result: Execution, timeout_s: float) -> str:
    """Return what the model reads: the end of the program, then its outputs."""
    match result.ended:
        case Ended.TIMEOUT:
            end = f"killed after {timeout_s:.3g} s"
        case Ended.KILLED:
            end = f"killed by signal {-result.status} ({_signal_name(-result.status)})"
        case Ended.EXITED:
            end = f"exit status {result.status}"
    parts = [end, result.stdout.rstrip("\n")]
    if result.is_cut:
        parts.append("[output cut here]")
    if result.stderr:
        parts += ["stderr:", result.stderr.rstrip("\n")]
    if result.is_stderr_cut:
        parts.append("[stderr cut here]")
    return "\n".join(part for part in parts if part)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "unnamed"
