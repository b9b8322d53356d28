"""Trackers by name, and a tracker in a thread of its own, so that a slow or unreachable one does not delay training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from queue import Full, Queue

from lockstep.rollout.on_demand import OnDemand
from lockstep.trainer.observe.trackers.tracker import (
    LocalTracker,
    Session,
    TrackedRun,
    Values,
    read_tracked,
    tracker_directory,
    write_tracked,
)

KINDS = OnDemand[type[LocalTracker]](
    __name__.rpartition(".")[0],
    {
        "tensorboard": "tensorboard_run:TensorBoardRun",
        "mlflow": "mlflow_run:MlflowRun",
        "trackio": "trackio_run:TrackioRun",
        "swanlab": "swanlab_run:SwanlabRun",
    },
)

WAITING = 1000
"""Maximum number of calls that wait for the tracker."""
FINISH_S = 60.0
"""Maximum time for the rest at the end of a run [s]: a new MLflow database alone takes half of it on a busy core."""


class Background:
    """Queue of calls to one tracker, and the thread that makes them in order.

    The tracker is imported, opened and closed in the thread. So it sets no signal handlers, which need the main thread.
    """

    def __init__(
        self, kind: type[LocalTracker], session: Session, tolerating: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        """tolerating: context that counts an exception under a label and suppresses it; used in both threads."""
        self.shows = kind.shows
        self._kind = kind
        self._session = session
        self._tolerating = tolerating
        self._calls: Queue[tuple[int, Values] | bool] = Queue(WAITING)
        """Updates to log; at last True for a failed run, False for another."""
        self._thread = threading.Thread(target=self._work, name=f"tracker-{kind.label}", daemon=True)
        self._thread.start()

    def log(self, update: int, values: Values) -> None:
        """Log later. Raises TimeoutError if the tracker is `WAITING` calls behind."""
        try:
            self._calls.put_nowait((update, values))
        except Full as error:
            raise TimeoutError(f"{WAITING} calls wait for it") from error

    def finish(self, *, failed: bool) -> None:
        """Wait until everything is logged. Raises TimeoutError if that takes more than `FINISH_S`."""
        try:
            self._calls.put(failed, timeout=FINISH_S)
        except Full as error:
            raise TimeoutError(f"{WAITING} calls wait for it") from error
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take all of its data within {FINISH_S:g} s; the rest is in metrics.jsonl")

    def _work(self) -> None:
        label = self._kind.label
        tracker: LocalTracker | None = None
        before = record = TrackedRun(store="")
        memory = tracker_directory(self._session.directory, f"{label.lower()}.json")
        with self._tolerating(label):
            before = read_tracked(memory, self._kind.place(self._session.settings, self._session.directory).store)
            new_tracker = self._open(replace(self._session, tracked=before))
            record = write_tracked(memory, before, id=new_tracker.id, update=-1)
            tracker = new_tracker
        while not isinstance(call := self._calls.get(), bool):
            if tracker is None:
                continue
            update, values = call
            with self._tolerating(label):
                if not (tracker.keeps_first and update <= before.update):
                    tracker.log(update, values)
                    record = write_tracked(memory, record, id=tracker.id, update=update)
        if tracker is not None:
            with self._tolerating(label):
                tracker.finish(failed=call)

    def _open(self, session: Session) -> LocalTracker:
        try:
            return self._kind(session)
        except SystemExit as error:  # a library that ends the process would only end this thread, without a word
            raise RuntimeError(f"it ended with status {error.code}") from error
