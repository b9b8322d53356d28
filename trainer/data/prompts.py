"""Data rows of a run, in an order that is a function of the seed, a position, and the records of a curriculum.

One data set: row number k of the run is `permutation(seed, epoch)[place]` with `epoch, place = divmod(k, rows)`.

Several, with weights: the run goes through blocks of `MIX_BLOCK` rows. In each block every data set has its share,
spread evenly; each data set goes through its own permutations at its own pace.

A curriculum (`trainer/data/curriculum.py`) skips rows. The next row that it takes, of the same data set, comes instead,
so the shares of the data sets stay. With a curriculum, a row in flight is not begun again, if its data set has others.

So a resumed run continues exactly where it stopped, on any number of ranks. Rows begun ahead of their training
(`rollout.max_staleness`) are tracked by their place until they are finished. A place stands for a row of a data set in
one of its epochs, whatever the curriculum skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.rollout.environments import declaration
from lockstep.rollout.environments.prompt import IMAGE_COLUMNS, PROMPT_COLUMNS, PromptReader
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import DataRow
from lockstep.trainer.config.groups.data_settings import CurriculumConfig, DataConfig, DataSetConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig, RewardConfig
from lockstep.trainer.data.datasets import load_rows, rename
from lockstep.trainer.data.reader import Rows, every, silent
from lockstep.trainer.data.row_check import RowCheck

if TYPE_CHECKING:
    from lockstep.rollout.media.store import ImageStore
    from lockstep.trainer.data.curriculum import Curriculum
    from lockstep.trainer.data.row_images import RowImages

Row = Mapping[str, Any]

OF_ENVIRONMENT = "environment"
"""Path of held-out data that the environment brings."""
DATASET = "dataset"
"""Column with the name of the data set, if the run has several."""
MIX_BLOCK = 1000
"""Rows per block; weights are rounded to multiples of 1 / MIX_BLOCK."""


class DataSet:
    """A data set with the columns that environments and rewards read."""

    def __init__(
        self, rows: Any, settings: DataSetConfig, *, name: str | None = None, store: ImageStore | None = None
    ) -> None:
        """rows: as `Rows.of` takes them. name: written into each row; None for a single data set. store: takes the
        images of a row when it is read; None for a run without images.

        Raises `DataError` for a column of a type that JSON does not have.
        """
        left_out = [name for name, column in (settings.columns or {}).items() if column is None]
        self._settings, self._store = settings, store
        self._images: RowImages | None = None
        rows, with_images = Rows.of(rows), set[str]()
        if store is not None:
            from lockstep.trainer.data import row_images  # runs without images do not load it

            self._images = row_images.images_of(settings, store)
            rows, with_images = row_images.undecoded(rows), row_images.columns_with_images(rows, settings)
        self._rows = rows.for_rewards(left_out=left_out, of=settings.path, with_images=with_images)
        self.path = settings.path
        self.name = name

    @property
    def has_images(self) -> bool:
        return self._images is not None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        if self._images is None:
            return self._row(index)
        try:
            return self._row(index, self._images.read)
        except DataError as error:
            raise DataError(f"data set {self.path}: {self._rows.place(index)}: {error}") from error

    def _row(self, index: int, read_images: Callable[[Row], dict[str, Any]] | None = None) -> Row:
        row = DataRow(prepared(self._rows[index], self._settings, name=self.name, read_images=read_images))
        row.place = f"{self._rows.place(index)} of {self.path}"
        return row

    def checked(self, check: Callable[[Row], None], *, say: Callable[[str], None]) -> DataSet:
        """Return the data set. Raises `DataError` if `check` raises it for some of the rows: how many, and which.

        Of images the headers are read.
        """
        read = self._images.checked if self._images else None
        places = map(self._rows.place, range(len(self)))
        records = ((place, partial(lambda i: check(self._row(i, read)), i)) for i, place in enumerate(places))
        for _ in every(records, of=self.path, say=say):
            pass
        return self

    def prompts(self, reader: PromptReader) -> Iterator[Any]:
        """Yield the prompts of all rows as the file holds them, without reading other columns; in a run with images
        each with hashes of its images."""
        names = {*reader.columns, *PROMPT_COLUMNS}
        own = self._settings.columns or {}
        columns: dict[str, str | None] = {name: path for name, path in own.items() if name in names and path}
        read = {part for path in filter(None, columns.values()) for part in (path, path.partition(".")[0])} or names
        if self._images:
            columns |= self._images.columns
            sources = self._images.sources
            read |= {*IMAGE_COLUMNS, *sources, *(path.partition(".")[0] for path in sources)}
        for row in self._rows.only(read.__contains__):
            row = rename(row, columns, of=self.path)
            row = self._images.checked(row) if self._images else row
            if (name := reader.find(row)) is not None:
                yield [row[name], row["images"]] if self._images else row[name]

    def subset(self, kept: Sequence[int]) -> DataSet:
        """Return the data set with these rows only."""
        if not kept:
            raise DataError(f"data set {self.path}: no prompt has at most data.max_prompt_tokens tokens; raise it")
        return DataSet(self._rows.select(kept), self._settings, name=self.name, store=self._store)


def prepared(
    values: Row,
    settings: DataSetConfig,
    *,
    name: str | None = None,
    read_images: Callable[[Row], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return a row of the data set as environments and rewards see it. Raises `DataError`.

    read_images: a function of `RowImages`; None for a run without images.
    """
    row = rename(values, settings.columns or {}, of=settings.path)
    if read_images is not None:
        row = read_images(row)
    if settings.system_prompt is not None:
        row["messages"] = list(PromptReader(system=settings.system_prompt).messages(row))
    if settings.environment is not None:
        row["environment"] = settings.environment
    return row if name is None else {**row, DATASET: name}


