"""The demo tasks: what is asked, which tools there are, and how a good and a clumsy player behave.

A player is a generator: it yields the text of its next turn, as a model would sample it, and is sent what the
environment answered. Demonstrations are played against the real environment (`demo/play.py`),
so they hold exactly what rollouts will.

Noise makes the warm-started model middling. Its rates are chosen so that the greedy policy is wrong (a guess is the
most likely first move) while sampling is sometimes right: reinforcement learning then has something to find.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.environments.calculator import evaluate

Row = dict[str, Any]
Player = Generator[str, str, None]

# One prompt in eight is held out, by its hash: a split that does not depend on seed, order or amount of data.
HELDOUT_ONE_IN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTask:
    """One task: its rows and its players."""

    name: str
    """Also its key in `rollout.environments.ENVIRONMENTS`."""
    max_turns: int
    """Assistant turns an episode needs at most."""
    draw: Callable[[random.Random], Row]
    """A row of the distribution that is trained on: question, answer, and what the environment needs."""
    draw_harder: Callable[[random.Random], Row] | None
    """A row beyond it, for evaluation of generalisation only."""
    play: Callable[[Row, random.Random, bool], Player]
    """Turns for a row; the last argument asks for noise."""


def is_heldout(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % HELDOUT_ONE_IN == 0


def draw_unique(draw: Callable[[random.Random], Row], rng: random.Random, count: int, *, heldout: bool) -> list[Row]:
    """`count` different rows, all from the asked side of the split. (Chains that start alike differ in their links.)"""
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = draw(rng)
        if is_heldout(row["question"]) == heldout:
            rows.setdefault(json.dumps(row), row)
    return list(rows.values())


def answer_text(answer: str) -> str:
    """The sentence that the demo reward asks for."""
    return f"The answer is {answer}"


def tool_call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as Qwen3's template writes it, so that a rendered message equals a sampled one."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _broken(call: str) -> str:
    """Without the brackets that close it: the commonest way in which a small model breaks JSON."""
    return call.replace('"}}', '"')


def _other_digit(text: str, rng: random.Random) -> str:
    """`text` with one of its digits replaced by another one."""
    position = rng.choice([index for index, char in enumerate(text) if char.isdigit()])
    digit = rng.choice([digit for digit in "0123456789" if digit != text[position]])
    return text[:position] + digit + text[position + 1 :]


def _draw_calculator(rng: random.Random) -> Row:
    a, b, c = (rng.randint(10, 99) for _ in range(3))
    expression = f"{a}{rng.choice('+-*')}{b}{rng.choice('+-*')}{c}"
    return {"question": f"compute {expression}", "answer": str(evaluate(expression))}


def _play_calculator(row: Row, rng: random.Random, noisy: bool) -> Player:
    expression = row["question"].removeprefix("compute ")
    if noisy and rng.random() < 0.55:
        yield answer_text(str(rng.randint(10, 9999)))
        return
    asked = expression
    if noisy and rng.random() < 0.04:
        asked = _other_digit(asked, rng)
    if noisy and rng.random() < 0.04:
        operator = asked[2]
        asked = asked[:2] + rng.choice([other for other in "+-*" if other != operator]) + asked[3:]
    call = tool_call_text("calculator", {"expression": asked})
    if noisy and rng.random() < 0.04:
        yield _broken(call)
    result = yield call
    if noisy and rng.random() < 0.12:
        result = expression[:2]
    elif noisy and rng.random() < 0.05:
        result = _other_digit(result, rng)
    yield answer_text(result)


def _draw_chain(rng: random.Random, hops: tuple[int, ...] = (1, 2)) -> Row:
    length = rng.choice(hops)
    keys: list[str] = []
    while len(keys) < length:
        key = f"{rng.choice('abcdefghijklmnopqrstuvwxyz')}{rng.randint(10, 99)}"
        if key not in keys:
            keys.append(key)
    answer = str(rng.randint(100, 999))
    says = [f"go {key}" for key in keys[1:]] + [f"value {answer}"]
    links = [{"key": key, "value": value} for key, value in zip(keys, says, strict=True)]
    return {"question": f"find {keys[0]}", "answer": answer, "hops": length, "links": links}


def _draw_long_chain(rng: random.Random) -> Row:
    return _draw_chain(rng, hops=(3, 4))


def _play_chain(row: Row, rng: random.Random, noisy: bool) -> Player:
    key = row["question"].removeprefix("find ")
    guess_rate = 0.55
    while not (noisy and rng.random() < guess_rate):
        guess_rate = 0.25  # once it has begun to look things up, a player is more patient
        call = tool_call_text("lookup", {"key": _other_digit(key, rng) if noisy and rng.random() < 0.04 else key})
        if noisy and rng.random() < 0.04:
            yield _broken(call)
        said = yield call
        kind, _, target = said.partition(" ")
        if kind == "value":
            yield answer_text(_other_digit(target, rng) if noisy and rng.random() < 0.1 else target)
            return
        if kind == "go":
            key = target
    yield answer_text(str(rng.randint(100, 999)))


def _draw_reverse(rng: random.Random) -> Row:
    digits = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 6))]
    return {"question": f"reverse {' '.join(digits)}", "answer": " ".join(reversed(digits))}


def _play_reverse(row: Row, rng: random.Random, noisy: bool) -> Player:
    digits = row["answer"].split()
    # The choice shows in the first token. Copying inside the sentence would not: the model then mixes both, digit by
    # digit, and is right one time in twenty (measured) instead of one in four.
    if noisy and rng.random() < 0.6:
        yield row["question"].removeprefix("reverse ")
        return
    if noisy and rng.random() < 0.1:
        digits.pop(rng.randrange(len(digits)))
    if noisy and rng.random() < 0.1:
        digits[rng.randrange(len(digits))] = str(rng.randint(0, 9))
    yield answer_text(" ".join(digits))


TASKS: dict[str, DemoTask] = {
    task.name: task
    for task in (
        DemoTask(name="calculator", max_turns=3, draw=_draw_calculator, draw_harder=None, play=_play_calculator),
        DemoTask(name="chain", max_turns=6, draw=_draw_chain, draw_harder=_draw_long_chain, play=_play_chain),
        DemoTask(name="reverse", max_turns=1, draw=_draw_reverse, draw_harder=None, play=_play_reverse),
    )
}
