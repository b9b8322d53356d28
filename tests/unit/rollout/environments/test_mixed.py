"""Several environments in one run, chosen by the row."""

from __future__ import annotations

import pytest

from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.demo.calculator import CalculatorEnvironment
from lockstep.rollout.environments.mixed import environment_of
from lockstep.rollout.environments.single_turn import SingleTurn
from lockstep.rollout.errors import ConfigError, DataError


async def test_a_row_names_its_environment_and_all_share_settings():
    mixed = make_environment(
        "mixed",
        environments={"calculator": {"system_prompt": "be exact"}, "single_turn": {}},
        default="single_turn",
        system_prompt="be brief",
    )
    calculator = environment_of(mixed, {"question": "q", "environment": "calculator"})
    assert isinstance(calculator, CalculatorEnvironment)
    assert (await calculator.reset({"question": "q"}))[0] == {"role": "system", "content": "be exact"}
    default = environment_of(mixed, {"question": "q"})
    assert isinstance(default, SingleTurn)
    assert (await default.reset({"question": "q"}))[0] == {"role": "system", "content": "be brief"}


def test_a_part_can_be_mixed_itself():
    inner = {"environments": {"calculator": {}}, "column": "tool"}
    mixed = make_environment("mixed", environments={"mixed": inner}, default="mixed")
    assert isinstance(environment_of(mixed, {"question": "q", "tool": "calculator"}), CalculatorEnvironment)


def test_a_row_or_a_default_with_an_unknown_name_is_refused():
    mixed = make_environment("mixed", environments={"calculator": {}})
    with pytest.raises(DataError, match="'chess'"):
        environment_of(mixed, {"question": "q", "environment": "chess"})
    with pytest.raises(DataError, match="None"):
        environment_of(mixed, {"question": "q"})
    with pytest.raises(ConfigError, match="default"):
        make_environment("mixed", environments={"calculator": {}}, default="chess")