def load_data_set(
    settings: DataSetConfig,
    *,
    name: str | None = None,
    store: ImageStore | None = None,
    say: Callable[[str], None] = silent,
) -> DataSet:
    """Load one data set. store: takes its images; None for a run without images.

    Raises `DataError` if it cannot be loaded or is empty.
    """
    assert settings.split is not None, "resolved by DataConfig.complete"
    rows = load_rows(settings.path, settings.split, settings.subset, settings.parameters, say=say)
    return DataSet(rows, settings, name=name, store=store)


def training_data(
    data: DataConfig,
    environment: EnvironmentConfig,
    reward: RewardConfig,
    *,
    store: ImageStore | None = None,
    max_images: int = 0,
    say: Callable[[str], None] = silent,
) -> list[DataSet]:
    """Load the training data of a run, data.path or all of data.sources, and check every row. say: told of progress.

    store: of the images; None for a run without them. max_images: of a prompt. Raises `DataError` if rows cannot be
    used.
    """
    check = RowCheck(environment, reward, max_images=max_images)
    return [
        load_data_set(one, name=name or None, store=store, say=say).checked(check, say=say)
        for name, one in data.training_sets().items()
    ]


def heldout_data(
    heldout: Mapping[str, DataSetConfig],
    environment: EnvironmentConfig,
    reward: RewardConfig,
    *,
    store: ImageStore | None = None,
    max_images: int = 0,
    say: Callable[[str], None] = silent,
) -> dict[str, DataSet]:
    """Load the held-out data by name, and check every row. heldout: `Config.heldout_sets`.

    store and max_images: as in `training_data`. The path `environment` stands for the evaluation data of an environment
    that brings its own. Raises `DataError`.
    """
    check = RowCheck(environment, reward, max_images=max_images)
    sets = {}
    for name, settings in heldout.items():
        own_rows = rows_of_environment(environment.name, settings.path)
        if own_rows is not None:
            sets[name] = DataSet(own_rows(**environment.settings), settings, name=name or None, store=store)
        else:
            sets[name] = load_data_set(settings, name=name or None, store=store, say=say)
    return {name: data.checked(check, say=say) for name, data in sets.items()}


