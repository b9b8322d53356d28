"""Built-in reward functions: `fn(rollout, **settings) -> float`, or of a group (`rewards/batches.py`)."""

from collections.abc import Callable
from typing import Any

from lockstep.rollout.on_demand import OnDemand
from lockstep.rollout.system.user_functions import OBJECT

GYM_PREFIX, GYM_COLUMN = "reasoning_gym:", "reasoning_gym"
"""Beginning of a data path that names a task of reasoning-gym, and the column that the reward of its tasks reads."""
JUDGES = {
    "llm_judge": "judges.scored:LlmJudge",
    "rubric_judge": "judges.rubric:RubricJudge",
    "pairwise_judge": "judges.pairwise:PairwiseJudge",
}
FUNCTIONS = OnDemand[Callable[..., Any]](
    __name__,
    {
        "demo_answer": "built_in:demo_answer",
        "exact_match": "built_in:exact_match",
        "contains": "built_in:contains",
        "numeric": "built_in:numeric",
        "regex": "built_in:regex",
        "think_format": "built_in:think_format",
        "soft_overlong": "built_in:soft_overlong",
        "repetition": "built_in:repetition",
        "environment_reward": "built_in:environment_reward",
        "math_equal": "mathematics:math_equal",
        "reasoning_gym": "reasoning_gym:reasoning_gym",
        "code_tests": "programs:code_tests",
        "tool_calls_match": "tool_calls:tool_calls_match",
        "question_answer": "tagged:question_answer",
        "similarity": "tagged:similarity",
        **JUDGES,
        "majority_vote": "consensus:MajorityVote",
        "novelty": "consensus:Novelty",
    },
)
"""By name. A class is made from its settings, which it checks, then called as a function."""

ISOLATED = frozenset({"regex", "math_equal", "reasoning_gym", "code_tests", "similarity", "majority_vote", "novelty"})
"""Built-ins that may hang on a model's text, and therefore always run in a process that can be killed."""


def runs_in_worker(spec: str, isolation: str) -> bool:
    """Return True for a user's function of which a worker process calls its file, or a copy. isolation: the setting."""
    return ":" in spec and isolation == "process" and not spec.startswith(OBJECT)
