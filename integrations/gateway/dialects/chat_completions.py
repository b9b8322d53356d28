"""Chat completions: requests, whose messages are the gateway's inner form, and replies, whole or as a stream of chunks.

The ids of the prompt belong to the completion, as in vLLM's API: messages are sent back with every request, and would
carry the whole conversation once for every turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.integrations.gateway.dialects.dialect import (
    Dialect,
    Reply,
    data_event,
    evidence,
    is_cut,
    openai_error,
    token_logprobs,
)
from lockstep.integrations.gateway.dialects.fields import (
    DISTRIBUTION,
    FieldTable,
    read_flag,
    read_integer,
    read_sampling,
    read_seed,
    read_stop_ids,
    read_stop_strings,
    read_tool_choice,
)
from lockstep.integrations.gateway.errors import checked, not_supported
from lockstep.integrations.gateway.messages import read_last_ids, read_tools
from lockstep.integrations.gateway.request import Offer, SampleRequest
from lockstep.integrations.gateway.session import Answer, TurnMark

MAX_CHOICES = 128

FIELDS = FieldTable(
    read=frozenset({"model", "messages", "tools", "tool_choice", "n", "stream", "stream_options", "stop"})
    | {"stop_token_ids", "max_tokens", "max_completion_tokens", "seed", "logprobs", "top_logprobs"}
    | {"parallel_tool_calls", *DISTRIBUTION},
    ignored=frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
    | {"prompt_cache_retention"},
    neutral={
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "min_tokens": 0,
        "ignore_eos": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
    },
)


def read_chat_request(body: Mapping[str, Any], offer: Offer) -> SampleRequest:
    """Check a request. Raises `ApiError` (400) with the field and the expected value."""
    FIELDS.check(body)
    sampling = read_sampling(
        body,
        offer.sampling,
        limits=("max_tokens", "max_completion_tokens"),  # the older and the newer name
        stop_ids=read_stop_ids(body, offer.vocab_size),
    )
    tools = read_tools(body.get("tools"))
    if read_integer(body, "top_logprobs", default=0, low=0, high=20):
        raise not_supported(
            "top_logprobs",
            why="only sampled tokens have logprobs; leave it out, or send 0. logprobs=true returns these",
        )
    options = {} if body.get("stream_options") is None else body["stream_options"]
    checked(options, dict, "stream_options", expected="an object")
    conversation = offer.session.prefixes.read(body.get("messages"), tools)
    return SampleRequest(
        conversation=conversation,
        mark=TurnMark(sampled_ids=read_last_ids(body["messages"])),
        sampling=sampling,
        num_choices=read_integer(body, "n", default=1, low=1, high=MAX_CHOICES),
        must_call=read_tool_choice(body.get("tool_choice"), tools),
        one_call=not read_flag(body, "parallel_tool_calls", default=True),
        stop_strings=read_stop_strings(body, "stop"),
        seed=read_seed(body),
        wants_logprobs=read_flag(body, "logprobs"),
        stream=read_flag(body, "stream"),
        wants_usage=read_flag(options, "include_usage"),
    )


STREAM_END = b"data: [DONE]\n\n"


def completion_body(reply: Reply) -> dict[str, Any]:
    """Return a `chat.completion`."""
    choices = [
        {"index": index, "message": _message(choice), **_ending(reply, choice)}
        for index, choice in enumerate(reply.completion.choices)
    ]
    prompt = {"prompt_token_ids": reply.completion.prompt.ids, "usage": chat_usage(reply)}
    return {**reply_head(reply, "chat.completion"), "choices": choices, **prompt}


def completion_events(reply: Reply) -> Iterator[bytes]:
    """Yield the completion as server-sent events: per choice its role, text and tool calls, and an end with the ids."""
    head = reply_head(reply, "chat.completion.chunk")
    wants_usage = reply.request.wants_usage
    if wants_usage:
        head["usage"] = None
    prompt = {"prompt_token_ids": reply.completion.prompt.ids}  # once, with the first chunk
    for index, choice in enumerate(reply.completion.choices):
        for delta in _deltas(choice):
            chunk = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            yield data_event({**head, **prompt, "choices": [chunk]})
            prompt = {}
        chunk = {"index": index, "delta": evidence(choice), **_ending(reply, choice)}
        yield data_event({**head, "choices": [chunk]})
    if wants_usage:
        yield data_event({**head, "choices": [], "usage": chat_usage(reply)})
    yield STREAM_END


def chat_usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_prompt + reply.num_sampled,
    }


def _deltas(choice: Answer) -> Iterator[dict[str, Any]]:
    message = choice.message
    yield {"role": "assistant", "content": ""}
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    if message["content"]:
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls", ())):
        # Clients that join the pieces expect the name first, then the arguments.
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call["function"]["arguments"]}}]}


def _message(choice: Answer) -> dict[str, Any]:
    message = {**choice.message, "refusal": None, **evidence(choice)}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def reply_head(reply: Reply, kind: str, *, prefix: str = "chatcmpl") -> dict[str, Any]:
    """Return the fields with which every reply begins. prefix: of the id."""
    return {
        "id": f"{prefix}-{reply.first.name}",
        "object": kind,
        "created": int(time.time()),
        "model": reply.model,
        "prompt_kind": reply.completion.prompt.kind,
    }


def _ending(reply: Reply, choice: Answer) -> dict[str, Any]:
    wants_logprobs = reply.request.wants_logprobs
    logprobs = {"content": token_logprobs(choice, reply.decode), "refusal": None} if wants_logprobs else None
    reason = "tool_calls" if choice.message.get("tool_calls") else "stop"
    return {
        "finish_reason": "length" if is_cut(choice) else reason,
        "logprobs": logprobs,
    }


CHAT_COMPLETIONS = Dialect(
    path="/chat/completions",
    read=read_chat_request,
    body=completion_body,
    events=completion_events,
    error=openai_error,
)
