"""Suggestions for misspelled names, and for names of other trainers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens_per_turn",
    "max_response_length": "rollout.max_tokens_per_turn",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "updates",
    "total_training_steps": "updates",
    "num_iterations": "algorithm.epochs",
    "ppo_epochs": "algorithm.epochs",
    "beta": "algorithm.kl_coef",
    "router_aux_loss_coef": "algorithm.router_aux_coef",
    "router_z_loss_coef": "algorithm.router_z_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "warmup_steps": "optimizer.warmup_updates",
}
"""Settings by the last part of their names in TRL and verl (docs/migrating.md)."""


def closest(word: str, words: Sequence[str]) -> str:
    """Return " (did you mean 'x'?)" for a similar word or another trainer's name for it, else an empty text."""
    last = word.rpartition(".")[2]
    ends = [name for name in words if name.rpartition(".")[2] == last]
    other = OTHER_NAMES.get(last)
    if other in words:
        match = [other]
    elif len(ends) == 1 and "." in ends[0]:
        match = ends
    elif word and (starts := [name for name in words if name.startswith(word)]):
        match = starts
    elif swapped := [name for name in words if sorted(name) == sorted(word)]:
        match = swapped
    else:
        match = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
