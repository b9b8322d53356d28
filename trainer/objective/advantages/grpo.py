"""GRPO (Shao et al. 2024, DeepSeekMath) and Dr. GRPO (Liu et al. 2025)."""

from typing import Annotated

from lockstep.trainer.objective.advantages.inputs import DDOF, EPS, STD, AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage


@advantage(compares_group=True)
def grpo(
    inputs: AdvantageInputs,
    *,
    advantage_std: Annotated[bool, STD],
    advantage_ddof: Annotated[int, DDOF],
    advantage_eps: Annotated[float, EPS],
) -> Advantages:
    """(r − mean of the group) / (std of the group + eps), or without the division.

    Section 4.1.2 of the paper, which does not specify ddof; 1, the sample deviation, is the default of torch, TRL and
    verl. A group of one, or of equal rewards: 0.
    """
    groups = GroupStatistics.of(inputs)
    centered_S = groups.rewards_S - groups.mean_S
    if advantage_std:
        centered_S = centered_S / (groups.std(advantage_ddof) + advantage_eps)
    return groups.finish(centered_S.masked_fill(groups.is_flat_S, 0.0), inputs)


@advantage(compares_group=True)
def dr_grpo(inputs: AdvantageInputs) -> Advantages:
    """r − mean of the group.

    "Understanding R1-Zero-like training": the division by the standard deviation favors questions that are nearly
    always or nearly never solved.
    """
    groups = GroupStatistics.of(inputs)
    return groups.finish((groups.rewards_S - groups.mean_S).masked_fill(groups.is_flat_S, 0.0), inputs)
