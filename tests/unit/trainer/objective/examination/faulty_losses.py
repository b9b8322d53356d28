"""Policy losses with one fault each, and correct ones that look unusual."""

import torch

from lockstep.trainer.objective.declare import policy_loss
from lockstep.trainer.objective.losses.inputs import (
    LossInputs,
    LossOutputs,
    plain_log_ratio,
    sequence_ratio,
    token_ratio,
    weighted,
)


def surrogate(inputs: LossInputs, *, scale: float = 1.0):
    return weighted(-scale * token_ratio(inputs) * inputs.advantages_T, inputs)


def mean_of_microbatch(inputs: LossInputs):
    return surrogate(inputs).mean()


def divided_by_tokens(inputs: LossInputs):
    return surrogate(inputs) / len(inputs.logp_T)


def centered_in_microbatch(inputs: LossInputs):
    return surrogate(inputs) - surrogate(inputs).mean()


def mean_of_rollout(inputs: LossInputs):
    return surrogate(inputs) / inputs.rollout_T.bincount()[inputs.rollout_T]


def old_with_gradient(inputs: LossInputs):
    return weighted(-(inputs.logp_T - inputs.old_logp_T).clamp(-20, 20).exp() * inputs.advantages_T, inputs)


def unbounded(inputs: LossInputs):
    return weighted(-(inputs.logp_T - inputs.old_logp_T.detach()).exp() * inputs.advantages_T, inputs)


def world_size(inputs: LossInputs):
    return surrogate(inputs) * _ranks()


def _ranks():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


class WrongExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class RightExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.detach().exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def _log_ratio(inputs):
    return (inputs.logp_T - inputs.old_logp_T.detach()).clamp(-20, 20)


def wrong_backward(inputs: LossInputs):
    return weighted(-WrongExp.apply(_log_ratio(inputs)) * inputs.advantages_T, inputs)


def right_backward(inputs: LossInputs):
    return weighted(-RightExp.apply(_log_ratio(inputs)) * inputs.advantages_T, inputs)


def mean_metric(inputs: LossInputs):
    return LossOutputs(
        loss_T=surrogate(inputs), metrics={"own/ratio": token_ratio(inputs).detach().mean().nan_to_num()}
    )


def metric_of_some_microbatches(inputs: LossInputs):
    metrics = {"own/ratio": token_ratio(inputs).detach().sum()} if len(inputs.logp_T) else {}
    return LossOutputs(loss_T=surrogate(inputs), metrics=metrics)


def metric_with_gradient(inputs: LossInputs):
    return LossOutputs(loss_T=surrogate(inputs), metrics={"own/ratio": token_ratio(inputs).sum()})


def random(inputs: LossInputs):
    return surrogate(inputs) * torch.rand(())


def in_place(inputs: LossInputs):
    inputs.advantages_T.mul_(2)
    return surrogate(inputs)


def crashes(inputs: LossInputs):
    return surrogate(inputs) + torch.zeros(3)


def detached(inputs: LossInputs):
    return weighted(-inputs.logp_T.detach() * inputs.advantages_T, inputs)


def without_weights(inputs: LossInputs):
    return -token_ratio(inputs) * inputs.advantages_T


def flat_at_old(inputs: LossInputs):
    return weighted(_log_ratio(inputs).square(), inputs)


def undeclared_sequence(inputs: LossInputs):
    return weighted(-inputs.seq_log_ratio_S.exp()[inputs.rollout_T] * inputs.logp_T, inputs)


@policy_loss(sequence_log_ratio=plain_log_ratio)
def declared_sequence(inputs: LossInputs):
    return weighted(-sequence_ratio(inputs, inputs.logp_T - inputs.old_logp_T.detach()) * inputs.advantages_T, inputs)


@torch.no_grad()
def _coefficient(inputs):
    return token_ratio(inputs).clamp(max=1.5)


def under_no_grad(inputs: LossInputs):
    return weighted(-_coefficient(inputs) * inputs.advantages_T * inputs.logp_T, inputs)


def no_ratio(inputs: LossInputs):
    return weighted(-inputs.advantages_T * inputs.logp_T, inputs)
