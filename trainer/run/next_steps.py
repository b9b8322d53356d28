"""A run in words: its task, what it has reached, and commands to continue, evaluate and inspect it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.rollout.system.user_functions import holds_objects
from lockstep.trainer.command_line import is_call, settings_files, typed_words
from lockstep.trainer.compose import describe_task
from lockstep.trainer.config.redaction import REDACTED, override_value, redact_words
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain, settings
from lockstep.trainer.observe.alarms import dropped_counts
from lockstep.trainer.observe.metrics_log import RUN_SECONDS
from lockstep.trainer.observe.trackers.view import lockstep, short_path

SAMPLED_AND_SCORED = re.compile(r"(experiment|model|data|environment|reward|rollout|eval)[=.]")
"""Settings on which an evaluation depends."""
TRAINING_ONLY = (
    *("model.path=", "model.lora.", "model.critic", "model.reference_path=", "model.gradient_checkpointing="),
    *("eval.every=", "eval.before_training="),
)

CURVES = {"reward/mean": ("mean reward", 3), "loss/demonstrations": ("mean loss", 4)}
"""Name and decimals of the metrics of training, of which the first that a run has is printed at its end."""
HELDOUT_LOSS = re.compile(r"eval/(.+/)?cross_entropy")
MOST_STEPS = 5
"""Steps at both ends of a run whose mean reward is printed."""


def outcome(lines: Iterable[Mapping[str, float | None]], update: int, heldout: Sequence[str], *, seconds: float) -> str:
    """Return what a run has reached: updates, time, the reward at both ends, or the loss without rollouts, and drops.

    lines: of metrics.jsonl. update: the last one. heldout: results on held-out sets. seconds: age of this process.
    """
    ages = []
    curves: dict[str, list[float]] = {name: [] for name in CURVES}
    losses: dict[str, dict[int, float]] = {}
    drops: Counter[str] = Counter()
    for line in lines:
        drops.update(dropped_counts(line))
        ages += [age] if (age := line.get(RUN_SECONDS)) else []
        for name, value in line.items():
            if value is not None and name in curves:
                curves[name].append(value)
            elif value is not None and HELDOUT_LOSS.fullmatch(name):
                losses.setdefault(name, {})[int(line["step"] or 0)] = value
    # A process that resumed the run is younger than the one before.
    ages.append(seconds)
    total_s = sum(age for age, following in zip(ages, [*ages[1:], 0.0], strict=True) if following < age)
    parts = [_both_ends(*CURVES[name], values) for name, values in curves.items() if values][:1] + list(heldout)
    for name, by_update in losses.items():
        before = f"{by_update[0]:.4f} before training" if 0 in by_update else ""
        last = max(by_update)
        after = f"{by_update[last]:.4f} after update {last}" if last else ""
        parts.append(f"{name} {' and '.join(filter(None, [before, after]))}")
    if drops:
        causes = ", ".join(f"{cause} {count}" for cause, count in drops.most_common())
        parts.append(f"{drops.total()} rollouts were not trained: {causes}")
    return "; ".join([f"reached update {update} in {timedelta(seconds=round(total_s))}", *parts])


def _both_ends(name: str, decimals: int, values: Sequence[float]) -> str:
    """Return the means over the first and the last steps, at most half of all."""
    if not (few := min(MOST_STEPS, len(values) // 2)):
        return f"{name} {values[0]:.{decimals}f} in the only step"
    steps, rest = (f"{few} steps", f" {few}") if few > 1 else ("step", "")
    first, last = fmean(values[:few]), fmean(values[-few:])
    return f"{name} {first:.{decimals}f} in the first {steps} and {last:.{decimals}f} in the last{rest}"


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
    shown_run = short_path(run)
    goal = config.updates if update < config.updates else 2 * config.updates
    # The command line of a resumed run does not repeat its settings.
    own = redact_words(words) if config.resume == "never" else changed_words(plain(config))
    evaluate = evaluate_command(
        own, base=config.model.path, model=model, adapter=adapter, by_turn=config.algorithm.turn_rewards
    )
    inspect = f"{lockstep()} inspect-run {shlex.quote(shown_run)}"
    lines = {
        **({"model": short_path(model)} if adapter is None else {"adapter": short_path(adapter)}),
        **({"critic": short_path(critic)} if critic else {}),
        "resume": resume_command(words, run=run, updates=goal, launcher=launcher),
        **({"evaluate": evaluate} if config.has_rollouts and config.heldout_sets() and not holds_objects(own) else {}),
        **({"inspect": inspect} if config.has_rollouts else {}),
        "report": f"{lockstep()} report {shlex.quote(shown_run)}",
        **trackers,
    }
    return "\n".join(f"{name:<14} {text}" for name, text in lines.items())


def evaluate_command(words: Sequence[str], *, base: str, model: Path, adapter: Path | None, by_turn: bool) -> str:
    """Return the command that evaluates a trained model, and compares it with the one it began from.

    words: of its run. base: `model.path` there. adapter: as for `next_steps`. by_turn: `algorithm.turn_rewards`.
    """
    own = {word.partition("=")[0].lstrip("+"): word for word in words}  # typed words come after those of a file
    sampling = [word for word in own.values() if SAMPLED_AND_SCORED.match(word) and not word.startswith(TRAINING_ONLY)]
    turn_words = ["algorithm.turn_rewards=true"] if by_turn else []
    if adapter is not None:  # compared with the model without it
        base_words = [own["model.path"]] if "model.path" in own else []
        words = [*base_words, *turn_words, f"model.adapters={{trained: {short_path(adapter)}}}", *sampling]
    else:
        comparison = [f"eval.compare_to={override_value(base)}"] if base and "eval.compare_to" not in own else []
        words = [f"model.path={short_path(model)}", *turn_words, *sampling, *comparison]
    return f"{lockstep()} evaluate {shlex.join(words)}"


def all_words() -> list[str]:
    """Return the words of this process, with the content of its settings file in place of its name."""
    if not settings_files(typed_words()):
        return typed_words()
    from lockstep.trainer.settings_file import with_file  # other runs do not load it

    return with_file(typed_words())


def described_task(config: Config) -> str:
    """Return the task of this process in words, as `describe_task` and with values that a settings file keeps."""
    if not settings_files(typed_words()):
        return describe_task(config, typed_words())
    from lockstep.trainer.settings_file import describe_command  # other runs do not load it

    return describe_command(config)


def resume_command(words: Sequence[str], *, run: Path, updates: int, launcher: str) -> str:
    """Return the command that continues a run. Arguments as for `next_steps`."""
    if is_call():
        again = (
            f"lockstep.Run({str(run)!r}).resume(updates={updates}), with what has changed as arguments (rewards=...)"
        )
        place = f"run_root={str(run.parent)!r}, run_name={run.name!r}, resume='auto', updates={updates}"
        return f"in Python: {again}; in another process: lockstep.train(<the same arguments>, {place})"
    # Its config.yaml holds all other settings, without secrets.
    again = [word for word in redact_words(words) if word.lstrip("+").startswith("run_root=") or REDACTED in word]
    again += [f"run_name={run.name}", "resume=auto", f"updates={updates}"]
    return f"{launcher} train {shlex.join(again)}"


def changed_words(values: Mapping[str, Any]) -> list[str]:
    """Return a word for each setting that is not the default. values: nested dicts from `plain`."""
    changed_settings = [one for one in settings(values) if one.is_changed]
    return [f"{'.'.join(one.path)}={override_value(one.value)}" for one in changed_settings]
