"""Curriculum: how often a row comes, by the pass rate of its last visits.

A visit is one finished group of the row; a rollout passes with a reward of at least `solved_reward`. Over the last
`window` visits of a row, with c passes of n rollouts, its pass rate is p = c / n:

    too hard   p <= min_pass_rate        in between   otherwise        solved   p >= max_pass_rate

* Rest: a row that is too hard or solved is left out of the next `rest_epochs` epochs of its data set.
* Weight: in each epoch in which it does not rest, a row is taken with probability w, else skipped:

      uniform       w = 1
      learnability  w = max(min_weight, 4 p (1 - p))
      pools         w = hard_weight if too hard, solved_weight if solved, else 1

So the visits of two rows that do not rest are in the ratio of their weights. p (1 - p) is the learnability of "Learning
to Reason at the Frontier of Learnability" (arXiv:2502.12272); 4 p (1 - p), the variance of a group over its maximum, is
the score of VCRL (arXiv:2509.19803). Both train the best rows of a sampled pool or memory again. Pools are those of
prime-rl's first buffer, with shares of a batch there. Here a row keeps its place in the permutation of its epoch, so
the order is a function of seed, position and records, and takes no row twice in an epoch. A row without a visit has
weight 1 and does not rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.config.groups.data_settings import CurriculumConfig

RECORD = re.compile(r"\d+(?: \d+/[1-9]\d*)*", re.ASCII)
"""Record of a row in a checkpoint: `until passes/rollouts passes/rollouts ...`."""
KEY = re.compile(r"(\d+):(\d+)", re.ASCII)
"""Key of a row in a checkpoint: `set:row`."""


class Visit(NamedTuple):
    """Result of one group."""

    passes: int
    rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """State of one row."""

    until: int = 0
    """First epoch in which the row is taken again; 0: it was not put to rest at its last visit."""
    visits: tuple[Visit, ...] = ()
    """Last visits, oldest first. Empty for rows whose rest an older version recorded."""

    @property
    def pass_rate(self) -> float | None:
        """Share of the rollouts that passed; None without a visit."""
        rollouts = sum(visit.rollouts for visit in self.visits)
        return sum(visit.passes for visit in self.visits) / rollouts if rollouts else None

    def text(self) -> str:
        """Return the record as a checkpoint stores it."""
        return " ".join([str(self.until), *(f"{visit.passes}/{visit.rollouts}" for visit in self.visits)])

    @classmethod
    def parse(cls, text: str) -> RowRecord:
        """Read `text()`. Raises ValueError if it is not a record."""
        if not RECORD.fullmatch(text):
            raise ValueError(f"expected `until passes/rollouts ...`, found {text!r:.80}")
        until, *visits = text.split()
        history = tuple(Visit(*map(int, visit.split("/"))) for visit in visits)
        if any(visit.passes > visit.rollouts for visit in history):
            raise ValueError(f"expected at most as many passes as rollouts, found {text!r:.80}")
        return cls(until=int(until), visits=history)


class Curriculum:
    """The records of a run's rows, and what follows from them. A row is (data set, index in it)."""

    def __init__(self, rule: CurriculumConfig, *, sizes: Sequence[int], seed: int) -> None:
        """sizes: number of rows of each data set."""
        self._rule = rule
        self._sizes = sizes
        self._seed = seed
        self._records: dict[tuple[int, int], RowRecord] = {}
        self._counts: Counter[str] = Counter()
        """Number of records by `_labels`, kept up to date because data sets can have millions of rows."""
        self._coins: dict[int, tuple[int, np.ndarray]] = {}

    def takes(self, row: tuple[int, int], epoch: int) -> bool:
        """Return True if the row is taken in this epoch of its data set; False if it is skipped."""
        record = self._records.get(row)
        return record is None or (record.until <= epoch and self._coin(row, epoch) < self.weight(record))

    def wakes(self, which: int) -> int:
        """Return the first epoch in which a row of the data set does not rest."""
        size = self._sizes[which]
        if self._counts["resting"] < size:
            return 0
        untils = [record.until for row, record in self._records.items() if row[0] == which]
        return min(untils) if len(untils) == size else 0

    def weight(self, record: RowRecord) -> float:
        """Return the probability of a row that does not rest to be taken in an epoch."""
        rule, rate = self._rule, record.pass_rate
        if rate is None or rule.weighting == "uniform":
            return 1.0
        if rule.weighting == "learnability":
            return max(rule.min_weight, 4 * rate * (1 - rate))
        return {"too_hard": rule.hard_weight, "between": 1.0, "solved": rule.solved_weight}[self.level(rate)]

    def level(self, rate: float) -> str:
        """Return the name of a pass rate: too_hard, between or solved."""
        if rate <= self._rule.min_pass_rate:
            return "too_hard"
        return "solved" if rate >= self._rule.max_pass_rate else "between"

    def learn(self, row: tuple[int, int], epoch: int, rewards: Sequence[float]) -> None:
        """Record a visit by the rewards of its finished rollouts, at least one. epoch: that of the visit."""
        rule, before = self._rule, self._records.get(row, RowRecord())
        passes = sum(reward >= rule.solved_reward for reward in rewards)
        visits = (*before.visits, Visit(passes, len(rewards)))[-rule.window :]
        after = RowRecord(visits=visits)
        assert after.pass_rate is not None
        if rule.rest_epochs and self.level(after.pass_rate) != "between":
            after = RowRecord(visits=visits, until=epoch + rule.rest_epochs + 1)
        self._counts.subtract(self._labels(before))
        self._counts.update(self._labels(after))
        self._records[row] = after

    def metrics(self) -> dict[str, float]:
        """Return the number of rows put to rest at their last visit, and shares of all rows, which sum to 1."""
        rows = sum(self._sizes)
        level_counts = {level: self._counts[level] for level in ("too_hard", "between", "solved")}
        counts = {"unseen": rows - sum(level_counts.values()), **level_counts}
        shares = {f"data/{level}_share": count / rows for level, count in counts.items()}
        return {"data/resting_rows": float(self._counts["resting"]), **shares}

    def state(self) -> dict[str, str]:
        """Return the records as a checkpoint stores them, `set:row` -> text."""
        return {f"{which}:{index}": record.text() for (which, index), record in self._records.items()}

    def restore(self, state: Mapping[str, str]) -> bool:
        """Continue with the records of a checkpoint. Returns False, without any record, if they are of other data.

        Raises `CheckpointError` if a record cannot be read.
        """
        records: dict[tuple[int, int], RowRecord] = {}
        for key, text in state.items():
            try:
                match = KEY.fullmatch(key)
                if match is None:
                    raise ValueError("expected the key `set:row`")
                record = RowRecord.parse(text)
            except ValueError as error:
                raise CheckpointError(
                    f"the checkpoint's curriculum has an unreadable record of row {key!r:.80} ({error}); resume from "
                    "another checkpoint, or set data.curriculum.rest_epochs=0 data.curriculum.weighting=uniform"
                ) from error
            row = int(match[1]), int(match[2])
            records[row] = RowRecord(until=record.until, visits=record.visits[-self._rule.window :])
        is_same = all(which < len(self._sizes) and index < self._sizes[which] for which, index in records)
        self._records = records if is_same else {}
        self._counts = Counter(label for record in self._records.values() for label in self._labels(record))
        return is_same

    def _labels(self, record: RowRecord) -> Iterator[str]:
        if record.until:
            yield "resting"
        if (rate := record.pass_rate) is not None:
            yield self.level(rate)

    def _coin(self, row: tuple[int, int], epoch: int) -> float:
        """Return a number in [0, 1), a function of seed, epoch and row."""
        which, index = row
        if which not in self._coins or self._coins[which][0] != epoch:
            # A stream of its own: the permutations use the same entropy without a spawn key.
            stream = np.random.SeedSequence([self._seed, epoch, which], spawn_key=(1,))
            self._coins[which] = (epoch, np.random.default_rng(stream).random(self._sizes[which]))
        return float(self._coins[which][1][index])
