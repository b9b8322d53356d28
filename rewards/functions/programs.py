"""Tests of programs that a model wrote, run in the sandbox (`rollout/sandbox/sandbox.py`)."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.rewards.functions.answers import reference
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.sandbox.execution import Ended, Execution, Limits
from lockstep.rollout.sandbox.sandbox import run_python

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code_tests(
    rollout: Rollout,
    *,
    column: str = "tests",
    partial: bool = False,
    timeout_s: float = 5.0,
    memory_mib: int = 512,
    max_tests: int = 20,
    unsafe: bool = False,
) -> float:
    """Return 1 if the answer's last code block passes all tests of the data row; with `partial` the share it passes.

    Tests are a list, or its JSON: of Python statements that run after the program (`assert f(2) == 4`), or of
    {"input": ..., "output": ...}: standard input and expected output, compared up to space at the ends of lines. A
    single text of statements is one test. Each test is a new process with its own `timeout_s`; together they have
    `reward.timeout_s`. An answer without a program gets 0. A program that prints 64 KiB more than twice the expected
    output does not pass.

    unsafe: run the programs without isolation, with the rights of the trainer; for systems without namespaces.

    Statements share a process with the program, which can be written to cheat (an object that equals everything,
    reading the word of `_passes` from its standard input). Tests by input and output cannot be cheated from inside.

    Raises:
        ConfigError: `unsafe` as root.
        SandboxError: the system did not isolate the program.
        DataError: the tests are malformed.
    """
    if not isinstance(unsafe, bool):  # the text "false" would count as true
        raise ConfigError(f"code_tests: unsafe={unsafe!r} must be true or false")
    if max_tests < 1:
        raise ConfigError(f"code_tests: max_tests={max_tests} must be at least 1")
    tests = _tests(reference(rollout, column), column)[:max_tests]
    limits = Limits(timeout_s=timeout_s, memory_mib=memory_mib)
    program = last_program(rollout.answer)
    if program is None:
        return 0.0
    num_passed = 0
    for test in tests:
        ok = _passes(program, test, limits, unsafe)
        if not ok and not partial:
            return 0.0
        num_passed += ok
    return num_passed / len(tests)


def last_program(answer: str) -> str | None:
    """Return the last fenced block of an answer; None without one."""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else None


def _passes(program: str, test: str | Mapping[str, Any], limits: Limits, unsafe: bool) -> bool:
    if isinstance(test, str):
        # The tests end by printing this word, so that a program that exits with status 0 before them does not pass.
        word = secrets.token_hex(16)
        source = f"{program}\n\n{test}\n\nprint('\\n' + input())\n"
        result = run_python(source, stdin=word, limits=limits, unsafe=unsafe)
        return _succeeded(result) and _lines(result.stdout)[-1:] == [word]
    expected = str(test["output"])
    room = limits.output_bytes + 2 * len(expected.encode(errors="replace"))  # also for space at the ends of lines
    limits = dataclasses.replace(limits, output_bytes=room)
    result = run_python(program, stdin=str(test["input"]), limits=limits, unsafe=unsafe)
    return _succeeded(result) and _lines(result.stdout) == _lines(expected)


def _succeeded(result: Execution) -> bool:
    return result.ended is Ended.EXITED and result.status == 0 and not result.is_cut


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _tests(value: Any, column: str) -> list[str | Mapping[str, Any]]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]  # statements that begin with a list
    tests = [value] if isinstance(value, str | Mapping) else value
    is_well_formed = isinstance(tests, Sequence) and all(
        isinstance(test, str) or (isinstance(test, Mapping) and {"input", "output"} <= test.keys()) for test in tests
    )
    if not is_well_formed or not tests:
        raise DataError(
            f"code_tests: column {column!r} holds a {type(value).__name__}; expected a list of statements or of "
            '{"input", "output"}'
        )
    return list(tests)
