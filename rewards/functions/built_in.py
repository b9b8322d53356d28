"""Built-in reward functions that are short, `fn(rollout, **settings) -> float`. `functions/__init__.py` names all.

They read what was sampled (`rollout.answer`, `rollout.sampled_turns`) and `rollout.example` (the data row); only the
length reward counts sampled tokens. The answer is the text of the last sampled turn; a tool call alone has none.
"""

from __future__ import annotations

import re
from collections import Counter

from lockstep.rewards.functions.answers import expected, reference
from lockstep.rewards.functions.numbers import final_number, first_number, only_number
from lockstep.rewards.shaping import length_penalty
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout, content_text


def demo_answer(rollout: Rollout) -> float:
    """Return 1 for the reference in the sentence "The answer is 1353", else 0. The reward of the demo tasks."""
    return float(rollout.answer == f"The answer is {expected(rollout, 'answer')}")


def environment_reward(rollout: Rollout, *, fact: str = "environment_reward") -> float:
    """Return the reward that the environment or the agent put into its outcome (`environment=trl`, `verifiers`).

    Raises `DataError` if the outcome has none.
    """
    value = rollout.outcome.get(fact)
    if value is None:
        reason = rollout.outcome.get("environment_error", f"its outcome has {', '.join(rollout.outcome) or 'nothing'}")
        raise DataError(f"the environment gave no {fact!r}: {reason}")
    return float(value)


def exact_match(rollout: Rollout, *, column: str = "answer", ignore_case: bool = False) -> float:
    """Return 1 if the answer is the reference, up to surrounding space."""
    answer, reference = rollout.answer, expected(rollout, column)
    return float(answer.casefold() == reference.casefold() if ignore_case else answer == reference)


def contains(rollout: Rollout, *, column: str = "answer", ignore_case: bool = False) -> float:
    """Return 1 if the reference occurs in the answer as whole words: 7 does not occur in 17, 7.5, 1,007 or -7."""
    text = expected(rollout, column)
    before, after = (
        (r"(?<![-−])(?<!\d[.,])" if text[0].isdigit() else ""),
        (r"(?![.,]\d)" if text[-1].isdigit() else ""),
    )
    pattern = rf"(?<!\w){before}{re.escape(text)}{after}(?!\w)"
    return float(re.search(pattern, rollout.answer, re.IGNORECASE if ignore_case else 0) is not None)


def numeric(
    rollout: Rollout,
    *,
    column: str = "answer",
    after: str | None = None,
    rel_tol: float | None = None,
    abs_tol: float | None = None,
) -> float:
    r"""Return 1 if the last number of the answer is the reference (`rewards/functions/numbers.py`).

    The content of the last `\boxed{}` wins over later numbers; if it is not a number, the answer is none.
    after: only the number that directly follows the last `after` of the answer counts, `#### 72` for "####".
    rel_tol, abs_tol: largest difference, as a share of the larger number and absolute; without them numbers must be
    equal, but for rounded decimals (`Number.equals`). Raises `DataError` if the reference is not one number.
    """
    target = only_number(reference(rollout, column))
    if target is None:
        raise DataError(
            f"numeric: column {column!r} holds {rollout.example[column]!r:.200}, expected one number such as 72, -1.5 "
            r"or 3/4, or a text with one, or with \boxed{72} or #### 72; mend the row, or choose another reward"
        )
    answer = rollout.answer
    if after is not None:
        number = first_number(next((part for part in reversed(answer.split(after)[1:]) if part.strip()), ""))
    else:
        number = final_number(answer)
    return float(number is not None and number.equals(target, rel_tol=rel_tol, abs_tol=abs_tol))


def regex(rollout: Rollout, *, pattern: str, full: bool = False) -> float:
    """Return 1 if the pattern occurs in the answer (or, with `full`, matches all of it). `.` matches line breaks.

    Runs in a process that can be killed: a pattern with nested repetition can take exponential time on a model's text.
    """
    match = re.fullmatch if full else re.search
    return float(match(pattern, rollout.answer, re.DOTALL) is not None)


def think_format(rollout: Rollout) -> float:
    """Return 1 if the last sampled turn is `<think>…</think>` (or `reasoning_content`) once, with text after it."""
    turns = rollout.sampled_turns
    if not turns:
        return 0.0
    content = rollout.answer
    if turns[-1].get("reasoning_content"):
        return float(bool(content) and "<think>" not in content and "</think>" not in content)
    parts = re.fullmatch(r"<think>(.*?)</think>(.+)", content, re.DOTALL)
    return float(parts is not None and "think>" not in parts[2] and bool(parts[2].strip()))


def soft_overlong(rollout: Rollout, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return DAPO's `length_penalty`, which starts at `max_tokens - buffer_tokens` sampled tokens."""
    if not 0 < buffer_tokens <= max_tokens:
        raise ConfigError(
            f"soft_overlong: expected 0 < buffer_tokens <= max_tokens, found buffer_tokens={buffer_tokens} and "
            f"max_tokens={max_tokens}"
        )
    return length_penalty(rollout.num_sampled, start=max_tokens - buffer_tokens, horizon=max_tokens)


def repetition(rollout: Rollout, *, ngram: int = 4) -> float:
    """Return minus the share of word n-grams that repeat an earlier one: 0 without repetition, near -1 in a loop."""
    if ngram < 1:
        raise ConfigError(f"repetition: ngram must be at least 1, found {ngram}")
    words = " ".join(content_text(turn) for turn in rollout.sampled_turns).split()
    grams = Counter(tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1))
    total = sum(grams.values())
    return -(total - len(grams)) / total if total else 0.0
