"""Columns of the data: the answer stays out of the prompt, and the reward reads the reference and nothing else."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from lockstep.lab.environments.reference_answer import (
    Reference,
    earn_reference,
    in_form,
    prompt_columns,
    text_of,
    unrelated_columns,
)
from lockstep.lab.environments.reward_probes import EPSILON, Earned
from lockstep.lab.environments.subject import Subject, reward_of, with_value
from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.rollout.records import Rollout, ids_with_images
from lockstep.trainer.data.prompts import Row

LEAK = "answer in the prompt"
DEPENDS = "prompt without the reference"
READS = "reward reads the reference"
DIFFER = "prompts differ between rows"
OTHERS = "reward ignores other columns"
MAX_SHOWN = 3


async def examine_columns(subject: Subject, earned: Earned, *, is_scored: bool) -> AsyncIterator[Finding]:
    """Yield the findings on the reference column, then on all others.

    is_scored: False if rewards do not apply to scripted answers; then only prompts are examined.
    """
    reference = earned.reference
    if reference.column is None:
        sentence = "no column with a reference is known; name it with --reference <column>."
        for check in (LEAK, DEPENDS, *([READS] if is_scored else [])):
            yield Finding(check=check, verdict=Verdict.NOTE, sentence=sentence, measured="not checked")
    else:
        yield _leak(subject, earned, reference.column)
        yield await _depends(subject, earned, reference.column)
        yield _differ(subject, earned, reference.column)
        if is_scored:
            yield await _reads(subject, earned, reference.column)
    if is_scored:
        yield await _others(subject, earned)


def prompt_text(subject: Subject, rollout: Rollout) -> str:
    """Return the first prompt of an episode as the model reads it, tools included."""
    return subject.chat.decode(rollout.calls[0].prompt_ids) if rollout.calls else ""


def _leak(subject: Subject, earned: Earned, column: str) -> Finding:
    if column in prompt_columns(subject):
        return Finding(check=LEAK, verdict=Verdict.NOTE, measured="the prompt is the reference")
    prompts = [prompt_text(subject, rollout) for rollout in earned.rollouts["empty answer"]]
    answers = [text_of(row.get(column)) for row in subject.rows]
    own, chance = rows_that_hold(prompts, answers)
    measurement = f"{len(own)} of {len(prompts)} rows, by chance {chance:.0%}"
    if not own:
        return Finding(check=LEAK, measured=measurement)
    cases = ", ".join(f"row {row} holds {answers[row]:.40}" for row in own[:MAX_SHOWN])
    if is_beyond(own, chance, len(prompts)):
        sentence = (
            f"the prompt, as the model reads it, has the value of column {column!r} in {len(own)} of {len(prompts)} "
            f"rows ({cases}; other rows' values: {chance:.0%}), so the model can copy it. Take it out; if the task is "
            f"to find it in a text, add --accept '{LEAK}'."
        )
        return failure(LEAK, sentence, measurement)
    sentence = f"some prompts have the value of column {column!r} as a word ({cases}); this may be chance."
    return Finding(check=LEAK, verdict=Verdict.NOTE, sentence=sentence, measured=measurement)


def rows_that_hold(texts: Sequence[str], answers: Sequence[str]) -> tuple[list[int], float]:
    """Return the rows whose text has the answer as a word, and the share of other rows' answers that texts have."""
    own = [row for row, (text, answer) in enumerate(zip(texts, answers, strict=True)) if holds(text, answer)]
    pairs = [holds(text, answer) for row, text in enumerate(texts) for answer in answers if answer != answers[row]]
    return own, sum(pairs) / len(pairs) if pairs else 0.0


def is_beyond(rows: Sequence[int], chance: float, number: int) -> bool:
    """Return True if these rows, of all of them, are more than chance explains."""
    return len(rows) >= min(2, number) and len(rows) / number > max(0.25, 2 * chance)


def holds(text: str, answer: str) -> bool:
    answer = answer.strip()
    return bool(answer) and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


async def _depends(subject: Subject, earned: Earned, column: str) -> Finding:
    """Compare prompts with those after the reference was replaced by another row's."""
    if column in prompt_columns(subject):
        return Finding(check=DEPENDS, verdict=Verdict.NOTE, measured="the prompt is the reference")
    rows = []
    swaps = _swaps(subject.rows, column)
    for row, value in swaps:
        rollout = await subject.say(with_value(subject.rows[row], column, value), "")
        before = earned.rollouts["empty answer"][row]
        if _opening(rollout) != _opening(before) and _opening(await subject.say(subject.rows[row], "")) == _opening(
            before
        ):
            rows.append(row)  # and not by chance: the row itself has the same prompt twice
    if not swaps:
        return _all_equal(DEPENDS, column)
    measurement = f"{len(rows)} of {len(swaps)} prompts change with column {column}"
    if not rows:
        return Finding(check=DEPENDS, measured=measurement)
    sentence = (
        f"the first prompt of row {rows[0]} changes if column {column!r} gets the value of another row, so the "
        "environment writes the reference, or something made from it, into the prompt. Use it in `step` and rewards."
    )
    return failure(DEPENDS, sentence, measurement)


