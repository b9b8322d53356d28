"""Code, addresses and environment variables that a configuration names, and that a run therefore uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from trainer.config.schema import Config

PACKAGED = ("verifiers",)
"""Environments that import an installed package named in their settings."""


def code_of_files(config: Config) -> list[str]:
    """Return the `path/to/file.py:name` of reward functions, environments, tools and agents, in order of settings."""
    named = [*config.reward.functions, config.environment.name, *_texts(config.environment.settings)]
    return list(dict.fromkeys(text for text in named if _is_code(text)))


def outside_of(config: Config) -> list[str]:
    """Return all that sampling with these settings uses outside of models and data: code, addresses, variables."""
    texts = dict(_named_texts("", asdict(config)))
    found = [text for text in texts.values() if _is_code(text) or "://" in text]
    found += [f"the environment variable {text}" for name, text in texts.items() if name.endswith("_env")]
    if config.environment.name in PACKAGED:
        found.append(f"the package of environment.name={config.environment.name}")
    return list(dict.fromkeys([*code_of_files(config), *found]))


def _is_code(text: str) -> bool:
    """True for `path/to/file.py:name`, or several names separated by commas."""
    return text.rpartition(":")[0].endswith(".py")


def runs_unisolated(config: Config) -> bool:
    """Return True if programs of the model run without isolation (`reward.settings.code_tests.unsafe=true`)."""
    settings = config.reward.settings.get("code_tests")
    return "code_tests" in config.reward.functions and isinstance(settings, Mapping) and settings.get("unsafe") is True


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
