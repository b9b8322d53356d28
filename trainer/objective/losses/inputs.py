"""What every policy loss takes and returns.

Dimensions: `_T` trained tokens of a microbatch, flat and without padding, of the loss mask only (rejected tokens are
not in it); `_S` rollouts of the optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.objective.kl import bounded, k2
from trainer.objective.per_rollout import LOCAL, RankReduction, rollout_mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One microbatch.

    A rollout's tokens can lie in several microbatches. Losses with a sequence-level ratio then need what no
    microbatch can see, `seq_log_ratio_S`: make it with `sequence_log_ratio` from a pass without gradients over the
    whole step (before the first update of a rollout batch it is 0, since logp = old_logp). Left at None, it is
    computed from the tokens at hand, which is right if and only if no rollout is spread over microbatches.
    """

    logp_T: Tensor
    """log π_θ of the sampled token, with gradient."""
    old_logp_T: Tensor
    """log π_old, at the start of the update. No gradient."""
    advantages_T: Tensor
    rollout_T: Tensor
    """int64, 0..num_rollouts−1."""
    num_rollouts: int
    weights_T: Tensor | None = None
    """Weights of the rollout correction, multiplied onto every token's loss; None means 1."""
    seq_log_ratio_S: Tensor | None = None
    """Per rollout, the mean of log π_θ − log π_old over all its tokens."""

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
    """Per-token losses, to be summed with the coefficients of `trainer.objective.loss_normalization`."""

    loss_T: Tensor
    """To be minimised; correction weights included."""
    metrics: dict[str, Tensor]
    """Sums over the tokens of this microbatch, detached: add them over microbatches and ranks, then divide by N_tok."""


def token_ratio(inputs: LossInputs) -> Tensor:
    """(T,) π_θ / π_old of each token, with gradient; its log clamped to ±20, outside which the gradient is 0."""
    return bounded(inputs.logp_T - inputs.old_logp_T.detach()).exp()


def sequence_log_ratio(
    logp_T: Tensor, old_logp_T: Tensor, rollout_T: Tensor, num_rollouts: int, *, over_ranks: RankReduction = LOCAL
) -> Tensor:
    """(S,) mean of logp − old_logp over all tokens of each rollout, detached; from all tokens of the step."""
    return rollout_mean((logp_T - old_logp_T).detach(), rollout_T, num_rollouts, over_ranks=over_ranks)


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """(T,) geometric mean ratio s of the token's rollout; the gradient with respect to logp_t is s.

    The value is s = exp(mean_t (logp_t − old_logp_t)) for every token of the rollout. Differentiating s itself would
    give s / |T_s| to each of its tokens, in whichever microbatch they are. Giving each token s for itself alone
    (GSPO-token: sg[s] · π_θ / sg[π_θ]) has the same sum over the tokens of a rollout when they share advantage and
    weight, and needs nothing from other microbatches but the value of s.
    """
    seq_log_ratio_S = inputs.seq_log_ratio_S
    if seq_log_ratio_S is None:
        seq_log_ratio_S = sequence_log_ratio(inputs.logp_T, inputs.old_logp_T, inputs.rollout_T, inputs.num_rollouts)
    value_T = bounded(seq_log_ratio_S.detach()).exp()[inputs.rollout_T]
    return value_T * (inputs.logp_T - inputs.logp_T.detach()).exp()


def weighted(loss_T: Tensor, inputs: LossInputs) -> Tensor:
    """Losses times the (detached) correction weights."""
    return loss_T if inputs.weights_T is None else loss_T * inputs.weights_T.detach()


def common_metrics(inputs: LossInputs, ratio_T: Tensor) -> dict[str, Tensor]:
    """Sums over tokens of what every loss reports."""
    log_ratio_T = (inputs.logp_T - inputs.old_logp_T).detach()
    return {
        "policy/ratio_mean": ratio_T.detach().sum(),
        "policy/approx_kl": k2(log_ratio_T).sum(),
    }


def count(mask_T: Tensor) -> Tensor:
    """How many tokens, as a float that adds up with the other sums."""
    return mask_T.sum().to(torch.float32)
