"""An environment whose calls are announced, timed and checked; a fault ends its episode and is kept.

Covered: a call that raises, awaits longer than the limit, or returns something else than messages or a `Step`.
Not covered: a call that blocks the event loop or ends the process; the journal names it to the other side.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lockstep.lab.environments.journal import Journal
from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import declaration_of
from lockstep.rollout.environments.drivers import turn_by_turn
from lockstep.rollout.environments.mixed import AnyEnvironment, Mixed
from lockstep.rollout.episode.contract import opening_problem, outcome_problem, step_problem, tools_problem
from lockstep.rollout.episode.environment import (
    Closes,
    Concludes,
    Environment,
    HostsConversations,
    OpenConversation,
    RunsItself,
    ShowsImages,
    Step,
)
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import Message, content_text
from lockstep.rollout.safe_text import error_text

PLACEHOLDER: tuple[Message, ...] = ({"role": "user", "content": ""},)
"""Messages in place of those of a `reset` that failed."""


class FaultKind(StrEnum):
    RAISED = "raised"
    HUNG = "hung"
    WRONG_TYPE = "wrong type"
    CHANGED_ROW = "changed row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A call of the environment without a usable result, or that changed its data row."""

    place: str
    """Class and method."""
    kind: FaultKind
    text: str
    after: str = ""
    """The tool calls or the text that the call had to answer."""


@dataclass(slots=True)
class Watch:
    """Record of all calls of watched environments."""

    journal: Journal
    limit_s: float
    """Wall-clock limit of one call."""
    faults: list[Fault] = field(default_factory=list)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Durations of calls by class and method."""


def watch_environment(environment: AnyEnvironment, watch: Watch) -> AnyEnvironment:
    """Return the environment with its calls watched, if it is played turn by turn."""
    if isinstance(environment, RunsItself) or declaration_of(environment).driver is not turn_by_turn:
        return environment
    if isinstance(environment, Mixed):
        environment.parts = {name: watch_environment(part, watch) for name, part in environment.parts.items()}
        return environment
    return (
        WatchedHost(environment, watch) if isinstance(environment, HostsConversations) else Watched(environment, watch)
    )


class Watched:
    """An environment behind checks of its contract."""

    tools: Tools = ()
    sees_images = False

    def __init__(self, environment: Environment, watch: Watch) -> None:
        self.inner = environment
        self.messages: list[Message] = []
        """The conversation so far."""
        self._watch = watch
        self._failure: EvidenceError | None = None
        self._row: Mapping[str, Any] = {}
        self._row_before: Mapping[str, Any] = {}

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        """Return the first messages, or a placeholder after a fault, which the next step then raises."""
        self._row, self._row_before = example, copy.deepcopy(example)
        if isinstance(self.inner, ShowsImages):
            self.inner.sees_images = self.sees_images
        try:
            opening = await self._call("reset", lambda: self.inner.reset(example), opening_problem)
            self.tools = await self._call("tools", self._tools, tools_problem)
        except EvidenceError as failure:
            self._failure, opening = failure, PLACEHOLDER
        self.messages = list(opening)
        return opening

    async def step(self, message: Message) -> Step:
        """Raises `EvidenceError` after a fault: the rollout becomes FAILED."""
        if self._failure is not None:
            raise self._failure
        self.messages.append(message)
        step = await self._call("step", lambda: self.inner.step(message), step_problem, after=_summary(message))
        self.messages += step.messages
        return step

    async def conclude(self) -> Mapping[str, Any]:
        inner = self.inner
        if self._failure is not None or not isinstance(inner, Concludes):
            return {}
        return await self._call("conclude", lambda: inner.conclude(), outcome_problem)

    async def close(self) -> None:
        """Let go of what the environment holds, also after a fault."""
        if isinstance(self.inner, Closes):
            await self.inner.close()

    async def _tools(self) -> Tools:
        return self.inner.tools

    async def _call(
        self,
        method: str,
        call: Callable[[], Awaitable[Any]],
        problem_of: Callable[[Any], str],
        *,
        after: str = "",
    ) -> Any:
        place, watch = f"{type(self.inner).__name__}.{method}", self._watch
        what = f"{place} after {after}" if after else place
        start = time.perf_counter()
        try:
            with watch.journal.doing(what, limit_s=watch.limit_s):
                async with asyncio.timeout(watch.limit_s) as deadline:
                    awaitable = call()
                    if not isinstance(awaitable, Awaitable):
                        problem = f"is not async; write `async def {method}`"
                        raise self._fault(place, FaultKind.WRONG_TYPE, problem, after)
                    value = await awaitable
        except EvidenceError:
            raise
        except TimeoutError as error:
            if deadline.expired():
                problem = f"did not return in {watch.limit_s:g} s"
                raise self._fault(place, FaultKind.HUNG, problem, after) from None
            raise self._fault(place, FaultKind.RAISED, f"raised TimeoutError: {error_text(error)}", after) from error
        except (Exception, SystemExit) as error:
            text = f"raised {type(error).__name__}: {error_text(error)}"
            raise self._fault(place, FaultKind.RAISED, text, after) from error
        finally:
            watch.seconds[place].append(time.perf_counter() - start)
        if self._row != self._row_before:
            columns = [
                name for name in {**self._row, **self._row_before} if self._row.get(name) != self._row_before.get(name)
            ]
            self._row = self._row_before  # once is enough
            text = f"changed column {columns[0]!r} of the data row, which other episodes read; work on a copy"
            self._watch.faults.append(Fault(place=place, kind=FaultKind.CHANGED_ROW, text=text, after=after))
        if problem := problem_of(value):
            raise self._fault(place, FaultKind.WRONG_TYPE, problem, after)
        return value

    def _fault(self, place: str, kind: FaultKind, text: str, after: str) -> EvidenceError:
        self._watch.faults.append(Fault(place=place, kind=kind, text=text, after=after))
        return EvidenceError(f"{place} {text}")


class WatchedHost(Watched):
    """A watched environment that opens conversations of its own."""

    inner: Any

    @property
    def max_calls(self) -> int | None:
        return self.inner.max_calls

    def host(self, open_conversation: OpenConversation) -> None:
        self.inner.host(open_conversation)


def _summary(message: Message) -> str:
    names = [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]
    if names:
        return f"a call of {', '.join(names[:4])}"
    content = content_text(message)
    return f"the turn {content[:40]!r}" if content else "an empty turn"
