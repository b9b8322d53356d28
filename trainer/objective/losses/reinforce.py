"""REINFORCE, plain and with the clipped importance weight of seed 004."""

from __future__ import annotations

from trainer.objective.losses.inputs import (
    LossInputs,
    LossOutputs,
    common_metrics,
    count,
    sequence_ratio,
    token_ratio,
    weighted,
)


def reinforce(inputs: LossInputs) -> LossOutputs:
    """l = −A logp (Williams 1992). No ratio: after the first update of a rollout batch it is off policy."""
    loss_T = -inputs.advantages_T * inputs.logp_T
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=common_metrics(inputs, token_ratio(inputs)))


def clipped_tis(inputs: LossInputs, *, clip_high: float = 0.2, level: str = "token") -> LossOutputs:
    """l = −sg[min(r, 1 + clip_high)] A logp; with the correction weight ρ, the gradient is −min(r, 1 + ε) ρ A ∇logp.

    `level="token"`: r = π_θ / π_old. `level="sequence"`: r is the geometric mean ratio of the rollout (seed 004 says
    "averaged over the sequence"; the code it describes averages the log ratio), exact over microbatches when
    `inputs.seq_log_ratio_S` is given. Raises ValueError for another level.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"importance sampling level {level!r}; expected token or sequence")
    ratio_T = (token_ratio(inputs) if level == "token" else sequence_ratio(inputs)).detach()
    loss_T = -ratio_T.clamp(max=1 + clip_high) * inputs.advantages_T * inputs.logp_T
    metrics = {"policy/clip_frac": count(ratio_T > 1 + clip_high), **common_metrics(inputs, ratio_T)}
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=metrics)
