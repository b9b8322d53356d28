"""Code that a run executes with the rights of the user: Python files that the configuration names, and programs of the
model that it does not isolate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.schema import Config

SPEC = re.compile(r"\S.*\.py:\w+")
"""path/to/file.py:name, or several names separated by commas."""


def code_of_files(config: Config) -> list[str]:
    """Return the `path/to/file.py:name` of reward functions, environments, tools and agents, in order of settings."""
    named = [*config.reward.functions, config.environment.name, *_texts(config.environment.settings)]
    return list(dict.fromkeys(text for text in named if SPEC.match(text)))


def runs_unisolated(config: Config) -> bool:
    """Return True if programs of the model run without isolation (`reward.settings.code_tests.unsafe=true`)."""
    settings = config.reward.settings.get("code_tests")
    return "code_tests" in config.reward.functions and isinstance(settings, Mapping) and settings.get("unsafe") is True


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