def rows_of_environment(environment: str, path: str) -> Callable[..., Any] | None:
    """Return what gives the rows of a path that stands for data of the environment; None for any other path."""
    return declaration(environment).evaluation_rows if path == OF_ENVIRONMENT else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a run in its data."""

    cursor: int = 0
    """Rows begun since the start of the run."""
    skipped: tuple[int, ...] = ()
    """Rows that the curriculum skipped, by data set; empty: none."""
    unfinished: tuple[int, ...] = ()
    """Places of rows that were begun and are not finished, in the order of their beginning."""


class _PlacedRow(NamedTuple):
    """A row of a data set in one of its epochs, which a place stands for."""

    which: int
    """Data set."""
    epoch: int
    """Epoch of the data set."""
    index: int
    """Row of the data set."""

    @property
    def row(self) -> tuple[int, int]:
        return self.which, self.index


class Prompts:
    """Data rows in training order. Its whole state is its `position` and the records of its `curriculum`."""

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
        self.sizes = tuple(map(len, self.sets))
        """Number of rows of each data set."""
        self.curriculum: Curriculum | None = None
        if curriculum is not None and curriculum.is_on:
            from lockstep.trainer.data.curriculum import Curriculum  # other runs do not load it

            self.curriculum = Curriculum(curriculum, sizes=self.sizes, seed=seed)
        self._seed = seed
        self._shuffle = shuffle
        self._pattern = _mix(weights or [1.0] * len(self.sets))
        self._places = [np.flatnonzero(self._pattern == which) for which in range(len(self.sets))]
        """Places of each set in a block."""
        same = self._pattern[:, None] == np.arange(len(self.sets))
        self._earlier = (np.cumsum(same, axis=0) - same)[np.arange(len(self._pattern)), self._pattern]
        """Number of earlier places of the same set, by place in a block."""
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._begun: dict[int, _PlacedRow] = {}
        """Rows in flight by place, in the order of their beginning."""
        self._again: list[int] = []
        self._skipped = [0] * len(self.sets)
        self.cursor = 0
        """Rows begun since the start of the run."""

    def __len__(self) -> int:
        """Number of rows of all data sets together."""
        return sum(self.sizes)

    def metrics(self) -> dict[str, float]:
        """Return `data/epoch`, the passes over all rows, skipped ones included, and the metrics of the curriculum."""
        num_passed = self.cursor + sum(self._skipped)
        return {"data/epoch": num_passed / len(self), **(self.curriculum.metrics() if self.curriculum else {})}

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Places whose rows were begun and are not finished."""
        return (*self._begun, *self._again)

    @property
    def position(self) -> Position:
        return Position(cursor=self.cursor, skipped=tuple(self._skipped), unfinished=self.unfinished)

    def restore(self, position: Position) -> None:
        """Return to a position: first its unfinished rows, then from its cursor on. Records are kept."""
        self.cursor = position.cursor
        self._skipped = list(position.skipped) or [0] * len(self.sets)
        self._begun, self._again = {}, list(position.unfinished)

    def resume(self, position: Position, records: Mapping[str, str], sizes: Sequence[int]) -> str | None:
        """Continue a stopped run. Returns a warning if its curriculum starts again, because the data is another.

        records, sizes: `Curriculum.state` and `sizes` of the checkpoint; sizes is empty if it has none.
        Raises `CheckpointError` if a record cannot be read.
        """
        fits = tuple(sizes) in ((), self.sizes) and len(position.skipped) in (0, len(self.sets))
        if self.curriculum is not None:
            fits = self.curriculum.restore(records if fits else {}) and fits
        self.restore(position if fits else replace(position, skipped=()))
        if fits or self.curriculum is None or not records:
            return None
        return (
            f"the checkpoint's curriculum is of data sets with {list(sizes)} rows, and this run's have "
            f"{list(self.sizes)}: it starts again, without pass rates"
        )

    def begin(self, count: int) -> list[int]:
        """Return the places of the next `count` rows, across epochs. Call `finish` for each later."""
        again, self._again = self._again[:count], self._again[count:]
        entries = {place: self._locate(place) for place in again}
        busy: set[tuple[int, int]] = set()
        if self.curriculum is not None:
            busy = {entry.row for entry in (*self._begun.values(), *entries.values(), *map(self._locate, self._again))}
        while len(entries) < count:
            place, entry = self._next(busy)
            entries[place] = entry
            busy.add(entry.row)
        self._begun |= entries
        return list(entries)

    def finish(self, places: Iterable[int]) -> None:
        """Mark rows as trained or dropped, so that no resumed run takes them again."""
        for place in places:
            self._begun.pop(place, None)

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows, begun and finished at once."""
        places = self.begin(count)
        self.finish(places)
        return self.rows(places)

    def learn(self, place: int, rewards: Sequence[float]) -> None:
        """Report the rewards of a row to the curriculum, if the run has one, before `finish`."""
        if self.curriculum is not None and rewards:
            entry = self._begun[place]
            self.curriculum.learn(entry.row, entry.epoch, rewards)

    def rows(self, places: Iterable[int]) -> list[Row]:
        """Read the rows at these places, on any rank."""
        entries = map(self._locate, places)
        reads = [partial(self.sets[entry.which].__getitem__, entry.index) for entry in entries]
        if not any(getattr(one, "has_images", False) for one in self.sets):
            return [read() for read in reads]
        with ThreadPoolExecutor() as threads:  # a megapixel takes 0.2 s, most of them outside of Python
            return [row.result() for row in [threads.submit(read) for read in reads]]

    def _next(self, busy: set[tuple[int, int]]) -> tuple[int, _PlacedRow]:
        """Draw a row of the data set whose turn it is. busy: rows in flight."""
        block, turn = divmod(self.cursor, len(self._pattern))
        which = int(self._pattern[turn])
        places = self._places[which]
        while True:
            draws = block * len(places) + int(self._earlier[turn]) + self._skipped[which]
            draw_block, draw = divmod(draws, len(places))
            place = draw_block * len(self._pattern) + int(places[draw])
            entry = self._locate(place)
            if self.curriculum is not None and draws % self.sizes[which] == 0:
                epochs = self.curriculum.wakes(which) - entry.epoch
                if epochs > 0:  # else a long rest of all rows would be walked through row by row
                    self._skipped[which] += epochs * self.sizes[which]
                    continue
            if self._takes(entry, busy):
                self.cursor += 1
                return place, entry
            self._skipped[which] += 1

    def _takes(self, drawn: _PlacedRow, busy: set[tuple[int, int]]) -> bool:
        if self.curriculum is None:
            return True
        if drawn.row in busy and sum(which == drawn.which for which, _ in busy) < self.sizes[drawn.which]:
            return False
        return self.curriculum.takes(drawn.row, drawn.epoch)

    def _locate(self, place: int) -> _PlacedRow:
        block, turn = divmod(place, len(self._pattern))
        which = int(self._pattern[turn])
        draws = block * len(self._places[which]) + int(self._earlier[turn])
        epoch, position = divmod(draws, self.sizes[which])
        return _PlacedRow(which, epoch, int(self._order(which, epoch)[position]))

    def _order(self, which: int, epoch: int) -> np.ndarray:
        if which not in self._orders or self._orders[which][0] != epoch:
            size = self.sizes[which]
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
