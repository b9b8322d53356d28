"""The score of a rollout: functions, their composition, and what happens when one of them fails."""

from rewards.composition import FaultTolerance, Policy, Reward, RewardSet, make_reward_set
from rewards.functions.built_in import FUNCTIONS
from rewards.outcomes import Outcome
from rewards.shaping import Shaping
from rewards.trl import from_trl
from rewards.workers.pool import Isolation

__all__ = [
    "FUNCTIONS",
    "FaultTolerance",
    "Isolation",
    "Outcome",
    "Policy",
    "Reward",
    "RewardSet",
    "Shaping",
    "from_trl",
    "make_reward_set",
]
