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
from lockstep.rollout.weights.distributions import MOST_MOVED, Bound, WholeResult, distances
from lockstep.trainer.model.head.whole_head import whole_logits
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.rounding import rounding_errors, rounding_of

WORST, SPREAD = 8, 8
"""Positions with the largest |Δ log π| of the sampled token, and evenly spaced ones, of one row per case."""
CHOICE = (
    f"temperature 1, before masks; per case the row with the largest |Δ log π|, within its first {MAX_TOKENS} tokens: "
    f"its {WORST} worst positions and {SPREAD} evenly spaced"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseDistributions:
    """Distributions at n positions of one row."""

    rollout_id: int
    positions: tuple[int, ...]
    """Places in the row of the tokens that are predicted."""
    ids: tuple[int, ...]
    """Those tokens."""
    whole: WholeResult

    @property
    def explanation(self) -> str:
        numbers = {name: f"{number:.2g}" for name, number in self.whole.numbers().items()}
        return (
            "the distributions over the vocabulary differ: KL {kl} in the median, rounding explains {kl_limit}; log p "
            "of token {token} by {move}, rounding explains {move_limit}"
        ).format(token=self.moved[0]["token_id"], **numbers)

    @property
    def moved(self) -> list[dict[str, Any]]:
        """Tokens whose log p differs most in the median of the positions, where it differs most."""
        return [self._token(*one) for one in self.whole.moved()]

    def _token(self, n: int, token: int, logp: float, logq: float) -> dict[str, Any]:
        place = {"token_id": token, "position": self.positions[n]}
        return place | {"logp_engine": finite(logp), "logp_trainer": finite(logq)}

    def to_json(self, text: Callable[[int], str]) -> dict[str, Any]:
        """Return all numbers; those that are not finite are None. text: of a token."""

        def with_text(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [token | {"text": text(token["token_id"])} for token in tokens]

        (logp_nV, logq_nV), distance = self.whole.logprobs(), self.whole.distance
        mass_nV = (logp_nV.exp() - logq_nV.exp()).abs()
        rows = []
        for n, position in enumerate(self.positions):
            tokens = mass_nV[n].topk(min(MOST_MOVED, mass_nV.shape[1])).indices.tolist()
            row = {"kl": distance.kl_N[n], "kl_reverse": distance.reverse_kl_N[n], "tv": distance.tv_N[n]}
            moved = [self._token(n, token, logp_nV[n, token].item(), logq_nV[n, token].item()) for token in tokens]
            tops = {"top_engine": int(logp_nV[n].argmax()), "top_trainer": int(logq_nV[n].argmax())}
            place = {"position": position, "token_id": self.ids[n]}
            rows.append(place | {k: finite(v) for k, v in row.items()} | tops | {"moved": with_text(moved)})
        numbers = {name: finite(number) for name, number in self.whole.numbers().items()}
        about = {"rollout_id": self.rollout_id, "choice": CHOICE}
        return about | numbers | {"moved": with_text(self.moved), "positions": rows}


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
    bound = None if is_quantized else Bound.of([distances(disturbed.to(logits.dtype), trainer)], dtype)
    both = {"engine_NV": logits, "trainer_NV": trainer}
    whole = WholeResult(**both, distance=distances(logits, trainer), bound=bound, num_bytes=num_bytes)
    ids = tuple(part.ids[list(positions)].tolist())
    return CaseDistributions(rollout_id=row.rollout_id, positions=positions, ids=ids, whole=whole)


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


def finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
