"""The reward of the comparison: the demo's sentence counts, what is said after it does not."""

from __future__ import annotations

from demo.tasks import answer_text
from rewards.functions.answers import final_answer
from rollout.records import Rollout


def is_right(text: str, answer: str) -> bool:
    return text.strip(" .\n") == answer_text(answer)


def right_sentence(rollout: Rollout) -> float:
    """As Lockstep takes a reward; `trl_side.py` has it as TRL does."""
    return float(is_right(final_answer(rollout), str(rollout.example["answer"])))
