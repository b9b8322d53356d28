"""Problems of settings that name models, directories, functions and environments."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.rewards.functions import FUNCTIONS
from lockstep.rewards.outcomes import ERRORS
from lockstep.rewards.resolve import MODEL, check_built_in, compares_groups
from lockstep.rewards.signatures import refuse_foreign
from lockstep.rollout.chat.template_files import template_text
from lockstep.rollout.environments import environment_class, environment_names, make_environment
from lockstep.rollout.environments.declaration import declaration_of
from lockstep.rollout.environments.drivers import turn_by_turn
from lockstep.rollout.environments.mixed import parts_of
from lockstep.rollout.episode.environment import ChecksSystem, Environment, RunsItself
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.user_functions import (
    fault,
    file_sha256,
    is_object,
    names_function,
    place_problem,
    written_names,
)
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig, RewardConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.hints import closest
from lockstep.trainer.config.paths import file_exists, path_exists
from lockstep.trainer.config.prepared import model_command
from lockstep.trainer.config.user_code import runs_unisolated
from lockstep.trainer.objective.declare import Declared
from lockstep.trainer.objective.own.lookup import advantage_named, policy_loss_named
from lockstep.trainer.objective.own.signature import fits, in_words
from lockstep.trainer.setting import typed

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_problems(model: ModelConfig, teacher: TeacherConfig) -> Iterator[str]:
    """Yield one sentence per missing model directory; hub ids are checked when they are loaded."""
    paths = {
        **{f"model.{name}": getattr(model, name) for name in ("path", "reference_path", "critic_path")},
        "teacher.path": teacher.path,
    }
    runs = {setting: problem for setting, path in paths.items() if path and (problem := run_problem(setting, path))}
    yield from runs.values()
    for name in ("reference_path", "critic_path"):
        path = getattr(model, name)
        if path is not None and lacks_model(path) and f"model.{name}" not in runs:
            yield (
                f"model.{name}={path} has no config.json; set it to a directory written by `save_pretrained`, or set "
                f"model.{name}=null for model.path"
            )
    if teacher.path is not None and lacks_model(teacher.path) and "teacher.path" not in runs:
        yield (
            f"teacher.path={teacher.path} has no config.json; set it to a directory written by "
            "`save_pretrained`, or a hub id"
        )
    if model.chat_template is not None:
        try:
            template_text(model.chat_template)
        except ConfigError as error:
            yield str(error)
    if model.path and lacks_model(model.path) and "model.path" not in runs:  # `missing_problems` reports an empty one
        command = model_command(model.path)
        make = f"run `{command}`" if command else "expected a saved model"
        yield f"model.path={model.path} has no config.json; {make}, or set model.path=<directory or hub id>"


def run_problem(setting: str, path: str) -> str:
    """Return a sentence for a run or a checkpoint in place of a model; "" for another path."""
    run, checkpoint = path, "<update>"
    if file_exists(f"{path}/manifest.json"):
        run, checkpoint = str(Path(path).parent.parent), Path(path).name.removeprefix("step-")
        kind = "a checkpoint, which holds no model files"
    elif not file_exists(f"{path}/config.yaml"):
        return ""
    elif file_exists(f"{path}/model/config.json"):
        return f"{setting}={path} is a run; set {setting}={path}/model for the model that it has left"
    else:
        kind = "a run without a saved model"
    return (
        f"{setting}={path} is {kind}; write the model of a checkpoint with `lockstep publish {run} --repo "
        f"<user>/<name> --checkpoint {checkpoint} --out <folder>`, and set {setting}=<folder>"
    )


def repository_problems(repo: str | None) -> Iterator[str]:
    """Yield the problem of the name of a hub repository; null has none."""
    if repo is not None and not HUB_ID.fullmatch(repo):
        yield f"hub.repo={repo} is not a repository id; set hub.repo=<user or organization>/<name>, or hub.repo=null"


def run_problems(resume: str, run_name: str | None) -> Iterator[str]:
    """Yield one sentence per problem of the resumed checkpoint and the run directory."""
    yield from resume_problems(resume)
    if resume == "auto" and run_name is None:
        yield "resume=auto needs the name of the run; set run_name=<name of the directory under runs/>"
    yield from run_name_problems(run_name)


def resume_problems(resume: str) -> Iterator[str]:
    """Yield the problem of what `resume` names; the files of a checkpoint are checked by the run, before its engine."""
    path = os.path.expanduser(resume)
    # An empty path would be the current directory.
    if resume in ("never", "auto") or (resume and file_exists(f"{path}/manifest.json")):
        return
    places = filter(path_exists, (f"{path}/checkpoints", path, str(Path(path).parent)) if resume else ())
    near = next((steps for place in places if (steps := list(Path(place).glob("step-*")))), [])
    newest = max(near, key=lambda step: (len(step.name), step.name), default="<run>/checkpoints/step-<update>")
    yield (
        f"resume={resume} is neither never, auto nor a checkpoint (it "
        f"{'has no manifest.json' if path_exists(path) else 'does not exist'}); set resume={newest}, or resume=auto "
        "run_name=<name of the run>"
    )


def run_name_problems(name: str | None) -> Iterator[str]:
    """Yield the problem of the name of a run directory; null has none."""
    if name is None:
        return
    if not name.strip():  # with resume=auto it would silently start a new run
        yield "run_name= is empty, as from an unset shell variable; set run_name=my-run, or leave it out"
    elif os.sep in name or name in (".", "..", "latest") or len(name.encode(errors="replace")) > 255:
        yield f"run_name={name} must be a plain directory name of at most 255 bytes; set run_name=my-run"


def reward_problems(reward: RewardConfig) -> Iterator[str]:
    """Yield one sentence per problem of reward weights, functions and policies for errors."""
    for outcome, policy in reward.on_error.items():
        if outcome not in ERRORS:
            hint = closest(str(outcome), [str(name) for name in ERRORS])
            yield (
                f"reward.on_error: {outcome} is not one of {', '.join(ERRORS)}{hint}; set reward.on_error.timeout=drop"
            )
        is_number = isinstance(policy, int | float) and not isinstance(policy, bool)
        is_number = is_number and abs(policy) <= sys.float_info.max  # refuses integers beyond floats
        if policy not in ("drop", "raise") and not is_number:
            yield (
                f"reward.on_error.{outcome}={policy} is neither drop, raise nor a number; "
                f"set reward.on_error.{outcome}=drop"
            )
    for weight in reward.weights or []:
        if not math.isfinite(weight):
            yield f"reward.weights holds {weight}, which is not a finite number; set reward.weights=null for 1 each"
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        yield (
            f"reward.weights={reward.weights} has {len(reward.weights)} entries for "
            f"{len(reward.functions)} reward.functions; set reward.weights=null, or one weight per function"
        )


def reward_name_problems(reward: RewardConfig) -> Iterator[str]:
    """Yield one sentence per problem of names of reward functions and settings of built-ins; not of user files."""
    names = [*FUNCTIONS, MODEL]
    settings = reward.settings
    short = [spec.rpartition(":")[2] for spec in reward.functions]
    for name in sorted({name for name in short if short.count(name) > 1}):
        once = ",".join(dict.fromkeys(reward.functions))
        yield (
            f"two of reward.functions are named {name}, expected unique names for metrics and settings; set "
            f"reward.functions=[{once}] if it is one function, or give one of the two another name"
        )
    for name in sorted(set(settings) - set(short)):
        yield (
            f"reward.settings.{name} is for a function that is not among reward.functions ({', '.join(short)})"
            f"{closest(name, short)}; leave it out, or set '~reward.settings.{name}' if a file sets it"
        )
    for name, entry in settings.items():
        if name not in names and not isinstance(entry, dict):
            yield (
                f"reward.settings.{name}={entry} is not a mapping of settings; set "
                f"reward.settings.{name}.<name>=<value>"
            )
    for spec in dict.fromkeys(reward.functions):
        if spec in names:
            entry = settings.get(spec, {})
            if spec == MODEL and isinstance(entry, dict):
                entry = {"path": None, **entry}  # `reward_model_problems` asks for it
            try:
                check_built_in(spec, entry)
            except ConfigError as error:
                yield str(error)
        _, colon, name = spec.rpartition(":")
        if colon and (problem := place_problem(spec)):
            expected = "" if is_object(spec) else "; expected path/to/file.py:function"
            yield f"reward.functions: {problem}{expected}"
        elif colon:
            try:
                refuse_foreign(name, written_names(spec).get(name) or ())
            except ConfigError as error:
                yield f"reward.functions: {error}"
        if not colon and spec not in names:
            yield (
                f"reward.functions: {spec} is not one of {', '.join(names)}{closest(spec, names)}; set "
                "reward.functions=[exact_match], or reward.functions=[path/to/file.py:function]"
            )


def group_wise_rewards(functions: Sequence[str]) -> list[str]:
    """Return the reward functions that are known to compare the rollouts of a group, without running their files."""
    specs = []
    for spec in functions:
        with suppress(ConfigError):  # `reward_name_problems` reports it
            if compares_groups(spec):
                specs.append(spec)
    return specs


def scores_groups_alone(functions: Sequence[str]) -> bool:
    """Return True if a rollout that is alone in its group has no reward: all functions are group-wise built-ins."""
    return bool(functions) and all(spec in FUNCTIONS and compares_groups(spec) for spec in functions)


def objective_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield one sentence per problem of a loss or advantage of a user's file, which is loaded, and of its settings.

    A file with another hash than the settings name is not loaded.
    """
    for kind, lookup in (("loss", policy_loss_named), ("advantage", advantage_named)):
        spec, name = getattr(algorithm, kind), f"algorithm.{kind}"
        if not names_function(spec):
            continue
        expected = getattr(algorithm, f"{kind}_sha256")
        if expected is not None and place_problem(spec) is None and file_sha256(spec) != expected:
            yield (
                f"{name}={spec}: the SHA-256 of the file is {file_sha256(spec)}, expected {expected}, so it is not the "
                f"file of the run; restore it, or set {name}_sha256=null"
            )
            continue
        try:
            objective = lookup(spec)
        except ConfigError as error:
            yield f"{name}={spec}: {error}"
            continue
        yield from own_setting_problems(objective, getattr(algorithm, f"{kind}_settings"), f"{name}_settings.")


