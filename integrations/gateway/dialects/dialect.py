"""The interface of a dialect, and what several of them share: forms of errors, events and logprobs.

A stream is sent after sampling: tool calls and reasoning can only be told from text in a complete turn, and the ids and
logprobs of a message cover the whole turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.integrations.gateway.completion import Completion, Decode
from lockstep.integrations.gateway.errors import CONVERSATION, ApiError
from lockstep.integrations.gateway.request import Offer, SampleRequest
from lockstep.integrations.gateway.session import Answer
from lockstep.rollout.records import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The inner reply, which every dialect's reply is translated from."""

    completion: Completion
    model: str
    """Name of the model, as the client knows it."""
    decode: Decode

    @property
    def request(self) -> SampleRequest:
        return self.completion.request

    @property
    def first(self) -> Answer:
        """The first answer, and the only one in dialects without `n`."""
        return self.completion.choices[0]

    @property
    def num_prompt(self) -> int:
        return len(self.completion.prompt.ids)

    @property
    def num_sampled(self) -> int:
        return sum(len(choice.call.sampled_ids) for choice in self.completion.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Translation of one API to the inner request, and of the inner reply and of errors to that API."""

    path: str
    """Path of its requests, after `/v1`."""
    read: Callable[[Mapping[str, Any], Offer], SampleRequest]
    """Check the JSON of a request. Raises `ApiError` with the field, in the names of the API."""
    body: Callable[[Reply], dict[str, Any]]
    """Make the JSON of a reply."""
    events: Callable[[Reply], Iterator[bytes]]
    """Make the server-sent events of a reply."""
    error: Callable[[ApiError], dict[str, Any]]
    """Make the JSON of an error."""


def openai_error(error: ApiError, *, messages: str = "messages") -> dict[str, Any]:
    """Return an error in the form that OpenAI's client libraries turn into their own exceptions.

    messages: the field of the API that holds the conversation.
    """
    param = messages if error.param == CONVERSATION else error.param
    return {"error": {"message": error.message, "type": error.kind, "param": param, "code": error.code}}


def evidence(choice: Answer) -> dict[str, Any]:
    return {
        "generation_token_ids": choice.call.sampled_ids,
        "generation_log_probs": choice.call.sampled_logprobs,
    }


def is_cut(choice: Answer) -> bool:
    """Return True if the limit of tokens, or the context, ended the answer."""
    return choice.call.finish_reason is FinishReason.LENGTH


def token_texts(choice: Answer, decode: Decode) -> list[str]:
    return [decode([token]) for token in choice.call.sampled_ids]


def token_logprobs(choice: Answer, decode: Decode) -> list[dict[str, Any]]:
    """Return text, bytes and logprob of each sampled token."""
    texts, logprobs = token_texts(choice, decode), choice.call.sampled_logprobs
    # A token may be part of a character; it then has no text of its own.
    raw = [None if "\ufffd" in text else list(text.encode()) for text in texts]
    return [
        {"token": text, "bytes": bytes_, "logprob": logprob, "top_logprobs": []}
        for text, bytes_, logprob in zip(texts, raw, logprobs, strict=True)
    ]


def data_event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return an event whose name is also the `type` in its data."""
    return f"event: {data['type']}\n".encode() + data_event(data)
