"""The adaptive coefficient β of the KL penalty in the reward.

The coefficient is state of the run, saved in the checkpoint. It is the same on every rank, because every rank applies
the rule to the same global mean.

Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2; "The N Implementation Details of RLHF with PPO" (Hugging
Face blog, 2023), "Adaptive KL".
"""

from __future__ import annotations

ERROR_BOUND = 0.2
"""The relative error is clipped to ± this, so that one bad batch cannot throw the coefficient."""
MAX_EPISODES_PER_HORIZON = 1 / ERROR_BOUND
"""At this many episodes per horizon an error at the bound makes β zero; beyond it, negative."""


def adapted_kl_coef(kl_coef: float, *, kl: float, num_episodes: int, target: float, horizon: int) -> float:
    """Return β (1 + e n / horizon) with e = clip(kl / target − 1, −0.2, 0.2) and n = `num_episodes`.

    Args:
        kl_coef: β that the batch was penalized with.
        kl: mean over the episodes of Σ_t (log π − log π_ref) [nats].
        num_episodes: episodes of the batch on all ranks; fewer than 5 horizons, or β could change its sign
            (trainer/checks/algorithm.py refuses such settings).
        target: KL per episode to settle at [nats].
        horizon: episodes over which an error at the bound changes β by 20 %.
    """
    assert num_episodes < MAX_EPISODES_PER_HORIZON * horizon
    error = min(max(kl / target - 1, -ERROR_BOUND), ERROR_BOUND)
    return kl_coef * (1 + error * num_episodes / horizon)
