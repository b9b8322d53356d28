"""RLOO (Ahmadian et al. 2024, "Back to Basics"): leave-one-out baseline."""

from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage


@advantage(compares_group=True, kl_in_reward=True)
def rloo(inputs: AdvantageInputs) -> Advantages:
    """r − mean of the *other* rewards of the group = G/(G−1) (r − mean). A group of one: 0."""
    groups = GroupStatistics.of(inputs)
    leave_one_out_S = (groups.rewards_S - groups.mean_S) * groups.size_S / (groups.size_S - 1).clamp(min=1)
    return groups.finish(leave_one_out_S.masked_fill(groups.is_flat_S, 0.0), inputs)
