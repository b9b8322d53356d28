"""ReMax (Li et al. 2023, arXiv 2310.10505): the reward of the greedy answer as the baseline."""

from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage


@advantage(needs_greedy=True, takes_turns=False, kl_in_reward=True)
def remax(inputs: AdvantageInputs) -> Advantages:
    """r − reward of the greedy answer to the same prompt."""
    assert inputs.greedy_rewards_S is not None, "remax needs greedy_rewards_S"
    groups = GroupStatistics.of(inputs)
    return groups.finish(groups.rewards_S - inputs.greedy_rewards_S.double(), inputs)
