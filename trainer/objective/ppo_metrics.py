"""PPO's metrics of a rollout batch before the update: `objective/*`, `ppo/value|returns/*`, `value/*`.

To detect reward hacking, compare three of them: `objective/score` rises, `objective/kl` stays near its target,
`rollout/sampled_tokens_mean` does not drift.

Source: github.com/openai/lm-human-preferences, `lm_human_preferences/train_policy.py`. All statistics are over kept
tokens (or rollouts) of the step. Dimensions: `_T` trained tokens of the step, `_S` rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.trainer.objective.per_rollout import rollout_sum
from lockstep.trainer.objective.whitening import moments


def objective_metrics(
    scores_S: Tensor, kl_S: Tensor, penalty_T: Tensor, logp_T: Tensor, rollout_T: Tensor, *, kl_coef: float
) -> dict[str, float]:
    """Return means over episodes: KL, score, KL penalty, and the sum of the last two, which PPO maximizes.

    `objective/entropy` is the mean over episodes of −Σ log π of the sampled tokens, a one-sample estimate; the exact
    entropy per token is `ppo/policy/entropy`.
    """
    num_rollouts = len(scores_S)
    if not num_rollouts:
        return {}
    non_score = float(rollout_sum(penalty_T.double(), rollout_T, num_rollouts).mean())
    score = float(scores_S.double().mean())
    return {
        "objective/kl": float(kl_S.double().mean()),
        "objective/kl_coef": kl_coef,
        "objective/entropy": float(-rollout_sum(logp_T.double(), rollout_T, num_rollouts).mean()),
        "objective/score": score,
        "objective/non_score_reward": non_score,
        "objective/score_total": score + non_score,
    }


def value_metrics(values_T: Tensor, returns_T: Tensor, keep_T: Tensor) -> dict[str, float]:
    """Return mean and variance of values and returns, and the explained variance."""
    if not bool(keep_T.any()):
        return {}
    values, returns = moments(values_T, keep_T), moments(returns_T, keep_T)
    return {
        "ppo/value/mean": float(values.mean),
        "ppo/value/var": float(values.variance),
        "ppo/returns/mean": float(returns.mean),
        "ppo/returns/var": float(returns.variance),
        "value/explained_variance": float(explained_variance(values_T, returns_T, keep_T)),
    }


def explained_variance(values_T: Tensor, returns_T: Tensor, keep_T: Tensor) -> Tensor:
    """Return 1 − Var[R − V] / Var[R]: 1 is perfect, 0 that of a constant, below 0 worse; 0 for equal returns."""
    residual = moments(returns_T - values_T, keep_T).variance
    total = moments(returns_T, keep_T).variance
    return torch.where(
        total > 0, 1 - residual / total.clamp(min=torch.finfo(total.dtype).tiny), torch.zeros_like(total)
    )
