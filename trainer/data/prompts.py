"""Data rows of a run, in an order that is a function of the seed and a cursor.

One data set: row number k of the run is `permutation(seed, epoch)[place]` with `epoch, place = divmod(k, rows)`.

Several, with weights: the run goes through blocks of `MIX_BLOCK` rows. In each block every data set has its share,
spread evenly; each data set goes through its own permutations at its own pace.

A curriculum by pass rate leaves out rows without a learning signal: a row whose group had a pass rate of at most
`min_pass_rate`, or at least `max_pass_rate`, rests for the next `rest_epochs` epochs of its data set, and is then tried
again. The resting rows are the only state beside the cursor.

So a resumed run continues exactly where it stopped, skips nothing and repeats nothing, on any number of ranks. Rows
begun ahead of their training (`rollout.max_staleness`) are tracked by their place until they are finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rollout.environments.adapters.verifiers import evaluation_rows
from rollout.environments.prompt import PROMPT_COLUMNS, PromptReader
from rollout.errors import DataError
from trainer.config.schema import Config, CurriculumConfig, DataSetConfig
from trainer.data.datasets import UNREADABLE, load_rows, reason, rename

Row = Mapping[str, Any]

OF_ENVIRONMENT = "environment"
"""Path of held-out data that the environment brings."""
DATASET = "dataset"
"""Column with the name of the data set, if the run has several."""
ROW_KEY = "data_row"
"""Column with the key of a row in the curriculum: `set:row@epoch`."""
MIX_BLOCK = 1000
"""Rows per block; weights are rounded to multiples of 1 / MIX_BLOCK."""


class DataSet:
    """A data set with the columns that environments and rewards read."""

    def __init__(self, rows: Any, settings: DataSetConfig, *, name: str | None = None) -> None:
        """rows: a `datasets.Dataset`. name: written into each row; None for a single data set.

        Raises `DataError` if the first row lacks a column of `settings`.
        """
        self._rows = rows
        self._settings = settings
        self.name = name
        self[0]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        settings = self._settings
        try:
            values = self._rows[index]
        except UNREADABLE as error:
            raise DataError(f"data set {settings.path}: row {index} cannot be read: {reason(error)}") from error
        row = rename(values, settings.columns or {}, of=settings.path)
        if settings.system_prompt is not None:
            row["messages"] = list(PromptReader(system=settings.system_prompt).messages(row))
        if settings.environment is not None:
            row["environment"] = settings.environment
        if self.name is not None:
            row[DATASET] = self.name
        return row

    def prompts(self, reader: PromptReader) -> Iterator[Any]:
        """Yield the prompts of all rows as the file holds them, without reading other columns."""
        names = {*reader.columns, *PROMPT_COLUMNS}
        renamed = {name: path for name, path in (self._settings.columns or {}).items() if name in names}
        there = self._rows.column_names
        read = {path if path in there else path.partition(".")[0] for path in renamed.values()} or names
        for row in self._rows.select_columns(sorted(read.intersection(there))):
            row = rename(row, renamed, of=self._settings.path)
            if (name := reader.find(row)) is not None:
                yield row[name]

    def subset(self, kept: Sequence[int]) -> DataSet:
        """Return the data set with these rows only."""
        if not kept:
            raise DataError(
                f"data set {self._settings.path}: no prompt has at most data.max_prompt_tokens tokens; raise it"
            )
        return DataSet(self._rows.select(kept), self._settings, name=self.name)


def load_data_set(settings: DataSetConfig, *, name: str | None = None) -> DataSet:
    """Load one data set. Raises `DataError` if it cannot be loaded, is empty, or lacks a column."""
    assert settings.split is not None, "resolved by trainer.config.schema"
    return DataSet(load_rows(settings.path, settings.split, settings.subset), settings, name=name)


def training_data(config: Config) -> list[DataSet]:
    """Load the training data of a run: data.path, or all of data.sources."""
    sources = config.data.training_sets()
    return [load_data_set(settings, name=name or None) for name, settings in sources.items()]


def heldout_data(config: Config) -> dict[str, DataSet]:
    """Load the held-out data by name: data.heldout_path under an empty name, then eval.sets.

    The path `environment` stands for the evaluation data of an environment that brings its own.
    """
    return {
        name: DataSet(evaluation_rows(**config.environment.settings), settings, name=name or None)
        if brings_data(config, settings.path)
        else load_data_set(settings, name=name or None)
        for name, settings in config.heldout_sets().items()
    }


def brings_data(config: Config, path: str) -> bool:
    """Return True if this path stands for data of the environment, not for a file or a data set of the hub."""
    return path == OF_ENVIRONMENT and config.environment.name == "verifiers"


class Prompts:
    """Data rows in training order. Its whole state is `cursor`, `resting` and `unfinished`."""

    def __init__(
        self,
        sets: Sequence[Any],
        *,
        seed: int,
        shuffle: bool,
        weights: Sequence[float] | None = None,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        """sets: objects with a length and integer indices. weights: shares of the sets; None: equal."""
        self.sets = list(sets)
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum = curriculum if curriculum is not None and curriculum.rest_epochs else None
        self._pattern = _mix(weights or [1.0] * len(self.sets))
        self._draws = np.bincount(self._pattern)
        """Number of places in a block, by set."""
        same = self._pattern[:, None] == np.arange(len(self.sets))
        self._earlier = (np.cumsum(same, axis=0) - same)[np.arange(len(self._pattern)), self._pattern]
        """Number of earlier places of the same set, by place in a block."""
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._begun: set[int] = set()
        self._again: list[int] = []
        self.cursor = 0
        """Places passed since the start of the run, including those of resting rows."""
        self.resting: dict[str, int] = {}
        """First epoch in which a resting row is taken again, by `set:row`."""

    def __len__(self) -> int:
        """Number of rows of all data sets together."""
        return sum(map(len, self.sets))

    def metrics(self) -> dict[str, float]:
        """Return `data/*`: epochs over all rows, and with a curriculum the number of resting rows."""
        resting = {} if self._curriculum is None else {"data/resting_rows": float(len(self.resting))}
        return {"data/epoch": self.cursor / len(self), **resting}

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Places before the cursor whose rows are not finished."""
        return tuple(sorted({*self._begun, *self._again}))

    def restore(self, cursor: int, unfinished: Sequence[int]) -> None:
        """Continue a stopped run: first its unfinished rows, then from its cursor on."""
        self.cursor = cursor
        self._begun, self._again = set(), sorted(unfinished)

    def begin(self, count: int) -> list[tuple[int, Row]]:
        """Return the next `count` rows with their places, across epochs. Call `finish` for each later."""
        again, self._again = self._again[:count], self._again[count:]
        begun = [(place, self._row(*self._locate(place))) for place in again]
        while len(begun) < count:
            which, epoch, index = self._locate(self.cursor)
            if self.resting.get(f"{which}:{index}", 0) <= epoch:
                begun.append((self.cursor, self._row(which, epoch, index)))
            self.cursor += 1
        self._begun.update(place for place, _ in begun)
        return begun

    def finish(self, places: Iterable[int]) -> None:
        """Mark rows as trained or dropped, so that no resumed run takes them again."""
        self._begun.difference_update(places)

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows, begun and finished at once."""
        taken = self.begin(count)
        self.finish(place for place, _ in taken)
        return [row for _, row in taken]

    def learn(self, row: Row, rewards: Sequence[float]) -> None:
        """Report the rewards of a row to the curriculum, if the run has one."""
        rule = self._curriculum
        if rule is None or not rewards:
            return
        rate = sum(reward >= rule.solved_reward for reward in rewards) / len(rewards)
        key, _, epoch = str(row[ROW_KEY]).rpartition("@")
        self.resting.pop(key, None)
        if rate <= rule.min_pass_rate or rate >= rule.max_pass_rate:
            self.resting[key] = int(epoch) + rule.rest_epochs + 1

    def _row(self, which: int, epoch: int, index: int) -> Row:
        row = self.sets[which][index]
        return row if self._curriculum is None else {**row, ROW_KEY: f"{which}:{index}@{epoch}"}

    def _locate(self, k: int) -> tuple[int, int, int]:
        """Return the set of place k, its epoch, and the row's index in it."""
        block, place = divmod(k, len(self._pattern))
        which = int(self._pattern[place])
        drawn = block * int(self._draws[which]) + int(self._earlier[place])
        epoch, position = divmod(drawn, len(self.sets[which]))
        return which, epoch, int(self._order(which, epoch)[position])

    def _order(self, which: int, epoch: int) -> np.ndarray:
        if which not in self._orders or self._orders[which][0] != epoch:
            size = len(self.sets[which])
            seed = [self._seed, epoch, which] if which else [self._seed, epoch]
            order = np.random.default_rng(seed).permutation(size) if self._shuffle else np.arange(size)
            self._orders[which] = (epoch, order)
        return self._orders[which][1]


def _mix(weights: Sequence[float]) -> np.ndarray:
    """Return the set of each place of a block: shares by largest remainder, spread evenly."""
    if len(weights) == 1:
        return np.zeros(1, dtype=np.int64)
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * MIX_BLOCK
    counts = np.floor(exact).astype(np.int64)
    for which in np.argsort(counts - exact, kind="stable")[: MIX_BLOCK - counts.sum()]:
        counts[which] += 1
    if (counts == 0).any():
        raise DataError(
            f"data.sources: a weight of {min(weights)} beside {max(weights)} is less than one row in {MIX_BLOCK}; "
            "raise it, or leave the data set out"
        )
    places = [((j + 0.5) / count, which) for which, count in enumerate(counts) for j in range(count)]
    return np.array([which for _, which in sorted(places)], dtype=np.int64)
