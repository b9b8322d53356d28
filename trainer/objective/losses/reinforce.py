"""REINFORCE (Williams 1992)."""

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, common_metrics, token_ratio, weighted


@policy_loss(has_ratio=False)
def reinforce(inputs: LossInputs) -> LossOutputs:
    """l = −A logp. Without a ratio, updates after the first one of a rollout batch are off policy."""
    loss_T = -inputs.advantages_T * inputs.logp_T
    return LossOutputs(loss_T=weighted(loss_T, inputs), metrics=common_metrics(inputs, token_ratio(inputs)))
