"""Commands to continue, evaluate and inspect a finished run, with the settings of its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.trainer.config.redaction import REDACTED, override_value, redact_words
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain, settings
from lockstep.trainer.observe.trackers.view import lockstep, short_path

SAMPLED_AND_SCORED = re.compile(r"(experiment|model|data|environment|reward|rollout|eval)[=.]")
"""Settings on which an evaluation depends."""
TRAINING_ONLY = (
    *("model.path=", "model.lora.", "model.critic", "model.reference_path=", "model.gradient_checkpointing="),
    "eval.every=",
)


def next_steps(
    config: Config,
    words: Sequence[str],
    *,
    run: Path,
    model: Path,
    update: int,
    launcher: str,
    critic: Path | None = None,
    adapter: Path | None = None,
    trackers: Mapping[str, str],
) -> str:
    """Return lines of a name and a path or command each.

    Paths are those of the directory where the user stands, so that a command can be pasted there.

    words: command line of the run without the command, of which secrets are redacted. update: the last one. launcher:
    command in front of `train`. adapter: what was trained, if its weights stay apart from those of
    `model.path`; None: `model`. trackers: text for each tracker.
    """
    shown_run, shown_model = short_path(run), short_path(model)
    goal = config.updates if update < config.updates else 2 * config.updates
    # The command line of a resumed run does not repeat its settings.
    own = redact_words(words) if config.resume == "never" else changed_words(plain(config))
    evaluation_words = [word for word in own if SAMPLED_AND_SCORED.match(word) and not word.startswith(TRAINING_ONLY)]
    by_turn = ["algorithm.turn_rewards=true"] if config.algorithm.turn_rewards else []
    model_words = [f"model.path={shown_model}", *by_turn]
    if adapter is not None:
        base = [word for word in own if word.startswith("model.path=")]
        model_words = [*base, *by_turn, f"model.adapters={{trained: {short_path(adapter)}}}"]
    evaluate = f"{lockstep()} evaluate {shlex.join([*model_words, *evaluation_words])}"
    inspect = f"{lockstep()} inspect-run {shlex.quote(shown_run)}"
    lines = {
        **({"model": shown_model} if adapter is None else {"adapter": short_path(adapter)}),
        **({"critic": short_path(critic)} if critic else {}),
        "resume": resume_command(words, run=run, updates=goal, launcher=launcher),
        **({"evaluate": evaluate} if config.has_rollouts and config.heldout_sets() else {}),
        **({"inspect": inspect} if config.has_rollouts else {}),
        "report": f"{lockstep()} report {shlex.quote(shown_run)}",
        **trackers,
    }
    return "\n".join(f"{name:<14} {text}" for name, text in lines.items())


def resume_command(words: Sequence[str], *, run: Path, updates: int, launcher: str) -> str:
    """Return the command that continues a run. Arguments as for `next_steps`."""
    # Its config.yaml holds all other settings, without secrets.
    again = [word for word in redact_words(words) if word.lstrip("+").startswith("run_root=") or REDACTED in word]
    again += [f"run_name={run.name}", "resume=auto", f"updates={updates}"]
    return f"{launcher} train {shlex.join(again)}"


def changed_words(values: Mapping[str, Any]) -> list[str]:
    """Return a word for each setting that is not the default. values: nested dicts from `plain`."""
    changed_settings = [one for one in settings(values) if one.is_changed]
    return [f"{'.'.join(one.path)}={override_value(one.value)}" for one in changed_settings]
