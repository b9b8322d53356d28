"""Estimates from samples: pass@k, means and paired differences, each with a 95 % interval.

The unit is the prompt: samples of one prompt are correlated, so every spread is taken over prompts (Miller 2024,
"Adding error bars to evals", section on clustered errors). Intervals cover the choice of prompts and of samples.

Covered: proportions (Wilson interval with the effective number of prompts), means and paired differences (normal
interval of the mean over prompts; where all values are equal, Wilson's and Tango's for zeros and ones, else none). Not
covered: fewer than about 20 prompts, for which normal intervals are too narrow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval, unbounded if the values do not determine one."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.text(".3f")

    def text(self, form: str) -> str:
        """Write value and bounds, each in the form of a number."""
        bounds = f"{self.low:{form}}, {self.high:{form}}"
        if not math.isfinite(self.low):
            bounds = "no interval from one prompt or equal values"
        return f"{self.value:{form}} [{bounds}]"


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate, from n >= k samples, of the probability that at least one of k samples passes.

    1 - C(n - c, k) / C(n, k), as a product, which neither overflows nor cancels (Chen et al. 2021, section 2.1). Raises
    `ValueError` if k is not in 1 .. num_samples, or num_passed not in 0 .. num_samples.
    """
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed: expected 0 to {num_samples}, found {num_passed}")
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, found {num_samples}")
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_passed + 1, num_samples + 1))


def ks_of(num_samples: int) -> tuple[int, ...]:
    """Return the k reported for n samples per prompt: powers of two below n, and n."""
    return (*(2**power for power in range(num_samples.bit_length()) if 2**power < num_samples), num_samples)


def proportion(values: Sequence[float], *, trials_per_value: int) -> Estimate:
    """Return the mean of probabilities in [0, 1], one per prompt, with Wilson's interval.

    Wilson's formula needs a number of independent trials: n_eff = p (1 - p) / (s² / n), with s² the variance over the n
    prompts (the design effect of survey statistics, Kish 1965). That is n if each prompt is 0 or 1, and more if several
    samples inform each value, but at most n x `trials_per_value` (independent trials behind each value: samples // k
    for pass@k). If all values are 0, or all 1, n is used.
    """
    n = len(values)
    p = min(1.0, math.fsum(values) / n)
    variance = math.fsum((value - p) ** 2 for value in values) / n
    effective, most = float(n), float(n * trials_per_value)
    if 0 < p < 1:
        effective = min(most, max(effective, n * p * (1 - p) / variance)) if variance > 0 else most
    z2 = Z_95**2
    center = (p + z2 / (2 * effective)) / (1 + z2 / effective)
    half = Z_95 / (1 + z2 / effective) * math.sqrt(p * (1 - p) / effective + z2 / (4 * effective**2))
    # At 0 and 1 one bound equals the value up to rounding.
    return Estimate(value=p, low=max(0.0, min(p, center - half)), high=min(1.0, max(p, center + half)))


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean over prompts with its normal interval, ± 1.96 s / √n.

    Equal values have no spread: the interval is Wilson's if all are 0 or all are 1, else unbounded, as for one prompt.
    """
    value = statistics.fmean(values)
    if len(values) > 1 and _are_equal(values):
        if values[0] in (0, 1):
            return proportion(values, trials_per_value=1)
        return Estimate(value=value, low=-math.inf, high=math.inf)
    half = Z_95 * standard_error(values)
    return Estimate(value=value, low=value - half, high=value + half)


def _are_equal(values: Sequence[float]) -> bool:
    """Return True for values that differ by rounding only."""
    return all(math.isclose(value, values[0], rel_tol=1e-12, abs_tol=1e-12) for value in values)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, from the sample variance; infinite for a single prompt."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of second - first over the same prompts: common difficulty cancels, so the interval narrows.

    Equal differences have no spread: the interval is Tango's (1998) if all values are 0 or 1, else unbounded.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    n, value = len(differences), statistics.fmean(differences)
    if n > 1 and _are_equal(differences):
        if not {*first, *second} <= {0, 1}:
            return Estimate(value=value, low=-math.inf, high=math.inf)
        # His score statistic solved for n pairs with one difference: n δ² / (|δ| (1 - |δ|)) = z² for 0, n (1 - δ) /
        # (1 + δ) = z² for 1.
        margin = Z_95**2 / (n + Z_95**2)
        low, high = {0: (-margin, margin), 1: (1 - 2 * margin, 1.0), -1: (-1.0, 2 * margin - 1)}[round(value)]
        return Estimate(value=value, low=low, high=high)
    return mean(differences)
