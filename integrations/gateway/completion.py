"""Sampling and recording of the answers to one request, the same for all dialects."""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.integrations.gateway.errors import ApiError, server_error
from lockstep.integrations.gateway.prompt_maker import PromptMaker
from lockstep.integrations.gateway.request import SampleRequest
from lockstep.integrations.gateway.session import CONTEXT_FULL, Answer, Session
from lockstep.integrations.gateway.splice import Prompt
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Engine
from lockstep.rollout.episode.conversation import request_seed
from lockstep.rollout.errors import EngineError, EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, Message, SamplingSupport

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answered request."""

    request: SampleRequest
    prompt: Prompt
    choices: tuple[Answer, ...]


async def complete(
    engine: Engine, chat: Chat, prompts: PromptMaker, session: Session, request: SampleRequest
) -> Completion:
    """Sample the answers to a request and record them. Raises `TemplateError` if the chat template refuses them.

    Raises `ApiError` if the conversation does not fit the model, the session is at its limit, a weight update cut off
    the sample, or the engine failed (recorded as the session's failure). If it raises or is canceled, the request does
    not count.
    """
    try:
        prompt, conversation = await prompts.prompt(session, request)
    except ApiError as error:
        session.refusal = error.code
        raise
    room = engine.max_model_len - len(prompt.ids)
    if room < 1:
        raise session.refused(
            f"This model's maximum context length is {engine.max_model_len} tokens, but the messages are "
            f"{len(prompt.ids)} tokens; at least one must be left for the answer",
            code=CONTEXT_FULL,
        )
    number = session.begin_request()
    try:
        calls = await _sample(engine, session, request, prompt, number, room)
    except BaseException:
        session.give_back(number)
        raise
    read = [_read(chat, call, request) for call in calls]
    choices = tuple(
        Answer(
            call=call,
            conversation=conversation.then(message),
            order=(number, index),
            num_instructions=request.num_instructions,
            must_call=request.must_call,
            stop=stop,
        )
        for index, (call, message, stop) in enumerate(read)
    )
    session.record(choices, prompt.kind)
    return Completion(request=request, prompt=prompt, choices=choices)


async def _sample(
    engine: Engine, session: Session, request: SampleRequest, prompt: Prompt, number: int, room: int
) -> Sequence[EngineCall]:
    sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
    seeds = [_seed(session, request, number, choice) for choice in range(request.num_choices)]
    samples = (engine.generate(prompt.ids, replace(sampling, seed=seed), prompt.images) for seed in seeds)
    try:
        calls = await asyncio.gather(*samples)
    except (EngineError, EvidenceError) as failure:
        if session.failure is None:
            log.error("gateway: the engine failed: %s", failure)
        session.failed(failure)
        # Its text names files and is followed by the engine's log, which clients must not see.
        raise server_error(
            f"the engine failed ({type(failure).__name__}); the server's log has the details"
        ) from failure
    if any(call.finish_reason is FinishReason.ABORT for call in calls):
        raise server_error("the answer was cut off by an update of the weights; send the request again", status=503)
    return calls


def _seed(session: Session, request: SampleRequest, number: int, choice: int) -> int | None:
    if session.seed is not None:
        return request_seed(session.seed, number, choice)
    return None if request.seed is None else request_seed(request.seed, choice)


def _read(chat: Chat, call: EngineCall, request: SampleRequest) -> tuple[EngineCall, Message, str | None]:
    """Return the call up to the first stop string or the end of the only tool call, its message and the stop string."""
    tools = request.conversation.tools
    call, stop = cut_at_stop(call, request.stop_strings, chat.decode)
    if request.given is not None:
        return call, {"role": "assistant", "content": _text(chat, call, stop)}, stop
    message = dict(chat.parse(call.sampled_ids, tools, prompt_ids=call.prompt_ids))
    if request.one_call and len(message.get("tool_calls", ())) > 1:
        call, stop = _first_tokens(call, _length_at(call, lambda ids: chat.has_called(ids, tools))), None
        message = dict(chat.parse(call.sampled_ids, tools, prompt_ids=call.prompt_ids))
    elif stop is not None:
        _hide_stop(message, stop)
    return call, message, stop


def _text(chat: Chat, call: EngineCall, stop: str | None) -> str:
    """Return the text of a call, without the token or the string that ended it."""
    ids = call.sampled_ids
    text = chat.decode(ids[:-1] if ids and ids[-1] in chat.stop_token_ids else ids)
    return text if stop is None else text.partition(stop)[0]


def cut_at_stop(call: EngineCall, stops: Sequence[str], decode: Decode) -> tuple[EngineCall, str | None]:
    """End a call with the token that completes the first stop string; return both, or the unchanged call and None.

    Exact, although the engine sampled further: the end depends only on the tokens before it, so the kept tokens have
    the distribution and the logprobs of a call that stopped there.
    """
    text = decode(call.sampled_ids)
    matches = [stop for stop in stops if stop in text]
    if not matches:
        return call, None
    ends = {stop: _length_at(call, lambda ids, stop=stop: stop in decode(ids)) for stop in matches}
    first = min(matches, key=lambda stop: (ends[stop], text.index(stop)))
    return _first_tokens(call, ends[first]), first


def _length_at(call: EngineCall, holds: Callable[[Sequence[int]], bool]) -> int:
    """Return the least number of sampled tokens for which a condition holds, which stays true once it is."""
    lengths = range(len(call.sampled_ids) + 1)
    return bisect.bisect_left(lengths, True, key=lambda length: holds(call.sampled_ids[:length]))


def _first_tokens(call: EngineCall, length: int) -> EngineCall:
    support = call.support
    if support is not None:
        offsets = support.offsets[: length + 1]
        support = SamplingSupport(offsets=np.array(offsets), token_ids=support.token_ids[: offsets[-1]])
    return replace(
        call,
        sampled_ids=call.sampled_ids[:length],
        sampled_logprobs=call.sampled_logprobs[:length],
        finish_reason=FinishReason.STOP,
        version_spans=tuple(
            replace(span, end=min(span.end, length)) for span in call.version_spans if span.start < length
        ),
        support=support,
        routes=None if call.routes is None else call.routes.first(len(call.prompt) + length - 1),
    )


def _hide_stop(message: dict[str, Any], stop: str) -> None:
    """Remove the stop string and the text after it, as the OpenAI API does."""
    for field in ("content", "reasoning_content"):
        if stop in message.get(field, ""):
            message[field] = message[field].partition(stop)[0]
            return
