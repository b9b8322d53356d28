"""Checks of the gradient of a policy loss: constants, weights, finite differences, extreme values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lockstep.lab.finding import Finding, failure
from lockstep.lab.losses.examined_loss import TOLERANCE, ExaminedLoss, change, slope
from lockstep.lab.losses.stop_gradients import finite_differences

LOG_RATIOS = (0.0, 0.1, 1.0, 20.0, 100.0, 1000.0)
"""Absolute log ratios of the extreme tokens [nats]; exp overflows float32 at 88.7."""


def check_old_logprobs(examined: ExaminedLoss) -> Finding:
    name = "no gradient through old logprobs"
    inputs = examined.inputs()
    inputs = replace(inputs, old_logp_T=inputs.old_logp_T.clone().requires_grad_())
    if not bool(slope(examined(inputs).loss_T.sum(), inputs.old_logp_T).any()):
        return Finding(check=name)
    return failure(
        name,
        "The loss has a gradient through old_logp_T, which is a constant (in the first update of a batch it is log π_θ "
        "itself, and both gradients would cancel); write inputs.old_logp_T.detach().",
    )


def check_weights(examined: ExaminedLoss) -> Finding:
    """Compare losses with weights of 0, 1 and 2 with those without weights."""
    name = "correction weights are factors"
    inputs = examined.inputs()
    if examined.loss.weighs_by_sampling:
        return Finding(check=name, measured="none")
    plain_T = examined.values(replace(inputs, weights_T=None))
    assert inputs.sampling_logp_T is not None
    shifted_inputs = replace(inputs, weights_T=None, sampling_logp_T=inputs.sampling_logp_T - 0.3)
    if not torch.equal(examined.values(shifted_inputs), plain_T):
        return failure(
            name,
            "The losses change with sampling_logp_T, and the weights of the rollout correction are π_old / μ already, "
            "so μ counts twice; take the ratio to old_logp_T, or declare @policy_loss(weighs_by_sampling=True).",
        )
    for weight in (1.0, 2.0, 0.0):
        found_T = examined.values(replace(inputs, weights_T=torch.full_like(inputs.old_logp_T, weight)))
        if change(found_T, plain_T * weight) > TOLERANCE:
            return failure(
                name,
                f"With weights of {weight:g} the losses are not {weight:g} times those without weights, so the rollout "
                "correction is lost; return `weighted(loss_T, inputs)` of trainer/objective/losses/inputs.py.",
            )
    return Finding(check=name)


def check_finite_differences(examined: ExaminedLoss) -> Finding:
    """Compare the gradient of a sum of the losses, each with another factor, with central differences."""
    name = "gradient against finite differences"
    inputs = examined.inputs()
    generator = torch.Generator().manual_seed(7)
    factor_T = 0.5 + torch.rand(len(inputs.old_logp_T), generator=generator, dtype=torch.float64)

    def value(logp_T: Tensor) -> Tensor:
        return (factor_T * examined(replace(inputs, logp_T=logp_T)).loss_T).sum()

    logp_T = inputs.logp_T.detach().clone().requires_grad_()
    gradient_T = slope(value(logp_T), logp_T)
    try:
        expected_T = finite_differences(value, logp_T.detach())
    except RuntimeError as error:
        return failure(name, f"Finite differences cannot be taken: {error}.")
    error_T = (gradient_T - expected_T).abs() / expected_T.abs().max().clamp(min=1e-6)
    worst = int(error_T.argmax())
    measurement = f"{float(error_T[worst]):.0e}"
    if error_T[worst] <= 1e-5:
        return Finding(check=name, measured=measurement)
    return failure(
        name,
        f"At logp {float(logp_T[worst].detach()):.3f}, old logp {float(inputs.old_logp_T[worst]):.3f} and advantage "
        f"{float(inputs.advantages_T[worst]):.3f}, autograd gives the slope {float(gradient_T[worst]):.4g} and finite "
        f"differences {float(expected_T[worst]):.4g}: a hand-written backward is wrong, or a value depends on logp_T "
        "in a way that autograd does not see.",
        measurement,
    )


def check_extremes(examined: ExaminedLoss) -> Finding:
    """Call the loss in float32 with log ratios of up to ±1000 nats, one token per rollout."""
    name = "finite at extreme log ratios"
    cases = [
        (sign * size, advantage, weight)
        for size in LOG_RATIOS
        for sign in (1, -1)
        for advantage in (-3.0, 0.0, 3.0)
        for weight in (0.0, 1.0)
    ]
    ratio_T, advantages_T, weights_T = (torch.tensor(column) for column in zip(*cases, strict=True))
    inputs = examined.tokens(ratio_T, advantages_T, torch.arange(len(cases)), weights_T)
    outputs = examined(inputs)
    gradient_T = slope(outputs.loss_T.sum(), inputs.logp_T)
    for what, values_T in (("loss", outputs.loss_T), ("gradient", gradient_T)):
        if not bool(values_T.isfinite().all()):
            where = int((~values_T.isfinite()).nonzero()[0])
            log_ratio, advantage, _ = cases[where]
            return failure(
                name,
                f"The {what} is {float(values_T[where].detach()):g} at a log ratio of {log_ratio:g} and the advantage "
                f"{advantage:g} in float32, and one such token makes the guard skip the update; bound the log ratio "
                "before exp, for example by `token_ratio` of trainer/objective/losses/inputs.py.",
            )
    for key, metric in outputs.metrics.items():
        if not metric.isfinite():
            return failure(name, f"The metric {key} is {float(metric):g} at log ratios of up to ±1000; bound it.")
    return Finding(check=name)
