"""Advantages with a critic: generalized advantage estimation per token, as in PPO.

    scores, log π, log π_ref ─► reward per token ─► (whitened) ─► GAE with V_old ─► returns = A + V_old
                                                                       └─► advantages (whitened)

Whitening uses the statistics of the minibatch. Whitened rewards change the advantages, so GAE runs again for each
minibatch. Returns come from the advantages before whitening, because values are in the unit of rewards ("The N
Implementation Details of RLHF with PPO", Hugging Face blog, 2023, "per-minibatch reward and advantage whitening").

Dimensions: `_N` trained tokens of the step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from lockstep.trainer.objective.declare import advantage
from lockstep.trainer.objective.whitening import moments, standardize
from lockstep.trainer.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """Inputs of the advantages of a step. Detached, on CPU, the same on every rank."""

    rewards_N: "Tensor"
    """By trainer/objective/token_rewards.py."""
    values_N: "Tensor"
    """Values at the start of the update."""
    rollout_N: "Tensor"
    turns_N: "Tensor"
    keep_N: "Tensor"
    """bool: tokens of the loss mask; only these enter statistics."""


class TokenAdvantages(NamedTuple):
    advantages_N: "Tensor"
    returns_N: "Tensor"
    """Targets of the values."""


@advantage(needs_critic=True, kl_in_reward=True)
def gae(
    credit: Credit,
    chosen_N: "Tensor",
    *,
    gamma: Annotated[float, Setting(default=1.0, description="gae: discount per token", low=0, high=1)],
    gae_lambda: Annotated[
        float,
        Setting(default=0.95, description="gae: 1: reward-to-go, 0: one-step temporal difference", low=0, high=1),
    ],
    gae_length_alpha: Annotated[
        float | None,
        Setting(
            default=None,
            description="gae: λ = 1 - 1 / (alpha x trained tokens of the rollout) in place of gae_lambda (VAPO); null: "
            "off",
            above=0,
        ),
    ],
    critic_lambda: Annotated[
        float | None,
        Setting(
            default=None,
            description="gae: λ of the returns that values are trained on (decoupled GAE); null: that of the "
            "advantages",
            low=0,
            high=1,
        ),
    ],
    whiten_rewards: Annotated[
        bool,
        Setting(default=False, description="gae: scale rewards to variance 1 per optimizer step, keeping their mean"),
    ],
    whiten_advantages: Annotated[
        bool, Setting(default=True, description="gae: scale advantages to mean 0, variance 1 per optimizer step")
    ],
) -> TokenAdvantages:
    """Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t, over the trained tokens of the rollout.

    Schulman et al. 2015 (arXiv 1506.02438), equation 16. 0 outside the chosen tokens. GAE passes through tokens that
    left the loss mask, because they are decisions of the rollout; whitening leaves them out of its statistics.

    Values may have a λ of their own (Yuan et al. 2025, VC-PPO, arXiv 2503.01491, section 4.2): with λ = 1 their targets
    are rewards-to-go, which the values themselves cannot bias.

    Args:
        chosen_N: bool, all trained tokens of the rollouts of this optimizer step.
    """
    counted_N = (chosen_N & credit.keep_N)[chosen_N]
    rewards, values = credit.rewards_N[chosen_N], credit.values_N[chosen_N]
    if whiten_rewards:
        rewards = standardize(rewards, moments(rewards, counted_N), shift_mean=False)
    rollouts, turns = credit.rollout_N[chosen_N], credit.turns_N[chosen_N]

    from lockstep.trainer.objective.gae import GaeResult, gae_flat, length_adaptive_lambda  # only critics need it

    def estimate(lam: "float | Tensor") -> GaeResult:
        return gae_flat(rewards, values, rollouts, gamma=gamma, lam=lam, turn_T=turns)

    lam = gae_lambda
    if gae_length_alpha is not None:
        lam = length_adaptive_lambda(rollouts, alpha=gae_length_alpha).to(values.dtype)
    advantages, returns = estimate(lam)
    if critic_lambda is not None:
        returns = estimate(critic_lambda).returns
    if whiten_advantages:
        advantages = standardize(advantages, moments(advantages, counted_N), shift_mean=True)

    def spread(chosen: "Tensor") -> "Tensor":
        return credit.rewards_N.new_zeros(credit.rewards_N.shape).masked_scatter(chosen_N, chosen)

    return TokenAdvantages(spread(advantages), spread(returns))
