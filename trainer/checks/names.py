"""Settings that name something: models, directories, reward functions, environments."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rewards.functions.built_in import FUNCTIONS
from rewards.outcomes import ERRORS
from rewards.resolve import MODEL, check_built_in
from rollout.environments import ENVIRONMENTS, make_environment
from rollout.errors import ConfigError
from trainer.config.hints import closest
from trainer.config.paths import file_exists, path_exists
from trainer.config.schema import Config

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_problems(config: Config) -> Iterator[str]:
    """Models that are directories must be there; hub ids are seen when they are loaded."""
    for name in ("reference_path", "critic_path"):
        path = getattr(config.model, name)
        if path is not None and is_local(path) and not file_exists(f"{path}/config.json"):
            yield (
                f"model.{name}={path} has no config.json; point it at a directory that `save_pretrained` "
                f"wrote, or set model.{name}=null for model.path"
            )
    if is_local(config.model.path) and not file_exists(f"{config.model.path}/config.json"):
        task = Path(config.model.path).name
        make = (
            f"run `python scripts/make_demo_model.py --task {task}`"
            if task in ("calculator", "chain", "reverse")
            else "point it at a directory that `save_pretrained` wrote"
        )
        yield f"model.path={config.model.path} has no config.json; {make}, or set model.path=<directory or hub id>"


def run_problems(config: Config) -> Iterator[str]:
    """The run directory, what is resumed, and where the model goes."""
    repo = config.hub.repo
    if repo is not None and not HUB_ID.fullmatch(repo):
        yield f"hub.repo={repo} is no repository id; set hub.repo=<user or organisation>/<name>, or hub.repo=null"
    # The path of an empty text is this directory.
    if config.resume not in ("never", "auto") and not (config.resume and path_exists(config.resume)):
        yield f"resume={config.resume} is neither never, auto nor a checkpoint directory; set resume=auto"
    if config.resume == "auto" and config.run_name is None:
        yield "resume=auto does not know which run to continue; set run_name=<name of the directory under runs/>"
    yield from run_name_problems(config.run_name)


def run_name_problems(name: str | None) -> Iterator[str]:
    """What is wrong with the name of a run directory; null is a name of its own."""
    if name is None:
        return
    if not name.strip():  # taken for null, resume=auto would silently begin a new run
        yield "run_name= is empty, as from a shell variable that is not set; set run_name=my-run, or leave it out"
    elif os.sep in name or name in (".", "..", "latest"):
        yield f"run_name={name} must be a plain directory name; set run_name=my-run"


def reward_problems(config: Config) -> Iterator[str]:
    """How rewards are combined, and what happens to those that fail."""
    for outcome, policy in config.reward.on_error.items():
        if outcome not in ERRORS:
            hint = closest(str(outcome), [str(known) for known in ERRORS])
            yield (
                f"reward.on_error: {outcome} is not one of {', '.join(ERRORS)}{hint}; set reward.on_error.timeout=drop"
            )
        is_number = isinstance(policy, int | float) and not isinstance(policy, bool)
        is_number = is_number and abs(policy) <= sys.float_info.max  # which an integer of many digits is not
        if policy not in ("drop", "raise") and not is_number:
            yield (
                f"reward.on_error.{outcome}={policy} is neither drop, raise nor a number; "
                f"set reward.on_error.{outcome}=drop"
            )
    if not config.reward.functions:
        yield "reward.functions is empty, so every reward would be 0; set reward.functions=[exact_match]"
    for weight in config.reward.weights or []:
        if not math.isfinite(weight):
            yield f"reward.weights holds {weight}, which is not a finite number; set reward.weights=null for 1 each"
    if config.reward.weights is not None and len(config.reward.weights) != len(config.reward.functions):
        yield (
            f"reward.weights={config.reward.weights} has {len(config.reward.weights)} entries for "
            f"{len(config.reward.functions)} reward.functions; set reward.weights=null, or one weight per function"
        )


def reward_name_problems(config: Config) -> Iterator[str]:
    """Names of reward functions, and settings of built-ins; what a user's own file holds is seen when it is loaded."""
    names = [*FUNCTIONS, MODEL]
    settings = config.reward.settings
    short = [spec.rpartition(":")[2] for spec in config.reward.functions]
    for name in sorted({name for name in short if short.count(name) > 1}):
        once = ",".join(dict.fromkeys(config.reward.functions))
        yield (
            f"two of reward.functions are named {name}, and metrics and settings go by name; set "
            f"reward.functions=[{once}] if it is one function, or give one of the two another name"
        )
    for name in sorted(set(settings) - set(short)):
        yield (
            f"reward.settings.{name} is for a function that is not among reward.functions ({', '.join(short)})"
            f"{closest(name, short)}; leave it out, or set '~reward.settings.{name}' if a file sets it"
        )
    for spec in dict.fromkeys(config.reward.functions):
        if spec in names:
            given = settings.get(spec, {})
            if spec == MODEL and isinstance(given, dict):
                given = {"path": None, **given}  # `reward_model_problems` asks for it
            try:
                check_built_in(spec, given)
            except ConfigError as error:
                yield str(error)
        path, colon, _ = spec.rpartition(":")
        if colon and not file_exists(path):
            yield f"reward.functions: no file {path} (looked in {Path.cwd()}); expected path/to/file.py:function"
        if not colon and spec not in names:
            yield (
                f"reward.functions: {spec} is not one of {', '.join(names)}{closest(spec, names)}; set "
                "reward.functions=[exact_match], or reward.functions=[path/to/file.py:function]"
            )


def reward_model_problems(config: Config) -> Iterator[str]:
    """Where a reward model is."""
    settings = config.reward.settings.get(MODEL, {})
    if MODEL not in config.reward.functions or not isinstance(settings, dict):
        return
    path = settings.get("path")
    if path is None:
        yield (
            "reward.functions=[model] needs a model; set reward.settings.model.path=<directory or hub id>, for example "
            "runs/<name>/model of scripts/train_reward_model.py"
        )
    elif is_local(str(path)) and not file_exists(f"{path}/config.json"):
        yield (
            f"reward.settings.model.path={path} has no config.json; train a reward model there with `python "
            "scripts/train_reward_model.py run_name=<name>`, or set reward.settings.model.path=<directory or hub id>"
        )


def environment_problems(config: Config) -> Iterator[str]:
    """The environment's name, and settings that it refuses itself."""
    name = config.environment.name
    if ":" not in name and name not in ENVIRONMENTS:
        yield (
            f"environment.name={name} is not one of {', '.join(ENVIRONMENTS)}{closest(name, list(ENVIRONMENTS))}; set "
            "environment.name=single_turn, or environment.name=path/to/file.py:ClassName"
        )
        return
    try:
        make_environment(name, **config.environment.settings)
    except ConfigError as error:
        yield str(error)


def is_local(path: str) -> bool:
    """Whether a model path can only mean a directory: hub ids look like 'name' or 'organisation/name'."""
    return path.startswith(("/", ".", "~", "models/")) or path.count("/") > 1 or path_exists(path)
