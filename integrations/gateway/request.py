"""The gateway's inner request, which every dialect's request is translated to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.integrations.gateway.errors import ApiError, checked
from lockstep.integrations.gateway.messages import forget_ids
from lockstep.integrations.gateway.prefix_chain import Prefix
from lockstep.integrations.gateway.session import Session, TurnMark
from lockstep.rollout.chat.tool_calls import without_surrogates
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.replies import MAX_DEPTH, depth_of, refuse_constant


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request that can be sampled."""

    conversation: Prefix
    """Messages and tools; without messages if a prompt is given."""
    given: str | tuple[int, ...] | None = None
    """Text or ids of the whole prompt, in place of one that the chat template makes of the conversation."""
    mark: TurnMark
    """Origin of the last assistant message by the client's account, not yet checked against the record."""
    num_instructions: int = 0
    """First messages that belong to this request alone: a request that continues its answer leaves them out."""
    sampling: Sampling
    """Settings of the run. `max_tokens` is the lower one of the run's and the client's, and stop ids may be added."""
    num_choices: int = 1
    must_call: bool = False
    """The client asked for a call of a tool. It is sampled as any answer, with or without a call, and counted."""
    one_call: bool = False
    """End each answer with its first tool call."""
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    wants_logprobs: bool = False
    stream: bool = False
    wants_usage: bool = False
    """Send the usage at the end of a stream of chunks. Other answers always contain it."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the reply repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Limits of what a request may ask for, and the session that it is read for."""

    session: Session
    sampling: Sequence[Sampling]
    """Sampling settings; the first is the default."""
    vocab_size: int
    """Limit of token ids."""
    max_model_len: int
    """Limit of ids of a prompt."""


def read_json(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request, without the token evidence that is not read (`forget_ids`).

    Lone surrogates, which no tokenizer can encode, become U+FFFD.

    Raises `ApiError`: 400; not JSON, not an object, or nested too deeply.
    """
    try:
        text = raw.decode()
        body = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body of the request is not valid JSON: {error}") from None
    checked(body, dict, "body", expected="a JSON object")
    forget_ids(body.get("messages"))
    if depth_of(body) > MAX_DEPTH:
        raise ApiError(f"the body of the request is nested more than {MAX_DEPTH} levels deep")
    if "\\u" not in text:  # only escapes can spell lone surrogates
        return body
    text = json.dumps(body, ensure_ascii=False)
    clean = without_surrogates(text)
    return body if clean == text else json.loads(clean)
