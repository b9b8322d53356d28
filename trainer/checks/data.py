"""Conflicts between settings of data and evaluation, missing data files, and first rows of local ones."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.rewards.functions import GYM_COLUMN, GYM_PREFIX
from lockstep.rollout.environments import declaration, declared_parts, environment_class
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.system.user_functions import is_object
from lockstep.trainer.checks.declared import value_problems
from lockstep.trainer.checks.names import lacks_model, run_problem, scores_groups_alone
from lockstep.trainer.config.groups.data_settings import DataConfig, DataSetConfig, DemonstrationsConfig
from lockstep.trainer.config.groups.evaluation_settings import EvalConfig, LmEvalConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig
from lockstep.trainer.config.hints import closest
from lockstep.trainer.config.paths import file_exists, path_exists
from lockstep.trainer.config.prepared import data_command
from lockstep.trainer.data.datasets import is_at_hand, is_file, is_made, path_problem, read_first_row
from lockstep.trainer.data.prompts import OF_ENVIRONMENT, prepared, rows_of_environment
from lockstep.trainer.data.row_check import RowCheck
from lockstep.trainer.data.split import seeds

NAME = re.compile(r"[\w-]+")
"""Name of a data set, a part of metric names."""
LM_EVAL = "lm-eval>=0.4.13,<0.5"


def data_problems(
    data: DataConfig, evaluated: Mapping[str, DataSetConfig], environment: EnvironmentConfig
) -> Iterator[str]:
    """Yield one sentence per problem of the names, entries and columns of data sets. evaluated: `eval.sets`."""
    environment_declaration = declaration(environment.name)
    for setting, sets in (("data.sources", data.sources), ("eval.sets", evaluated)):
        for name, data_set in sets.items():
            if not NAME.fullmatch(name):
                yield f"{setting}: the name {name!r} must consist of letters, digits, _ and -"
            if not data_set.path:
                yield f"{setting}.{name} has no path; set {setting}.{name}.path=<file or hub id>"
            if data_set.environment is not None and not environment_declaration.has_parts:
                yield (
                    f"{setting}.{name}.environment={data_set.environment} is for environment.name=mixed, found "
                    f"{environment.name}; set environment.name=mixed, or {setting}.{name}.environment=null"
                )
    for name, source in data.sources.items():
        yield from value_problems(source, f"data.sources.{name}.")
    curriculum = data.curriculum
    if curriculum.is_on and not curriculum.min_pass_rate < curriculum.max_pass_rate:
        yield (
            f"data.curriculum.min_pass_rate={curriculum.min_pass_rate} and max_pass_rate={curriculum.max_pass_rate} "
            "leave no rows to train on; set data.curriculum.min_pass_rate=0.0 data.curriculum.max_pass_rate=1.0"
        )
    if data.system_prompt is not None:
        for name in ("prompt_column", "system_prompt"):
            if environment.settings.get(name) is not None:
                yield (
                    f"data.system_prompt and environment.settings.{name} are both set, expected one of them; set "
                    f"environment.settings.{name}=null (data.columns={{prompt: <column>}} names the prompt)"
                )
    parts = declared_parts(environment.name, environment.settings)
    # A name without a class is that of a user's file, which may have prompts, or reported elsewhere.
    prompt_flags = [
        part.has_prompt for name, _, part in parts if not part.has_parts and environment_class(name) is not None
    ]
    if data.max_prompt_tokens is not None and prompt_flags and not any(prompt_flags):
        yield (
            f"data.max_prompt_tokens={data.max_prompt_tokens} cannot be checked: environment.name={environment.name} "
            "writes its own prompts; set data.max_prompt_tokens=null"
        )


def made_data_problems(sets: Sequence[DataSetConfig], data: DataConfig, rewards: Sequence[str]) -> Iterator[str]:
    """Yield one sentence per problem of seeds, of a task of reasoning-gym, its parameters, and the reward for it."""
    made_sets = {(data_set.path, str(data_set.parameters)): data_set for data_set in sets if is_made(data_set.path)}
    tasks = [data_set for data_set in made_sets.values() if data_set.path.startswith(GYM_PREFIX)]
    for data_set in made_sets.values():
        try:
            if data_set in tasks:
                from lockstep.trainer.data.gym_rows import check_task  # other runs do not load it

                check_task(data_set.path, data_set.parameters or {})
            elif not is_object(data_set.path):
                seeds(data_set.path, data_set.split or "train")
        except ConfigError as error:
            yield str(error)
    if data.parameters and not tasks:
        yield (
            f"data.parameters={data.parameters} is for tasks of reasoning-gym, found data.path="
            f"{data.path}; set data.path=reasoning_gym:<task>, or leave data.parameters out"
        )
    if (
        GYM_COLUMN in rewards
        and sets
        and not any(data_set in tasks or is_file(data_set.path) or is_object(data_set.path) for data_set in sets)
    ):
        yield (
            f"the reward {GYM_COLUMN} scores rows of data.path=reasoning_gym:<task>, found {sets[0].path}; set "
            "data.path, or another reward, for example reward.functions=[exact_match]"
        )


def evaluation_problems(
    settings: EvalConfig, rewards: Sequence[str], *, has_data: bool, trains: bool = True
) -> Iterator[str]:
    """Yield one sentence per conflict of `eval`.

    has_data: True if there are held-out sets. trains: False if the configuration is for an evaluation alone.
    """
    overrides = {f"eval.every={settings.every}": "eval.every=0"} if settings.every else {}
    overrides |= {"eval.before_training=true": "eval.before_training=false"} if settings.before_training else {}
    if overrides and not has_data:
        needs = "need" if len(overrides) > 1 else "needs"
        yield (
            f"{' and '.join(overrides)} {needs} held-out data; set data.heldout_path=<file or hub id>, or "
            f"{' '.join(overrides.values())}"
        )
    if settings.samples_per_prompt > 1 and settings.temperature == 0:
        yield (
            f"eval.samples_per_prompt={settings.samples_per_prompt} at eval.temperature=0 repeats one greedy answer; "
            "set eval.temperature=1.0, or eval.samples_per_prompt=1"
        )
    is_sampled = has_data and (bool(overrides) or not trains)
    if is_sampled and settings.samples_per_prompt == 1 and scores_groups_alone(rewards):
        first = rewards[0]
        yield (
            f"the reward {first} compares the rollouts of a prompt, and evaluations sample one (eval."
            "samples_per_prompt=1), which has no reward; set eval.samples_per_prompt=8 eval.temperature=1.0, or "
            f"'reward.functions=[{first},exact_match]' 'reward.weights=[1,0]' for one that is only measured, or "
            "eval.every=0 eval.before_training=false"
        )
    names = [spec.rpartition(":")[2] for spec in rewards]
    if settings.pass_reward is not None and settings.pass_reward not in names:
        yield (
            f"eval.pass_reward={settings.pass_reward} is not among reward.functions ({', '.join(names)})"
            f"{closest(settings.pass_reward, names)}; set eval.pass_reward=null for the weighted sum"
        )
    yield from _lm_eval_problems(settings.lm_eval)
    other = settings.compare_to
    if other is None:
        return
    if other.endswith(".json") and not file_exists(other):
        yield f"eval.compare_to={other} does not exist (looked in {Path.cwd()}); write it with eval.output={other}"
    elif not other.endswith(".json") and (problem := run_problem("eval.compare_to", other)):
        yield problem
    elif not other.endswith(".json") and lacks_model(other):
        yield f"eval.compare_to={other} has no config.json; expected a model, or the JSON file of an evaluation"


def _lm_eval_problems(settings: LmEvalConfig) -> Iterator[str]:
    """Yield one sentence per problem of `eval.lm_eval`; task names are checked when lm-eval loads them."""
    if settings.include_path is not None and not path_exists(settings.include_path):
        yield (
            f"eval.lm_eval.include_path={settings.include_path} does not exist (looked in {Path.cwd()}); set it to the "
            "directory of your task files, or to null"
        )
    if not settings.tasks:
        return
    if importlib.util.find_spec("lm_eval") is None:
        yield f"eval.lm_eval.tasks needs the lm-eval package; type: pip install '{LM_EVAL}'"
    if settings.fewshot_as_multiturn and not settings.apply_chat_template:
        yield (
            "eval.lm_eval.fewshot_as_multiturn=true needs the chat template; set "
            "eval.lm_eval.apply_chat_template=true, or eval.lm_eval.fewshot_as_multiturn=false"
        )


def data_file_problems(
    data: DataConfig, evaluation: EvalConfig, demonstrations: DemonstrationsConfig, environment: str, *, trains: bool
) -> Iterator[str]:
    """Yield one sentence per path at which nothing can be read. trains: True if training data is needed."""
    paths = {f"eval.sets.{name}.path": data_set.path for name, data_set in evaluation.sets.items()}
    if trains and data.sources:
        paths |= {f"data.sources.{name}.path": source.path for name, source in data.sources.items()}
    elif trains:
        paths["data.path"] = data.path
    if trains and demonstrations.path is not None:
        paths["demonstrations.path"] = demonstrations.path
    if data.heldout_path is not None and (trains or not evaluation.lm_eval.tasks):
        paths["data.heldout_path"] = data.heldout_path
    if not trains and not paths and not evaluation.lm_eval.tasks:
        yield "no held-out data is set; set data.heldout_path=<file or hub id>"
    for name, path in paths.items():
        if path == OF_ENVIRONMENT and not path_exists(path) and rows_of_environment(environment, path) is None:
            yield (
                f"{name}={path}: environment {environment} brings no held-out data; set {name}=<file or "
                "hub id>, or data.heldout_path=null for none"
            )
        elif path and (problem := path_problem(path)):
            also = ", or data.heldout_path=null for no held-out data" if trains and name == "data.heldout_path" else ""
            command = data_command(path)
            make = f"run `{command}`, or " if command else ""
            yield f"{name}={path} {problem}; {make}set {name}=<file or hub id>{also}"


def first_row_problems(sets: Sequence[DataSetConfig], check: RowCheck, *, heldout_path: str | None) -> Iterator[str]:
    """Yield one sentence per problem of the first row of a data set."""
    seen_places: set[tuple[str, str]] = set()
    for data_set in sets:
        place = (data_set.path, str(data_set.columns))
        if not is_at_hand(data_set.path) or place in seen_places:
            continue  # `data_file_problems` reports a missing one
        seen_places.add(place)
        # An experiment or a preset may have brought it.
        is_heldout = data_set.path == heldout_path
        also = "; or set data.heldout_path=null for no held-out data" if is_heldout else ""
        try:
            row = read_first_row(data_set.path)
            if check.max_images:
                from lockstep.trainer.data.row_images import images_of  # runs without images do not load it

                row = prepared(row, data_set, read_images=images_of(data_set, None).checked)
            else:
                row = prepared(row, data_set)
        except DataError as error:
            yield f"{error}{also}"
        else:
            yield from (f"data set {data_set.path}, first row: {problem}{also}" for problem in check.problems(row))
