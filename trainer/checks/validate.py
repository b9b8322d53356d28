"""Checks of a configuration. Reports all problems at once, each as one sentence with an override that fixes it.

`trainer/config/launcher.py` checks the launcher and the installation. Imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.algorithm import algorithm_problems
from lockstep.trainer.checks.correction import asynchrony_problems, correction_problems, gateway_problems
from lockstep.trainer.checks.data import (
    data_file_problems,
    data_problems,
    evaluation_problems,
    first_row_problems,
    made_data_problems,
)
from lockstep.trainer.checks.declared import (
    choices_hold,
    missing_problems,
    null_problems,
    unused_problems,
    value_problems,
)
from lockstep.trainer.checks.engines import engine_problems, image_problems
from lockstep.trainer.checks.names import (
    environment_problems,
    model_problems,
    objective_problems,
    repository_problems,
    reward_model_problems,
    reward_name_problems,
    reward_problems,
    run_problems,
    sandbox_problems,
)
from lockstep.trainer.checks.tracking import tracking_problems
from lockstep.trainer.config.groups.data_settings import DataSetConfig, DemonstrationsConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.launcher import launch_problems
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.row_check import RowCheck


def validate(config: Config, *, needs_data: bool = True, trains: bool = True, scores: bool = True) -> None:
    """Raise `ConfigError` with one line per problem, or return.

    needs_data: True if the data files must exist. trains: True if training data is among them. scores: True if rewards
    score what is sampled on the data.
    """
    heldout, demonstrations = config.heldout_sets().values(), config.demonstration_sets().values()
    sets = [*(config.data.training_sets().values() if trains else ()), *heldout]
    problems = [*missing_problems(config, needs_data=needs_data, trains=trains, scores=scores)]
    problems += value_problems(config)
    # Conflicts depend on what the loss and the advantage need, so their files are loaded first.
    own = list(objective_problems(config.algorithm)) if choices_hold(config) else []
    problems += own
    if choices_hold(config) and not own:
        if config.has_rollouts:
            problems += [*null_problems(config.algorithm)]
            problems += [*reward_problems(config.reward), *reward_name_problems(config.reward)]
            problems += algorithm_problems(config)
            problems += correction_problems(config.correction, config.algorithm, config.model)
            if staleness := config.rollout.max_staleness:
                problems += asynchrony_problems(staleness, config.correction, config.algorithm, pause=config.sync.pause)
                problems += gateway_problems(config.gateway, config.environment, every=config.eval.every)
            mode = config.correction.mode
            problems += engine_problems(config.rollout, config.sync, config.server, correction_mode=mode)
        if "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ:
            from lockstep.trainer.checks.lone_process import lone_process_problems  # other runs do not load it

            problems += lone_process_problems()
        problems += launch_problems(config.optimizer)
        problems += model_problems(config.model, config.teacher)
        if config.model.sees_images:
            problems += image_problems(config.model)
        problems += data_problems(config.data, config.eval.sets, config.environment)
        prompts = [*config.data.training_sets().values(), *heldout] if config.has_rollouts else []
        problems += _demonstration_problems(
            config.demonstrations, config.teacher, demonstrations, prompts, config.algorithm.name
        )
        if config.teacher.urls:
            from lockstep.rollout.server.url_list import url_problems  # runs without servers do not load it

            problems += url_problems("teacher.urls", config.teacher.urls)
        problems += evaluation_problems(config.eval, config.reward.functions, has_data=bool(heldout), trains=trains)
        if needs_data and trains:
            problems += unused_problems(config)
        if needs_data:
            problems += data_file_problems(
                config.data, config.eval, config.demonstrations, config.environment.name, trains=trains
            )
            problems += made_data_problems(sets, config.data, config.reward.functions)
            problems += reward_model_problems(config.reward) if config.has_rollouts else []
            problems += [*repository_problems(config.hub.repo), *run_problems(config.resume, config.run_name)]
        if needs_data and trains:
            problems += tracking_problems(config.logger)
    if not problems and config.has_rollouts:  # last, because an environment may load user files
        problems += environment_problems(config.environment, config.max_turns)
        if not problems and needs_data:
            check = RowCheck(config.environment, config.reward, max_images=config.model.images.max_per_prompt)
            problems += first_row_problems(sets, check, heldout_path=config.data.heldout_path)
            problems += sandbox_problems(config.environment, config.reward)
    if not problems and needs_data and trains:
        is_heldout = config.evaluates and not config.has_rollouts
        if conversations := [*demonstrations, *(heldout if is_heldout else ())]:
            from lockstep.trainer.checks.conversations import demonstration_row_problems  # other runs do not load it

            problems += demonstration_row_problems(conversations)
    if problems:
        raise ConfigError("\n".join(problems))


def _demonstration_problems(
    settings: DemonstrationsConfig,
    teacher: TeacherConfig,
    demonstrations: Collection[DataSetConfig],
    prompts: Collection[DataSetConfig],
    algorithm: str,
) -> list[str]:
    has_teacher = teacher.source == "saved" or settings.teacher_divergence != "off"
    if not (demonstrations or has_teacher or any(one.is_saved for one in prompts)):
        return []
    from lockstep.trainer.checks.conversations import demonstration_problems, saved_prompt_problems

    problems = [*demonstration_problems(settings, teacher, demonstrations)]
    return [*problems, *saved_prompt_problems(prompts, algorithm)]
