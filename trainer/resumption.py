"""Settings of a run that is resumed: found on disk, put under what is typed, and compared with the outcome.

`store_base` is for any settings that presets and words go on top of.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.names import resume_problems
from lockstep.trainer.compose import CONFIG_DIR, sets, unknown_keys
from lockstep.trainer.config.changes import changed_task, leaves
from lockstep.trainer.config.hints import closest
from lockstep.trainer.config.redaction import REDACTED
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import flow, plain
from lockstep.trainer.config.user_code import outside_of
from lockstep.trainer.settings_file import fit

TYPED = ("resume", "resume_with_changes", "run_name", "run_root", "dry_run")
"""Settings that a resumed run does not take from the run."""
OF_ONE_RUN = ("logger.wandb_id",)
"""Settings that a run from a named checkpoint does not take: it is another run, or goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The settings of the run that a command line resumes."""

    path: Path
    """File that holds them."""
    settings: Mapping[str, Any]
    unknown: tuple[str, ...]
    """Settings in the file that this version does not know."""


def saved_run(words: Sequence[str]) -> SavedRun | None:
    """Return the settings of the run that a command line resumes; None if it begins a new one.

    Raises `ConfigError` if `resume` does not name a checkpoint, or the file cannot be read.
    """
    resume, name = _typed(words, "resume"), _typed(words, "run_name")
    if resume in (None, "never") or (resume == "auto" and not name):
        return None  # the checks of a new run report a missing name
    for problem in resume_problems(resume):
        raise ConfigError(problem)
    run = _runs(words) / str(name)
    checkpoints = (run / "checkpoints").glob("step-*/config.json")  # without config.yaml, where it was lost
    files = [run / "config.yaml", *sorted(checkpoints, key=lambda file: (len(str(file)), file), reverse=True)]
    if resume != "auto":
        checkpoint = Path(os.path.expanduser(resume))
        files = [checkpoint / "config.json", checkpoint / "../../config.yaml"]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        return None
    tree = read_saved(path)
    keys = unknown_keys(tree)
    unknown = [key for key in keys if key.rpartition(".")[0] not in keys]
    for key in (*TYPED, *(() if resume == "auto" else OF_ONE_RUN), *unknown):
        place, _, last = key.rpartition(".")
        section = OmegaConf.select(tree, place) if place else tree
        if isinstance(section, DictConfig):  # others may have written the file
            section.pop(last, None)
    settings: Any = OmegaConf.to_container(tree)
    return SavedRun(path=path, settings=settings, unknown=tuple(unknown))


def new_run_hint(words: Sequence[str]) -> str | None:
    """Return a sentence for a command line with resume=auto that begins a new run, because none has its name."""
    name, runs = _typed(words, "run_name"), _runs(words)
    if _typed(words, "resume") != "auto" or not name or (runs / name).exists():
        return None
    others = [path.name for path in runs.glob("*/") if path.name != "latest"]
    return f"resume=auto run_name={name}: there is no {runs / name}{closest(name, others)}, so this would be a new run"


def store_base(settings: Mapping[str, Any], *, path: Path) -> str:
    """Store a configuration that begins with the settings of a file in place of presets; return its name for Hydra.

    Presets and words of the command line go on top. Raises `ConfigError` for a value of the wrong type.
    """
    content = yaml.safe_load((CONFIG_DIR / "train.yaml").read_text(encoding="utf-8"))
    defaults: list[Any] = []
    for entry in content["defaults"]:
        if isinstance(entry, str):
            defaults.append("base" if entry == "schema" else entry)
        else:
            defaults.append({key: value if key.startswith("override ") else None for key, value in entry.items()})
    ConfigStore.instance().store(name="base", node=fit(settings, path))
    ConfigStore.instance().store(name="on_base", node={**content, "defaults": defaults})
    return "on_base"


def check_resumed(saved: SavedRun, config: Config, words: Sequence[str]) -> None:
    """Raise `ConfigError` for secrets that must be typed again, code of another user's run, and a changed task.

    A file of a loss or advantage may be another one than the run's if the task may change.
    """
    values: Any = OmegaConf.to_container(OmegaConf.structured(config))
    if secrets := [name for name, value in leaves(values) if REDACTED in str(value)]:
        raise ConfigError(f"{saved.path} does not hold the secrets of the run; type them again: {', '.join(secrets)}")
    if not saved.path.resolve().is_relative_to(Path(config.run_root).resolve()):  # others may have written it
        names, trusts = outside_of(config), config.model.trust_remote_code
        _refuse_foreign_code(saved.path, names, words, run_root=config.run_root, trust_remote_code=trusts)
    task_changes = changed_task(saved.settings, plain(config))
    if task_changes and not config.resume_with_changes:
        listing = ", ".join(f"{name} ({flow(old)} -> {flow(new)})" for name, (old, new) in task_changes.items())
        raise ConfigError(
            f"the run of {saved.path} learns another task than this command: {listing}; leave these words out, add "
            "resume_with_changes=true to train it on the new task, or start a new run with model.path=<its model>"
        )
    for kind in ("loss", "advantage"):
        if task_changes and not sets(words, f"algorithm.{kind}_sha256"):
            setattr(config.algorithm, f"{kind}_sha256", None)


def _refuse_foreign_code(
    path: Path, names: Sequence[str], words: Sequence[str], *, run_root: str, trust_remote_code: bool
) -> None:
    """Raise `ConfigError` if a run from elsewhere than run_root names code or addresses that were not typed.

    path: file of its settings. names: code and addresses there.
    """
    usual = outside_of(Config())
    programs = [text for text in names if text not in usual and not any(text in word for word in words)]
    if trust_remote_code and not sets(words, "model.trust_remote_code"):
        programs.append("code that ships with the model (model.trust_remote_code=true)")
    if programs:
        raise ConfigError(
            f"{path} is not below run_root={run_root} and names {', '.join(programs)}, which would be used with your "
            "rights; type the settings that name them, or set run_root to its directory if you trust it"
        )


def _typed(words: Sequence[str], key: str) -> str | None:
    """Return the value of a setting on the command line; None if it is not there or is null."""
    matches = [word for word in words if word.lstrip("+").partition("=")[0] == key]
    try:
        value = OverridesParser.create().parse_override(matches[-1]).value() if matches else None
    except HydraException:
        return None  # Hydra reports it
    return None if value is None else str(value)


def _runs(words: Sequence[str]) -> Path:
    return Path(_typed(words, "run_root") or Config().run_root)
