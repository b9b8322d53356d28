"""GDPO (Liu et al. 2026, arXiv 2601.05242): rewards are normalized one by one before they are added."""

from dataclasses import replace
from typing import Annotated

from lockstep.rollout.errors import RewardError
from lockstep.trainer.objective.advantages.inputs import DDOF, EPS, AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage
from lockstep.trainer.objective.per_rollout import rollout_max


@advantage(compares_group=True, takes_turns=False)
def gdpo(
    inputs: AdvantageInputs, *, advantage_ddof: Annotated[int, DDOF], advantage_eps: Annotated[float, EPS]
) -> Advantages:
    """Σ_k w_k (r_k − mean of the group) / (std of the group + eps) over the reward functions k, whitened over the step.

    "Group reward-decoupled normalization policy optimization": GRPO gives rollouts with other rewards but the same sum
    the same advantage, and a function with a small deviation little weight. A function that does not apply to a rollout
    adds 0 there and is compared among the others of the group. A group in which every function gives equal rewards: 0.

    Raises:
        RewardError: no rewards by function.
    """
    terms = inputs.terms
    if terms is None or (not terms.weights_F.numel() and len(inputs.rewards_S)):
        raise RewardError(
            "algorithm.advantage=gdpo needs the rewards by function and found only their sum; set reward.functions to "
            "two or more functions, or algorithm.advantage=grpo"
        )
    total = GroupStatistics.of(inputs)
    sum_S = total.rewards_S.new_zeros(len(total.rewards_S))
    is_flat_S = sum_S == 0
    for values_S, weight in zip(terms.rewards_SF.T, terms.weights_F.tolist(), strict=True):
        applies_S = ~values_S.isnan()
        own = replace(inputs, rewards_S=values_S[applies_S], group_S=inputs.group_S[applies_S], terms=None)
        groups = GroupStatistics.of(own)
        normalized_S = (groups.rewards_S - groups.mean_S) / (groups.std(advantage_ddof) + advantage_eps)
        sum_S[applies_S] += weight * normalized_S.masked_fill(groups.is_flat_S, 0.0)
        is_flat_S[applies_S] &= groups.is_flat_S | (weight == 0)
    # Each function's advantages add up to 0 in a group, so the mean over the step is rounding.
    spread = sum_S.std(correction=advantage_ddof) if len(sum_S) > 1 else sum_S.new_zeros(())
    whitened_S = (sum_S - sum_S.mean()) / (spread + advantage_eps) if len(sum_S) else sum_S
    has_signal_G = rollout_max((~is_flat_S).double(), total.index_S, total.num_groups)
    total.metrics["reward/zero_std_fraction"] = float((has_signal_G == 0).double().mean()) if total.num_groups else 0.0
    return total.finish(whitened_S.masked_fill(is_flat_S, 0.0), inputs)
