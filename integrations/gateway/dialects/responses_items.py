"""Items of OpenAI's Responses API, translated to messages.

An assistant turn is one message there and several items here: its reasoning, its text, and one for each tool call. The
items that a client sends back are joined again. The ids of items that the gateway made name the answer, so that its
items find together even if the client puts the result of each call behind it:

    rs_<answer>   msg_<answer>   fc_<answer>_<number of the call>

Items without such an id are joined as long as they follow each other in this order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.integrations.gateway.dialects.turn import Recorded, Turn, function_call
from lockstep.integrations.gateway.errors import ApiError, checked, not_supported, quoted, wrong_type
from lockstep.integrations.gateway.messages import (
    MAX_MESSAGES,
    Content,
    StoredImage,
    joined,
    part_type,
    read_text,
    refuse_many,
    unread_part,
)
from lockstep.integrations.gateway.session import Answer, Session
from lockstep.rollout.records import Message

Item = Mapping[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_ID = re.compile(r"(rs|msg|fc)_([0-9a-f]{24})(?:_(\d{1,4}))?")
_REASONING, _TEXT, _CALL = range(3)


class Transcript:
    """Messages that items are translated to."""

    def __init__(self, session: Session) -> None:
        self.last_name: str | None = None
        """Name of the answer that the last assistant message is said to be."""
        self._parts: list[Message | Turn] = []
        self._recorded = Recorded(session)
        self._by_name: dict[str, Turn] = {}
        self._open: Turn | None = None
        """The turn that the next item may belong to."""
        self._stage = _REASONING

    @property
    def messages(self) -> list[Message]:
        return [part.message if isinstance(part, Turn) else part for part in self._parts]

    def continue_after(self, answer: Answer) -> None:
        """Begin with the conversation of an earlier answer, without the instructions of its request."""
        self._parts += answer.conversation.messages[answer.num_instructions :]
        self.last_name = answer.name

    def add(self, item: Any, where: str) -> None:
        """Add an item of a request. Raises `ApiError` (400) with the field."""
        checked(item, dict, where, expected="an item, an object with a type")
        kind = item.get("type")
        kind = "message" if kind is None and "role" in item else kind
        if not isinstance(kind, str):
            raise wrong_type(f"{where}.type", kind, expected=f"one of {', '.join(_READERS)}")
        if kind not in _READERS:
            raise not_supported(
                f"{where}.type", why=f"found {quoted(kind)}; this model reads {', '.join(_READERS)} items only"
            )
        _READERS[kind](self, item, where)

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise wrong_type(f"{where}.role", role, expected=f"one of {', '.join(_ROLES)}")
        content = _content(item.get("content"), f"{where}.content", with_images=role == "user")
        if role == "assistant":
            self._turn(_TEXT, _name_of(item, where)).texts.append(str(content))
        else:
            self._append({"role": role, "content": content})

    def _add_reasoning(self, item: Item, where: str) -> None:
        encrypted_content = item.get("encrypted_content")
        name = _name_of(item, where) or (encrypted_content if isinstance(encrypted_content, str) else None)
        text = _texts(item.get("content"), f"{where}.content", kinds=("reasoning_text",))
        summary = _texts(item.get("summary"), f"{where}.summary", kinds=("summary_text",))
        turn = self._turn(_REASONING, name)
        if text or summary:
            turn.reasoning.append(text or summary)
        elif answer := self._recorded.find(name, "reasoning"):  # some clients keep only the id or this content
            turn.reasoning.append(answer.message.get("reasoning_content") or "")

    def _add_call(self, item: Item, where: str) -> None:
        call = function_call(*(read_text(item, field, where) for field in ("call_id", "name", "arguments")))
        self._turn(_CALL, _name_of(item, where)).add_call(call, f"{where}.arguments")

    def _add_output(self, item: Item, where: str) -> None:
        call_id = read_text(item, "call_id", where)
        output = _content(item.get("output"), f"{where}.output", with_images=True)
        self._append({"role": "tool", "tool_call_id": call_id, "content": output})

    def _add_reference(self, item: Item, where: str) -> None:
        """Add an item that the client names only by its id."""
        match = _ID.fullmatch(read_text(item, "id", where))
        answer = self._recorded.find(match[2], match[0]) if match else None
        calls = answer.message.get("tool_calls", ()) if answer else ()
        if match is None or answer is None or (match[1] == "fc" and int(match[3] or 0) >= len(calls)):
            raise ApiError(
                f"{where}.id: this session has no item {quoted(item['id'])}, or it was named before; send the item",
                param=f"{where}.id",
            )
        stage = {"rs": _REASONING, "msg": _TEXT, "fc": _CALL}[match[1]]
        turn = self._turn(stage, answer.name)
        if stage == _REASONING:
            turn.reasoning.append(answer.message.get("reasoning_content") or "")
        elif stage == _TEXT:
            turn.texts.append(answer.message["content"])
        else:
            turn.add_call(calls[int(match[3] or 0)], where)

    def _append(self, message: Message) -> None:
        self._open = None
        self._parts.append(message)

    def _turn(self, stage: int, name: str | None) -> Turn:
        """Return the turn that an item belongs to; a new one if no other can be it."""
        if name is not None and name in self._by_name:
            return self._by_name[name]
        follows = stage > self._stage or stage == self._stage == _CALL
        is_other = name is not None and self.last_name is not None and name != self.last_name
        if self._open is None or not follows or is_other:
            self._open, self.last_name = Turn(), None
            self._parts.append(self._open)
        self._stage = stage
        if name is not None:
            self._by_name[name], self.last_name = self._open, name
        return self._open


_READERS: Mapping[str, Callable[[Transcript, Item, str], None]] = {
    "message": Transcript._add_message,
    "reasoning": Transcript._add_reasoning,
    "function_call": Transcript._add_call,
    "function_call_output": Transcript._add_output,
    "item_reference": Transcript._add_reference,
}


def add_input(transcript: Transcript, value: Any) -> None:
    """Add the input of a request: a text of the user, or a list of items. Raises `ApiError` (400)."""
    if isinstance(value, str):
        return transcript.add({"role": "user", "content": value}, "input")
    items = [] if value is None else checked(value, list, "input", expected="a string or a list of items")
    refuse_many(items, MAX_MESSAGES, "input")
    for index, item in enumerate(items):
        transcript.add(item, f"input[{index}]")
    return None


def _content(value: Any, where: str, *, with_images: bool) -> Content:
    """Return the content of a message or of a tool result."""
    if isinstance(value, str):
        return value
    parts = checked(value, list, where, expected="a string or a list of text parts")
    return joined(_read_parts(parts, where, kinds=("input_text", "output_text"), with_images=with_images))


def item_ids(message: Message, name: str) -> tuple[str, str, list[str]]:
    """Return the ids of the reasoning, the text and the calls of an answer."""
    calls = [f"fc_{name}_{index}" for index in range(len(message.get("tool_calls", ())))]
    return f"rs_{name}", f"msg_{name}", calls


def _texts(value: Any, where: str, *, kinds: Sequence[str]) -> str:
    parts = [] if value is None else checked(value, list, where, expected="a list of parts")
    return "".join(map(str, _read_parts(parts, where, kinds=kinds)))


def _read_parts(
    parts: Sequence[Any], where: str, *, kinds: Sequence[str], with_images: bool = False
) -> list[str | StoredImage]:
    read: list[str | StoredImage] = []
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        if with_images and isinstance(part, StoredImage):
            read.append(part)
            continue
        kind = part_type(part, at, expected=f'{{"type": "{kinds[0]}", "text": ...}}')
        if kind not in kinds:
            raise unread_part(kind, f"{at}.type", kinds=kinds)
        read.append(read_text(part, "text", at))
    return read


def _name_of(item: Item, where: str) -> str | None:
    """Return the name of the answer that an item was a part of, by its id."""
    if item.get("id") is not None:
        match = _ID.fullmatch(read_text(item, "id", where))
        return match[2] if match else None
    return None
