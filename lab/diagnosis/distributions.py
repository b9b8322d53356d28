"""Whole distributions of engine and trainer at some positions of a case: distances, and the tokens that move.

Compared are the distributions at temperature 1, before top-k, top-p and min-p: those that the weights define.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.lab.diagnosis.evidence import ScoredTokens
from lockstep.rollout.engine.heard_logits import MAX_TOKENS, hear
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.records import TrainingRow
from lockstep.rollout.vllm_names import check_vllm
from lockstep.rollout.weights.distributions import Bound, Distances, distances
from lockstep.trainer.model.head.whole_head import whole_logits
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.rounding import rounding_errors, rounding_of

WORST, SPREAD = 8, 8
"""Positions with the largest |Δ log π| of the sampled token, and evenly spaced ones, of one row per case."""
MOVED = 3
"""Tokens named at a position, and for a case."""
CHOICE = (
    f"temperature 1, before masks; per case the row with the largest |Δ log π|, within its first {MAX_TOKENS} tokens: "
    f"its {WORST} worst positions and {SPREAD} evenly spaced"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseDistributions:
    """Distributions at n positions of one row, and their distances."""

    rollout_id: int
    positions: tuple[int, ...]
    """Places in the row of the tokens that are predicted."""
    ids: tuple[int, ...]
    """Those tokens."""
    engine_nV: Tensor
    """log p, float64."""
    trainer_nV: Tensor
    distance: Distances
    bound: Bound | None
    """None: the engine computes with quantized weights, and may differ."""
    num_bytes: int

    @property
    def is_wrong(self) -> bool:
        return self.bound is not None and self.bound.excludes(self.distance)

    @property
    def explanation(self) -> str:
        assert self.bound is not None
        return (
            f"the distributions over the vocabulary differ: KL {self.distance.kl:.2g} in the median of "
            f"{len(self.positions)} positions, rounding explains {self.bound.kl:.2g}; log p of token "
            f"{self.moved[0]['token_id']} by {self.distance.move:.2g}, rounding explains {self.bound.move:.2g}"
        )

    @property
    def moved(self) -> list[dict[str, Any]]:
        """Tokens whose log p differs most in the median of the positions, where it differs most."""
        difference_nV = (self.engine_nV - self.trainer_nV).abs()
        return [
            self._token(int(difference_nV[:, token].argmax()), token)
            for token in self.distance.move_V.topk(min(MOVED, len(self.distance.move_V))).indices.tolist()
        ]

    def _token(self, n: int, token: int) -> dict[str, Any]:
        numbers = {"logp_engine": self.engine_nV[n, token], "logp_trainer": self.trainer_nV[n, token]}
        return {"token_id": token, "position": self.positions[n]} | {k: _finite(v) for k, v in numbers.items()}

    def numbers(self) -> dict[str, float | None]:
        distance, bound = self.distance, self.bound
        values = {
            "kl": distance.kl,
            "kl_limit": math.nan if bound is None else bound.kl,
            "kl_max": distance.kl_N.max(),
            "kl_reverse": distance.reverse_kl_N.median(),
            "tv": distance.tv_N.median(),
            "flips": distance.flips_N.sum(),
            "move": distance.move,
            "move_limit": math.nan if bound is None else bound.move,
        }
        return {name: _finite(value) for name, value in values.items()}

    def to_json(self, text: Callable[[int], str]) -> dict[str, Any]:
        """Return all numbers; those that are not finite are None. text: of a token."""

        def with_text(token: dict[str, Any]) -> dict[str, Any]:
            return token | {"text": text(token["token_id"])}

        mass_nV = (self.engine_nV.exp() - self.trainer_nV.exp()).abs()
        rows = [
            {
                "position": position,
                "token_id": self.ids[n],
                "kl": _finite(self.distance.kl_N[n]),
                "kl_reverse": _finite(self.distance.reverse_kl_N[n]),
                "tv": _finite(self.distance.tv_N[n]),
                "top_engine": int(self.engine_nV[n].argmax()),
                "top_trainer": int(self.trainer_nV[n].argmax()),
                "moved": [
                    with_text(self._token(n, token))
                    for token in mass_nV[n].topk(min(MOVED, mass_nV.shape[1])).indices.tolist()
                ],
            }
            for n, position in enumerate(self.positions)
        ]
        moved = [with_text(token) for token in self.moved]
        about = {"rollout_id": self.rollout_id, "choice": CHOICE, "bytes": self.num_bytes}
        return about | self.numbers() | {"moved": moved, "positions": rows}


def compare_case(
    scored: ScoredTokens,
    *,
    policy: Policy,
    score: Callable[..., Tensor],
    engine: EnginePool,
    dtype: torch.dtype,
    is_quantized: bool,
) -> CaseDistributions | None:
    """Compare the distributions of a case; None without trained tokens that fit. score: see `Examiner.score`.

    Raises `EngineError` if the engine cannot send them.
    """
    check_vllm("distributions")
    row, positions = choose(scored, limit=min(MAX_TOKENS, engine.max_model_len - 1))
    if not positions:
        return None
    part = prefix(row, positions)
    batch = replace(scored.batch, rows=(part,), teacher=None)

    def by_trainer(error: float) -> Tensor:
        with whole_logits(policy) as heard, rounding_errors(policy, error):
            score(batch, temperature=1.0)
        return heard[-1]

    trainer = by_trainer(0.0)
    disturbed = by_trainer(rounding_of(dtype, next(policy.parameters()).device.type))
    places = [position - 1 for position in positions]
    logits, num_bytes = engine.loop.run(hear(engine.members[0], part.ids.tolist(), places, part.images))
    floor = distances(disturbed.to(logits.dtype), trainer)
    return CaseDistributions(
        rollout_id=row.rollout_id,
        positions=positions,
        ids=tuple(part.ids[list(positions)].tolist()),
        engine_nV=logits.double().log_softmax(1),
        trainer_nV=trainer.double().log_softmax(1),
        distance=distances(logits, trainer),
        bound=None if is_quantized else Bound.of([floor], dtype),
        num_bytes=num_bytes,
    )


def choose(scored: ScoredTokens, *, limit: int) -> tuple[TrainingRow, tuple[int, ...]]:
    """Return a row and positions of its first `limit` tokens as `CHOICE` says, in order; none if no token fits."""
    size_N = torch.where(scored.position_N < limit, scored.diff_N.abs().nan_to_num(torch.inf), -1.0)
    if not len(size_N) or size_N.max() < 0:
        return scored.batch.rows[0], ()
    index = int(scored.row_N[size_N.argmax()])
    is_own = (scored.row_N == index) & (size_N >= 0)
    positions, sizes = scored.position_N[is_own], size_N[is_own]
    spread = torch.linspace(0, len(positions) - 1, min(SPREAD, len(positions))).long()
    indices = {*sizes.argsort(descending=True, stable=True)[:WORST].tolist(), *spread.tolist()}
    return scored.batch.rows[index], tuple(positions[sorted(indices)].tolist())


def prefix(row: TrainingRow, positions: Sequence[int]) -> TrainingRow:
    """Return the row up to the last of these positions, which alone are trained, from the whole vocabulary."""
    length = positions[-1] + 1
    names = ("ids", "sampling_logprobs", "versions", "turns")
    return replace(
        row,
        **{name: getattr(row, name)[:length] for name in names},
        loss_mask=np.isin(np.arange(length), positions),
        support=None,
        routes=None if row.routes is None else row.routes[:length],
        images=tuple(image for image in row.images if image.end <= length),
    )


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
