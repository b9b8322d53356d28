"""Contract of environments: what their methods may return, checked where it leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import numpy as np

from lockstep.rollout.episode.environment import Step
from lockstep.rollout.records import is_image_part
from lockstep.rollout.replies import MAX_DEPTH, depth_of, read_number

MAX_FACTS = 1000
"""Facts of one episode. Each number among them is a metric."""


def opening_problem(value: Any) -> str:
    """Return what is wrong with the first messages of an episode; "" if nothing is."""
    if problem := _messages_problem(value):
        return problem
    if not value:
        return "returned no messages; expected at least one that the model can answer"
    return "returned messages that end with the assistant's" if value[-1]["role"] == "assistant" else ""


def tools_problem(value: Any) -> str:
    """Return what is wrong with the tools; "" if nothing is."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return f"holds {_type(value)}; expected a list of tools in the OpenAI form"
    for tool in value:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or depth_of(tool) > MAX_DEPTH:
            return f"holds {tool!r:.80}; expected the OpenAI form, with a name, at most {MAX_DEPTH} levels deep"
    return ""


def step_problem(value: Any) -> str:
    """Return what is wrong with the answer to an assistant turn; "" if nothing is."""
    if not isinstance(value, Step):
        return f"returned {_type(value)}; expected rollout.episode.environment.Step"
    if problem := _messages_problem(value.messages):
        return problem
    if not isinstance(value.done, bool):
        return f"returned done={value.done!r:.80}; expected True or False"
    if not value.done and not value.messages:
        return "returned neither messages nor done=True, so the model would answer its own turn"
    return outcome_problem(value.outcome)


def outcome_problem(value: Any) -> str:
    """Return what is wrong with facts for rewards; "" if nothing is."""
    try:
        read_facts(value)
    except ValueError as error:
        return f"returned {error}"
    return ""


def read_facts(value: Any) -> dict[str, Any]:
    """Return facts as JSON values, with numbers and arrays of other libraries as Python's. Raises `ValueError`."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"an outcome of type {_type(value)}; expected a mapping with texts as keys")
    if len(value) > MAX_FACTS:
        raise ValueError(f"an outcome of {len(value)} facts; expected at most {MAX_FACTS}")
    facts = {}
    for name, fact in value.items():
        try:
            facts[name] = _plain(fact)
        except ValueError as error:
            raise ValueError(f"the outcome {name!r:.80}: {error}") from None
    return facts


def _plain(value: Any, depth: int = 1) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, SupportsFloat):
        number = read_number(value)
        return value if isinstance(value, int | float) else number
    if depth < MAX_DEPTH and isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if depth < MAX_DEPTH and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    raise ValueError(f"found {_type(value)}, expected texts, numbers, true, false, None, lists and mappings of these")


def _messages_problem(value: Any) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return f"returned {_type(value)}; expected a list of messages"
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"returned the message {message!r:.80}; expected a mapping with a role (system, user, tool, ...)"
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        if not isinstance(content, str | list | None) or not all(isinstance(part, dict) for part in parts):
            return f"returned a message with the content {content!r:.80}; expected a text, or a list of mappings"
        texts = [part for part in parts if not is_image_part(part)]  # images are read by the chat
        if not _is_json({**message, "content": texts if isinstance(content, list) else content}):
            return f"returned the message {dict(message)!r:.200}; expected texts, numbers, lists and mappings in it"
    return ""


def _is_json(value: Any, depth: int = 1) -> bool:
    """Return True for values that a file of rollouts holds; rows may have numbers that are not finite."""
    if value is None or type(value) in (str, bool, int, float):
        return True
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, list | tuple):
        return all(_is_json(item, depth + 1) for item in value)
    return isinstance(value, dict) and all(
        isinstance(key, str) and _is_json(item, depth + 1) for key, item in value.items()
    )


def _type(value: Any) -> str:
    return "None" if value is None else type(value).__name__
