"""GiGPO (Feng et al. 2025, arXiv 2505.10978): turns are compared with other turns from the same state."""

from dataclasses import replace
from typing import Annotated

from lockstep.trainer.objective.advantages.inputs import DDOF, EPS, STD, AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.declare import advantage
from lockstep.trainer.setting import Setting


@advantage(compares_group=True, needs_states=True)
def gigpo(
    inputs: AdvantageInputs,
    *,
    step_weight: Annotated[
        float, Setting(default=1.0, description="gigpo: weight of the advantage among turns of equal state", low=0)
    ],
    advantage_std: Annotated[bool, STD],
    advantage_ddof: Annotated[int, DDOF],
    advantage_eps: Annotated[float, EPS],
) -> Advantages:
    """A_episode + step_weight · A_step: the reward in its group, plus the turn's return among turns of equal state.

    "Group-in-group policy optimization". Both are (x − mean) / (std + eps), or without the division; the return of a
    turn is the discounted sum of the rewards from this turn on. A_step has no bias from what led to the state, because
    all compared turns began there. A state that only one turn visited, or equal returns: A_step = 0.

    Returns one advantage per turn. `credit/anchored_turns`: share of turns whose state another turn has too.
    """
    turns = inputs.turns
    assert turns is not None, "gigpo needs turns with their states"

    def normalized(x: AdvantageInputs) -> tuple[GroupStatistics, Advantages]:
        groups = GroupStatistics.of(x)
        centered_S = groups.rewards_S - groups.mean_S
        if advantage_std:
            centered_S = centered_S / (groups.std(advantage_ddof) + advantage_eps)
        return groups, groups.finish(centered_S.masked_fill(groups.is_flat_S, 0.0), inputs)

    _, episode = normalized(inputs)
    states, step = normalized(replace(inputs, rewards_S=turns.returns_K, group_S=turns.state_K, terms=None))
    advantages_K = episode.advantages_S[turns.rollout_K] + step_weight * step.advantages_S
    anchored_share = float((states.size_S > 1).double().mean()) if len(advantages_K) else 0.0
    return Advantages(advantages_K, {"credit/anchored_turns": anchored_share})
