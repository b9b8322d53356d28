"""Positions of a case at which whole distributions are compared, and both sides' logits there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lockstep.lab.diagnosis.case_distributions import SPREAD, WORST, CaseDistributions
from lockstep.lab.diagnosis.evidence import ScoredTokens
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.records import TrainingRow
from lockstep.rollout.vllm_names import check_vllm
from lockstep.rollout.weights.canary import ROUNDINGS, SMALLEST_MEDIAN
from lockstep.rollout.weights.whole.distributions import Bound, WholeResult, distances
from lockstep.rollout.weights.whole.heard_logits import MAX_TOKENS, hear
from lockstep.trainer.model.head.whole_head import whole_logits
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.rounding import rounding_errors, rounding_of


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
    bound = None if is_quantized else Bound.of([floor], factor=ROUNDINGS, least=SMALLEST_MEDIAN[dtype])
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
