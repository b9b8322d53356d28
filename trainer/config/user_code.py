"""Python files of the user that a configuration names, and that a run therefore executes."""

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


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
