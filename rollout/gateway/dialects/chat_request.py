"""Requests of chat completions, whose messages are the gateway's inner form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.rollout.gateway.dialects.fields import (
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
from lockstep.rollout.gateway.errors import checked, not_supported
from lockstep.rollout.gateway.messages import read_last_ids, read_tools
from lockstep.rollout.gateway.request import Offer, SampleRequest
from lockstep.rollout.gateway.session import TurnMark

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
