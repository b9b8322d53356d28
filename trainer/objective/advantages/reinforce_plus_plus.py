"""REINFORCE++ (Hu 2025, arXiv 2501.03262), with and without a group baseline."""

from typing import TYPE_CHECKING, Annotated

from lockstep.trainer.objective.advantages.inputs import EPS, AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage

if TYPE_CHECKING:
    from torch import Tensor


@advantage(kl_in_reward=True)
def reinforce_plus_plus(inputs: AdvantageInputs, *, advantage_eps: Annotated[float, EPS]) -> Advantages:
    """(r − mean of the step) / (std of the step + eps), ddof 1: no group baseline.

    Other implementations whiten over tokens; here a rollout counts once, whatever its length.
    """
    groups = GroupStatistics.of(inputs)
    return groups.finish(_whitened(groups.rewards_S, advantage_eps), inputs)


@advantage(compares_group=True, kl_in_reward=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, *, advantage_eps: Annotated[float, EPS]) -> Advantages:
    """(r − mean of the group) / (std over the step of these differences + eps): the baseline variant."""
    groups = GroupStatistics.of(inputs)
    centered_S = (groups.rewards_S - groups.mean_S).masked_fill(groups.is_flat_S, 0.0)
    return groups.finish(_whitened(centered_S, advantage_eps).masked_fill(groups.is_flat_S, 0.0), inputs)


def _whitened(values_S: "Tensor", eps: float) -> "Tensor":
    """Whiten over all rollouts of the step with the sample deviation; equal values become 0."""
    if len(values_S) == 0 or bool((values_S == values_S[0]).all()):
        return values_S.new_zeros(values_S.shape)
    return (values_S - values_S.mean()) / (values_S.std() + eps)
