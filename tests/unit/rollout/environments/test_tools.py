"""Tools from functions and files."""

from __future__ import annotations

from lockstep.rollout.environments.demo.calculator import calculator
from lockstep.rollout.environments.tools import ToolEnvironment
from tests.fixtures.turns import use


async def test_tools_come_from_functions_and_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text('def now() -> str:\n    """The time."""\n    return "noon"\n')
    environment = ToolEnvironment([calculator], files=[f"{file}:now"])
    assert [tool["function"]["name"] for tool in environment.tools] == ["calculator", "now"]
    await environment.reset({"question": "q"})
    assert (await environment.step(use("now"))).messages[0]["content"] == "noon"


async def test_an_environment_without_tools_says_how_to_get_some():
    assert "has no tools; set 'environment.settings.files=[" in str(await ToolEnvironment().problem())
    assert await ToolEnvironment([calculator]).problem() is None
