"""Settings that training depends on: their changes on resume, and their hash in a checkpoint.

Settings are nested mappings, as in `config.yaml`. Training does not depend on names, paths, time limits, servers, and
intervals of logs, checkpoints and evaluations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.trainer.config.schema import Config
from lockstep.trainer.setting import free_form

HARMLESS = (
    *("resume", "resume_with_changes", "run_name", "run_root", "max_hours", "step_timeout_s", "on_step_timeout"),
    *("logger", "checkpoint", "eval", "gateway", "data.heldout_path", "data.heldout_split", "algorithm.name"),
    *("updates", "dry_run", "profile", "profile_steps", "correction.on_disagreement"),
    *("rollout.urls", "rollout.drivers", "rollout.api_key_env", "rollout.silence_timeout_s", "rollout.pool_timeout_s"),
    *("rollout.request_timeout_s", "rollout.start_timeout_s", "sync.timeout_s", "sync.address"),
)
"""Settings and groups that training does not depend on; for `updates` see `changes`."""
TASK = (
    *("model", "data", "environment", "reward.functions", "reward.weights", "reward.settings"),
    *("algorithm.loss", "algorithm.advantage", "algorithm.trains_on", "teacher.source", "teacher.path"),
    *(f"demonstrations.{name}" for name in ("path", "subset", "split", "columns", "teacher_divergence")),
)
"""Settings and groups that say what is learned; a rate, a length or a limit does not."""
SAME_TASK = (
    *("model.dtype", "model.attn_implementation", "model.gradient_checkpointing", "model.compile"),
    *("model.trust_remote_code", "model.lora.send", "model.adapters", "environment.call_timeout_s"),
)
"""Settings of TASK that say how it is computed."""


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the settings that training depends on."""
    return hashlib.sha256(json.dumps(flat(settings), sort_keys=True, default=str).encode()).hexdigest()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return setting -> (value in the checkpoint, value now) for changed settings that training depends on.

    `updates` counts if the learning rate schedule depends on it. A setting on one side only belongs to another version
    of Lockstep and is not a change, except for keys that the user chooses; where these are missing, they are null.
    """
    old, new = flat(before), flat(after)
    for name in old.keys() ^ new.keys():
        if name.startswith(tuple(f"{setting}." for setting in free_form(Config()))):
            old.setdefault(name, None)
            new.setdefault(name, None)
    if new.get("optimizer.schedule") != "constant":
        old["updates"], new["updates"] = before.get("updates"), after.get("updates")
    return {name: (old[name], new[name]) for name in sorted(old.keys() & new.keys()) if old[name] != new[name]}


def changed_task(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the `changes` after which something else is learned; another address of the same service is none."""
    return {
        name: (old, new)
        for name, (old, new) in changes(before, after).items()
        if _is_among(name, TASK) and not _is_among(name, SAME_TASK) and not ("://" in str(old) and "://" in str(new))
    }


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted name -> value for settings that training depends on."""
    return {name: value for name, value in leaves(settings) if not _is_among(name, HARMLESS)}


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of everything in nested mappings that is not a mapping."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_among(name: str, settings: tuple[str, ...]) -> bool:
    return any(name == setting or name.startswith(f"{setting}.") for setting in settings)
