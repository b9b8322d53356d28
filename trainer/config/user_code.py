"""Which Python files of the user a configuration names: they are run, which is what naming them means, and said so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.schema import Config

SPEC = re.compile(r"\S.*\.py:\w+")
"""path/to/file.py:name, or several names with commas."""


def code_of_files(config: Config) -> list[str]:
    """The `path/to/file.py:name` of reward functions, environments, tools and agents, in the order of the settings."""
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
