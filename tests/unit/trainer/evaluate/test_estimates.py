"""pass@k and intervals, against numbers computed by hand and against invariants."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.trainer.evaluate import estimates

PROPORTIONS = st.lists(st.integers(0, 16).map(lambda passed: passed / 16), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (5, 2, 1, 2 / 5),
        (5, 2, 2, 1 - 3 / 10),  # 3 of the 10 pairs hold no passed sample
        (5, 2, 3, 1 - 1 / 10),  # 1 of the 10 triples
        (5, 2, 4, 1.0),  # four samples include one that passed
        (10, 3, 5, 1 - 21 / 252),  # C(7, 5) / C(10, 5)
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert estimates.pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_passed_sample(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    share = sum(min(subset) < c for subset in subsets) / len(subsets)
    assert estimates.pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_stable_where_binomials_overflow() -> None:
    exact = 1 - math.comb(9_990, 1_000) / math.comb(10_000, 1_000)  # Python's integers do not overflow
    assert estimates.pass_at_k(10_000, 10, 1_000) == pytest.approx(exact, rel=1e-12)
    assert 0 < estimates.pass_at_k(1_000_000, 1, 1) == pytest.approx(1e-6, rel=1e-9)


def test_pass_at_k_is_unbiased() -> None:
    """Averaged over samples of n = 6, the estimate of pass@3 is 1 - (1 - p)³; the naive 1 - (1 - c/n)³ is not."""
    rng, p, n, k = random.Random(0), 0.3, 6, 3
    counts = [sum(rng.random() < p for _ in range(n)) for _ in range(20_000)]
    found = sum(estimates.pass_at_k(n, c, k) for c in counts) / len(counts)
    naive = sum(1 - (1 - c / n) ** k for c in counts) / len(counts)
    truth = 1 - (1 - p) ** k
    assert found == pytest.approx(truth, abs=0.01)
    assert naive < truth - 0.03


@given(st.integers(1, 64), st.data())
def test_pass_at_k_rises_with_k_and_with_passed_samples(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = estimates.pass_at_k(n, c, k)
    assert 0 <= value <= 1
    assert k == n or estimates.pass_at_k(n, c, k + 1) >= value
    assert c == n or estimates.pass_at_k(n, c + 1, k) >= value


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"needs at least|num_passed: expected 0 to 4"):
        estimates.pass_at_k(n, c, k)


@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_powers_of_two_and_n_are_reported(n: int, ks: tuple[int, ...]) -> None:
    assert estimates.ks_of(n) == ks


def test_an_interval_of_zeros_and_ones_is_wilsons() -> None:
    """For 8 of 10, Wilson's 95 % interval is [0.4902, 0.9433], computed from the formula by hand."""
    found = estimates.proportion([1.0] * 8 + [0.0] * 2, trials_per_value=1)
    assert found.value == 0.8
    assert (found.low, found.high) == pytest.approx((0.49016, 0.94331), abs=1e-5)


def test_the_interval_of_all_passed_is_not_a_point() -> None:
    z2 = estimates.Z_95**2
    found = estimates.proportion([1.0] * 20, trials_per_value=8)
    assert found.high == 1.0
    assert found.low == pytest.approx(20 / (20 + z2))
    assert estimates.proportion([0.0] * 20, trials_per_value=8).high == pytest.approx(z2 / (20 + z2))


def test_an_interval_is_at_least_as_wide_as_that_of_independent_samples() -> None:
    """Every prompt has 0.5 from 4 samples: no spread, so the interval is that of 10 x 4 independent trials."""
    found = estimates.proportion([0.5] * 10, trials_per_value=4)
    same = estimates.proportion([1.0, 0.0] * 20, trials_per_value=1)
    assert (found.low, found.high) == pytest.approx((same.low, same.high))
    spread = estimates.proportion([0.25, 0.75] * 5, trials_per_value=4)
    assert spread.low == pytest.approx(found.low)  # 0.25 / 0.0625 = 4 trials per prompt: the same again
    nearly_equal = estimates.proportion([0.499, 0.501] * 5, trials_per_value=4)
    assert nearly_equal.low == pytest.approx(found.low, abs=1e-3)
    wider = estimates.proportion([0.1, 0.9] * 5, trials_per_value=4)
    assert wider.low < found.low


@given(PROPORTIONS, st.integers(1, 64))
def test_an_interval_of_proportions_holds_its_value_and_stays_between_0_and_1(values: list[float], trials: int) -> None:
    found = estimates.proportion(values, trials_per_value=trials)
    assert 0 <= found.low <= found.value <= found.high <= 1
    mirrored = estimates.proportion([1 - value for value in values], trials_per_value=trials)
    assert mirrored.low == pytest.approx(1 - found.high, abs=1e-6)


