"""A run in Trackio: in its local database, or on the Space or server that its own variables name.

Follows TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL. Trackio compares the runs of a project in one dashboard,
so without them its data are in Trackio's own directory and not in that of the run.
"""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.observe.trackers.tracker import (
    Histogram,
    LocalTracker,
    Page,
    Place,
    Session,
    Table,
    Values,
    media,
    numbers,
)


class TrackioRun(LocalTracker):
    label = "Trackio"
    shows = (Table, Histogram, Page)

    @staticmethod
    def place(settings: LoggerConfig, directory: Path) -> Place:
        if space := os.environ.get("TRACKIO_SPACE_ID"):
            return Place(data=f"https://huggingface.co/spaces/{space}", view="", store=space)
        if server := os.environ.get("TRACKIO_SERVER_URL"):  # its query may hold the write token
            address = urlsplit(server)
            data = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
            return Place(data=data, view="", store=data)
        cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
        data = os.environ.get("TRACKIO_DIR", f"{cache}/trackio")
        return Place(data=data, view=shlex.join(["trackio", "show", "--project", settings.project]), store=data)

    def __init__(self, session: Session) -> None:
        import trackio  # type: ignore[import-not-found]  # here: an optional package, slow to import

        self._trackio = trackio
        # The name is Trackio's key, and runs of several directories may have one.
        self.id = session.id or f"{session.name}-{secrets.token_hex(2)}"
        self._run = trackio.init(
            session.settings.project, name=self.id, group=session.settings.group, resume="allow",
            config={**session.run_config}, embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, update: int, values: Values) -> None:
        objects = {name: self._converted(medium) for name, medium in media(values).items()}
        self._run.log({**numbers(values), **objects}, step=update)

    def _converted(self, medium: Table | Histogram | Page) -> object:
        match medium:
            case Table():
                return self._trackio.Table(columns=list(medium.columns), data=[list(row) for row in medium.rows])
            case Histogram():
                return self._trackio.Histogram(np_histogram=(medium.counts, medium.edges))
            case Page():
                return self._trackio.Html(medium.html)

    def finish(self, *, failed: bool) -> None:
        self._trackio.finish()
