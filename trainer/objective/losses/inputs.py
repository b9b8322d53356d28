"""Inputs and outputs of a policy loss, and functions that several losses share.

Dimensions: `_T` tokens of the loss mask in a microbatch, flat and without padding; `_N` those of the optimizer step, on
all ranks; `_S` rollouts of the optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.trainer.objective.declare import SEQUENCE
from lockstep.trainer.objective.kl import bounded, k2
from lockstep.trainer.setting import Setting

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
    sampling_logp_T: Tensor | None = None
    """log μ, by the engine that sampled the tokens; given in training."""
    step_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Values of the loss's `step_values` at the tokens of the microbatch, (T,) each, and `SEQUENCE`."""

    def __post_init__(self) -> None:
        shapes = {
            "logp_T": self.logp_T.shape,
            "old_logp_T": self.old_logp_T.shape,
            "advantages_T": self.advantages_T.shape,
            "rollout_T": self.rollout_T.shape,
        }
        tensors = {"weights_T": self.weights_T, "sampling_logp_T": self.sampling_logp_T, **self.step_values}
        shapes |= {name: tensor.shape for name, tensor in tensors.items() if tensor is not None}
        if len(set(shapes.values())) != 1 or self.logp_T.ndim != 1:
            sizes = {name: tuple(shape) for name, shape in shapes.items()}
            raise ValueError(f"loss inputs must be flat and of one length, one entry per trained token; found {sizes}")

    @property
    def seq_log_ratio_S(self) -> Tensor | None:
        """Mean of the loss's `sequence_log_ratio` over all tokens of each rollout, in all microbatches; 0 for rollouts
        without tokens in this one. None if the loss declares none."""
        values_T = self.step_values.get(SEQUENCE)
        return (
            None if values_T is None else values_T.new_zeros(self.num_rollouts).index_copy(0, self.rollout_T, values_T)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """All tokens of the loss mask of an optimizer step, the same on every rank, in the order of the rows. Detached.

    Raises ValueError for shapes that differ.
    """

    logp_N: Tensor
    """log π_θ before the update."""
    old_logp_N: Tensor
    """log π_old."""
    sampling_logp_N: Tensor
    """log μ, by the engine."""
    advantages_N: Tensor
    rollout_N: Tensor
    """int64, 0..num_rollouts−1."""
    num_rollouts: int
    seed: int
    """Seed of random choices, from that of the run and the number of the update."""
    entropy_N: Tensor | None = None
    """Entropy of π_θ before the update [nats]; None unless the loss declares `needs_entropy`."""

    def __post_init__(self) -> None:
        tensors = (self.logp_N, self.old_logp_N, self.sampling_logp_N, self.advantages_N, self.rollout_N)
        shapes = {tuple(tensor.shape) for tensor in (*tensors, self.entropy_N) if tensor is not None}
        if len(shapes) != 1 or self.logp_N.ndim != 1:
            raise ValueError(f"step inputs must be flat and of one length, one entry per trained token; found {shapes}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    loss_T: Tensor
    """With the correction weights; the loss is its sum with the coefficients of `loss_normalization.py`."""
    metrics: dict[str, Tensor]
    """Sums over the tokens of this microbatch, detached: add them over microbatches and ranks, then divide by N_tok."""


def token_ratio(inputs: LossInputs) -> Tensor:
    """Return (T,) π_θ / π_old with gradient; its log is clamped to ±20, with gradient 0 outside."""
    return bounded(inputs.logp_T - inputs.old_logp_T.detach()).exp()


def sampling_ratio(inputs: LossInputs) -> Tensor:
    """Return (T,) π_θ / μ with gradient, for losses that declare `weighs_by_sampling`; its log is clamped to ±20."""
    assert inputs.sampling_logp_T is not None, "a loss with the ratio to the sampling policy needs its logprobs"
    return bounded(inputs.logp_T - inputs.sampling_logp_T.detach()).exp()


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
    assert SEQUENCE in inputs.step_values, "a loss with one ratio per rollout needs seq_log_ratio_S"
    value_T = bounded(inputs.step_values[SEQUENCE].detach()).exp()
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
