"""A run in TensorBoard: event files in the run directory.

A resumed run tells TensorBoard the update it continues from, and TensorBoard drops what was logged after that.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import yaml

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.observe.trackers.image_table import ImageTable
from lockstep.trainer.observe.trackers.tracker import (
    Histogram,
    LocalTracker,
    Place,
    Session,
    Table,
    Values,
    media,
    numbers,
    tracker_directory,
)
from lockstep.trainer.observe.trackers.view import short_path


class TensorBoardRun(LocalTracker):
    label = "TensorBoard"
    shows = (Table, Histogram)
    keeps_first = False

    @staticmethod
    def place(settings: LoggerConfig, directory: Path) -> Place:
        data = tracker_directory(directory, "tensorboard")
        return Place(data=short_path(data), view=shlex.join(["tensorboard", "--logdir", short_path(data)]))

    def __init__(self, session: Session) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # here: an optional package, slow to import

        data = tracker_directory(session.directory, "tensorboard")
        self.id = session.name
        resumed_at = session.resumed_at
        # Without a checkpoint, an earlier start in this directory has nothing that counts.
        self._writer = SummaryWriter(str(data), purge_step=0 if resumed_at is None else resumed_at + 1)
        self._writer.add_text("config", f"```\n{yaml.safe_dump(dict(session.run_config), sort_keys=False)}\n```")

    def log(self, update: int, values: Values) -> None:
        for name, number in numbers(values).items():
            self._writer.add_scalar(name, number, update)
        for name, medium in media(values).items():
            if isinstance(medium, Table):
                self._writer.add_text(name, _markdown(medium), update)
                if isinstance(medium, ImageTable):
                    self._images(update, f"{name}/images", medium)
            elif isinstance(medium, Histogram):
                self._histogram(update, name, medium)
        self._writer.flush()  # a killed run keeps all it logged

    def _images(self, update: int, name: str, table: ImageTable) -> None:
        """Draw each strip once, one below another: a group of rollouts often has the same images."""
        from lockstep.rollout.media.thumbnail import one_below_another  # other runs do not load it

        if strips := {strip.caption: strip.image for strip in table.strips if strip is not None}:
            joined = one_below_another(list(strips.values()))
            self._writer.add_image(name, np.asarray(joined), update, dataformats="HWC")

    def _histogram(self, update: int, name: str, histogram: Histogram) -> None:
        middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2
        counts = histogram.counts.astype(float)
        self._writer.add_histogram_raw(
            name, global_step=update, num=int(counts.sum()),
            min=float(histogram.edges[0]), max=float(histogram.edges[-1]),
            sum=float(np.dot(counts, middles)), sum_squares=float(np.dot(counts, middles**2)),
            bucket_limits=histogram.edges[1:].tolist(), bucket_counts=counts.tolist(),
        )  # fmt: skip

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


def _markdown(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(value: object) -> str:
    """Return the text of a cell, in which nothing is markup."""
    text = str(value)
    for mark, escape in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(mark, escape)
    return text
