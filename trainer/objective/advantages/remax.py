"""ReMax (Li et al. 2023): the reward of the greedy answer as the baseline."""

from trainer.objective.advantages.inputs import AdvantageInputs, Advantages, GroupStatistics
from trainer.objective.declare import advantage


@advantage(needs_greedy=True, takes_turns=False, kl_in_reward=True)
def remax(inputs: AdvantageInputs) -> Advantages:
    """r − reward of the greedy answer to the same prompt.

    Raises:
        ValueError: the greedy rewards are missing.
    """
    if inputs.greedy_rewards_S is None:
        raise ValueError("remax needs greedy_rewards_S, the reward of the greedy answer to each rollout's prompt")
    groups = GroupStatistics.of(inputs)
    return groups.finish(groups.rewards_S - inputs.greedy_rewards_S.double(), inputs)
