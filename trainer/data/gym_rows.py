"""Rows of `data.path=reasoning_gym:<task>`, drawn when the run starts, without a file.

They are drawn in a process with a fixed seed of Python's hashes: the entries of some tasks depend on the order of a
set, and would otherwise differ between ranks, and between a run and its continuation. No question occurs twice. The
hash of a question decides between training and held-out rows, so the two have no question in common, whatever the
seeds.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.rewards.functions import GYM_COLUMN, GYM_PREFIX
from lockstep.rewards.functions.reasoning_gym import make_task, write_entry
from lockstep.rollout.errors import ConfigError, DataError, error_named
from lockstep.trainer.data.split import is_heldout

SIZE, SEED = 1000, 0
"""Defaults of `size`, the questions of both splits together, and `seed`."""
MAX_ROUNDS = 20
"""Data sets drawn before a task counts as too small."""
SPLITS = ("train", "test")


def check_task(path: str, parameters: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the path names no task, or the task does not take these parameters."""
    own, size, seed = _parsed(parameters)
    make_task(path.removeprefix(GYM_PREFIX), own, seed=seed, size=size)


def gym_rows(path: str, split: str, parameters: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return rows with question, answer (of tasks with a single one) and reasoning_gym.

    split: train, or test for the held-out questions. parameters: of the task, and size and seed.
    Raises `ConfigError`: as `check_task`, for another split, or for a task with too few questions.
    """
    if split not in SPLITS:
        raise ConfigError(
            f"{path} has the splits train and test, found {split!r}; set data.split=train data.heldout_split=test"
        )
    check_task(path, parameters)
    rows = _draw_rows(path.removeprefix(GYM_PREFIX), json.dumps(dict(parameters), sort_keys=True))
    split_rows = [row for row in rows if is_heldout(row["question"]) == (split == "test")]
    if not split_rows:
        raise DataError(f"{path} has no {split} rows among {len(rows)}; raise data.parameters.size")
    return split_rows


def questions(task: str, parameters: Mapping[str, Any], *, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the entries with different questions, from up to `MAX_ROUNDS` data sets of this size with other seeds.

    The entries of one data set are not cut: some tasks mix kinds of questions in proportion to their size.
    Raises `ConfigError` as `make_task`.
    """
    seen_questions: set[str] = set()
    for round_number in range(MAX_ROUNDS):
        # Entry k of a data set depends on its seed + k: data sets of neighboring seeds would share their entries.
        data = make_task(task, parameters, seed=(seed * MAX_ROUNDS + round_number) * size, size=size)
        for index in range(size):
            entry = data[index]
            if entry["question"] not in seen_questions:
                seen_questions.add(entry["question"])
                yield entry


@functools.lru_cache(maxsize=8)
def _draw_rows(task: str, parameters: str) -> list[dict[str, str]]:
    """Draw the rows of both splits, once per process."""
    child = subprocess.run(
        [sys.executable, "-P", "-m", "lockstep.trainer.data.gym_rows", task, parameters],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
    )
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = child.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {child.returncode}"]
        raise DataError(f"{GYM_PREFIX}{task}: the rows could not be drawn: {lines[-1]}") from None
    if "error" in answer:
        raise error_named(*answer["error"]) or DataError(answer["error"][1])
    return answer["rows"]


def _draw(task: str, parameters: Mapping[str, Any]) -> list[dict[str, str]]:
    own, size, seed = _parsed(parameters)
    rows = []
    for entry in questions(task, own, seed=seed, size=size):
        row = {"question": entry["question"], GYM_COLUMN: write_entry(entry, task, own)}
        rows.append(row if entry["answer"] is None else {**row, "answer": str(entry["answer"])})
        if len(rows) == size:
            return rows
    raise ConfigError(
        f"{GYM_PREFIX}{task} has too few different questions: {len(rows)} of {size} in {size * MAX_ROUNDS} draws; "
        f"set data.parameters.size={len(rows)}, or parameters with more of them"
    )


def _parsed(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Return parameters of the task itself, size and seed. Raises `ConfigError`."""
    own = dict(parameters)
    size, seed = own.pop("size", SIZE), own.pop("seed", SEED)
    for name, value, low in (("size", size, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"data.parameters.{name}={value!r} must be a whole number from {low} on")
    return own, size, seed


def main() -> None:
    """Print the rows of a task as a line of JSON, or the error. Arguments: the task, its parameters as JSON."""
    task, parameters = sys.argv[1:]
    try:
        answer: dict[str, Any] = {"rows": _draw(task, json.loads(parameters))}
    except (ConfigError, DataError) as error:
        answer = {"error": [type(error).__name__, str(error)]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
