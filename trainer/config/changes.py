"""Settings that training depends on: their changes on resume, and their hash in a checkpoint.

Settings are nested mappings, as in `config.yaml`. Training does not depend on names, paths, time limits, and intervals
of logs, checkpoints and evaluations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

HARMLESS = (
    *("resume", "run_name", "run_root", "max_hours", "step_timeout_s", "on_step_timeout", "logger", "checkpoint"),
    *("eval", "gateway", "data.heldout_path", "data.heldout_split", "algorithm.name", "updates"),
    *("dry_run", "profile", "profile_steps"),
)
"""Settings and groups that training does not depend on; for `updates` see `changes`."""


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the settings that training depends on."""
    return hashlib.sha256(json.dumps(flat(settings), sort_keys=True, default=str).encode()).hexdigest()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return setting -> (value in the checkpoint, value now) for changed settings that training depends on.

    `updates` counts if the learning rate schedule depends on it. A setting on one side only belongs to another version
    of Lockstep and is not a change.
    """
    old, new = flat(before), flat(after)
    if new.get("optimizer.schedule") != "constant":
        old["updates"], new["updates"] = before.get("updates"), after.get("updates")
    return {name: (old[name], new[name]) for name in sorted(old.keys() & new.keys()) if old[name] != new[name]}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted name -> value for settings that training depends on."""
    return {name: value for name, value in _leaves(settings) if not _is_harmless(name)}


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_harmless(name: str) -> bool:
    return any(name == harmless or name.startswith(f"{harmless}.") for harmless in HARMLESS)
