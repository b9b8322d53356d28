"""Whole distributions of engine and trainer at the same positions: their distance, and the bound of a weight sync.

    KL(p ‖ q) = Σ p (log p - log q) = Σ p (expm1(d) - d), d = log q - log p; p: engine, q: trainer

The second form cancels no digits where the two are close. Rows are normalized in float64 first: an engine's float32
logprobs sum to 1 ± 1e-7, which alone is a KL of 1e-7 (1e-13 after it).

Judged are medians over the positions: a position whose router rounds to another expert says nothing.

Shape legend: _N positions, _V vocabulary entries.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.rollout.engine.protocol import SyncedEngine
from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.control_plane import ControlPlane
from lockstep.rollout.weights.whole.heard_logits import hear

MOST_MOVED = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distances:
    """Distances of p and q, float64, in nats; NaN where a logit is not finite."""

    kl_N: Tensor
    """KL(p ‖ q)."""
    reverse_kl_N: Tensor
    """KL(q ‖ p)."""
    tv_N: Tensor
    """Total variation, ½ Σ |p - q|."""
    flips_N: Tensor
    """True where p and q have different most probable tokens."""
    move_V: Tensor
    """Median over the positions of |log p - log q| of each token."""

    @property
    def kl(self) -> float:
        return self.kl_N.median().item()

    @property
    def move(self) -> float:
        return self.move_V.max().item()


def distances(engine_logits_NV: Tensor, trainer_logits_NV: Tensor) -> Distances:
    """Compare two tables of logits, of one shape and at least one position."""
    rows, moves_NV = [], torch.empty(engine_logits_NV.shape)
    for n, pair in enumerate(zip(engine_logits_NV, trainer_logits_NV, strict=True)):
        logp_V, logq_V = (logits_V.double().log_softmax(0) for logits_V in pair)
        p_V, q_V, d_V = logp_V.exp(), logq_V.exp(), logq_V - logp_V
        kl, reverse_kl = (p_V * (d_V.expm1() - d_V)).sum(), (q_V * ((-d_V).expm1() + d_V)).sum()
        rows.append([kl, reverse_kl, (p_V - q_V).abs().sum() / 2, logp_V.argmax() != logq_V.argmax()])
        moves_NV[n] = d_V.abs()
    kl_N, reverse_kl_N, tv_N, flips_N = torch.tensor(rows, dtype=torch.float64).T
    move_V = moves_NV.median(0).values.double()
    return Distances(kl_N=kl_N, reverse_kl_N=reverse_kl_N, tv_N=tv_N, flips_N=flips_N.bool(), move_V=move_V)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Largest median KL and largest median move of a token that rounding explains [nats]."""

    kl: float
    move: float

    @classmethod
    def of(cls, floors: Sequence[Distances], *, factor: float, least: float) -> Bound:
        """Return multiples of measured floors. least: smallest bound of a move; a KL is of second order in it."""
        kl, move = (max(getattr(floor, name) for floor in floors) for name in ("kl", "move"))
        return cls(kl=max(least**2 / 2, factor**2 * kl), move=max(least, factor * move))

    def excludes(self, distance: Distances) -> bool:
        return not (distance.kl <= self.kl and distance.move <= self.move)  # negated, so that NaN fails


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeResult:
    """Logits of an engine and the trainer, their distance, and its bound."""

    engine_NV: Tensor
    trainer_NV: Tensor
    distance: Distances
    bound: Bound | None
    """None: an engine with quantized weights may differ."""
    num_bytes: int

    @property
    def is_wrong(self) -> bool:
        return self.bound is not None and self.bound.excludes(self.distance)

    def logprobs(self) -> tuple[Tensor, Tensor]:
        """Return log p and log q of all tokens, (N, V) float64."""
        return self.engine_NV.double().log_softmax(1), self.trainer_NV.double().log_softmax(1)

    def moved(self) -> list[tuple[int, int, float, float]]:
        """Return the tokens that move most: position, where it moves most, token, log p and log q there."""
        logp_NV, logq_NV = self.logprobs()
        tokens = self.distance.move_V.topk(min(MOST_MOVED, len(self.distance.move_V))).indices.tolist()
        places = [(int((logp_NV[:, token] - logq_NV[:, token]).abs().argmax()), token) for token in tokens]
        return [(n, token, logp_NV[n, token].item(), logq_NV[n, token].item()) for n, token in places]

    def numbers(self) -> dict[str, float]:
        """Return the numbers of docs/diagnosis.md; NaN for a limit that there is not."""
        distance = self.distance
        return {
            "kl": distance.kl,
            "kl_limit": self.bound.kl if self.bound else math.nan,
            "kl_max": distance.kl_N.max().item(),
            "kl_reverse": distance.reverse_kl_N.median().item(),
            "tv": distance.tv_N.median().item(),
            "flips": float(distance.flips_N.sum()),
            "move": distance.move,
            "move_limit": self.bound.move if self.bound else math.nan,
            "bytes": float(self.num_bytes),
        }

    def __str__(self) -> str:
        tokens = [
            f"{token} (log p {logp:.5g} by the engine, {logq:.5g} by the trainer at {n + 1})"
            for n, token, logp, logq in self.moved()
        ]
        numbers = {name: f"{number:.3g}" for name, number in self.numbers().items()}
        return (
            "over the whole vocabulary: KL {kl} in the median of the positions, expected at most {kl_limit}; a token "
            "moves by {move}, expected at most {move_limit}; {flips} most probable tokens differ; ids that move most: "
        ).format(**numbers) + ", ".join(tokens)


