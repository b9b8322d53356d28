"""A policy loss with its settings on a toy step, as the checks call it.

The step has weights of the rollout correction, rejected tokens, and rollouts without trained tokens.

Dimensions: `_N` trained tokens of the step, `_T` tokens of a microbatch, `_S` rollouts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.objective.correction.weights import correction_weights
from lockstep.trainer.objective.declare import PolicyLoss
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, StepInputs

TOLERANCE = 1e-9
"""Largest relative difference of float64 results that should be equal."""
LENGTHS = (9, 1, 5, 3, 0, 0)
"""Tokens of each rollout of the toy step."""
VOCABULARY = 7


class ExaminedLoss:
    """A loss, and the toy step on which it is examined."""

    def __init__(self, loss: PolicyLoss, settings: Mapping[str, Any]) -> None:
        self.loss, self.settings = loss, settings
        self.step, self.weights_N = _toy_step()
        self._function = inspect.unwrap(loss.function)
        self.shared: str | None = None
        """Cause of a dependence on the other tokens of a microbatch, if it is known."""

    def inputs(self, chosen: slice = slice(None)) -> LossInputs:
        """Return a microbatch of these tokens, by default of the whole step; logprobs have a gradient."""
        return self._microbatch(self.step, self.weights_N, chosen)

    def tokens(
        self, log_ratio_T: Tensor, advantages_T: Tensor, rollout_T: Tensor, weights_T: Tensor | None = None
    ) -> LossInputs:
        """Return a microbatch of tokens with these log ratios of the policy to the old one, which sampled them."""
        logp_T, old_T = log_ratio_T.clamp(max=0) - 0.1, (-log_ratio_T).clamp(max=0) - 0.1
        of_step = StepInputs(
            logp_N=logp_T,
            old_logp_N=old_T,
            sampling_logp_N=old_T,
            advantages_N=advantages_T,
            rollout_N=rollout_T,
            num_rollouts=int(rollout_T.max()) + 1,
            seed=0,
            entropy_N=torch.ones_like(logp_T),
        )
        return self._microbatch(of_step, weights_T)

    def _microbatch(self, step: StepInputs, weights_N: Tensor | None, chosen: slice = slice(None)) -> LossInputs:
        """Return the chosen tokens of a step, with what the loss takes from all of its tokens."""
        of_step = step_values(self.loss, step, **self.settings)
        return LossInputs(
            logp_T=step.logp_N[chosen].clone().requires_grad_(),
            old_logp_T=step.old_logp_N[chosen].clone(),
            advantages_T=step.advantages_N[chosen].clone(),
            rollout_T=step.rollout_N[chosen],
            num_rollouts=step.num_rollouts,
            weights_T=None if weights_N is None else weights_N[chosen],
            sampling_logp_T=step.sampling_logp_N[chosen],
            step_values={name: values_N[chosen] for name, values_N in of_step.items()},
        )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return self.loss(inputs, **self.settings)

    def values(self, inputs: LossInputs) -> Tensor:
        """Return (T,) losses without gradient."""
        return self(inputs).loss_T.detach()

    def gradient(self, inputs: LossInputs) -> Tensor:
        """Return (T,) the gradient of the sum of the losses with respect to the logprobs."""
        return slope(self(inputs).loss_T.sum(), inputs.logp_T)

    def changes_with_old(self) -> bool:
        """Return True if the losses change with the logprobs of the old policy."""
        inputs = replace(self.inputs(), weights_T=None)
        shift_T = torch.linspace(-0.1, 0.1, len(inputs.old_logp_T), dtype=inputs.old_logp_T.dtype)
        moved_T = self.values(replace(inputs, old_logp_T=inputs.old_logp_T + shift_T))
        return not torch.equal(moved_T, self.values(inputs))

    def returns_number(self) -> bool:
        """Return True if a user's function gives one number for its microbatch in place of one per token."""
        try:
            self(self.inputs())
        except TrainingError as error:
            return "the shape ()" in str(error)
        return False

    def expand_number(self) -> None:
        """Give the number of a microbatch to each of its tokens, so that the other checks can say more."""

        def expanded(inputs: LossInputs, **settings: Any) -> LossOutputs:
            return LossOutputs(loss_T=self._unchecked(inputs).expand_as(inputs.logp_T), metrics={})

        self.loss = replace(self.loss, function=expanded)
        self.shared = "it is one number for all tokens of the microbatch"

    def _unchecked(self, inputs: LossInputs) -> Any:
        """Return the losses of a user's function as it returns them."""
        outputs = self._function(inputs, **self.loss.values(settings_of(self.loss, self.settings)))
        return outputs.loss_T if isinstance(outputs, LossOutputs) else outputs


def _toy_step() -> tuple[StepInputs, Tensor]:
    """Return the tokens of a step that are not rejected, and their correction weights."""
    generator = torch.Generator().manual_seed(6)
    rollout_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    logp_TV = normal(len(rollout_T), VOCABULARY).log_softmax(dim=1)
    logp_T = logp_TV[:, 0]
    old_T = logp_T + 0.3 * normal(len(rollout_T))
    sampling_T = old_T + 0.2 * normal(len(rollout_T))
    advantages_T = normal(len(LENGTHS))[rollout_T]
    correction = correction_weights(
        old_T,
        sampling_T,
        rollout_T,
        len(LENGTHS),
        mode="token_mask",
        bounds=(0.85, 1.15),
        rejection={"token_k3": 0.05},
    )
    keep_T = correction.keep_T
    step = StepInputs(
        logp_N=logp_T[keep_T],
        old_logp_N=old_T[keep_T],
        sampling_logp_N=sampling_T[keep_T],
        advantages_N=advantages_T[keep_T],
        rollout_N=rollout_T[keep_T],
        num_rollouts=len(LENGTHS),
        seed=0,
        entropy_N=-(logp_TV.exp() * logp_TV).sum(dim=1)[keep_T],
    )
    return step, correction.weights_T[keep_T]


def step_values(loss: PolicyLoss, inputs: StepInputs, **settings: Any) -> dict[str, Tensor]:
    """Return the (N,) tensors of which `LossInputs.step_values` holds the part of a microbatch."""
    function = loss.whole_step(settings_of(loss, settings))
    return {} if function is None else dict(function(inputs))


def settings_of(loss: PolicyLoss, settings: Mapping[str, Any]) -> SimpleNamespace:
    """Return the part of `Config.algorithm` with these settings of a loss, and defaults for others."""
    if loss.given_in is not None:
        return SimpleNamespace(**{loss.given_in: dict(settings)})
    defaults = {name: argument.setting.default for name, argument in loss.arguments.items()}
    return SimpleNamespace(**defaults | dict(settings))


def slope(value: Tensor, by: Tensor) -> Tensor:
    """Return the gradient of a scalar, 0 where it has none."""
    if not value.requires_grad:
        return torch.zeros_like(by)
    (gradient,) = torch.autograd.grad(value, by, allow_unused=True)
    return torch.zeros_like(by) if gradient is None else gradient


def change(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference in units of the largest expected value; infinite for NaN."""
    if not found.numel():
        return 0.0
    largest = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    return math.inf if math.isnan(largest) else largest
