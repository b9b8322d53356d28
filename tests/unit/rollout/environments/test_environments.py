"""Environments by name: settings are checked when they are made."""

from __future__ import annotations

import pytest

from lockstep.rollout.environments import environment_names, make_environment
from lockstep.rollout.environments.mixed import environment_of
from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.errors import ConfigError

NEEDED = {
    "mixed": {"environments": {"calculator": {}}},
    "search": {"url": "http://127.0.0.1:8000/retrieve"},
    "agent": {"agent": print},
    "trl": {"factory": dict},
    "openenv": {"url": "http://127.0.0.1:8000"},
    "mcp": {"servers": {"search": {"url": "http://127.0.0.1:8000/mcp"}}},
    "trl_rollout": {"rollout_func": print},
}


def test_every_environment_can_be_made_by_its_name():
    for name in environment_names():
        if name in ("verifiers", "textarena"):  # may not be installed
            continue
        environment = environment_of(make_environment(name, **NEEDED.get(name, {})), {"environment": "calculator"})
        assert isinstance(environment, RunsItself) or environment.tools is not None


def test_an_unknown_name_or_setting_is_a_config_error():
    with pytest.raises(ConfigError, match=r"expected one of .*calculator"):
        make_environment("calculater")
    with pytest.raises(ConfigError, match="turns_per_day"):
        make_environment("calculator", turns_per_day=3)
    with pytest.raises(ConfigError, match="tool_timeout"):
        make_environment("mixed", environments={"calculator": {"tool_timeout": 3}})
