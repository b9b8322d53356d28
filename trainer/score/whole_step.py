"""The configured policy loss, with the values that it takes from all tokens of an optimizer step: masks by rank,
covariances, sequence weights and ratios.

Dimensions: `_N` trained tokens of the rollout batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.credit.old_policy import FromUpdate, Recomputed
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.objective.declare import PolicyLoss
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, StepInputs
from lockstep.trainer.score.scorer import Scorer


class ConfiguredLoss:
    """A policy loss with its settings."""

    def __init__(self, loss: PolicyLoss, algorithm: AlgorithmConfig, *, seed: int) -> None:
        self._name, self._seed = algorithm.loss, seed
        self.function: Callable[[LossInputs], LossOutputs] = loss.configured(algorithm)
        self._whole_step = loss.whole_step(algorithm)
        self._needs_entropy, self._has_ratio_alone = loss.needs_entropy, loss.step_values is None

    def step_values(
        self,
        scorer: Scorer,
        batch: StepBatch,
        targets: Targets,
        rows: Sequence[int],
        *,
        is_first: bool,
        update: int,
    ) -> Mapping[str, Tensor]:
        """Return (N,) tensors by name, 0 outside of the loss mask and of `rows`; a collective.

        The logprobs are those of θ. In the first update of a batch they are the recomputed old ones; otherwise, and for
        entropies, a pass of the trainer gives them.

        Args:
            rows: those of the optimizer step (indices).
            is_first: True if θ is still θ_old.
            update: number of updates done, part of the seed of random choices.

        Raises:
            TrainingError: a value has another shape, or is not finite although the logprobs are. If they are not, the
                loss is not finite either, and the guard skips the update.
        """
        if self._whole_step is None:
            return {}
        entropy_N = None
        if self._needs_entropy:
            logp_N, entropy_N = scorer.score_with_entropy(batch, rows)
        elif is_first and isinstance(targets.old, Recomputed):
            logp_N = targets.old.logp_N
        elif is_first and isinstance(targets.old, FromUpdate) and self._has_ratio_alone:
            logp_N = torch.zeros(batch.layout.num_tokens)  # as the old ones: no pass for log ratios of 0
        else:
            logp_N = scorer.score(batch, rows)
        of_step = torch.zeros(batch.num_rollouts, dtype=torch.bool)
        of_step[torch.from_numpy(batch.layout.rollout_index)[torch.tensor(rows, dtype=torch.long)]] = True
        indices = (targets.keep_N & of_step[batch.rollout_N]).nonzero().squeeze(1)
        old_N = logp_N if targets.old.logp_N is None else targets.old.logp_N
        inputs = StepInputs(
            logp_N=logp_N[indices],
            old_logp_N=old_N[indices],
            sampling_logp_N=batch.sampling_logprobs_N[indices].to(logp_N.dtype),
            advantages_N=targets.advantages_N[indices],
            rollout_N=batch.rollout_N[indices],
            num_rollouts=batch.num_rollouts,
            seed=int(np.random.SeedSequence([self._seed, update]).generate_state(1)[0]),
            entropy_N=None if entropy_N is None else entropy_N[indices],
        )
        values = self._whole_step(inputs)
        is_finite = bool(inputs.logp_N.isfinite().all())
        return {name: self._checked(name, value, inputs, is_finite, indices, logp_N) for name, value in values.items()}

    def _checked(
        self, name: str, value: Tensor, inputs: StepInputs, is_finite: bool, kept: Tensor, like_N: Tensor
    ) -> Tensor:
        if value.shape != inputs.logp_N.shape:
            raise TrainingError(
                f"step_values of algorithm.loss={self._name}: {name} has shape {tuple(value.shape)}, expected "
                f"{tuple(inputs.logp_N.shape)}, one entry per trained token of the step"
            )
        if is_finite and not bool(value.isfinite().all()):
            raise TrainingError(
                f"step_values of algorithm.loss={self._name}: {name} is not finite for "
                f"{int((~value.isfinite()).sum())} of {len(value)} tokens, although their logprobs are finite"
            )
        return torch.zeros_like(like_N).index_copy(0, kept, value.detach().to(like_N.dtype))
