"""Rewards of rollouts: reward functions, their weighted sum, shaping, and the action on failures."""

from rewards.composition import FaultTolerance, OnError, Reward, RewardSet, make_reward_set
from rewards.functions.built_in import FUNCTIONS
from rewards.outcomes import Outcome
from rewards.shaping import Shaping
from rewards.trl import from_trl
from rewards.workers.pool import Isolation

__all__ = [
    "FUNCTIONS",
    "FaultTolerance",
    "Isolation",
    "OnError",
    "Outcome",
    "Reward",
    "RewardSet",
    "Shaping",
    "from_trl",
    "make_reward_set",
]
