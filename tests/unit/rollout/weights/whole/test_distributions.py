"""Distances of whole distributions, and what a weight sync accepts, with an engine whose logits the test chooses."""

from __future__ import annotations

import base64
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.rollout.errors import SyncError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import Canary, CanarySettings
from lockstep.rollout.weights.control_plane import ControlPlane
from lockstep.rollout.weights.whole.distributions import Bound, WholeRow, distances

VOCAB, ROWS = 1000, 23
TOKEN = 512
"""An id that the canary has not."""


def logits(seed: int = 0, rows: int = ROWS) -> Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_distances_follow_their_definitions() -> None:
    p, q = (logits(seed).double().softmax(1) for seed in (1, 2))
    found = distances(logits(1), logits(2))
    torch.testing.assert_close(found.kl_N, (p * (p / q).log()).sum(1))
    torch.testing.assert_close(found.reverse_kl_N, (q * (q / p).log()).sum(1))
    torch.testing.assert_close(found.tv_N, (p - q).abs().sum(1) / 2)
    assert found.flips_N.tolist() == (p.argmax(1) != q.argmax(1)).tolist()
    torch.testing.assert_close(found.move_V, (p / q).log().abs().median(0).values, rtol=1e-6, atol=1e-6)


def test_a_small_kl_keeps_its_digits() -> None:
    """Σ p (log p - log q) in float64 has errors of 1e-16, as large as the KL itself."""
    table = logits().double()
    d = 1e-8 * torch.randn(table.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    p = table.softmax(1)
    second_order = ((p * d**2).sum(1) - (p * d).sum(1) ** 2) / 2
    torch.testing.assert_close(distances(table, table + d).kl_N, second_order, rtol=1e-2, atol=0)


def test_the_same_constant_on_all_logits_makes_equal_distributions() -> None:
    found = distances(logits(), logits().double() + 3)
    assert found.kl_N.abs().max() < 1e-15
    assert found.move < 1e-6


def test_logits_that_are_not_finite_fail_every_bound() -> None:
    broken = logits()
    broken[:, 5] = math.nan
    assert Bound(kl=1e9, move=1e9).excludes(distances(broken, logits()))


class Engines:
    """A trainer with fixed logits, and engines that have them plus `fault`, in a canary."""

    def __init__(self, loop: BackgroundLoop, *, rounding: float = 0.0, every: int = 1, **canary: Any) -> None:
        self.fault = torch.zeros(ROWS, VOCAB)
        self.wrong_shape = False

        async def score(ids: list[int]) -> list[float]:
            return [-2.0] * (len(ids) - 1)

        async def ask_workers(method: str, *arguments: Any) -> list[Any]:
            if method == "hear_logits":
                return [None]
            table = logits() + self.fault
            table = table[:, 1:] if self.wrong_shape else table
            raw = base64.b64encode(table.contiguous().numpy().tobytes()).decode()
            return [None, [0.0, "float32", list(table.shape), raw]]

        def by_trainer(ids: list[int], error: float) -> Tensor:
            return logits() + (rounding * logits(9) if error else 0)

        engine: Any = SimpleNamespace(name="engine 0", loop=loop, score=score, ask_workers=ask_workers)
        self.plane = ControlPlane([engine], 30.0, is_staged=True)
        self.row = WholeRow(every=every, score=by_trainer, rounding=1e-7)
        settings = CanarySettings(whole=self.row, threshold=canary.pop("threshold", None))
        traits: Any = {"dtype": torch.float32, "vocab_size": VOCAB} | canary
        self.canary = Canary(lambda ids: [-2.0] * (len(ids) - 1), settings=settings, **traits)

    def push(self) -> Any:
        """Compare as a sync does, and return the result of the canary."""
        self.row.begin()
        results = self.canary.compare(self.plane, self.canary.expected(is_long=False))
        self.metrics = self.row.metrics([one.whole for one in results.values()])
        return results["engine 0"]


@pytest.fixture
def loop() -> Any:
    with BackgroundLoop() as background:
        yield background


def test_one_token_that_no_row_samples_fails_the_canary_and_is_named(loop: BackgroundLoop) -> None:
    engines = Engines(loop)
    assert not engines.push().is_wrong
    engines.fault[:, TOKEN] = 0.5
    result = engines.push()
    assert result.short == 0.0, "the tokens of the row do not show it"
    assert result.is_wrong
    assert f"ids that move most: {TOKEN} (log p " in str(result)
    assert "a token moves by 0.499" in str(result) or "a token moves by 0.5" in str(result)
    assert "expected at most 0.0001" in str(result)


def test_a_position_with_another_expert_says_nothing(loop: BackgroundLoop) -> None:
    engines = Engines(loop)
    engines.fault[3] = logits(5)[3]
    assert not engines.push().is_wrong
    assert engines.metrics["sync/distribution_kl_max"] > 1 > engines.metrics["sync/distribution_kl"]


def test_what_rounding_explains_is_accepted(loop: BackgroundLoop) -> None:
    engines = Engines(loop, rounding=1e-3)
    for factor, is_wrong in ((9, False), (11, True)):
        engines.fault = factor * 1e-3 * logits(9)
        assert engines.push().is_wrong is is_wrong


def test_a_chosen_threshold_takes_the_place_of_the_floor(loop: BackgroundLoop) -> None:
    engines = Engines(loop, threshold=0.6)
    engines.fault[:, TOKEN] = 0.5
    assert not engines.push().is_wrong
    engines.fault[:, TOKEN] = 0.7
    assert engines.push().is_wrong


def test_the_first_distance_of_a_quantized_engine_bounds_the_later_ones(loop: BackgroundLoop) -> None:
    engines = Engines(loop, is_quantized=True, dtype=torch.bfloat16)
    engines.fault[:, TOKEN] = 0.5
    assert not engines.push().is_wrong
    engines.fault[:, TOKEN] = 1.4
    assert not engines.push().is_wrong
    engines.fault[:, TOKEN] = 1.6
    assert engines.push().is_wrong


def test_the_first_sync_and_every_nth_compare(loop: BackgroundLoop) -> None:
    engines = Engines(loop, every=3)
    compared = [engines.push().whole is not None for _ in range(7)]
    assert compared == [True, False, False, True, False, False, True]
    assert engines.metrics["sync/distribution_age"] == 0
    engines.push()
    assert engines.metrics["sync/distribution_age"] == 1, "the numbers are those of the last comparison"
    assert engines.metrics["sync/distribution_bytes"] > ROWS * VOCAB * 4


def test_an_engine_with_another_vocabulary_is_named(loop: BackgroundLoop) -> None:
    engines = Engines(loop)
    engines.wrong_shape = True
    with pytest.raises(SyncError, match="engine 0 has logits of 999 tokens, the trainer of 1000"):
        engines.push()
