"""Inputs and outputs of a policy loss, and functions that several losses share.

Dimensions: `_T` tokens of the loss mask in a microbatch, flat and without padding; `_S` rollouts of the optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.objective.kl import bounded, k2
from trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

CLIP_LOW = Setting(
    default=0.2,
    description="lower clip of the importance ratio: 1 - clip_low; null, for cispo only: none",
    above=0,
    below=1,
)
CLIP_HIGH = Setting(
    default=0.28, description="upper clip of the importance ratio: 1 + clip_high", above=0, may_be_infinite=True
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One microbatch. Raises ValueError for shapes that differ."""

    logp_T: Tensor
    """log π_θ, with gradient."""
    old_logp_T: Tensor
    """log π_old."""
    advantages_T: Tensor
    rollout_T: Tensor
    """int64, 0..num_rollouts−1."""
    num_rollouts: int
    weights_T: Tensor | None = None
    """Weights of the rollout correction, factors of each token's loss; None: 1."""
    seq_log_ratio_S: Tensor | None = None
    """Mean of the loss's `sequence_log_ratio` over all tokens of each rollout, in all microbatches."""

    def __post_init__(self) -> None:
        shapes = {
            "logp_T": self.logp_T.shape,
            "old_logp_T": self.old_logp_T.shape,
            "advantages_T": self.advantages_T.shape,
            "rollout_T": self.rollout_T.shape,
        }
        if self.weights_T is not None:
            shapes["weights_T"] = self.weights_T.shape
        if len(set(shapes.values())) != 1 or self.logp_T.ndim != 1:
            found = {name: tuple(shape) for name, shape in shapes.items()}
            raise ValueError(f"loss inputs must be flat and of one length, one entry per trained token; found {found}")
        if self.seq_log_ratio_S is not None and self.seq_log_ratio_S.shape != (self.num_rollouts,):
            raise ValueError(
                f"seq_log_ratio_S has shape {tuple(self.seq_log_ratio_S.shape)}, expected ({self.num_rollouts},), "
                "one entry per rollout of the step"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    loss_T: Tensor
    """With the correction weights; the loss is its sum with the coefficients of `loss_normalization.py`."""
    metrics: dict[str, Tensor]
    """Sums over the tokens of this microbatch, detached: add them over microbatches and ranks, then divide by N_tok."""


def token_ratio(inputs: LossInputs) -> Tensor:
    """Return (T,) π_θ / π_old with gradient; its log is clamped to ±20, with gradient 0 outside."""
    return bounded(inputs.logp_T - inputs.old_logp_T.detach()).exp()


def plain_log_ratio(log_ratio_T: Tensor, advantages_T: Tensor, **settings: object) -> Tensor:
    """Return the log ratios, for losses whose ratio of a rollout is the geometric mean of its tokens' ratios."""
    return log_ratio_T


def sequence_ratio(inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
    """Return (T,) the ratio s of the token's rollout; the gradient with respect to logp_t is s ∂log_ratio_t/∂logp_t.

    The value is s = exp(mean_t log_ratio_t) for every token of the rollout. Differentiating s itself would give
    s / |T_s| to each of its tokens, in all microbatches. The gradient s for each token alone (GSPO-token:
    sg[s] · r_t / sg[r_t]) has the same sum over the tokens of a rollout when they share advantage and weight, and needs
    only the value of s from other microbatches.

    log_ratio_T: values of the loss's `sequence_log_ratio`, with gradient.
    """
    assert inputs.seq_log_ratio_S is not None, "a loss with one ratio per rollout needs seq_log_ratio_S"
    value_T = bounded(inputs.seq_log_ratio_S.detach()).exp()[inputs.rollout_T]
    return value_T * (log_ratio_T - log_ratio_T.detach()).exp()


def weighted(loss_T: Tensor, inputs: LossInputs) -> Tensor:
    """Return the losses times the detached correction weights."""
    return loss_T if inputs.weights_T is None else loss_T * inputs.weights_T.detach()


def common_metrics(inputs: LossInputs, ratio_T: Tensor) -> dict[str, Tensor]:
    """Return the metrics of every loss."""
    log_ratio_T = (inputs.logp_T - inputs.old_logp_T).detach()
    return {
        "policy/ratio_mean": ratio_T.detach().sum(),
        "policy/approx_kl": k2(log_ratio_T).sum(),
    }


def count(mask_T: Tensor) -> Tensor:
    """Return the number of true entries as a float."""
    return mask_T.sum().float()
