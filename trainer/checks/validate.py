"""Settings that contradict each other, files that are not there: found in milliseconds, with the override that helps.

Nothing heavy is imported here. Every problem is one sentence; all of them are reported at once.

    validate_numbers.py      values that are right nowhere: numbers out of their bounds, words that are no choice
    validate_algorithm.py    settings that do not go together
    validate_correction.py   the rollout correction
    validate_engines.py      where engines are, and how they are reached
    validate_launch.py       settings that the launcher or the installation rules out
    validate_asynchrony.py   rollouts made ahead
    validate_names.py        models, directories, reward functions, environments
    validate_data.py         data sets, their files and first rows, evaluation
    validate_unused.py       settings of training that nothing would act on
"""

from __future__ import annotations

from rollout.errors import ConfigError
from trainer.checks.algorithm import algorithm_problems
from trainer.checks.bounds import choice_problems, number_problems
from trainer.checks.correction import correction_problems
from trainer.checks.data import data_file_problems, data_problems, evaluation_problems, first_row_problems
from trainer.checks.engines import engine_problems
from trainer.checks.names import (
    environment_problems,
    model_problems,
    reward_model_problems,
    reward_name_problems,
    reward_problems,
    run_problems,
)
from trainer.checks.staleness import asynchrony_problems
from trainer.checks.unused import unused_problems
from trainer.config.launcher import launch_problems
from trainer.config.schema import Config


def validate(config: Config, *, needs_data: bool = True, trains: bool = True) -> None:
    """Raise `ConfigError` with one line per problem, or return.

    needs_data: whether the data files must be there. trains: whether training data is among them.
    """
    problems = [*choice_problems(config), *number_problems(config), *reward_problems(config)]
    problems += reward_name_problems(config)
    problems += [*algorithm_problems(config), *correction_problems(config), *asynchrony_problems(config)]
    problems += [*engine_problems(config), *launch_problems(config)]
    problems += [*model_problems(config), *data_problems(config), *evaluation_problems(config)]
    if needs_data and trains:
        problems += unused_problems(config)
    if needs_data:
        problems += [*data_file_problems(config, trains=trains), *reward_model_problems(config), *run_problems(config)]
    if not problems:  # asked last, because an environment may load the user's files
        problems += environment_problems(config)
    if not problems and needs_data:
        problems += first_row_problems(config, trains=trains)
    if problems:
        raise ConfigError("\n".join(problems))
