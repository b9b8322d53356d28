"""The adaptive weight of the entropy bonus, which acts while the entropy is below a target.

    α = c if e ≤ target else 0        weight of an update, e the mean entropy per trained token [nats]
    c ← min(c + step, max) if e ≤ target else max(c − step, 0)        after the update

The entropy that decides on α is that of the update before, so that no further pass is needed and all microbatches of an
update have the same weight; in the first update α = 0. It is the mean over all ranks, so every rank has the same
coefficient. The state is part of the checkpoint.

Source: He et al. 2025, "Skywork Open Reasoner 1 Technical Report" (arXiv 2505.22312), adaptive entropy control, where e
is measured in a pass of its own before the update.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl:
    """State of the controller."""

    coef: float
    """c; without a target the fixed weight."""
    entropy: float | None = None
    """Mean entropy of the last update [nats]; None before the first."""

    def weight(self, algorithm: AlgorithmConfig) -> float:
        """Return α."""
        if algorithm.entropy_target is None:
            return self.coef
        return self.coef if self.entropy is not None and self.entropy <= algorithm.entropy_target else 0.0

    def after(self, entropy: float, algorithm: AlgorithmConfig) -> EntropyControl:
        """Return the state after an update that was made. entropy: its mean over all trained tokens [nats]."""
        if algorithm.entropy_target is None:
            return self
        change = algorithm.entropy_coef_step if entropy <= algorithm.entropy_target else -algorithm.entropy_coef_step
        return EntropyControl(coef=min(max(self.coef + change, 0.0), algorithm.entropy_coef_max), entropy=entropy)