def _differ(subject: Subject, earned: Earned, column: str) -> Finding:
    """Look for prompts that do not say which row is asked, in episodes that never say it later."""
    rollouts = earned.rollouts["empty answer"]
    prompts = {_opening(rollout) for rollout in rollouts}
    measurement = f"{len(prompts)} prompts for {len(rollouts)} rows"
    episodes = [*rollouts, *earned.rollouts.get("reference", ())]  # whose player may call tools
    is_told_later = any(len(rollout.messages) > len(rollout.prompt) + 1 for rollout in episodes)
    if len(prompts) > 1 or is_told_later or not _swaps(subject.rows, column):
        return Finding(check=DIFFER, measured=measurement)
    sentence = (
        f"all rows have the same first prompt, and nothing is said after an answer, but column {column!r} differs, so "
        "no policy can know it. Write the messages in `reset` from the row that it is called with."
    )
    return failure(DIFFER, sentence, measurement)


async def _reads(subject: Subject, earned: Earned, column: str) -> Finding:
    """Play the same answer on rows whose reference was replaced by another row's."""
    swaps = _swaps(subject.rows, column)
    if not swaps:
        return _all_equal(READS, column)
    rewards = earned.rewards("reference")
    rows = []
    for row, value in swaps:
        variant = with_value(subject.rows[row], column, value)
        player = earned.reference.play_of(subject.rows[row])
        (rollout,) = await subject.score([await subject.play(variant, player)])
        if reward_of(rollout) == rewards[row]:
            rows.append(row)
    measurement = f"{len(swaps) - len(rows)} of {len(swaps)} rewards change with column {column}"
    if len(rows) == len(swaps):
        sentence = (
            f"an answer earns the same if column {column!r} gets the value of another row, so the reward does not read "
            f"it. Let it read {column!r}, or name the column that it should read with --reference <column>."
        )
        return failure(READS, sentence, measurement)
    if rows:
        sentence = (
            f"in rows {', '.join(map(str, rows[:MAX_SHOWN]))} the answer also earns its reward with another row's "
            f"value of column {column!r}: the comparison may be too lenient."
        )
        return Finding(check=READS, verdict=Verdict.NOTE, sentence=sentence, measured=measurement)
    return Finding(check=READS, measured=measurement)


async def _others(subject: Subject, earned: Earned) -> Finding:
    """Replace the values of each further column; answer with its value, and with the reference."""
    columns = unrelated_columns(subject, earned.reference.column) if earned.reference.is_known else []
    faults: list[str] = []
    for column in columns:
        swaps = _swaps(subject.rows, column)
        if better := await _answers_better(subject, earned, column):
            faults.append(better)
        elif fault := await _changes(subject, earned, column, swaps):
            faults.append(fault)
    measurement = ", ".join(columns) or "no other columns"
    if not faults:
        return Finding(check=OTHERS, measured=measurement)
    sentence = f"{' '.join(faults)} If the reward is meant to read the column, add --reads <column>."
    return failure(OTHERS, sentence, measurement)


async def _changes(subject: Subject, earned: Earned, column: str, swaps: Sequence[tuple[int, Any]]) -> str:
    """Return a sentence if the reference earns another reward, in the same conversation, with another value."""
    for row, value in swaps:
        before = earned.rollouts["reference"][row]
        variant = with_value(subject.rows[row], column, value)
        (after,) = await earn_reference_as(subject, earned.reference, subject.rows[row], variant)
        if list(after.messages) != list(before.messages) or reward_of(after) == reward_of(before):
            continue
        (again,) = await earn_reference(subject, earned.reference, [subject.rows[row]])
        if reward_of(again) == reward_of(before):  # else the reward is not the same twice, which another line says
            return (
                f"The reference of row {row} earns {_excerpt(before)}, and {_excerpt(after)} if column {column!r} gets "
                "the value of another row."
            )
    return ""


async def earn_reference_as(subject: Subject, reference: Reference, row: Row, played: Row) -> list[Rollout]:
    """Play the reference of one row on another, and score it."""
    if reference.player is None:
        return await subject.score([await subject.play(played, reference.play_of(row))])
    return await earn_reference(subject, reference, [played])


async def _answers_better(subject: Subject, earned: Earned, column: str) -> str:
    """Return a sentence if the values of this column earn more as answers than the reference."""
    rows = [row for row in range(len(subject.rows)) if isinstance(subject.rows[row].get(column), str | int | float)]
    if not rows:
        return ""
    form = earned.reference.form
    rollouts = await subject.earn(
        [subject.rows[row] for row in rows], [in_form(subject.rows[row][column], form) for row in rows]
    )
    own = earned.rewards("reference")
    better = [
        row
        for row, rollout in zip(rows, rollouts, strict=True)
        if (reward_of(rollout) or 0.0) > max(EPSILON, (own[row] or 0.0) + EPSILON)
    ]
    if not better:
        return ""
    share = f"{len(better)} of {len(rows)} rows"
    return f"The value of column {column!r} as an answer earns more than the reference in {share}."


def _opening(rollout: Rollout) -> tuple[int, ...]:
    return ids_with_images(rollout.calls[0].prompt_ids, rollout.calls[0].images) if rollout.calls else ()


def _swaps(rows: Sequence[Row], column: str) -> list[tuple[int, Any]]:
    """Return rows with the value of another row that is different; none if all are equal."""
    swaps = []
    for number, row in enumerate(rows):
        others = [*rows[number + 1 :], *rows[:number]]
        value = next((other[column] for other in others if column in other and other[column] != row.get(column)), None)
        if value is not None and column in row:
            swaps.append((number, value))
    return swaps


def _all_equal(check: str, column: str) -> Finding:
    sentence = f"all examined rows have the same value of column {column!r}; take more with --rows."
    return Finding(check=check, verdict=Verdict.NOTE, sentence=sentence, measured="not checked")


def _excerpt(rollout: Rollout) -> str:
    reward = reward_of(rollout)
    return "no reward" if reward is None else f"{reward:.3g}"
