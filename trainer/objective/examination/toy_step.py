"""One optimizer step of a toy policy, divided over ranks and microbatches as `trainer/update/updater.py` divides one.

The policy is a softmax over a linear map of random features. The step has weights of the rollout correction, rejected
tokens, rollouts without trained tokens, branches, a KL term and an entropy bonus.

Dimensions: `_T` tokens, `_S` rollouts. Ranks are lists of microbatches, and these are indices of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.trainer.objective.correction.weights import correction_weights
from lockstep.trainer.objective.declare import PolicyLoss
from lockstep.trainer.objective.examination.divisions import DIVISIONS, Division, Part
from lockstep.trainer.objective.kl import kl_term
from lockstep.trainer.objective.loss_normalization import StepCounts, loss_coefficients, normalized_loss
from lockstep.trainer.objective.losses.inputs import LossInputs, StepInputs
from lockstep.trainer.objective.per_rollout import rollout_count, rollout_mean

LENGTHS = (9, 1, 5, 3, 0, 0)
"""Tokens per rollout."""
BRANCHES = ((4, 5), (1,), (2, 3), (3,), (), ())
"""Tokens of each rollout's rows."""
NUM_ROLLOUTS = len(LENGTHS)
VOCABULARY, WIDTH = 7, 4

Ranks = list[list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToyUpdate:
    """Outcome of an update, added up over microbatches and ranks."""

    gradient: Tensor
    metrics: Mapping[str, float]


class ToyStep:
    """The trained tokens of a step with their records."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.rollout_T = torch.repeat_interleave(torch.arange(NUM_ROLLOUTS), torch.tensor(LENGTHS))
        rows = [length for lengths in BRANCHES for length in lengths]
        self.row_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        num_tokens = len(self.rollout_T)
        self.features = normal(num_tokens, WIDTH)
        self.targets_T = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
        self.initial = normal(WIDTH, VOCABULARY)
        logp_T = self.logp_and_entropy(self.initial, torch.arange(num_tokens))[0]
        self.old_logp_T = logp_T + 0.3 * normal(num_tokens)
        self.ref_logp_T = logp_T + 0.3 * normal(num_tokens)
        self.samp_logp_T = self.old_logp_T + 0.2 * normal(num_tokens)
        self.advantages_T = normal(NUM_ROLLOUTS)[self.rollout_T]
        correction = correction_weights(
            self.old_logp_T,
            self.samp_logp_T,
            self.rollout_T,
            NUM_ROLLOUTS,
            mode="token_mask",
            bounds=(0.85, 1.15),
            rejection={"token_k3": 0.05},
        )
        self.weights_T = correction.weights_T
        self.kept = correction.keep_T.nonzero()[:, 0]

    def logp_and_entropy(self, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logp = (self.features[tokens] @ weight).log_softmax(dim=1)
        return logp.gather(1, self.targets_T[tokens, None])[:, 0], -(logp.exp() * logp).sum(dim=1)

    def inputs(
        self, tokens: Tensor, logp_T: Tensor, seq_log_ratio_S: Tensor | None, of_step: Mapping[str, Tensor]
    ) -> LossInputs:
        """Return the inputs of a microbatch. logp_T: of its tokens. of_step: from `step_values`."""
        return LossInputs(
            logp_T=logp_T,
            old_logp_T=self.old_logp_T[tokens],
            advantages_T=self.advantages_T[tokens],
            rollout_T=self.rollout_T[tokens],
            num_rollouts=NUM_ROLLOUTS,
            weights_T=self.weights_T[tokens],
            seq_log_ratio_S=seq_log_ratio_S,
            sampling_logp_T=self.samp_logp_T[tokens],
            step_values={name: values_T[tokens] for name, values_T in of_step.items()},
        )

    def step_values(self, loss: PolicyLoss, settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the loss's values of the whole step at all tokens; NaN at rejected ones, which no loss may read."""
        with torch.no_grad():
            logp_T, entropy_T = self.logp_and_entropy(self.initial, self.kept)
        inputs = StepInputs(
            logp_N=logp_T,
            old_logp_N=self.old_logp_T[self.kept],
            sampling_logp_N=self.samp_logp_T[self.kept],
            advantages_N=self.advantages_T[self.kept],
            rollout_N=self.rollout_T[self.kept],
            num_rollouts=NUM_ROLLOUTS,
            seed=0,
            entropy_N=entropy_T,
        )
        nowhere = torch.full_like(self.old_logp_T, torch.nan)
        found = step_values(loss, inputs, **settings)
        return {name: nowhere.index_copy(0, self.kept, x_N.to(nowhere.dtype)) for name, x_N in found.items()}

    def sequence_ratios(self, loss: PolicyLoss, settings: Mapping[str, Any]) -> Tensor | None:
        """Return `LossInputs.seq_log_ratio_S` of the step."""
        with torch.no_grad():
            logp_T = self.logp_and_entropy(self.initial, self.kept)[0]
        return sequence_ratios(
            loss,
            logp_T - self.old_logp_T[self.kept],
            self.advantages_T[self.kept],
            self.rollout_T[self.kept],
            NUM_ROLLOUTS,
            **settings,
        )

    def gradient(self, loss: PolicyLoss, settings: Mapping[str, Any], normalizer: str, ranks: Ranks) -> Tensor:
        """Return the gradient averaged over ranks, each of which accumulates its microbatches."""
        return self.update(loss, settings, normalizer, ranks).gradient

    def update(self, loss: PolicyLoss, settings: Mapping[str, Any], normalizer: str, ranks: Ranks) -> ToyUpdate:
        counts = StepCounts(num_rollouts=NUM_ROLLOUTS, num_tokens=len(self.kept), max_completion_length=16)
        tokens_per_rollout_S = rollout_count(self.rollout_T[self.kept], NUM_ROLLOUTS)
        seq_log_ratio_S, of_step = self.sequence_ratios(loss, settings), self.step_values(loss, settings)
        gradients: list[Tensor] = []
        sums: dict[str, float] = {}
        for microbatches in ranks:
            weight = self.initial.clone().requires_grad_()
            for tokens in microbatches:
                logp_T, entropy_T = self.logp_and_entropy(weight, tokens)
                inputs = self.inputs(tokens, logp_T, seq_log_ratio_S, of_step)
                outputs = loss(inputs, **settings)
                loss_T = outputs.loss_T + 0.1 * kl_term("unbiased", logp_T, self.ref_logp_T[tokens], inputs.old_logp_T)
                loss_T = loss_T - 0.01 * entropy_T
                coefficient_T = loss_coefficients(
                    normalizer, inputs.rollout_T, tokens_per_rollout_S, counts, dtype=loss_T.dtype
                )
                (normalized_loss(loss_T, coefficient_T) * len(ranks)).backward()
                for name, value in outputs.metrics.items():
                    sums[name] = sums.get(name, 0.0) + float(value.detach())
            gradients.append(weight.grad if weight.grad is not None else torch.zeros_like(weight))
        return ToyUpdate(gradient=torch.stack(gradients).mean(dim=0), metrics=sums)


def sequence_ratios(
    loss: PolicyLoss,
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    rollout_T: Tensor,
    num_rollouts: int,
    **settings: Any,
) -> Tensor | None:
    """Return `LossInputs.seq_log_ratio_S` as the trainer computes it from all tokens of a step."""
    values = loss.sequence_values(settings_of(loss, settings))
    if values is None:
        return None
    return rollout_mean(values(log_ratio_T.detach(), advantages_T), rollout_T, num_rollouts)


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


def partition(tokens: Tensor, ranks: int, microbatches: int, seed: int) -> Ranks:
    """Assign tokens to random microbatches of random ranks, in random order; some stay empty."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens[torch.randperm(len(tokens), generator=generator)]
    places = torch.randint(ranks * microbatches, (len(tokens),), generator=generator)
    return [[tokens[places == rank * microbatches + m] for m in range(microbatches)] for rank in range(ranks)]


def partitions(step: ToyStep) -> dict[str, Ranks]:
    """Return divisions of the step's kept tokens by name."""
    return {one.name: _ranks(step, one) for one in DIVISIONS if not one.shares_prefixes}


def _ranks(step: ToyStep, division: Division) -> Ranks:
    ranks, microbatches, kept = division.ranks, division.microbatches, step.kept
    if division.part is Part.TOKEN:
        assert microbatches is not None, "a microbatch per token is that of no trainer"
        return partition(kept, ranks, microbatches, seed=ranks * 31 + microbatches)
    part_T = step.rollout_T if division.part is Part.ROLLOUT else step.row_T
    parts = [kept[part_T[kept] == number] for number in range(int(part_T.max()) + 1)]
    return [parts[rank::ranks] for rank in range(ranks)]
