"""Reward of the comparison: 1 for the demo's right sentence, whatever follows it."""

from __future__ import annotations

from lockstep.demo.tasks import answer_text
from lockstep.rollout.records import Rollout


def is_right(text: str, answer: str) -> bool:
    return text.strip(" .\n") == answer_text(answer)


def right_sentence(rollout: Rollout) -> float:
    """Return the reward in Lockstep's form; `trl_side.py` has TRL's."""
    return float(is_right(rollout.answer, str(rollout.example["answer"])))
