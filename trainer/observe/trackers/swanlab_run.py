"""A run in SwanLab: as SWANLAB_MODE says, without it offline, in the run directory.

Each start of a run writes a directory of its own under one id; `swanlab sync` puts them together. SwanLab's own records
of terminal, hardware, packages and command line are off: they hold secrets that the configuration does not.
"""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.observe.trackers.tracker import (
    LocalTracker,
    Page,
    Place,
    Session,
    Values,
    media,
    numbers,
    tracker_directory,
)
from lockstep.trainer.observe.trackers.view import short_path

OFFLINE = "offline"
PROBES = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")


class SwanlabRun(LocalTracker):
    label = "SwanLab"
    shows = (Page,)

    @staticmethod
    def place(settings: LoggerConfig, directory: Path) -> Place:
        mode = _mode()
        if mode in ("online", "cloud"):
            return Place(data=f"https://swanlab.cn, project {settings.project}", view="", store=mode)
        data = short_path(tracker_directory(directory, "swanlab"))
        if mode == OFFLINE:
            return Place(data=data, view=f"swanlab sync {shlex.quote(data)}/run-*")
        return Place(data=data, view=shlex.join(["swanlab", "watch", data]))

    def __init__(self, session: Session) -> None:
        import swanlab  # type: ignore[import-not-found]  # here: an optional package, slow to import

        self._swanlab = swanlab
        self.id = session.id or secrets.token_hex(8)
        data = tracker_directory(session.directory, "swanlab")
        data.mkdir(parents=True, exist_ok=True)
        settings = swanlab.Settings(
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(**dict.fromkeys(PROBES, False)),
        )
        self._run = swanlab.init(
            mode=_mode(), log_dir=str(data), project=session.settings.project, workspace=session.settings.entity,
            group=session.settings.group, name=session.name, id=self.id, resume="allow",
            config=dict(session.run_config), settings=settings,
        )  # fmt: skip

    def log(self, update: int, values: Values) -> None:
        pages = {name: self._swanlab.Html(page.html) for name, page in media(values).items() if isinstance(page, Page)}
        self._run.log({**numbers(values), **pages}, step=update)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success", error="the run failed" if failed else None)


def _mode() -> str:
    return os.environ.get("SWANLAB_MODE", OFFLINE)
