"""Policy losses by name: pure functions `LossInputs` → `LossOutputs`, one small module each.

What they leave to others: rejection and masks (tokens that do not train are not in the inputs), normalisation
(`trainer.objective.loss_normalization`), the KL term (`trainer.objective.kl.kl_term`) and the entropy bonus
(`entropy_bonus`). The loss of a microbatch is

    Σ_t coefficient_t · (loss_t + β kl_t + entropy_bonus_t)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trainer.objective.losses.cispo import cispo
from trainer.objective.losses.gspo import gspo
from trainer.objective.losses.inputs import LossInputs, LossOutputs, sequence_log_ratio
from trainer.objective.losses.ppo_clip import ppo_clip
from trainer.objective.losses.reinforce import clipped_tis, reinforce
from trainer.objective.losses.sapo import sapo

POLICY_LOSSES: dict[str, Callable[..., LossOutputs]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "clipped_tis": clipped_tis,
}


def entropy_bonus(entropy_T: Tensor, coef: float) -> Tensor:
    """(T,) −coef · entropy: what the loss of each token loses for being unsure. Not weighted by the correction."""
    return -coef * entropy_T


__all__ = [
    "POLICY_LOSSES",
    "LossInputs",
    "LossOutputs",
    "cispo",
    "clipped_tis",
    "entropy_bonus",
    "gspo",
    "ppo_clip",
    "reinforce",
    "sapo",
    "sequence_log_ratio",
]
