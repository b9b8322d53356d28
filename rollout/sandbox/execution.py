"""A program for a sandbox, its limits and its result; and the interface of sandboxes that live for an episode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.replies import read_json

MOST = 10**6
"""Largest value of a limit, in its unit: beyond any machine, and far from an overflow in the kernel's types."""


class Language(StrEnum):
    """Interpreter of a program."""

    PYTHON = "python"
    SHELL = "shell"


class Ended(StrEnum):
    """End of a program."""

    EXITED = "exited"
    """The program ended by itself, with any status."""
    TIMEOUT = "timeout"
    """The program was killed at the wall-clock limit."""
    KILLED = "killed"
    """A signal ended the program: a fault of its own, or the CPU limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program and its children."""

    timeout_s: float = 5.0
    """Wall-clock time; the limit on CPU time is one second more."""
    memory_mib: int = 512
    file_mib: int = 16
    """Size of one written file."""
    disk_mib: int = 64
    """Size of all files together, in memory. In namespaces only."""
    processes: int = 16
    """Number of processes and threads. In namespaces only."""
    open_files: int = 64
    output_bytes: int = 64 * 2**10
    """Bytes of each output to keep; the rest is discarded."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, is_time = getattr(self, field.name), field.name == "timeout_s"
            fits = isinstance(value, (int, float) if is_time else int) and not isinstance(value, bool)
            most = MOST * 2**10 if field.name == "output_bytes" else MOST
            if not fits or not 0 < value <= most:  # also refuses NaN
                kind = "number" if is_time else "integer"
                raise ConfigError(
                    f"sandbox: {field.name}={value!r} must be {'a' if is_time else 'an'} {kind} above 0 and at most "
                    f"{most}"
                )

    @property
    def cpu_s(self) -> int:
        return math.floor(self.timeout_s) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Result of a program."""

    ended: Ended
    status: int
    """Exit status, or minus the number of the signal."""
    stdout: str
    stderr: str
    is_cut: bool = False
    """True if the program printed more on its standard output than was kept."""
    is_stderr_cut: bool = False


def read_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object that the other side of a sandbox sent. Raises `ValueError` if it is not one."""
    try:
        value = read_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {text[:200]!r}")
    return value


def read_execution(answer: Mapping[str, Any]) -> Execution:
    """Return the result that the other side of a sandbox reported. Raises `ValueError` if it is not one."""
    types = {"ended": str, "status": int, "stdout": str, "stderr": str, "is_cut": bool, "is_stderr_cut": bool}
    if answer.keys() != types.keys() or any(type(answer[name]) is not kind for name, kind in types.items()):
        raise ValueError(f"found {dict(answer)!s:.200}, expected a result with {', '.join(types)}")
    return Execution(**{**answer, "ended": Ended(answer["ended"])})


class Sandbox(Protocol):
    """A sandbox that runs programs one after another, and keeps their files until it is closed."""

    async def run(self, language: Language, text: str, *, timeout_s: float) -> Execution:
        """Run a program; no process of it is left. Raises `SandboxError` if the sandbox cannot be used any more."""
        ...

    async def close(self) -> None:
        """End everything inside and remove its files. Idempotent; ends a program that runs. Never raises."""
        ...
