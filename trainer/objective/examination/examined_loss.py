"""A policy loss with its settings on a toy step, as the checks call it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.objective.declare import PolicyLoss
from lockstep.trainer.objective.examination.toy_step import ToyStep, sequence_ratios, settings_of, step_values
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, StepInputs

TOLERANCE = 1e-9
"""Largest relative difference of float64 results that should be equal."""


class ExaminedLoss:
    """A loss, and the toy step on which it is examined."""

    def __init__(self, loss: PolicyLoss, settings: Mapping[str, Any]) -> None:
        self.loss, self.settings, self.step = loss, settings, ToyStep()
        self._function = inspect.unwrap(loss.function)
        self.shared: str | None = None
        """Cause of a dependence on the other tokens of a microbatch, if it is known."""

    def inputs(self, tokens: Tensor | None = None) -> LossInputs:
        """Return a microbatch of these tokens, by default of the whole step; logprobs have a gradient."""
        tokens = self.step.kept if tokens is None else tokens
        with torch.no_grad():
            logp_T = self.step.logp_and_entropy(self.step.initial, tokens)[0]
        ratios = self.step.sequence_ratios(self.loss, self.settings)
        of_step = self.step.step_values(self.loss, self.settings)
        return self.step.inputs(tokens, logp_T.requires_grad_(), ratios, of_step)

    def tokens(
        self, log_ratio_T: Tensor, advantages_T: Tensor, rollout_T: Tensor, weights_T: Tensor | None = None
    ) -> LossInputs:
        """Return a microbatch of tokens with these log ratios of the policy to the old one, which sampled them."""
        logp_T, old_T = log_ratio_T.clamp(max=0) - 0.1, (-log_ratio_T).clamp(max=0) - 0.1
        num_rollouts = int(rollout_T.max()) + 1
        of_step = StepInputs(
            logp_N=logp_T.clone(),
            old_logp_N=old_T,
            sampling_logp_N=old_T,
            advantages_N=advantages_T,
            rollout_N=rollout_T,
            num_rollouts=num_rollouts,
            seed=0,
            entropy_N=torch.ones_like(logp_T),
        )
        ratios = sequence_ratios(self.loss, logp_T - old_T, advantages_T, rollout_T, num_rollouts, **self.settings)
        return LossInputs(
            logp_T=logp_T.requires_grad_(),
            old_logp_T=old_T,
            advantages_T=advantages_T,
            rollout_T=rollout_T,
            num_rollouts=num_rollouts,
            weights_T=weights_T,
            sampling_logp_T=old_T,
            step_values=step_values(self.loss, of_step, **self.settings),
            seq_log_ratio_S=ratios,
        )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return self.loss(inputs, **self.settings)

    def values(self, inputs: LossInputs) -> Tensor:
        """Return (T,) losses without gradient."""
        return self(inputs).loss_T.detach()

    def gradient(self, inputs: LossInputs) -> Tensor:
        """Return (T,) the gradient of the sum of the losses with respect to the logprobs."""
        return slope(self(inputs).loss_T.sum(), inputs.logp_T)

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
        found = self._function(inputs, **self.loss.values(settings_of(self.loss, self.settings)))
        return found.loss_T if isinstance(found, LossOutputs) else found


def slope(value: Tensor, by: Tensor) -> Tensor:
    """Return the gradient of a scalar, 0 where it has none."""
    if not value.requires_grad:
        return torch.zeros_like(by)
    (found,) = torch.autograd.grad(value, by, allow_unused=True)
    return torch.zeros_like(by) if found is None else found


def change(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference in units of the largest expected value; infinite for NaN."""
    if not found.numel():
        return 0.0
    largest = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    return math.inf if math.isnan(largest) else largest
