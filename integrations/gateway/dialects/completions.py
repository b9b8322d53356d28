"""Completions of a prompt that the client makes itself, as text or as token ids, for harnesses that keep token ids.

The prompt is taken as it is: the chat template is not used, and ids may be control tokens. Its ids are context and
never trained, and a prompt that begins with the prompt and the sampled ids of an earlier call continues its row. Text
becomes no control tokens, as everywhere.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.integrations.gateway.dialects.chat_completions import MAX_CHOICES, STREAM_END, chat_usage, reply_head
from lockstep.integrations.gateway.dialects.dialect import (
    Dialect,
    Reply,
    data_event,
    evidence,
    is_cut,
    openai_error,
    token_texts,
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
)
from lockstep.integrations.gateway.errors import ApiError, checked, not_supported, wrong_type
from lockstep.integrations.gateway.prefix_chain import Prefix
from lockstep.integrations.gateway.request import Offer, SampleRequest
from lockstep.integrations.gateway.session import CONTEXT_FULL, Answer, TurnMark

FIELDS = FieldTable(
    read=frozenset({"model", "prompt", "n", "stream", "stream_options", "stop", "stop_token_ids", "max_tokens"})
    | {"seed", "logprobs", *DISTRIBUTION},
    ignored=frozenset({"user", "return_token_ids"}),
    neutral={
        "best_of": 1,
        "echo": False,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "min_tokens": 0,
        "ignore_eos": False,
        "add_special_tokens": False,
    },
    refused={"suffix": "the model continues a prompt, it does not fill gaps"},
)


def read_completion_request(body: Mapping[str, Any], offer: Offer) -> SampleRequest:
    """Check a request. Raises `ApiError` (400) with the field and the expected value."""
    FIELDS.check(body)
    sampling = read_sampling(
        body, offer.sampling, limits=("max_tokens",), stop_ids=read_stop_ids(body, offer.vocab_size)
    )
    if read_integer(body, "logprobs", default=0, low=0, high=5) > 1:
        raise not_supported("logprobs", why="only sampled tokens have logprobs; send 0 or 1, which return these")
    options = {} if body.get("stream_options") is None else body["stream_options"]
    checked(options, dict, "stream_options", expected="an object")
    return SampleRequest(
        conversation=Prefix.root(),
        given=_prompt(body.get("prompt"), offer),
        mark=TurnMark(),
        sampling=sampling,
        num_choices=read_integer(body, "n", default=1, low=1, high=MAX_CHOICES),
        stop_strings=read_stop_strings(body, "stop"),
        seed=read_seed(body),
        wants_logprobs=body.get("logprobs") is not None,
        stream=read_flag(body, "stream"),
        wants_usage=read_flag(options, "include_usage"),
    )


def _prompt(value: Any, offer: Offer) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        raise not_supported("prompt", why=f"found a list of {len(value)} prompts; send one request for each")
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise wrong_type("prompt", value, expected="a text or a list of token ids, not empty")
    if len(value) >= offer.max_model_len:  # before millions of ids are looked at
        raise offer.session.refused(
            f"This model's maximum context length is {offer.max_model_len} tokens, but the prompt has {len(value)}; at "
            "least one must be left for the answer",
            code=CONTEXT_FULL,
        )
    if not all(type(token) is int and 0 <= token < offer.vocab_size for token in value):
        raise ApiError(
            f"prompt: expected token ids from 0 to {offer.vocab_size - 1}", param="prompt", code="invalid_type"
        )
    return tuple(value)


def text_body(reply: Reply) -> dict[str, Any]:
    """Return a `text_completion`."""
    choices = [_choice(reply, index, choice) for index, choice in enumerate(reply.completion.choices)]
    return {
        **reply_head(reply, "text_completion", prefix="cmpl"),
        "choices": choices,
        "prompt_token_ids": reply.completion.prompt.ids,
        "usage": chat_usage(reply),
    }


def text_events(reply: Reply) -> Iterator[bytes]:
    """Yield one chunk for each choice, with its text, ids and end."""
    usage = {"usage": None} if reply.request.wants_usage else {}
    head = {**reply_head(reply, "text_completion", prefix="cmpl"), **usage}
    prompt = {"prompt_token_ids": reply.completion.prompt.ids}  # once, with the first chunk
    for index, choice in enumerate(reply.completion.choices):
        yield data_event({**head, **prompt, "choices": [_choice(reply, index, choice)]})
        prompt = {}
    if reply.request.wants_usage:
        yield data_event({**head, "choices": [], "usage": chat_usage(reply)})
    yield STREAM_END


def _choice(reply: Reply, index: int, choice: Answer) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.message["content"],
        "finish_reason": "length" if is_cut(choice) else "stop",
        "logprobs": _logprobs(reply, choice) if reply.request.wants_logprobs else None,
        **evidence(choice),
    }


def _logprobs(reply: Reply, choice: Answer) -> dict[str, Any]:
    texts = token_texts(choice, reply.decode)
    return {
        "tokens": texts,
        "token_logprobs": choice.call.sampled_logprobs,
        "top_logprobs": None,
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }


COMPLETIONS = Dialect(
    path="/completions",
    read=read_completion_request,
    body=text_body,
    events=text_events,
    error=functools.partial(openai_error, messages="prompt"),
)
