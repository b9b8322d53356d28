"""Rule of the adaptive KL coefficient."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.trainer.objective.kl_control import adapted_kl_coef


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.0, 0.15), (6.6, 0.15 * (1 + 0.1 * 64 / 10000)), (60.0, 0.15 * (1 + 0.2 * 64 / 10000)),
     (0.0, 0.15 * (1 - 0.2 * 64 / 10000)), (-3.0, 0.15 * (1 - 0.2 * 64 / 10000))],
)  # fmt: skip
def test_adaptive_kl_moves_by_the_clipped_error_times_episodes_over_horizon(kl, expected):
    found = adapted_kl_coef(0.15, kl=kl, num_episodes=64, target=6, horizon=10000)
    assert found == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(1, 499))
def test_the_coefficient_never_changes_its_sign(kl, num_episodes):
    assert adapted_kl_coef(0.15, kl=kl, num_episodes=num_episodes, target=6, horizon=100) > 0


def test_batches_of_five_horizons_are_refused_because_the_sign_would_flip():
    with pytest.raises(AssertionError):
        adapted_kl_coef(0.15, kl=0.0, num_episodes=500, target=6, horizon=100)
