"""An assistant turn that is put together from the parts in which a client sends it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.integrations.gateway.messages import MAX_CALLS, refuse_deep, refuse_many
from lockstep.integrations.gateway.session import Answer, Session


@dataclass(slots=True, kw_only=True)
class Turn:
    """Parts of one assistant message. Texts are joined at the end: adding them one by one takes quadratic time."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Mapping[str, Any]] = field(default_factory=list)

    def add_call(self, call: Mapping[str, Any], where: str) -> None:
        """Add a call in the inner form. Raises `ApiError` (400) for too many calls, or arguments that nest too deep."""
        refuse_deep(call["function"]["arguments"], where)
        self.calls.append(call)
        refuse_many(self.calls, MAX_CALLS, where)

    @property
    def message(self) -> dict[str, Any]:
        """The message in the inner form."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Recorded:
    """Answers of a session that a request names in place of their text.

    Each answer is given out once for a request: a short name repeated could otherwise make a request of any length.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._used: set[tuple[str, str]] = set()

    def find(self, name: str | None, part: str) -> Answer | None:
        """Return the answer with this name if the request has not named this part of it before."""
        answer = self._session.answer_named(name)
        if answer is None or (answer.name, part) in self._used:
            return None
        self._used.add((answer.name, part))
        return answer


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the inner form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
