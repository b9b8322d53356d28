"""Requests of OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.rollout.gateway.dialects.fields import (
    DISTRIBUTION,
    FieldTable,
    function_tool,
    read_flag,
    read_integer,
    read_sampling,
    read_tool_choice,
)
from lockstep.rollout.gateway.dialects.responses_items import Transcript, add_input
from lockstep.rollout.gateway.errors import ApiError, checked, not_supported, quoted, wrong_type
from lockstep.rollout.gateway.messages import MAX_TOOLS, read_text, refuse_many
from lockstep.rollout.gateway.request import Offer, SampleRequest
from lockstep.rollout.gateway.session import TurnMark

RESPONSE_ID = "resp_"
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

FIELDS = FieldTable(
    read=frozenset({"model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "stream"})
    | {"parallel_tool_calls", "max_output_tokens", "include", "top_logprobs", "text", "reasoning", *DISTRIBUTION},
    ignored=frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
    | {"prompt_cache_retention", "prompt_cache_options", "max_tool_calls", "stream_options"},
    neutral={"background": False, "truncation": "disabled"},
    refused={
        "conversation": "the gateway keeps answers, not conversations; send the items, or previous_response_id",
        "prompt": "the gateway has no prompt templates; send input and instructions",
        "context_management": "a conversation that is compacted on the way is another one than the model had",
        "moderation": "the gateway has no moderation",
    },
)


def read_response_request(body: Mapping[str, Any], offer: Offer) -> SampleRequest:
    """Check a request. Raises `ApiError` (400) with the field and the expected value."""
    FIELDS.check(body)
    sampling = read_sampling(body, offer.sampling, limits=("max_output_tokens",))
    tools = _tools(body.get("tools"))
    _check_text(body.get("text"))
    _check_reasoning(body.get("reasoning"))
    if read_integer(body, "top_logprobs", default=0, low=0, high=20):
        raise not_supported("top_logprobs", why=f"only sampled tokens have logprobs; include {LOGPROBS} returns these")
    include = _include(body.get("include"))
    transcript = Transcript(offer.session)
    previous = body.get("previous_response_id")
    if previous is not None:
        _continue(transcript, previous, offer)
    add_input(transcript, body.get("input"))
    messages, instructions = transcript.messages, body.get("instructions")
    if instructions is not None:
        checked(instructions, str, "instructions", expected="a string")
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise wrong_type("input", body.get("input"), expected="a string, or a list with at least one item")
    return SampleRequest(
        conversation=offer.session.prefixes.read(messages, tools),
        mark=TurnMark(name=transcript.last_name),
        num_instructions=int(instructions is not None),
        sampling=sampling,
        must_call=read_tool_choice(body.get("tool_choice"), tools),
        one_call=not read_flag(body, "parallel_tool_calls", default=True),
        wants_logprobs=LOGPROBS in include,
        stream=read_flag(body, "stream"),
        echo={"previous_response_id": previous, "include": include},
    )


def _continue(transcript: Transcript, previous: Any, offer: Offer) -> None:
    checked(previous, str, "previous_response_id", expected="the id of a response")
    answer = offer.session.answer_named(previous.removeprefix(RESPONSE_ID))
    if answer is None:
        raise ApiError(
            f"Previous response with id {quoted(previous)} not found: this session has no such answer; send the whole "
            "conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    transcript.continue_after(answer)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    tools = [] if value is None else checked(value, list, "tools", expected="a list of tools")
    refuse_many(tools, MAX_TOOLS, "tools")
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    checked(tool, dict, where, expected='{"type": "function", "name": ..., "parameters": {...}}')
    if tool.get("type") != "function":
        raise not_supported(
            f"{where}.type", why=f"found {quoted(tool.get('type'))}, expected 'function': the gateway runs no tools"
        )
    return function_tool(tool, where, schema="parameters")


def _include(value: Any) -> Sequence[str]:
    include = [] if value is None else checked(value, list, "include", expected="a list of strings")
    for name in include:
        if name not in (LOGPROBS, ENCRYPTED):
            raise not_supported("include", why=f"found {quoted(name)}, expected {LOGPROBS} or {ENCRYPTED}")
    return tuple(include)


def _check_text(value: Any) -> None:
    text = {} if value is None else checked(value, dict, "text", expected="an object")
    for name, neutral in (("format", {"type": "text"}), ("verbosity", "medium")):
        if text.get(name) not in (None, neutral):
            raise not_supported(
                f"text.{name}", why=f"training needs unmodified samples; leave it out, or send {json.dumps(neutral)}"
            )


def _check_reasoning(value: Any) -> None:
    reasoning = {} if value is None else checked(value, dict, "reasoning", expected="an object")
    if reasoning.get("effort") is not None:
        read_text(reasoning, "effort", "reasoning")
        raise not_supported(
            "reasoning.effort", why="the model reasons as its chat template says, with one effort; leave it out"
        )
