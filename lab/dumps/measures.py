"""Measures of a dump, on which the questions of `decision_tree.py` decide.

d = log π_sampling − log π_training per trained token [nats]. If both are logprobs of the same tokens under policies
with equal support, E[e^−d] = 1 over sampled tokens, whatever the two policies are: the sum of π_training over tokens.

Dimensions: _N trained tokens with both logprobs, _R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.lab.dumps.dump_rows import Dump, DumpRow

JUMP, JUMP_NOISES = 0.05, 50
"""|d| from which a token is far off [nats], at least, and in units of `noise`: 6 deviations of normal noise."""
CLEAN, CLEAN_NOISES = 3e-3, 12
"""Mean |d| up to which tokens agree [nats], at least, and in units of `noise`: 1.5 deviations of normal noise."""
MIN_CLEAN = 4
"""Tokens before a jump that must agree; fewer may be luck."""
UNLIKELY = -0.1
"""Logprob below which a token cannot have had the sampling logprob 0, which is a probability of 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measures:
    """Numbers of a dump. Those over no tokens are 0, or 1 where they are ratios."""

    dump: Dump

    @cached_property
    def row_N(self) -> np.ndarray:
        counts = [int(both(row).sum()) for row in self.dump.rows]
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def position_N(self) -> np.ndarray:
        """Positions in the row."""
        return np.concatenate([np.flatnonzero(both(row)) for row in self.dump.rows])

    @cached_property
    def sampling_N(self) -> np.ndarray:
        return np.concatenate([row.sampling_L[both(row)] for row in self.dump.rows])

    @cached_property
    def training_N(self) -> np.ndarray:
        return np.concatenate([row.training_L[both(row)] for row in self.dump.rows])

    @property
    def d_N(self) -> np.ndarray:
        return self.sampling_N - self.training_N

    @property
    def num_tokens(self) -> int:
        return len(self.row_N)

    @cached_property
    def num_trained(self) -> int:
        return sum(int(row.is_trained_L.sum()) for row in self.dump.rows)

    @cached_property
    def without_sampling(self) -> int:
        """Trained tokens that the engine has no logprob for: none written, or 0 where the trainer finds them
        unlikely."""
        unwritten = sum(int((row.is_trained_L & np.isnan(row.sampling_L)).sum()) for row in self.dump.rows)
        return unwritten + int(self.is_zero_N.sum())

    @cached_property
    def without_training(self) -> int:
        return sum(int((row.is_trained_L & np.isnan(row.training_L)).sum()) for row in self.dump.rows)

    @cached_property
    def is_zero_N(self) -> np.ndarray:
        return (self.sampling_N == 0) & (self.training_N < UNLIKELY)

    @property
    def kl_v1(self) -> float:
        return _mean(self.d_N)

    @property
    def kl_v2(self) -> float:
        return _mean(self.d_N**2) / 2

    @property
    def abs_mean(self) -> float:
        return _mean(np.abs(self.d_N))

    @cached_property
    def ratio(self) -> tuple[float, float]:
        """Mean of e^−d and its standard error, with rows as the independent units."""
        with np.errstate(over="ignore"):
            ratio_N = np.exp(np.clip(-self.d_N, None, 50.0))
        by_row_R = np.bincount(self.row_N, ratio_N - 1, minlength=len(self.dump.rows))
        error = float(np.sqrt((by_row_R**2).sum())) / max(self.num_tokens, 1)
        return _mean(ratio_N, 1.0), error

    @cached_property
    def abs_by_offset(self) -> dict[int, float]:
        """Mean |log π_sampling[i + offset] − log π_training[i]| within turns, over tokens with two neighbors."""
        parts: dict[int, list[np.ndarray]] = {-1: [], 0: [], 1: []}
        for row in self.dump.rows:
            for turn in row.turns:
                sampling, training = row.sampling_L[turn], row.training_L[turn]
                for offset, part in parts.items():
                    end = len(training) - 1
                    near = sampling[1 + offset : end + offset] if end > 1 else sampling[:0]
                    part.append(np.abs(near - training[1 : 1 + len(near)]))
        return {offset: _mean(_finite(np.concatenate(part))) for offset, part in parts.items()}

    @cached_property
    def noise(self) -> float:
        """|d| that a tenth of the tokens stays below [nats]: what rounding leaves where nothing is wrong."""
        return float(np.quantile(np.abs(self.d_N), 0.1)) if self.num_tokens else 0.0

    @property
    def jump(self) -> float:
        """|d| from which a token is far off [nats]."""
        return max(JUMP, JUMP_NOISES * self.noise)

    @property
    def clean(self) -> float:
        """Mean |d| up to which tokens agree [nats]."""
        return max(CLEAN, CLEAN_NOISES * self.noise)

    @cached_property
    def onset_R(self) -> list[int | None]:
        """Index of the first far token of each row, if those before it agree and those from it on do not."""
        return [self._onset(self.d_N[self.row_N == row]) for row in range(len(self.dump.rows))]

    def _onset(self, d_T: np.ndarray) -> int | None:
        far = np.flatnonzero(np.abs(d_T) > self.jump)
        if not len(far) or far[0] < MIN_CLEAN:
            return None
        first = int(far[0])
        before, after = _mean(np.abs(d_T[:first])), _mean(np.abs(d_T[first:]))
        return first if before < self.clean and after > 10 * before else None

    @cached_property
    def far_R(self) -> np.ndarray:
        """True for rows with a far token."""
        return np.bincount(self.row_N, np.abs(self.d_N) > self.jump, minlength=len(self.dump.rows)) > 0

    @cached_property
    def abs_of_longest_and_others(self) -> tuple[float, float] | None:
        """Mean |d| of the longest rows and of the others; None if all are equally long."""
        lengths = np.array([len(row) for row in self.dump.rows])
        is_longest_N = (lengths == lengths.max())[self.row_N]
        if is_longest_N.all() or not is_longest_N.any():
            return None
        return _mean(np.abs(self.d_N[is_longest_N])), _mean(np.abs(self.d_N[~is_longest_N]))

    @cached_property
    def spread(self) -> tuple[float, float, float]:
        """Standard deviation of sampling over training logprobs, its error, and r² of the two.

        Not the slope of a regression, which noise lowers.
        """
        sigma_s, sigma_t = float(self.sampling_N.std()), float(self.training_N.std())
        if self.num_tokens < 3 or not sigma_s or not sigma_t:
            return 1.0, 0.0, 0.0
        r2 = float(np.corrcoef(self.sampling_N, self.training_N)[0, 1]) ** 2
        return sigma_s / sigma_t, float(np.sqrt(max(1 - r2, 1e-9) / self.num_tokens)), r2

    def by_position(self) -> Iterator[tuple[str, int, float]]:
        """Yield ranges of positions after the prompt, with the number of tokens and their mean |d|."""
        starts_R = np.array([int(np.argmax(row.is_trained_L)) for row in self.dump.rows])
        place_N = self.position_N - starts_R[self.row_N]
        low, high = 0, 4
        while low <= place_N.max(initial=-1):
            inside_N = (place_N >= low) & (place_N < high)
            if inside_N.any():
                yield f"{low} to {high - 1}", int(inside_N.sum()), _mean(np.abs(self.d_N[inside_N]))
            low, high = high, 4 * high

    def worst(self, count: int) -> list[dict[str, Any]]:
        """Return the tokens with the largest |d|, with their places."""
        order = np.argsort(-np.abs(self.d_N), kind="stable")[:count]
        return [
            {
                "place": self.dump.rows[self.row_N[n]].place,
                "position": int(self.position_N[n]),
                "token_id": int(self.dump.rows[self.row_N[n]].ids_L[self.position_N[n]]),
                "logp_samp": float(self.sampling_N[n]),
                "logp_train": float(self.training_N[n]),
                "diff": float(self.d_N[n]),
            }
            for n in order.tolist()
        ]


def both(row: DumpRow) -> np.ndarray:
    """Return (L,) True for trained tokens with both logprobs."""
    return row.is_trained_L & ~np.isnan(row.sampling_L) & ~np.isnan(row.training_L)


def _mean(values: np.ndarray | Sequence[float], empty: float = 0.0) -> float:
    return float(np.mean(values)) if len(values) else empty


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]