def own_setting_problems(declared: Declared, given: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield one sentence per setting that a function does not take, or with a wrong type or value. prefix: of names."""
    names = list(declared.arguments)
    for name, value in given.items():
        if name not in names:
            takes = f"the function takes {', '.join(names)}" if names else "the function takes no settings"
            yield f"{prefix}{name}: {takes}{closest(str(name), names)}; leave it out"
            continue
        argument = declared.arguments[name]
        if not fits(value, argument.type):
            problem = f"is not {in_words(argument.type)}"
        else:
            problem = None if value is None else argument.setting.problem(value)
        if problem is not None:
            default = typed(argument.setting.default)
            yield f"{prefix}{name}={typed(value)} {problem}; set {prefix}{name}={default} (the default)"


def reward_model_problems(reward: RewardConfig) -> Iterator[str]:
    """Yield the problem of the path of a reward model."""
    settings = reward.settings.get(MODEL, {})
    if MODEL not in reward.functions or not isinstance(settings, dict):
        return
    path = settings.get("path")
    if path is None:
        yield (
            "reward.functions=[model] needs a model; set reward.settings.model.path=<directory or hub id>, for example "
            "runs/<name>/model of lockstep train-reward-model"
        )
    elif lacks_model(str(path)):
        yield (
            f"reward.settings.model.path={path} has no config.json; train a reward model there with `python "
            "lockstep train-reward-model run_name=<name>`, or set reward.settings.model.path=<directory or hub id>"
        )


def sandbox_problems(environment: EnvironmentConfig, reward: RewardConfig) -> Iterator[str]:
    """Yield the problem of a system that cannot run programs of the model behind walls; tried by running one."""
    if "code_tests" in reward.functions and not runs_unisolated(reward):
        from lockstep.rollout.sandbox.sandbox import isolation_problem  # runs without programs do not load walls

        if (problem := isolation_problem()) is not None:
            yield f"reward.functions names code_tests: {problem}"
    with BackgroundLoop() as loop:
        for part in parts_of(make_environment(environment.name, **environment.settings)):
            if isinstance(part, ChecksSystem) and (problem := loop.run(part.problem())) is not None:
                yield problem


def environment_problems(settings: EnvironmentConfig, max_turns: int) -> Iterator[str]:
    """Yield the problem of the environment's name or settings. max_turns: with null resolved."""
    name = settings.name
    try:
        if ":" not in name and environment_class(name) is None:
            names = environment_names()
            yield (
                f"environment.name={name} is not one of {', '.join(names)}{closest(name, names)}; set "
                "environment.name=single_turn, or environment.name=path/to/file.py:ClassName"
            )
            return
        environment = make_environment(name, **settings.settings)
    except ConfigError as error:
        yield str(error)
        return
    except Exception as error:  # of a user's constructor
        yield f"environment {name} with the settings {settings.settings} raised {fault(error)}"
        return
    for part in parts_of(environment):
        yield from _part_problems(part)
        turns = declaration_of(part).max_turns
        declares = next((kind for kind in type(part).__mro__ if "declaration" in vars(kind)), object)
        is_own = not declares.__module__.startswith("lockstep.")  # a class that extends Lockstep's has the default
        if is_own and settings.max_turns is None and turns > max_turns:
            yield (
                f"environment {type(part).__name__} declares max_turns={turns}, which is not read from a file; set "
                f"environment.max_turns={turns}"
            )


def _part_problems(part: Environment | RunsItself) -> Iterator[str]:
    """Yield the problem of a class that its driver cannot play."""
    name, declaration = type(part).__name__, declaration_of(part)
    missing = [method for method in ("reset", "step") if not callable(getattr(part, method, None))]
    plays = declaration.driver is turn_by_turn
    if plays and not missing and "tools" not in dir(part) and not hasattr(part, "tools"):  # a property may need a reset
        yield f"environment {name} has no attribute tools, which the model may call; write tools = () if there are none"
    if missing and plays:
        yield (
            f"environment {name} has no method {' and '.join(missing)}, which the driver turn_by_turn calls; write "
            "what is missing, or declare the driver that plays it (docs/environments.md)"
        )


def lacks_model(path: str) -> bool:
    """Return True if a path without a model cannot be a hub id, which has the form 'name' or 'organization/name'."""
    is_local = not path or path.startswith(("/", ".", "~", "models/")) or path.count("/") > 1 or path_exists(path)
    return is_local and not file_exists(f"{path}/config.json")
