"""First rows of local data sets, read as environment and rewards will read them, before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.rollout.errors import DataError
from lockstep.trainer.config.paths import file_exists
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.datasets import is_file, read_first_row
from lockstep.trainer.data.prompts import prepared
from lockstep.trainer.data.row_check import RowCheck


def first_row_problems(config: Config, *, trains: bool) -> Iterator[str]:
    """Yield one sentence per problem of the first row of a data set. trains: True to check training data."""
    check = RowCheck(config)
    trained = config.data.training_sets().values() if trains else ()
    seen: set[tuple[str, str]] = set()
    for data_set in (*trained, *config.heldout_sets().values()):
        place = (data_set.path, str(data_set.columns))
        if not is_file(data_set.path) or not file_exists(data_set.path) or place in seen:
            continue  # `data_file_problems` reports a missing file
        seen.add(place)
        # An experiment or a preset may have brought it.
        is_heldout = data_set.path == config.data.heldout_path
        also = "; or set data.heldout_path=null for no held-out data" if is_heldout else ""
        try:
            row = prepared(read_first_row(data_set.path), data_set)
        except DataError as error:
            yield f"{error}{also}"
        else:
            yield from (f"data set {data_set.path}, first row: {problem}{also}" for problem in check.problems(row))
