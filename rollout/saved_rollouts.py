"""Rollouts as JSON lines, with all token evidence, for inspection, diagnosis and replay.

A call whose prompt begins as an earlier call of the rollout has `extends`, that call's index and the number of ids that
it takes from its prompt and sampled ids, and `own_prompt_ids`, the rest. Other calls have `prompt_ids`, the whole
prompt, as all calls in files of earlier versions.

Routes (`correction.routing_replay=engine`) are compressed, and shared between calls as prompts are: about (experts per
token x layers) bytes per token, of which a trained router's take less.

Images are named by their digests, in messages and calls alike; their pixels are in the store of the run
(`rollout/media/store.py`).
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import (
    Cause,
    EngineCall,
    FinishReason,
    ImageSpan,
    Prompt,
    Rollout,
    RolloutStatus,
    Routes,
    SamplingSupport,
    VersionSpan,
    token_ids,
)
from lockstep.rollout.rollout_lines import PLAIN_FIELDS
from lockstep.rollout.rollout_lines import to_json as to_json
from lockstep.rollout.rollout_lines import write_rollouts as write_rollouts
from lockstep.rollout.system.plain_files import plain_lines

KINDS: dict[str, Any] = {
    **dict.fromkeys(("rollout_id", "group_id"), int),
    **dict.fromkeys(("reward", "duration_s"), int | float),
    **dict.fromkeys(("rewards", "outcome", "example"), dict),
    **dict.fromkeys(("messages", "calls"), list),
    "error": str | None,
}
"""Types of the fields."""
UPDATE_FILE = re.compile(r"step-([0-9]{1,18})(-untrained-[0-9]+)?\.jsonl")
"""Name of a run's file of rollouts, with its update."""


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Yield the rollouts of a file. Raises `DataError` for a file that cannot be read, and with the line
    number for a line that is not a rollout."""
    number = 1
    try:
        for line in plain_lines(path):
            yield from_json(json.loads(line))
            number += 1
    except OSError as error:
        raise DataError(f"{path} is not a file of saved rollouts: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}:{number} is not a saved rollout: {error}") from error


def check_ids(rollouts: Iterable[Rollout], *, vocab_size: int) -> None:
    """Raise `DataError` for token ids that the model has no embedding of. vocab_size: rows of its embedding."""
    for rollout in rollouts:
        for call in rollout.calls:
            largest = max((*call.prompt.own_ids, *call.sampled_ids), default=-1)
            if largest >= vocab_size:
                raise DataError(
                    f"rollout {rollout.rollout_id} has the token id {largest}, but the model has {vocab_size} ids; set "
                    "model.path to the model that sampled it"
                )


def read_newest_rollouts(directory: Path) -> tuple[Path | None, list[Rollout], list[str]]:
    """Return the newest readable file of a run, its rollouts, and one sentence per skipped file.

    The path is None if no file can be read. Damage comes from failed disks and from versions that wrote non-atomically.
    """
    problems = []
    for path in sorted(directory.glob("step-*.jsonl"), reverse=True):
        if not UPDATE_FILE.fullmatch(path.name):
            problems.append(f"{path} is not a name that a run gives")
            continue
        try:
            if rollouts := list(read_rollouts(path)):
                return path, rollouts, problems
            problems.append(f"{path} is empty")
        except DataError as error:
            problems.append(str(error))
    return None, [], problems


def from_json(data: Mapping[str, Any]) -> Rollout:
    """Return the rollout. Raises ValueError, KeyError or TypeError for other content; later stages rely on types."""
    for name, kinds in KINDS.items():
        if not isinstance(data[name], kinds) or isinstance(data[name], bool):
            raise TypeError(f"{name} is {data[name]!r:.80}")
    if not all(-(2**63) <= data[name] < 2**63 for name in ("rollout_id", "group_id")):
        raise ValueError(f"rollout_id {data['rollout_id']} or group_id {data['group_id']} are not 64-bit integers")
    turn_rewards = data.get("turn_rewards", [])
    if len(turn_rewards) not in (0, len(data["calls"])):
        raise ValueError(f"{len(turn_rewards)} turn_rewards for {len(data['calls'])} calls")
    places, log_columns = data.get("call_messages"), data.get("logged", {})
    known_places = token_ids("call_messages", [place for place in places or () if place is not None])
    is_unclear = len(set(known_places)) < len(known_places) or max(known_places, default=-1) >= len(data["messages"])
    if is_unclear or (places is not None and len(places) != len(data["calls"])):
        raise ValueError(f"call_messages are {places!r:.80} for {len(data['calls'])} calls")
    if not isinstance(log_columns, dict) or not all(isinstance(columns, dict) for columns in log_columns.values()):
        raise TypeError(f"logged is {log_columns!r:.80}")
    for value in (data["reward"], data["duration_s"], *data["rewards"].values(), *turn_rewards):
        if isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{value!r:.80} is not a finite number")
    for message in data["messages"]:
        _check_message(message)
    return Rollout(
        **{name: data[name] for name in PLAIN_FIELDS}
        | {
            "status": RolloutStatus(data["status"]),
            "messages": tuple(data["messages"]),
            "calls": _calls_from_json(data["calls"]),
            "turn_rewards": tuple(turn_rewards),
            "cause": Cause(data["cause"]) if "cause" in data else None,
            "call_messages": None if places is None else tuple(places),
            "logged": log_columns,
        }
    )


def _check_message(message: Mapping[str, Any]) -> None:
    """Raise TypeError or KeyError for a message that cannot be shown."""
    parts = message.get("content") or ""
    is_text = isinstance(parts, str) or (isinstance(parts, list) and all(isinstance(part, dict) for part in parts))
    if not isinstance(message["role"], str) or not is_text:
        raise TypeError(f"a message is {message!r:.80}")
    for call in message.get("tool_calls") or ():
        if not {"name", "arguments"} <= call["function"].keys():
            raise KeyError("a tool call without name or arguments")
    if not isinstance(message.get("tool_call_errors"), list | None):
        raise TypeError("tool_call_errors is not a list")


def _calls_from_json(data: list[dict[str, Any]]) -> tuple[EngineCall, ...]:
    calls: list[EngineCall] = []
    for one in data:
        if "extends" in one:
            index, num_shared = token_ids("extended", one["extends"])
            base = calls[index]  # IndexError: the call is not an earlier one
            prompt = Prompt(own_ids=tuple(one["own_prompt_ids"]), base=base, num_shared=num_shared)
        else:
            prompt = Prompt(own_ids=tuple(one["prompt_ids"]))
        calls.append(_call_from_json(one, prompt))
    return tuple(calls)


def _routes_from_json(data: Mapping[str, Any], base: EngineCall | None) -> Routes:
    """Return the routes. Raises ValueError, KeyError or TypeError for other content."""
    shape = tuple(token_ids("routes shape", data["shape"]))
    dtype = np.dtype(data["dtype"])
    num_bytes = math.prod(shape) * dtype.itemsize
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(base64.b64decode(data["data"], validate=True), num_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"routes cannot be decompressed: {error}") from error
    if len(raw) != num_bytes:
        raise ValueError(f"routes of shape {shape} have {len(raw)} bytes, expected {num_bytes}")
    own = np.frombuffer(raw, dtype=dtype).reshape(shape)
    (num_shared,) = token_ids("routes", [data["shared"]])
    return Routes(own=own, base=base.routes if base is not None and num_shared else None, num_shared=num_shared)


def _call_from_json(data: dict[str, Any], prompt: Prompt) -> EngineCall:
    support, routes = data.get("support"), data.get("routes")
    return EngineCall(
        prompt=prompt,
        sampled_ids=tuple(data["sampled_ids"]),
        sampled_logprobs=tuple(data["sampled_logprobs"]),
        finish_reason=FinishReason(data["finish_reason"]),
        version_spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in data["version_spans"]),
        support=None
        if support is None
        else SamplingSupport(
            offsets=np.asarray(token_ids("support offset", support["offsets"])),
            token_ids=np.asarray(token_ids("support", support["token_ids"])).astype(np.int32),
        ),
        routes=None if routes is None else _routes_from_json(routes, prompt.base),
        images=tuple(ImageSpan(start=start, end=end, digest=digest) for start, end, digest in data.get("images", ())),
    )
