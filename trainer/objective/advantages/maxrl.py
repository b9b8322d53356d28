"""MaxRL (Tajwar et al. 2026, "Maximum likelihood reinforcement learning", arXiv 2602.02710)."""

from lockstep.rollout.errors import RewardError
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage


@advantage(compares_group=True, takes_turns=False)
def maxrl(inputs: AdvantageInputs) -> Advantages:
    """(r − mean of the group) / mean of the group.

    With rewards 0 and 1 the gradient of a group with K successes is the mean of ∇ log π over these K, less a baseline:
    it estimates the gradient of log P(success), truncated at order G of its series in the failure rate, in place of
    that of P(success). So a prompt weighs the more the more seldom it is solved. A group without a success, or of equal
    rewards: 0.

    Raises:
        RewardError: a negative reward, with which the mean is not a success rate and can flip the sign.
    """
    groups = GroupStatistics.of(inputs)
    if bool((groups.rewards_S < 0).any()):
        raise RewardError(
            f"algorithm.advantage=maxrl divides by the mean reward of the group and found the reward "
            f"{float(groups.rewards_S.min())}; expected rewards from 0 on: shift them, leave out penalties, or set "
            "algorithm.advantage=grpo"
        )
    relative_S = (groups.rewards_S - groups.mean_S) / groups.mean_S.masked_fill(groups.is_flat_S, 1.0)
    return groups.finish(relative_S.masked_fill(groups.is_flat_S, 0.0), inputs)
