"""GRPO for pass@k (Tang et al. 2025, arXiv 2503.19595): trains only the best rollout of a group."""

import math
from typing import Annotated

from lockstep.trainer.objective.advantages.inputs import DDOF, EPS, STD, AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage
from lockstep.trainer.objective.per_rollout import rollout_max, rollout_sum


@advantage(compares_group=True, takes_turns=False)
def grpo_passk(
    inputs: AdvantageInputs,
    *,
    advantage_std: Annotated[bool, STD],
    advantage_ddof: Annotated[int, DDOF],
    advantage_eps: Annotated[float, EPS],
) -> Advantages:
    """Best reward − second best for the best rollout, or that / (std of the group + eps); 0 for the others.

    Estimates the gradient of E[max of the group] with a leave-one-out baseline ("Optimizing language models for
    inference time objectives using reinforcement learning"); the division by the standard deviation is verl's (its
    `grpo_passk`). A tie for the best, or a group of one: 0.
    """
    groups = GroupStatistics.of(inputs)
    best_S = rollout_max(groups.rewards_S, groups.index_S, groups.num_groups)[groups.index_S]
    is_best_S = groups.rewards_S == best_S
    num_best_S = rollout_sum(is_best_S.double(), groups.index_S, groups.num_groups)[groups.index_S]
    is_only_best_S = is_best_S & (num_best_S == 1)
    others_S = groups.rewards_S.masked_fill(is_best_S, -math.inf)
    second_S = rollout_max(others_S, groups.index_S, groups.num_groups)[groups.index_S]
    lead_S = groups.rewards_S - second_S
    if advantage_std:
        lead_S = lead_S / (groups.std(advantage_ddof) + advantage_eps)
    return groups.finish(lead_S.masked_fill(~is_only_best_S | groups.is_flat_S, 0.0), inputs)
