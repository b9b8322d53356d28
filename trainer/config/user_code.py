"""Code, programs, addresses and environment variables that a configuration names, and that a run therefore uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from lockstep.rollout.environments import declared_parts
from lockstep.rollout.sandbox import ENVIRONMENT_SETTING, REWARD_SETTING
from lockstep.rollout.system.user_functions import file_sha256, names_function
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig, RewardConfig
from lockstep.trainer.config.schema import Config


def code_of_files(environment: EnvironmentConfig, reward: RewardConfig, algorithm: AlgorithmConfig) -> list[str]:
    """Return the `path/to/file.py:name` of reward functions, environments, tools, agents, losses and advantages."""
    environments = [name for name, *_ in declared_parts(environment.name, environment.settings)]
    texts = [*reward.functions, *environments, *_texts(environment.settings)]
    return list(dict.fromkeys([*filter(names_function, texts), *code_of_objective(algorithm)]))


def code_of_objective(algorithm: AlgorithmConfig) -> list[str]:
    """Return the `path/to/file.py:name` of loss and advantage."""
    return list(filter(names_function, (algorithm.loss, algorithm.advantage)))


def outside_of_update(demonstrations: Mapping[str, DataSetConfig], algorithm: AlgorithmConfig) -> list[str]:
    """Return all that a replay that trains uses outside of models and local data: code, and data at addresses."""
    data = {"demonstrations": [asdict(one) for one in demonstrations.values()]}
    addresses = (text for text in _texts(data) if "://" in text)
    return list(dict.fromkeys([*code_of_objective(algorithm), *addresses]))


def hashes(algorithm: AlgorithmConfig) -> dict[str, str]:
    """Return the SHA-256 of the file of each loss or advantage that is a user's, by the setting that records it."""
    names = {kind: getattr(algorithm, kind) for kind in ("loss", "advantage")}
    return {f"{kind}_sha256": file_sha256(spec) for kind, spec in names.items() if names_function(spec)}


def outside_of(config: Config) -> list[str]:
    """Return all that sampling with these settings uses outside of models and data, a text for each."""
    texts = dict(_named_texts("", asdict(config)))
    uses = [text for text in texts.values() if names_function(text) or "://" in text]
    uses += [f"the environment variable {text}" for name, text in texts.items() if name.endswith("_env")]
    for name, settings, part in declared_parts(config.environment.name, config.environment.settings):
        if part.opens:  # whole: a key of another name may start a program in the next version of a package
            settings_json = json.dumps(settings, default=str)
            uses.append(f"{part.opens}, of environment {name} with the settings {settings_json}")
    return list(dict.fromkeys([*code_of_files(config.environment, config.reward, config.algorithm), *uses]))


def runs_unisolated(reward: RewardConfig) -> bool:
    """Return True if programs of the model run without isolation (`reward.settings.code_tests.unsafe=true`)."""
    settings = reward.settings.get("code_tests")
    return "code_tests" in reward.functions and isinstance(settings, Mapping) and settings.get("unsafe") is True


def unisolated_settings(environment: EnvironmentConfig, reward: RewardConfig) -> list[str]:
    """Return the settings by which programs of the model run without isolation."""
    parts = declared_parts(environment.name, environment.settings)
    unsafe = any(part.runs_programs and settings.get("unsafe") is True for _, settings, part in parts)
    return [REWARD_SETTING] * runs_unisolated(reward) + [ENVIRONMENT_SETTING] * unsafe


def _texts(value: Any) -> Iterator[str]:
    return (text for _, text in _named_texts("", value))


def _named_texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the value of each text at any depth."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_texts(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _named_texts(f"{name}.{index}", item)
