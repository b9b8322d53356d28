"""Rewards for an answer between tags, `<answer>Beijing</answer>`, and for texts that resemble a reference."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from lockstep.rewards.functions.answers import reference
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def between_tags(text: str, tag: str) -> str | None:
    """Return the stripped text inside the last closed `<tag>`; None without one."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 or end < 0 else text[start + len(tag) + 2 : end].strip()


def question_answer(rollout: Rollout, *, column: str = "answer", tag: str = "answer") -> float:
    """Return 1 if the answer between tags is one of the references, up to case, punctuation, articles and space.

    column: holds a text or a list of texts. The answer of `environment=search` is its outcome `answer`, so that one
    written behind a search call does not count; elsewhere it is the last one in the last sampled turn.

    Source: exact match of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), as in github.com/PeterGriffinJin/Search-R1,
    verl/utils/reward_score/qa_em.py.
    """
    references = _texts(reference(rollout, column), column)
    outcome_answer = rollout.outcome.get("answer")
    answer = between_tags(rollout.answer, tag) if outcome_answer is None else str(outcome_answer)
    return float(answer is not None and _normal(answer) in map(_normal, references))


def similarity(rollout: Rollout, *, column: str = "answer", tag: str | None = None, is_reversed: bool = False) -> float:
    """Return the similarity of the answer and the reference: 2 M / T, with M matching and T all characters of both.

    tag: the answer is between these tags, and empty without them. is_reversed: the reference is the column's text
    backwards. Matches are the blocks of Python's `difflib.SequenceMatcher`, which approximate the longest common
    subsequence.

    Source: github.com/PrimeIntellect-ai/verifiers, environments/reverse_text.
    """
    expected = str(reference(rollout, column))
    if is_reversed:
        expected = expected[::-1]
    answer = rollout.answer
    if tag is not None:
        answer = between_tags(answer, tag) or ""
    return SequenceMatcher(None, answer, expected).ratio()


def _normal(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _texts(value: Any, column: str) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"question_answer: column {column!r} holds {value!r:.80}, expected a text or a list of texts")
    return texts
