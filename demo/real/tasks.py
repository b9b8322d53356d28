"""The rows of the real tasks, from reasoning-gym (https://github.com/open-thought/reasoning-gym, Apache-2.0).

A row is a chat: worked examples as earlier turns, then the question. The examples show the form of an answer, so that
a small model is right some of the time before training. Held-out questions occur in no training row: the hash of a
question decides which of the two it is, as in the demo.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.rollout.environments.demo.calculator import evaluate
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.data.gym_rows import MAX_ROUNDS, questions
from lockstep.trainer.data.split import is_heldout

DEFAULT = "names"
Row = dict[str, Any]
Message = dict[str, Any]

TRAIN_ROWS, HELDOUT_ROWS = 2048, 256
DRAWS = 5000
"""Questions drawn at a time."""
_EXPRESSION = re.compile(r"-?\d+(?: [-+*] -?\d+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealTask:
    """A data set of reasoning-gym with its settings, and the examples in front of each question."""

    name: str
    generator: str
    """Name of the data set in reasoning-gym."""
    settings: Mapping[str, Any]
    """Its settings: the difficulty."""
    shots: int
    """Number of worked examples in front of a question, with different answers: a small model repeats what it sees."""
    play: Callable[[str, str], list[Message]] | None = None
    """Turns of an example after its question, from question and answer; None: the answer alone."""
    left_out: frozenset[str] = frozenset()
    """Answers that the data set gives to questions whose right answer is another: these questions are left out."""


def make_data(task: str, folder: Path, *, seed: int = 0) -> bool:
    """Write `train.jsonl` and `heldout.jsonl` to a folder. Return False if they are there already.

    Raises `ConfigError`: reasoning-gym is missing, or the files cannot be written.
    """
    paths = {name: folder / name for name in ("train.jsonl", "heldout.jsonl")}
    recipe = folder / "recipe.json"
    text = json.dumps(_recipe(TASKS[task], seed), indent=2) + "\n"
    if recipe.is_file() and recipe.read_text(encoding="utf-8") == text and all(map(Path.is_file, paths.values())):
        return False
    files = make_rows(TASKS[task], seed=seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recipe.unlink(missing_ok=True)
        for name, rows in files.items():
            _write_atomically(paths[name], "".join(json.dumps(row) + "\n" for row in rows))
        _write_atomically(recipe, text)  # last: files without it are written again
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    return True


def make_rows(
    task: RealTask, *, seed: int, train: int = TRAIN_ROWS, heldout: int = HELDOUT_ROWS
) -> dict[str, list[Row]]:
    """Return the rows of a task by file name: no question occurs twice, neither in one file nor in both.

    Raises `ConfigError`: reasoning-gym is missing, or the task has too few questions.
    """
    counts = {"train.jsonl": train, "heldout.jsonl": heldout}
    files: dict[str, list[Row]] = {name: [] for name in counts}
    examples: dict[str, tuple[str, list[Message]]] = {}
    """Question and turns of each example by its answer; the examples of all rows."""
    for question, answer in _questions(task, seed):
        if len(examples) == task.shots:
            break
        turns = [{"role": "user", "content": question}, *(task.play or _say)(question, answer)]
        examples.setdefault(answer, (question, turns))
    example_questions = {question for question, _ in examples.values()}
    prefix = [message for _, turns in examples.values() for message in turns]
    for question, answer in _questions(task, seed):
        if question in example_questions:
            continue
        name = "heldout.jsonl" if is_heldout(question) else "train.jsonl"
        if len(files[name]) < counts[name]:
            files[name].append({"messages": [*prefix, {"role": "user", "content": question}], "answer": answer})
        if all(len(files[name]) == count for name, count in counts.items()):
            return files
    summary = ", ".join(f"{len(rows)} of {counts[name]} rows for {name}" for name, rows in files.items())
    raise ConfigError(f"task {task.name} has too few different questions: {summary} in {MAX_ROUNDS * DRAWS} draws")


def _questions(task: RealTask, seed: int) -> Iterator[tuple[str, str]]:
    """Yield questions with their answers, no question twice."""
    for entry in questions(task.generator, task.settings, seed=seed, size=DRAWS):
        if entry["answer"] not in task.left_out:
            yield str(entry["question"]), str(entry["answer"])


def _say(question: str, answer: str) -> list[Message]:
    return [{"role": "assistant", "content": answer}]


def _calculate(question: str, answer: str) -> list[Message]:
    """Return a call of the calculator with the expression of the question, its result, and the answer."""
    (expression,) = _EXPRESSION.findall(question)
    result = str(evaluate(expression))
    if result != answer:
        raise ValueError(f"{question!r}: the calculator says {result}, reasoning-gym {answer}")
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "name": "calculator", "tool_call_id": "1", "content": result},
        {"role": "assistant", "content": answer},
    ]


def _recipe(task: RealTask, seed: int) -> dict[str, Any]:
    """Return everything that determines the rows, except the code."""
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            "the package reasoning-gym is missing, which makes the rows; run: pip install 'lockstep-rl[real]'"
        ) from error
    fields = {name: getattr(task, name) for name in ("generator", "settings", "shots")}
    left_out = {"left_out": sorted(task.left_out)} if task.left_out else {}
    return {**fields, **left_out, "seed": seed, "rows": [TRAIN_ROWS, HELDOUT_ROWS], "reasoning_gym": version}


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


TASKS: dict[str, RealTask] = {
    task.name: task
    for task in (
        RealTask(
            name="names",
            generator="needle_haystack",
            settings={"min_num_statements": 3, "max_num_statements": 5},
            shots=2,
        ),
        RealTask(name="words", generator="word_sequence_reversal", settings={"min_words": 3, "max_words": 3}, shots=4),
        RealTask(
            name="family",
            generator="family_relationships",
            settings={"min_family_size": 3, "max_family_size": 4},
            shots=5,  # one for each answer
            # Asked what a daughter-in-law is to a parent of her husband, it answers what the parent is to her.
            left_out=frozenset({"mother-in-law", "father-in-law"}),
        ),
        RealTask(
            name="calculator",
            generator="products",
            settings={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3},
            shots=3,
            play=_calculate,
        ),
    )
}
