"""The cross-entropy on given tokens: the loss of demonstrations.

    loss = w · Σ_t −log π(token t) / D        D: trained tokens of the step's rows, on all ranks

Dimensions: _T trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.batch.packing import PackedBatch
from trainer.update.components import Outputs, Share, component_metrics
from trainer.update.router_loss import RouterStep


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossEntropyTerm:
    """Cross-entropy of all trained tokens of a token set, in one optimizer step."""

    name: str
    weight: float
    num_tokens: int
    """D."""
    routers: RouterStep | None = None
    """Losses about the routers on the same tokens, not weighted; None: none."""

    def arguments(self, packed: PackedBatch) -> Mapping[str, Any]:
        return {}

    def share(self, outputs: Outputs) -> Share:
        cross_entropy = -outputs.logp_T.sum()
        loss = self.weight * cross_entropy / max(self.num_tokens, 1)
        sums = {
            f"loss/{self.name}": cross_entropy.detach(),
            f"loss/{self.name}_entropy": outputs.entropy_T.detach().sum(),
        }
        if self.routers is not None:
            router = self.routers.share(outputs.routers, outputs.packed.target_index_T)
            loss = loss if router.loss is None else loss + router.loss
            sums |= router.sums
        return Share(loss=loss, sums=sums)

    def metrics(self, totals: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return means over the trained tokens."""
        means = {name: float(total) / max(self.num_tokens, 1) for name, total in totals.items() if total.ndim == 0}
        loss = means[f"loss/{self.name}"]
        of_routers = {} if self.routers is None else self.routers.metrics(totals)
        common = component_metrics(self.name, loss=loss, weight=self.weight, num_tokens=self.num_tokens)
        return {**means, **common, **of_routers}
