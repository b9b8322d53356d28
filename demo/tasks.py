"""The demo tasks: their rows, and scripted players with and without noise.

A player is a generator: it yields the text of its next turn, as a model would sample it, and receives the answer of
the environment. Demonstrations are played in the real environment (`demo/play.py`), so they have the tokens of
rollouts.

Noise lowers the reward of the warm-started model. Its rates make the greedy policy wrong (a guess is the most likely
first move) while sampling is sometimes right, so that reinforcement learning has something to find.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.rollout.environments.demo.calculator import evaluate
from lockstep.rollout.environments.demo.squares import COLORS, PATTERNS, QUARTERS, SIDE, draw_picture
from lockstep.trainer.data.split import is_heldout

if TYPE_CHECKING:
    from PIL.Image import Image

Row = dict[str, Any]
Player = Generator[str, str, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTask:
    """One task: its rows and its players."""

    name: str
    """Also the name of its environment."""
    max_turns: int
    """Largest number of assistant turns that an episode needs."""
    draw: Callable[[random.Random], Row]
    """Draw a row of the training distribution: question, answer, and the fields that the environment reads."""
    draw_harder: Callable[[random.Random], Row] | None
    """Draw a row beyond it, for the evaluation of generalization only."""
    play: Callable[[Row, random.Random, bool], Player]
    """Return a player of a row; the last argument is True for noise."""
    draw_image: Callable[[Row], Image] | None = None
    """Draw the image in front of a row's question; None: a task of texts."""
    train_rows: int = 4096
    """Number of rows to train on. Each has a file of its own if the task has images."""


def draw_unique(draw: Callable[[random.Random], Row], rng: random.Random, count: int, *, heldout: bool) -> list[Row]:
    """Draw `count` different rows of one side of the split. (Chains with the same question differ in their links.)"""
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = draw(rng)
        if is_heldout(identity(row)) == heldout:
            rows.setdefault(json.dumps(row), row)
    return list(rows.values())


def identity(row: Row) -> str:
    """Return the text by which a row is held out: its question, or its picture, since all have one question."""
    return json.dumps(row["square"]) if "square" in row else row["question"]


def answer_text(answer: str) -> str:
    """Return the sentence that the demo reward requires."""
    return f"The answer is {answer}"


def tool_call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a tool call as Qwen3's template does, so that a rendered message equals a sampled one."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _broken(call: str) -> str:
    """Drop the closing brackets, the most common JSON error of a small model."""
    return call.replace('"}}', '"')


def _other_digit(text: str, rng: random.Random) -> str:
    """Replace one digit of `text` by another one."""
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
    query = expression
    if noisy and rng.random() < 0.04:
        query = _other_digit(query, rng)
    if noisy and rng.random() < 0.04:
        operator = query[2]
        query = query[:2] + rng.choice([other for other in "+-*" if other != operator]) + query[3:]
    call = tool_call_text("calculator", {"expression": query})
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
        guess_rate = 0.25  # guesses are rarer after the first lookup
        call = tool_call_text("lookup", {"key": _other_digit(key, rng) if noisy and rng.random() < 0.04 else key})
        if noisy and rng.random() < 0.04:
            yield _broken(call)
        reply = yield call
        kind, _, target = reply.partition(" ")
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
    # The first token must show which variant is played. With noise only inside the sentence, the model mixed both digit
    # by digit and was right one time in twenty (measured) instead of one in four.
    if noisy and rng.random() < 0.6:
        yield row["question"].removeprefix("reverse ")
        return
    if noisy and rng.random() < 0.1:
        digits.pop(rng.randrange(len(digits)))
    if noisy and rng.random() < 0.1:
        digits[rng.randrange(len(digits))] = str(rng.randint(0, 9))
    yield answer_text(" ".join(digits))


def _draw_square(rng: random.Random) -> Row:
    color, pattern, half = rng.choice(sorted(COLORS)), rng.choice(PATTERNS), SIDE // 2
    column, line = rng.choice(list(QUARTERS.values()))
    size = rng.randrange(72, 96, 4)
    # It covers what `zoom` shows.
    left, top = (rng.randrange(max(8, 84 - size), min(28, half - 8 - size) + 1, 4) for _ in range(2))
    square = [half * column + left, half * line + top, size, color, pattern]
    return {"question": "which square is this?", "answer": f"{color} {pattern}", "square": square}


def _draw_row_image(row: Row) -> Image:
    return draw_picture(row["square"])


def _play_square(row: Row, rng: random.Random, noisy: bool) -> Player:
    left, top, _, color, pattern = row["square"]
    if noisy and rng.random() < 0.6:
        yield answer_text(f"{color} {rng.choice(PATTERNS)}")
        return
    place = (left >= SIDE // 2, top >= SIDE // 2)
    quarter = next(name for name, at in QUARTERS.items() if at == place)
    if noisy and rng.random() < 0.15:
        quarter = rng.choice(list(QUARTERS))
    call = tool_call_text("zoom", {"quarter": quarter})
    if noisy and rng.random() < 0.04:
        yield _broken(call)
    yield call
    is_seen = QUARTERS[quarter] == place and not (noisy and rng.random() < 0.15)
    yield answer_text(f"{color} {pattern if is_seen else rng.choice(PATTERNS)}")


TASKS: dict[str, DemoTask] = {
    task.name: task
    for task in (
        DemoTask(name="calculator", max_turns=3, draw=_draw_calculator, draw_harder=None, play=_play_calculator),
        DemoTask(name="chain", max_turns=6, draw=_draw_chain, draw_harder=_draw_long_chain, play=_play_chain),
        DemoTask(name="reverse", max_turns=1, draw=_draw_reverse, draw_harder=None, play=_play_reverse),
        DemoTask(
            name="squares",
            max_turns=3,
            draw=_draw_square,
            draw_harder=None,
            play=_play_square,
            draw_image=_draw_row_image,
            train_rows=1024,
        ),
    )
}
