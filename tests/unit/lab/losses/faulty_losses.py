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


def wrong_sign(inputs: LossInputs):
    return -surrogate(inputs)


def absolute_advantage(inputs: LossInputs):
    return weighted(-token_ratio(inputs) * inputs.advantages_T.abs(), inputs)


def wrong_sign_of_large_advantages(inputs: LossInputs):
    """Large advantages have the wrong sign."""
    return weighted(-token_ratio(inputs) * inputs.advantages_T * (1.5 - inputs.advantages_T.abs()), inputs)


def _surrogates(inputs: LossInputs):
    ratio_T = token_ratio(inputs)
    return ratio_T * inputs.advantages_T, ratio_T.clamp(0.8, 1.2) * inputs.advantages_T


def clipped(inputs: LossInputs):
    one_T, other_T = _surrogates(inputs)
    return weighted(-torch.minimum(one_T, other_T), inputs)


def max_for_min(inputs: LossInputs):
    one_T, other_T = _surrogates(inputs)
    return weighted(-torch.maximum(one_T, other_T), inputs)


@policy_loss(sequence_log_ratio=plain_log_ratio)
def max_for_min_in_sequences(inputs: LossInputs):
    ratio_T = sequence_ratio(inputs, _log_ratio(inputs))
    advantages_T = inputs.advantages_T
    return weighted(-torch.maximum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T), inputs)


def swapped_bounds(inputs: LossInputs):
    """The bounds of rewarded and punished tokens are swapped."""
    ratio_T, advantages_T = token_ratio(inputs), inputs.advantages_T
    bounded_T = torch.where(advantages_T > 0, ratio_T.clamp(min=0.8), ratio_T.clamp(max=1.2))
    return weighted(-bounded_T * advantages_T, inputs)


def masked_on_both_sides(inputs: LossInputs):
    ratio_T = token_ratio(inputs)
    is_near_T = (ratio_T > 0.5) & (ratio_T < 5.0)
    return weighted(-ratio_T * inputs.advantages_T * is_near_T, inputs)


def bounded_above(inputs: LossInputs):
    return weighted(-token_ratio(inputs).clamp(max=2.0) * inputs.advantages_T, inputs)


def without_first_rollout(inputs: LossInputs):
    return surrogate(inputs) * (inputs.rollout_T > 0)


def without_last_rollout(inputs: LossInputs):
    return surrogate(inputs) * (inputs.rollout_T < inputs.num_rollouts - 1)


def without_first_token(inputs: LossInputs):
    is_first_T = torch.cat([inputs.rollout_T.new_ones(1), inputs.rollout_T.diff()]) != 0
    return surrogate(inputs) * ~is_first_T[: len(inputs.rollout_T)]


def without_small_advantages(inputs: LossInputs):
    return surrogate(inputs) * (inputs.advantages_T.abs() > 0.75)


def only_rewarded(inputs: LossInputs):
    return surrogate(inputs) * (inputs.advantages_T > 0)


def without_every_second_rollout(inputs: LossInputs):
    return surrogate(inputs) * (inputs.rollout_T % 2 == 1)


def two_temperatures(inputs: LossInputs):
    log_ratio_T = inputs.logp_T / 0.7 - inputs.old_logp_T.detach()
    return weighted(-log_ratio_T.clamp(-20, 20).exp() * inputs.advantages_T, inputs)


def weight_with_gradient(inputs: LossInputs):
    return weighted(-token_ratio(inputs).clamp(max=1.5) * inputs.advantages_T * inputs.logp_T, inputs)


def weighted_by_probability(inputs: LossInputs):
    return surrogate(inputs) * (1 - inputs.logp_T.detach().exp())


def ratio_to_sampling(inputs: LossInputs):
    assert inputs.sampling_logp_T is not None
    return weighted(-(inputs.logp_T - inputs.sampling_logp_T).clamp(-20, 20).exp() * inputs.advantages_T, inputs)


def _kl(inputs: LossInputs):
    return (-_log_ratio(inputs)).exp() + _log_ratio(inputs) - 1


def kl(inputs: LossInputs):
    return surrogate(inputs) + weighted(0.1 * _kl(inputs), inputs)


def kl_of_wrong_sign(inputs: LossInputs):
    return surrogate(inputs) - weighted(0.1 * _kl(inputs), inputs)


def kl_as_log_ratio(inputs: LossInputs):
    return surrogate(inputs) - weighted(0.1 * _log_ratio(inputs), inputs)


def never_raised(inputs: LossInputs):
    return weighted(-token_ratio(inputs).clamp(min=1.0) * inputs.advantages_T, inputs)
