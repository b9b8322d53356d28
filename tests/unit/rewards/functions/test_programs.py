"""Programs of a model, judged by the tests of the data row."""

from __future__ import annotations

import pytest

import lockstep.rewards.functions.programs
from lockstep.rewards.functions.programs import code_tests, last_program
from lockstep.rollout.errors import DataError
from lockstep.rollout.sandbox.execution import Ended, Execution
from tests.unit.rewards.workers.test_pool import rollout

ANSWER = "Here it is:\n```python\ndef f(n):\n    return n * n\n```\nDone."
PASSED = Execution(ended=Ended.EXITED, status=0, stdout="4\n", stderr="")


def judged(answer: str, tests: object, **settings: object) -> float:
    return code_tests(rollout(answer, tests=tests), **settings)  # type: ignore[arg-type]


def test_programs_are_judged_by_their_tests():
    assert judged(ANSWER, ["assert f(2) == 4", "assert f(3) == 9"]) == 1.0
    assert judged(ANSWER, ["assert f(2) == 4", "assert f(3) == 8"]) == 0.0
    assert judged(ANSWER, ["assert f(2) == 4", "assert f(3) == 8"], partial=True) == 0.5
    assert judged("no program", ["assert True"]) == 0.0
    assert judged("```python\nsyntax error here\n```", ["assert True"]) == 0.0
    doubler = "```\nprint(2 * int(input()))\n```"
    assert judged(doubler, '[{"input": "4\\n", "output": "8"}, {"input": "1", "output": "2 \\n"}]') == 1.0
    assert judged(doubler, [{"input": "4", "output": "9"}]) == 0.0


@pytest.mark.parametrize("cheat", ["import os\nos._exit(0)", "import sys\nsys.exit(0)", "exit()", "while True: pass"])
def test_a_program_that_ends_before_its_tests_does_not_pass(cheat):
    assert judged(f"```python\n{cheat}\n```", ["assert False"], timeout_s=2.0) == 0.0


def test_malformed_tests_are_errors_not_zeros():
    for tests in ([], 7, [1], [{"input": ""}]):
        with pytest.raises(DataError, match="'tests'"):
            judged(ANSWER, tests)
    with pytest.raises(DataError, match="'tests'"):
        code_tests(rollout(ANSWER))


def test_the_last_block_is_the_program():
    assert last_program("```python\na\n``` and ```py\nb\n```") == "b\n"
    assert last_program("a = 1") is None


def test_output_is_read_as_far_as_the_expected_output_needs():
    lines = "\n".join(map(str, range(20_000)))
    assert len(lines) > 64 * 2**10
    prints = "```python\nprint(*range(20_000), sep='{}')\n```"
    assert judged(prints.format("\\n"), [{"input": "", "output": lines}]) == 1.0
    assert judged(prints.format("\\r\\n"), [{"input": "", "output": lines}]) == 1.0
    assert judged(prints.format(" "), [{"input": "", "output": lines}]) == 0.0


@pytest.mark.parametrize("sep", ["", "\\n"], ids=["one_line", "empty_lines"])
def test_a_program_whose_output_was_cut_does_not_pass(sep):
    """The part that was kept would pass: only space follows, or a second copy of the word."""
    floods = f"```python\nprint('x' * 65536)\nprint(' {sep}' * 10_000_000)\n```"
    assert judged(floods, [{"input": "", "output": "x" * 65536}]) == 0.0


def test_programs_run_without_isolation_only_if_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(
        lockstep.rewards.functions.programs, "run_python", lambda *_, unsafe, **__: asked.append(unsafe) or PASSED
    )
    for settings in ({}, {"unsafe": True}):
        assert judged(ANSWER, [{"input": "", "output": "4"}], **settings) == 1.0
    assert asked == [False, True]
