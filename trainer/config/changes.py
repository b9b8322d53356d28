"""Which settings a run was changed in when it was resumed, and what a checkpoint's hash of them covers.

Settings are nested mappings, as `config.yaml` holds them. Those that cannot change what is trained are left out: names
and places, how often something is logged, saved or evaluated, and limits on time.
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
"""Settings, or groups of them, that training does not depend on; for `updates` see `changes`."""


def settings_hash(settings: Mapping[str, Any]) -> str:
    """SHA-256 of everything that training depends on."""
    return hashlib.sha256(json.dumps(flat(settings), sort_keys=True, default=str).encode()).hexdigest()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Setting -> (value in the checkpoint, value now), of those that training depends on.

    `updates` is one of them where the learning rate ends with it. A setting that only one of the two has is of another
    version of Lockstep, and no change of the user's.
    """
    old, new = flat(before), flat(after)
    if new.get("optimizer.schedule") != "constant":
        old["updates"], new["updates"] = before.get("updates"), after.get("updates")
    return {name: (old[name], new[name]) for name in sorted(old.keys() & new.keys()) if old[name] != new[name]}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Setting with dots -> value, of those that training depends on."""
    return {name: value for name, value in _leaves(settings) if not _is_harmless(name)}


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_harmless(name: str) -> bool:
    return any(name == harmless or name.startswith(f"{harmless}.") for harmless in HARMLESS)
