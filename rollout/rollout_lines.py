"""Rollouts as they are written: one JSON line each (`rollout/saved_rollouts.py` has the format, and reads them)."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.rollout.episode.prepared_calls import PreparedCalls
from lockstep.rollout.records import EngineCall, Rollout, Routes

PLAIN_FIELDS = ("rollout_id", "group_id", "status", "reward", "rewards", "outcome", "error", "duration_s", "example")
"""Fields of a rollout that JSON holds as they are."""


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write the file atomically: under a temporary name first, so a reader never finds half of it.

    Raises OSError on failure; an older file is kept.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w") as file:
            for rollout in rollouts:
                file.write(rollout_line(rollout) + "\n")
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash of the machine may keep the name without the content
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def as_text(value: Any) -> str:
    """Return what JSON has no form for as text; of bytes, such as an image of a data row, their number."""
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def to_json(rollout: Rollout, *, shares_prompts: bool = False) -> dict[str, Any]:
    """Return a rollout as JSON. shares_prompts: write the beginning of a prompt that an earlier call has only there."""
    return _values(rollout, calls=_calls_to_json(rollout.calls, shares_prompts=shares_prompts))


def _values(rollout: Rollout, calls: Any) -> dict[str, Any]:
    data = {name: getattr(rollout, name) for name in PLAIN_FIELDS} | {
        "messages": [dict(message) for message in rollout.messages],
        "calls": calls,
    }
    if rollout.call_messages is not None:
        data["call_messages"] = list(rollout.call_messages)
    if rollout.logged:
        data["logged"] = {name: dict(columns) for name, columns in rollout.logged.items()}
    optional = {"turn_rewards": list(rollout.turn_rewards), "cause": rollout.cause}
    return data | {name: value for name, value in optional.items() if value}


def _calls_to_json(calls: Sequence[EngineCall], *, shares_prompts: bool) -> list[dict[str, Any]]:
    indices: dict[int, int] = {}
    values = []
    for call in calls:
        base = indices.get(id(call.prompt.base)) if shares_prompts else None
        values.append(_call_to_json(call, base=base))
        indices[id(call)] = len(indices)
    return values


def calls_as_json(calls: Sequence[EngineCall]) -> str:
    """Return the calls of a rollout as they are in a line of `write_rollouts`."""
    return json.dumps(_calls_to_json(calls, shares_prompts=True), default=as_text)


def rollout_line(rollout: Rollout) -> str:
    """Return a rollout as one line, with the JSON of its calls if they have it, which takes most of the time."""
    if not isinstance(rollout.calls, PreparedCalls) or rollout.calls.as_json is None:
        return json.dumps(to_json(rollout, shares_prompts=True), default=as_text)
    values = list(_values(rollout, calls=None).items())
    place = [name for name, _ in values].index("calls")
    before, after = (json.dumps(dict(part), default=as_text) for part in (values[:place], values[place + 1 :]))
    return f'{before[:-1]}, "calls": {rollout.calls.as_json}{", " if len(after) > 2 else ""}{after[1:]}'


def _call_to_json(call: EngineCall, *, base: int | None = None) -> dict[str, Any]:
    """Return a call as JSON. base: index of the call that its prompt builds on; None writes the whole prompt."""
    if base is None:
        data: dict[str, Any] = {"prompt_ids": call.prompt_ids}
    else:
        data = {"extends": (base, call.prompt.num_shared), "own_prompt_ids": call.prompt.own_ids}
    data |= {
        "sampled_ids": call.sampled_ids,
        "sampled_logprobs": call.sampled_logprobs,
        "finish_reason": call.finish_reason.value,
        "version_spans": [span.values for span in call.version_spans],
    }
    if call.support is not None:
        data["support"] = {"offsets": call.support.offsets.tolist(), "token_ids": call.support.token_ids.tolist()}
    if call.routes is not None:
        data["routes"] = _routes_to_json(call.routes, is_shared=base is not None)
    if call.images:
        data["images"] = [(image.start, image.end, image.digest) for image in call.images]
    return data


def _routes_to_json(routes: Routes, *, is_shared: bool) -> dict[str, Any]:
    own = routes.own if is_shared else routes.whole
    return {
        "shared": routes.num_shared if is_shared else 0,
        "shape": own.shape,
        "dtype": str(own.dtype),
        "data": base64.b64encode(zlib.compress(own.tobytes())).decode(),
    }
