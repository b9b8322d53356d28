"""Demonstrations: conversations that were not sampled here, as the calls that a rollout would have made.

    messages ─► one call per assistant turn: its prompt as in an episode, its tokens as if sampled ─► rows

Prompts are made by the code of episodes, and rows by that of rollouts, so a demonstration has the ids and the loss mask
of a rollout with the same turns, also where the chat template makes the conversation branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.episode.conversation import next_prompt
from lockstep.rollout.errors import TemplateError
from lockstep.rollout.records import EngineCall, FinishReason, Message

if TYPE_CHECKING:  # it imports transformers, which takes seconds
    from lockstep.rollout.chat.chat import Chat


def demonstrated_calls(chat: Chat, messages: Sequence[Message], tools: Tools = ()) -> list[EngineCall]:
    """Return one call per assistant turn, with logprobs of 0.

    A turn whose message has `weight: 0`, as in OpenAI's format for fine-tuning, is context: its call counts as aborted.
    Raises `TemplateError` for messages that no rollout could have, and `ConfigError` if the template drops the tools.
    """
    calls: list[EngineCall] = []
    start = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if index == 0:
            raise TemplateError("message 0 is an assistant turn; expected a message before it that the model reads")
        history, new = messages[:start], messages[start:index]
        prompt = next_prompt(chat, calls[-1] if calls else None, history, new, tools)
        sampled_ids = chat.turn(messages[: index + 1], tools)
        calls.append(
            EngineCall(
                prompt_ids=tuple(prompt),
                sampled_ids=tuple(sampled_ids),
                sampled_logprobs=(0.0,) * len(sampled_ids),
                images=prompt.images,
                finish_reason=FinishReason.STOP if _is_trained(message, index) else FinishReason.ABORT,
            )
        )
        start = index + 1
    if not calls:
        raise TemplateError("there is no assistant turn to train; expected a message with role assistant")
    return calls


def _is_trained(message: Message, index: int) -> bool:
    weight: Any = message.get("weight", 1)
    if weight in (None, 0, 1):
        return weight != 0
    raise TemplateError(f"message {index} has weight {weight!r}; expected 0 (context) or 1 (trained)")
