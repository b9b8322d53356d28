"""Messages → prompt ids: the exact ids of the last call where the conversation goes on from it, else a branch.

The record gives `model_prefix`, the ids of the last call's prompt and of what it sampled. The prompt is this prefix
and what the template puts behind it. Done by counting end-of-turn tokens in a rendering, as is usual, this goes wrong
without a word in four ways; each is handled here by proving first, and rendering the whole conversation otherwise:

    a forged assistant turn without ids        the last assistant turn must be one that was sampled here; by counting,
                                               messages would be deleted
    system prompt or early history edited      all messages before it, and the tools, must be those it was sampled
                                               from; by counting, the edit would be ignored
    end-of-turn token inside stripped          a turn without its reasoning is another turn, and no tokens are
    reasoning                                  counted; by counting, the next user turn would be deleted
    a turn ended by another stop token         a sampled stop token closes the turn (`Chat.extend`); by counting, it
                                               would get a second terminator

A branch is not an error: it is another row, and every sampled token is still trained once (`rollout/episode/rows.py`).

Token ids on messages choose among recorded calls that said the same (two of `n` samples can have equal text and
different tokens). They are never copied into a prompt: an id that is not in the record has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollout.chat.chat import Chat
from rollout.gateway.session import Recorded, Session, Tools
from rollout.records import Message


class PromptKind(StrEnum):
    """How a prompt came about. All but `extended` are rendered by the chat template."""

    ROOT = "root"
    """No assistant turn yet."""
    EXTENDED = "extended"
    """Everything the last call saw and sampled, then the new messages."""
    NOT_SAMPLED = "not_sampled"
    """Branch: the last assistant turn was not sampled in this session."""
    TURN_EDITED = "turn_edited"
    """Branch: the last assistant turn has ids of this session, but says something else (reasoning was stripped)."""
    HISTORY_EDITED = "history_edited"
    """Branch: the last assistant turn was sampled here, after other messages or with other tools."""
    UNPROVEN = "unproven"
    """Branch: the chat template strips or rewrites earlier turns, so that an extension is not what it shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    ids: tuple[int, ...]
    kind: PromptKind


def make_prompt(chat: Chat, session: Session, messages: Sequence[Message], tools: Tools) -> Prompt:
    """Ids to sample from. Raises `TemplateError` if the chat template refuses the messages."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        return Prompt(ids=tuple(chat.prompt(messages, tools)), kind=PromptKind.ROOT)
    conversation, new_messages = messages[: last + 1], messages[last + 1 :]
    recorded = choose(session.find(conversation, tools), messages[last])
    if recorded is None:
        kind = _why_not_found(session, messages[last])
    else:
        ids = chat.extend(recorded.call, conversation, new_messages, tools)
        if ids is not None and extends(ids, recorded.call.all_ids):
            return Prompt(ids=tuple(ids), kind=PromptKind.EXTENDED)
        kind = PromptKind.UNPROVEN
    return Prompt(ids=tuple(chat.prompt(messages, tools)), kind=kind)


def choose(candidates: Sequence[Recorded], message: Message) -> Recorded | None:
    """The call with the ids that the message carries; without ids, or with ids of no candidate, the latest."""
    prompt_ids, sampled_ids = message.get("prompt_token_ids"), message.get("generation_token_ids")
    for recorded in reversed(candidates):
        if prompt_ids == list(recorded.call.prompt_ids) and sampled_ids == list(recorded.call.sampled_ids):
            return recorded
    return candidates[-1] if candidates else None


def extends(ids: Sequence[int], model_prefix: Sequence[int]) -> bool:
    """Whether a prompt begins with all of the last call and goes on after it."""
    return len(ids) > len(model_prefix) and tuple(ids[: len(model_prefix)]) == tuple(model_prefix)


def _why_not_found(session: Session, message: Message) -> PromptKind:
    if session.has_sampled(message):
        return PromptKind.HISTORY_EDITED
    if session.has_sampled_ids(message.get("generation_token_ids", ())):
        return PromptKind.TURN_EDITED
    return PromptKind.NOT_SAMPLED
