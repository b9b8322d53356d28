"""Conversations of a session, in which every message is checked and hashed once.

A harness sends the whole conversation with each request. Conversations that begin alike share a chain of `Prefix`
objects, so a request costs one look-up for every message that the session knows, and work for the new ones. A chain
lives as long as a recorded answer holds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from lockstep.integrations.gateway.errors import wrong_type
from lockstep.integrations.gateway.messages import ID_FIELDS, MAX_MESSAGES, read_message, refuse_many
from lockstep.rollout.chat.messages import Tools, normalize_messages
from lockstep.rollout.chat.tool_calls import THINK_CLOSE
from lockstep.rollout.records import Message


class Prefix:
    """A conversation from its tools up to one message."""

    __slots__ = ("__weakref__", "_parent", "_tools", "digest", "longest_message", "message", "num_characters")

    def __init__(self, parent: Prefix | None, message: Message, digest: bytes, tools: Tools) -> None:
        self._parent = parent
        self._tools = tools
        self.message = message
        """The last message; empty at the root."""
        self.digest = digest
        """Hash of the tools and of the roles, texts, images, reasoning, tool calls, names and call ids of all messages.

        Null fields, empty reasoning, the spacing of JSON arguments and 1.0 for 1 in them make no difference.
        """
        num_visible = _shown_characters(message)
        self.num_characters: int = num_visible + (
            num_characters(json.dumps(tools)) if parent is None else parent.num_characters
        )
        """Characters (`num_characters`) without reasoning, which chat templates leave out of earlier turns."""
        whole = num_visible + num_characters(message.get("reasoning_content") or "")
        self.longest_message: int = whole if parent is None else max(whole, parent.longest_message)
        """Characters of the longest message, its reasoning included."""

    @classmethod
    def root(cls, tools: Tools = ()) -> Prefix:
        """Return the conversation without messages."""
        return cls(None, {}, _hash(b"", [dict(tool) for tool in tools]), tools)

    @classmethod
    def of_text(cls, text: str) -> Prefix:
        """Return a conversation for people to read, from the text of a prompt that was not made of messages.

        No request with messages continues it, whatever they say.
        """
        return cls(None, {}, _hash(b"text", []), ()).then({"role": "user", "content": text})

    def then(self, message: Message, *, names: Mapping[str, str] = MappingProxyType({})) -> Prefix:
        """Return this conversation with one more message, which has no token ids.

        names: names of the tools that were called before, by the ids of the calls.
        """
        (copy,) = normalize_messages([message], sees_images=True)
        if copy["role"] == "tool" and not copy.get("name"):
            copy["name"] = names.get(copy.get("tool_call_id", ""))
        copy = {key: value for key, value in copy.items() if value not in (None, "") or key in ("role", "content")}
        return Prefix(self, message, _hash(self.digest, _by_value(copy)), self._tools)

    @property
    def tools(self) -> Tools:
        return self._tools

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(prefix.message for prefix in self.prefixes)

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """The conversations up to each message, this one last."""
        return tuple(self._backwards())[::-1]

    def up_to_last_turn(self) -> Prefix | None:
        """Return the conversation up to its last assistant message; None without one."""
        return next((prefix for prefix in self._backwards() if prefix.message["role"] == "assistant"), None)

    def after(self, start: Prefix) -> tuple[Message, ...]:
        """Return the messages after `start`, from which this conversation must have been extended."""
        messages = []
        for prefix in self._backwards():
            if prefix is start:
                break
            messages.append(prefix.message)
        return tuple(reversed(messages))

    def _backwards(self) -> Iterator[Prefix]:
        prefix = self
        while prefix._parent is not None:
            yield prefix
            prefix = prefix._parent


class Prefixes:
    """The conversations that a session knows, by the JSON that clients sent."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[int, Hashable], Prefix] = WeakValueDictionary()

    def read(self, messages: Any, tools: Tools) -> Prefix:
        """Check the messages of a request that are new. Raises `ApiError` (400) with the message and the field."""
        if not isinstance(messages, list) or not messages:
            raise wrong_type("messages", messages, expected="a list with at least one message")
        refuse_many(messages, MAX_MESSAGES, "messages")
        key: tuple[int, Hashable] = (0, json.dumps(tools))
        prefix = self._known.get(key)
        if prefix is None:
            prefix = self._known[key] = Prefix.root(tools)
        names: dict[str, str] = {}
        for index, message in enumerate(messages):
            key = (id(prefix), _key_of(message))  # a child holds its parent, so the id is not used twice
            child = self._known.get(key)
            if child is None:
                child = self._known[key] = prefix.then(read_message(message, f"messages[{index}]"), names=names)
            prefix = child
            for call in prefix.message.get("tool_calls", ()):
                names[call["id"]] = call["function"]["name"]
        return prefix


def num_characters(text: str) -> int:
    """Return the number of characters. White space counts a quarter at most: templates and tokenizers may drop it."""
    return max(sum(map(len, text.split())), len(text) // 4)


def _shown_characters(message: Message) -> int:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    if message.get("role") == "assistant":
        content = content.rpartition(THINK_CLOSE)[2]
    calls = (call["function"] for call in message.get("tool_calls", ()))
    return num_characters(content) + sum(num_characters(call["name"] + call["arguments"]) for call in calls)


def message_digest(message: Message) -> bytes:
    return Prefix.root().then(message).digest


def _key_of(message: Any) -> Hashable:
    """Return a key that only equal JSON has."""
    if not isinstance(message, dict):
        return json.dumps(message)
    unread = ID_FIELDS if message.get("role") == "assistant" else ()
    fields = tuple(item for item in message.items() if item[0] not in unread)
    try:
        hash(fields)
    except TypeError:  # text parts, tool calls
        return json.dumps(fields)
    return fields


def _by_value(value: Any) -> Any:
    """Return a JSON value with integers for whole numbers: a client in JavaScript sends the argument 1.0 back as 1."""
    if isinstance(value, dict):
        return {key: _by_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_by_value(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _hash(before: bytes, value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(before + text, digest_size=16).digest()