def test_intervals_have_their_nominal_coverage() -> None:
    """Prompts of unequal difficulty, four samples each: 95 % intervals of pass@1 hold the mean difficulty in 93 to 98 %
    of 1,500 evaluations."""
    rng = random.Random(1)

    def evaluation() -> bool:
        passed = []
        for _ in range(60):
            p = rng.betavariate(0.6, 0.6)  # mean 0.5
            passed.append(estimates.pass_at_k(4, sum(rng.random() < p for _ in range(4)), 1))
        found = estimates.proportion(passed, trials_per_value=4)
        return found.low <= 0.5 <= found.high

    assert 0.93 < sum(evaluation() for _ in range(1_500)) / 1_500 < 0.98


def test_a_mean_has_its_standard_error() -> None:
    found = estimates.mean([1.0, 2.0, 3.0, 4.0])  # s² = 5/3, standard error √(5/12)
    assert found.value == 2.5
    assert found.high - found.value == pytest.approx(estimates.Z_95 * math.sqrt(5 / 12))
    assert math.isinf(estimates.mean([1.0]).high)


def test_a_paired_difference_cancels_prompt_difficulty() -> None:
    """The second model is 0.1 better on each prompt, up to 0.001."""
    first = [0.0, 0.2, 0.4, 0.6, 0.8]
    second = [x + 0.1 + noise for x, noise in zip(first, (0.001, -0.001, 0.0, 0.001, -0.001), strict=True)]
    found = estimates.paired_difference(first, second)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1), abs=1e-3)
    assert found.low < 0.1 < found.high
    assert estimates.mean(second).low < estimates.mean(first).value
    with pytest.raises(ValueError, match="shorter"):
        estimates.paired_difference(first, second[1:])


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_mean_of_equal_zeros_or_ones_has_wilsons_interval(value: float) -> None:
    assert estimates.mean([value] * 40) == estimates.proportion([value] * 40, trials_per_value=1)
    assert str(estimates.mean([1.0] * 40)) == "1.000 [0.912, 1.000]"


def test_other_equal_values_have_no_interval() -> None:
    first = [0.1, 0.2, 0.3]
    for found in (estimates.mean([0.7] * 9), estimates.paired_difference(first, [x + 0.1 for x in first])):
        assert (found.low, found.high) == (-math.inf, math.inf)
        assert "no interval" in str(found)


def test_equal_differences_of_zeros_and_ones_have_tangos_interval() -> None:
    """Tango 1998: pairs that all agree (0, 0, 0, 54) have -0.0664 to 0.0664, whatever they agree on."""
    for pairs in ([0.0] * 54, [1.0] * 30 + [0.0] * 24):
        agree = estimates.paired_difference(pairs, pairs)
        assert (agree.value, round(agree.low, 4), round(agree.high, 4)) == (0.0, -0.0664, 0.0664)
    better = estimates.paired_difference([0.0] * 54, [1.0] * 54)
    worse = estimates.paired_difference([1.0] * 54, [0.0] * 54)
    assert (better.value, round(better.low, 4), better.high) == (1.0, 0.8672, 1.0)
    assert (worse.low, worse.high) == (-better.high, -better.low)


@pytest.mark.parametrize(("both", "gained"), [(0, 0), (30, 0), (0, 30)])
def test_tangos_bounds_are_the_roots_of_his_score_statistic(both: int, gained: int) -> None:
    """n pairs, of which `gained` are 0 before and 1 after, none the reverse: Tango 1998, equations 4 and 5."""
    n = 30

    def z(delta: float) -> float:
        b = 2 * n * delta - gained * (1 + delta)
        q = (math.sqrt(b * b) - b) / (4 * n)  # the discordant probability under delta; the last term has no losses
        return (gained - n * delta) / math.sqrt(n * (2 * q + delta * (1 - delta)))

    first = [1.0] * both + [0.0] * (n - both)
    found = estimates.paired_difference(first, [1.0] * n if gained else first)
    for bound in (found.low, found.high):
        if abs(bound) != 1:
            assert abs(z(bound)) == pytest.approx(estimates.Z_95)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=30))
def test_a_reversed_difference_is_the_negative(pairs: list[tuple[float, float]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = estimates.paired_difference(first, second), estimates.paired_difference(second, first)
    assert there.value == pytest.approx(-back.value, abs=1e-9)
    assert there.low == pytest.approx(-back.high, abs=1e-9)
