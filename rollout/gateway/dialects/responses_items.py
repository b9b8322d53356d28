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

from rollout.gateway.errors import ApiError, checked, not_supported, quoted, wrong_type
from rollout.gateway.messages import MAX_CALLS, MAX_MESSAGES, read_text, refuse_deep, refuse_many
from rollout.gateway.session import Answer, Session
from rollout.records import Message

Item = Mapping[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_ID = re.compile(r"(rs|msg|fc)_([0-9a-f]{24})(?:_(\d{1,4}))?")
_REASONING, _TEXT, _CALL = range(3)


class Transcript:
    """Messages that items are translated to."""

    def __init__(self, session: Session) -> None:
        self.messages: list[dict[str, Any]] = []
        self.last_name: str | None = None
        """Name of the answer that the last assistant message is said to be."""
        self._session = session
        self._by_name: dict[str, dict[str, Any]] = {}
        self._open: dict[str, Any] | None = None
        """The assistant message that the next item may belong to."""
        self._stage = _REASONING

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

    def add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise wrong_type(f"{where}.role", role, expected=f"one of {', '.join(_ROLES)}")
        text = read_parts(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._turn(_TEXT, _name_of(item, where))["content"] += text
        else:
            self._append({"role": role, "content": text})

    def add_reasoning(self, item: Item, where: str) -> None:
        name = _name_of(item, where) or _name_in(item.get("encrypted_content"))
        texts = [
            _texts(item.get(field), f"{where}.{field}", kinds=(kind,))
            for field, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
        ]
        text = texts[0] or texts[1]
        answer = self._session.answer_named(name)
        if not text and answer is not None:  # some clients keep only the id, or the encrypted content
            text = answer.message.get("reasoning_content") or ""
        turn = self._turn(_REASONING, name)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, item: Item, where: str) -> None:
        arguments = read_text(item, "arguments", where)
        refuse_deep(arguments, f"{where}.arguments")
        function = {"name": read_text(item, "name", where), "arguments": arguments}
        call = {"id": read_text(item, "call_id", where), "type": "function", "function": function}
        self._add_call(call, _name_of(item, where), where)

    def add_output(self, item: Item, where: str) -> None:
        call_id, output = read_text(item, "call_id", where), read_parts(item.get("output"), f"{where}.output")
        self._append({"role": "tool", "tool_call_id": call_id, "content": output})

    def add_reference(self, item: Item, where: str) -> None:
        """Add an item that the client names only by its id."""
        found = _ID.fullmatch(read_text(item, "id", where))
        answer = self._session.answer_named(found[2]) if found else None
        if found is None or answer is None:
            raise ApiError(
                f"{where}.id: this session has no item {quoted(item['id'])}; send the item itself", param=f"{where}.id"
            )
        message, name = answer.message, answer.name
        calls, index = message.get("tool_calls", ()), int(found[3] or 0)
        if found[1] == "rs":
            self._turn(_REASONING, name)["reasoning_content"] = message.get("reasoning_content") or ""
        elif found[1] == "msg":
            self._turn(_TEXT, name)["content"] = message["content"]
        elif index < len(calls):
            self._add_call(calls[index], name, where)

    def continue_after(self, answer: Answer) -> None:
        """Begin with the conversation of an earlier answer, without the instructions of its request."""
        self.messages = [dict(message) for message in answer.conversation.messages[answer.num_instructions :]]
        self.last_name = answer.name

    def _add_call(self, call: Mapping[str, Any], name: str | None, where: str) -> None:
        turn = self._turn(_CALL, name)
        turn.setdefault("tool_calls", []).append(call)
        refuse_many(turn["tool_calls"], MAX_CALLS, where)

    def _append(self, message: dict[str, Any]) -> None:
        self._open = None
        self.messages.append(message)

    def _turn(self, stage: int, name: str | None) -> dict[str, Any]:
        """Return the assistant message that an item belongs to; a new one if no other can be it."""
        if name is not None and name in self._by_name:
            return self._by_name[name]
        follows = stage > self._stage or stage == self._stage == _CALL
        is_other = name is not None and self.last_name is not None and name != self.last_name
        if self._open is None or not follows or is_other:
            self._append({"role": "assistant", "content": ""})
            self._open, self.last_name = self.messages[-1], None
        self._stage = stage
        if name is not None:
            self._by_name[name], self.last_name = self._open, name
        return self._open


_READERS: Mapping[str, Callable[[Transcript, Item, str], None]] = {
    "message": Transcript.add_message,
    "reasoning": Transcript.add_reasoning,
    "function_call": Transcript.add_call,
    "function_call_output": Transcript.add_output,
    "item_reference": Transcript.add_reference,
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


def read_parts(value: Any, where: str) -> str:
    """Return the text of a message or of a tool result. Raises `ApiError` (400) for other contents."""
    return value if isinstance(value, str) else _texts(value, where, kinds=("input_text", "output_text"), needed=True)


def item_ids(message: Message, name: str) -> tuple[str, str, list[str]]:
    """Return the ids of the reasoning, the text and the calls of an answer."""
    calls = [f"fc_{name}_{index}" for index in range(len(message.get("tool_calls", ())))]
    return f"rs_{name}", f"msg_{name}", calls


def _texts(value: Any, where: str, *, kinds: Sequence[str], needed: bool = False) -> str:
    if value is None and not needed:
        return ""
    parts = checked(value, list, where, expected="a string or a list of text parts" if needed else "a list of parts")
    texts = []
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        checked(part, dict, at, expected=f'{{"type": "{kinds[0]}", "text": ...}}')
        if part.get("type") not in kinds:
            raise not_supported(
                f"{at}.type", why=f"found {quoted(part.get('type'))}; this model reads {' and '.join(kinds)} parts only"
            )
        texts.append(read_text(part, "text", at))
    return "".join(texts)


def _name_of(item: Item, where: str) -> str | None:
    """Return the name of the answer that an item was a part of, by its id."""
    if item.get("id") is not None:
        found = _ID.fullmatch(read_text(item, "id", where))
        return found[2] if found else None
    return None


def _name_in(value: Any) -> str | None:
    return value if isinstance(value, str) else None