@dataclass(kw_only=True)
class WholeRow:
    """The short row of a canary, scored over the whole vocabulary after the first of every `every` syncs."""

    every: int
    score: Callable[[Sequence[int], float], Tensor]
    """The trainer's (N, V) logits behind each of the ids but the last, with a relative rounding error of this size in
    the output of each layer. Called as `ScoreCanary`."""
    rounding: float
    """Relative rounding of the engine."""
    is_due: bool = False
    seconds: float = 0.0
    """Cost of the last comparison, on this rank."""
    _syncs: int = 0
    _age: int = 0
    _last: dict[str, float] = field(default_factory=dict)
    _engine_floors: dict[str, Distances] = field(default_factory=dict)
    """By engine: its distance from itself, alone and among other requests; its first one if it is quantized."""

    def begin(self) -> bool:
        """Count a sync. Returns True if its distributions are compared."""
        self.is_due = self.is_due or self._syncs % self.every == 0
        self._syncs += 1
        return self.is_due

    def expected(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the trainer's logits, and those with rounding errors; a collective under ZeRO-3."""
        began = time.perf_counter()
        logits = self.score(ids, 0.0), self.score(ids, self.rounding)
        self.seconds = time.perf_counter() - began
        return logits

    def compare(
        self,
        engines: ControlPlane,
        ids: Sequence[int],
        expected: tuple[Tensor, Tensor],
        *,
        factor: float,
        least: float,
        threshold: float | None,
        is_quantized: bool,
    ) -> Mapping[str, WholeResult]:
        """Compare this rank's engines, by name. factor, least: see `Bound.of`. threshold: of the canary; None: by the
        floors, of quantized engines by their first distance."""
        began = time.perf_counter()
        trainer, disturbed = expected
        places = range(len(ids) - 1)

        async def compare(engine: SyncedEngine) -> WholeResult:
            logits, num_bytes = await hear(engine, ids, places)
            if logits.shape != trainer.shape:
                raise SyncError(
                    f"{engine.name} has logits of {logits.shape[1]} tokens, the trainer of {trainer.shape[1]}; start "
                    "it with the model at model.path"
                )
            distance = distances(logits, trainer)
            bound = None
            if engine.name not in self._engine_floors:
                others = (engine.score(list(reversed(ids))[:length]) for length in (len(ids), len(ids) // 2))
                (again, more), _ = await asyncio.gather(hear(engine, ids, places), asyncio.gather(*others))
                num_bytes += more
                self._engine_floors[engine.name] = distance if is_quantized else distances(again, logits)
            elif is_quantized:
                bound = Bound.of([self._engine_floors[engine.name]], factor=factor, least=least)
            if threshold is not None:
                bound = Bound(kl=threshold**2 / 2, move=threshold)
            elif not is_quantized:
                floor = distances(disturbed.to(logits.dtype), trainer)
                bound = Bound.of([floor, self._engine_floors[engine.name]], factor=factor, least=least)
            both = {"engine_NV": logits, "trainer_NV": trainer}
            return WholeResult(**both, distance=distance, bound=bound, num_bytes=num_bytes)

        results = engines.all(compare)
        self.is_due = False
        self.seconds += time.perf_counter() - began
        return dict(zip(engines.names, results, strict=True))

    def metrics(self, results: Iterable[WholeResult | None]) -> dict[str, float]:
        """Return the metrics of the last comparison, of the engine that differed most; empty before the first."""
        compared = [one for one in results if one is not None]
        self._age += 1
        if compared:
            self._age = 0
            numbers = {**max(compared, key=lambda one: one.distance.kl).numbers(), "s": self.seconds}
            self._last = {f"sync/distribution_{k}": v for k, v in numbers.items() if not math.isnan(v)}
        return self._last and {**self._last, "sync/distribution_age": float(self._age)}
