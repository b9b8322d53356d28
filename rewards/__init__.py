"""The score of a rollout: functions, their composition, and what happens when one of them fails."""

from rewards.composition import FaultTolerance, Policy, Reward, RewardSet, make_reward_set
from rewards.functions import FUNCTIONS
from rewards.isolation import Isolation
from rewards.outcomes import Outcome
from rewards.trl import from_trl

__all__ = [
    "FUNCTIONS",
    "FaultTolerance",
    "Isolation",
    "Outcome",
    "Policy",
    "Reward",
    "RewardSet",
    "from_trl",
    "make_reward_set",
]
