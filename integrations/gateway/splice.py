"""Conversion of messages to prompt ids: an extension of the last call where that is proven, else a branch.

The prompt starts with the prompt ids and the sampled ids of the last call, and continues with the template's text for
the new messages. The common way, counting end-of-turn tokens in a rendering, fails silently in four cases. This module
proves the extension first, and renders the whole conversation where it cannot:

    case                                 proof                                      counting would
    forged assistant turn without ids    the last assistant turn was sampled here   delete messages
    edited system prompt or history      the messages before the turn, and the      ignore the edit
                                         tools, are those it was sampled from
    end-of-turn token in stripped        a turn without its reasoning is another    delete the next user turn
    reasoning                            turn, and no tokens are counted
    turn ended by another stop token     a sampled stop token closes the turn       add a second terminator

A branch starts another row, and every sampled token is still trained once (`rollout/episode/rows.py`).

Token ids on messages select among recorded calls with equal messages (two of `n` samples can have equal text and
different tokens). They are never copied into a prompt: an id that is not in the record has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lockstep.integrations.gateway.prefix_chain import Prefix
from lockstep.integrations.gateway.session import Answer, Session, TurnMark
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import ImageSpan


class PromptKind(StrEnum):
    """Origin of a prompt. The chat template renders all but `extended`."""

    ROOT = "root"
    """No assistant turn yet."""
    EXTENDED = "extended"
    """Prompt ids and sampled ids of the last call, then the new messages."""
    NOT_SAMPLED = "not_sampled"
    """Branch: the last assistant turn was not sampled in this session."""
    TURN_EDITED = "turn_edited"
    """Branch: the last assistant turn has ids of this session but another message (for example no reasoning)."""
    HISTORY_EDITED = "history_edited"
    """Branch: the last assistant turn was sampled here, but after other messages or with other tools."""
    FORGOTTEN = "forgotten"
    """Branch: the last assistant turn was sampled under plain `/v1`, which has no room for it any more."""
    UNPROVEN = "unproven"
    """Branch: the chat template strips or rewrites earlier turns, so that an extension differs from its rendering."""
    GIVEN = "given"
    """Ids or text of the client, without messages. It extends each call whose ids it begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    ids: tuple[int, ...]
    kind: PromptKind
    images: tuple[ImageSpan, ...] = ()


def make_prompt(chat: Chat, session: Session, conversation: Prefix, mark: TurnMark) -> Prompt:
    """Return the ids to sample from.

    Raises `TemplateError` if the chat template refuses the messages. Raises `ConfigError`, and records it as the
    session's failure, if the template drops the tools.

    mark: origin of the last assistant message, as far as the client sent it.
    """
    turn = conversation.up_to_last_turn()
    if turn is None:
        return _rendered(chat, session, conversation, PromptKind.ROOT)
    answer = _choose(session.find(turn), mark)
    if answer is None:
        kind = _why_not_found(session, turn, mark)
    else:
        ids = chat.extend(answer.call, turn.messages, conversation.after(turn), conversation.tools)
        prefix = answer.call.all_ids
        if ids is not None and len(ids) > len(prefix) and tuple(ids[: len(prefix)]) == prefix:
            return Prompt(ids=tuple(ids), kind=PromptKind.EXTENDED, images=ids.images)
        kind = PromptKind.UNPROVEN
    return _rendered(chat, session, conversation, kind)


def _rendered(chat: Chat, session: Session, conversation: Prefix, kind: PromptKind) -> Prompt:
    try:
        chat.require_tools(conversation.messages, conversation.tools)
    except ConfigError as error:
        session.failed(error)
        raise
    ids = chat.prompt(conversation.messages, conversation.tools)
    return Prompt(ids=tuple(ids), kind=kind, images=ids.images)


def _choose(candidates: Sequence[Answer], mark: TurnMark) -> Answer | None:
    """Return the latest answer with this mark; without a mark, or with that of no candidate, the latest."""
    for answer in reversed(candidates):
        if mark.fits(answer):
            return answer
    return candidates[-1] if candidates else None


def _why_not_found(session: Session, turn: Prefix, mark: TurnMark) -> PromptKind:
    if session.has_forgotten(turn):
        return PromptKind.FORGOTTEN
    if session.has_sampled(turn.message):
        return PromptKind.HISTORY_EDITED
    if session.has_marked(mark):
        return PromptKind.TURN_EDITED
    return PromptKind.NOT_SAMPLED
