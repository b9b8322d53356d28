"""OpenAI's Responses API: requests, and replies, whole or as a stream of events.

The reply has the fields of chat completions that carry token evidence: `prompt_kind`, `prompt_token_ids`,
`generation_token_ids` and `generation_log_probs`. Items do not repeat them; their ids name the answer.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.integrations.gateway.dialects.dialect import (
    Dialect,
    Reply,
    evidence,
    is_cut,
    named_event,
    openai_error,
    token_logprobs,
)
from lockstep.integrations.gateway.dialects.fields import (
    DISTRIBUTION,
    FieldTable,
    read_flag,
    read_function_tools,
    read_integer,
    read_sampling,
    read_tool_choice,
)
from lockstep.integrations.gateway.dialects.responses_items import Transcript, add_input, item_ids
from lockstep.integrations.gateway.errors import ApiError, checked, not_supported, quoted, wrong_type
from lockstep.integrations.gateway.messages import read_text
from lockstep.integrations.gateway.request import Offer, SampleRequest
from lockstep.integrations.gateway.session import TurnMark

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
    tools = read_function_tools(
        body.get("tools"),
        expected='{"type": "function", "name": ..., "parameters": {...}}',
        kinds=("function",),
        schema="parameters",
    )
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


Event = dict[str, Any]


def response_body(reply: Reply) -> dict[str, Any]:
    """Return a `response`."""
    return {
        **_open_response(reply),
        "status": _status(reply),
        "completed_at": int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut(reply.first) else None,
        "output": _items(reply),
        "usage": {
            "input_tokens": reply.num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt + reply.num_sampled,
        },
        "prompt_token_ids": reply.completion.prompt.ids,
        **evidence(reply.first),
    }


def response_events(reply: Reply) -> Iterator[bytes]:
    """Yield the response as server-sent events, numbered in their order."""
    for number, event in enumerate(_events(reply)):
        yield named_event({**event, "sequence_number": number})


def _events(reply: Reply) -> Iterator[Event]:
    yield {"type": "response.created", "response": _open_response(reply)}
    yield {"type": "response.in_progress", "response": _open_response(reply)}
    whole = response_body(reply)
    for index, item in enumerate(whole["output"]):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        place = {"output_index": index}
        yield {"type": "response.output_item.added", **place, "item": {**item, **empty, "status": "in_progress"}}
        yield from _deltas(item, {**place, "item_id": item["id"]})
        yield {"type": "response.output_item.done", **place, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _deltas(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[Event]:
    if item["type"] == "function_call":
        name, arguments = item["name"], item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        return
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    logprobs = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
    yield {"type": f"response.{part['type']}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"response.{part['type']}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


def _open_response(reply: Reply) -> dict[str, Any]:
    """Return the response before anything is sampled: what the request asked for."""
    request = reply.request
    messages = request.conversation.messages
    return {
        "id": f"{RESPONSE_ID}{reply.first.name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": messages[0]["content"] if request.num_instructions else None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": {},
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": not request.one_call,
        "previous_response_id": request.echo["previous_response_id"],
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"], "strict": False} for tool in request.conversation.tools],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "prompt_kind": reply.completion.prompt.kind,
    }


def _status(reply: Reply) -> str:
    return "incomplete" if is_cut(reply.first) else "completed"


def _items(reply: Reply) -> list[dict[str, Any]]:
    """Return the items of the answer: at least one, so that the client can send the turn back."""
    message = reply.first.message
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", ())
    reasoning_id, text_id, call_ids = item_ids(message, reply.first.name)
    items: list[dict[str, Any]] = []
    if reasoning:
        extra = {"encrypted_content": reply.first.name} if ENCRYPTED in reply.request.echo["include"] else {}
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": reasoning_id, "type": "reasoning", "summary": [], "content": content, **extra})
    if message["content"] or not (reasoning or calls):
        logprobs = token_logprobs(reply.first, reply.decode) if reply.request.wants_logprobs else []
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        items.append({"id": text_id, "type": "message", "role": "assistant", "content": [part]})
    for call_id, call in zip(call_ids, calls, strict=True):
        items.append({"id": call_id, "type": "function_call", "call_id": call["id"], **call["function"]})
    # Only the last item can be cut off.
    return [{**item, "status": "completed"} for item in items[:-1]] + [{**items[-1], "status": _status(reply)}]


RESPONSES = Dialect(
    path="/responses",
    read=read_response_request,
    body=response_body,
    events=response_events,
    error=functools.partial(openai_error, messages="input"),
)
