"""Server of the live page: on this machine only, for reading only.

Pages of other sites cannot read it: a name that is not this machine's is refused (DNS rebinding), answers have no CORS
headers, and the page loads nothing from elsewhere (content security policy).
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from lockstep.lab.pages.panels import SECTIONS
from lockstep.lab.watch.metric_columns import Grid
from lockstep.lab.watch.rollout_search import Query, RolloutSearch
from lockstep.lab.watch.run_table import RunTable, WatchedRun
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import safe_text

Result = TypeVar("Result")
FOLDER = Path(__file__).parent
FILES = {
    "base.css": (FOLDER.parent / "pages/base.css.jinja", "text/css"),
    "tokens.css": (FOLDER.parent / "pages/tokens.css.jinja", "text/css"),
    "watch.css": (FOLDER / "page/watch.css", "text/css"),
    "uplot.css": (FOLDER / "uplot/uPlot.min.css", "text/css"),
    "uplot.js": (FOLDER / "uplot/uPlot.iife.min.js", "text/javascript"),
    "icon.svg": (FOLDER / "page/icon.svg", "image/svg+xml"),
    **{path.name: (path, "text/javascript") for path in (FOLDER / "page").glob("*.js")},
}
"""Files of the page by their names in addresses, with their types."""
NAMES_OF_THIS_MACHINE = ("localhost", "127.0.0.1")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
READING_S = 0.2
"""Longest time that an answer waits for files."""
SEARCH_S = 2.0
MAX_REQUEST = 2**17
MAX_POINTS = 2000
MAX_METRICS = 400


class PageServer:
    """Page and answers about runs."""

    def __init__(self, *roots: Path) -> None:
        self._table = RunTable(*roots)
        self._search = RolloutSearch()
        self._files = ThreadPoolExecutor(1)
        """Reads the table and the metrics, one request after the other."""
        self._rollouts = ThreadPoolExecutor(1)
        self._reading: asyncio.Task[None] | None = None
        """Reads long metrics on, between requests."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[guard], client_max_size=MAX_REQUEST)
        app.add_routes([
            web.get("/", self._page),
            web.get("/files/{name}", self._file),
            web.get("/api/runs", self._runs),
            web.post("/api/series", self._series),
            web.get("/api/rollouts", self._list),
            web.get("/api/rollout", self._rollout),
            web.get("/api/image", self._image),
        ])  # fmt: skip
        return app

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=(FOLDER / "page/watch.html").read_bytes(), content_type="text/html", charset="utf-8")

    async def _file(self, request: web.Request) -> web.Response:
        path, kind = FILES.get(request.match_info["name"], (None, ""))
        if path is None:
            raise web.HTTPNotFound(text="there is no such file")
        return web.Response(body=path.read_bytes(), content_type=kind, charset="utf-8")

    async def _runs(self, request: web.Request) -> web.Response:
        return await _in(self._files, lambda: _json(self._table.rows(_soon())))

    async def _series(self, request: web.Request) -> web.Response:
        wish = await request.json()
        answer = await _in(self._files, lambda: web.Response(body=self.series(wish)))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_on(self._runs_of(wish)))
        return answer

    async def _read_on(self, runs: list[WatchedRun]) -> None:
        share, before = 0.0, None
        while share < 1 and before != (share, self._table.clock):
            before = (share, self._table.clock)
            share = await _in(self._files, lambda: self._table.refresh_columns(runs, _soon()))

    def _runs_of(self, wish: dict[str, Any]) -> list[WatchedRun]:
        """Return the runs of a request for series, the one in focus first."""
        runs = [self._table.runs[name] for name in wish["runs"] if name in self._table.runs]
        return sorted(runs, key=lambda run: run.id != wish.get("focus"))

    def series(self, wish: dict[str, Any]) -> bytes:
        """Return buckets of metrics of runs: the length of a JSON head, the head, and float32 numbers.

        wish: `runs` (ids), `metrics`, `focus` (id of the run with a band), `hours`, `from`, `to`, `points`; `since` and
        `grid` of an earlier answer, so that only runs that changed since are sent. Raises ConfigError for another wish.
        """
        try:
            runs = self._runs_of(wish)
            metrics = [str(name) for name in wish["metrics"]][:MAX_METRICS]
            hours, points = bool(wish["hours"]), max(1, min(MAX_POINTS, int(wish["points"])))
            low, high = (None if wish.get(end) is None else float(wish[end]) for end in ("from", "to"))
            since, focus = int(wish.get("since", 0)), wish.get("focus")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"a request for series is damaged: {safe_text(repr(error), 200)}") from error
        share = self._table.refresh_columns(runs, _soon())
        ends = [end for run in runs if (end := run.columns.extent(hours=hours))]
        head: dict[str, Any] = {"clock": self._table.clock, "share": share, "names": _names(runs), "blocks": []}
        head["panels"] = _panels(head["names"])
        numbers: list[np.ndarray] = []
        if ends:
            first, last = min(start for start, _ in ends), max(end for _, end in ends)
            low = first if low is None else min(max(low, first), last)
            high = last if high is None else min(max(high, low), last)
            grid = Grid.over(low, high, points=points, is_whole=not hours)
            head |= {"grid": [grid.start, grid.width], "count": grid.count}
            since = since if wish.get("grid") == head["grid"] else 0
            head["isWhole"] = not since
            for run in runs:
                if run.changed_at <= since:
                    continue
                for metric in metrics:
                    values = run.columns.series(metric, grid, hours=hours)
                    if values is not None:
                        kinds = 3 if run.id == focus else 1
                        head["blocks"].append([run.id, metric, kinds])
                        numbers.append(values[:kinds].ravel())
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 4)
        return len(text).to_bytes(4, "little") + text + b"".join(array.tobytes() for array in numbers)

    async def _list(self, request: web.Request) -> web.Response:
        run, words = self._run(request), request.query

        def answer() -> web.Response:
            files = self._search.files(run)
            file = words.get("file") or (files[-1] if files else "")
            prompt = words.get("prompt", "")  # <file>:<line> of a rollout with it
            query = Query(
                order=words.get("order", "saved"),
                text=words.get("text", ""),
                prompt=self._search.prompt_of(run, *_place(prompt)) if prompt else "",
                only_failed=words.get("failed") == "1",
            )
            if words.get("all") == "1":
                rollouts = self._search.of_all_steps(
                    run, query, before=words.get("before", ""), deadline=time.monotonic() + SEARCH_S
                )
            else:
                nothing = {"rollouts": [], "count": 0, "damaged": 0, "before": ""}
                rollouts = self._search.of_step(run, file, query) if file else nothing
            return _json({"files": files, "file": file, **rollouts})

        return await _in(self._rollouts, answer)

    async def _rollout(self, request: web.Request) -> web.Response:
        run, place = self._run(request), _place(request.query.get("place", ""))
        return await _in(self._rollouts, lambda: _json(self._search.rollout(run, *place)))

    async def _image(self, request: web.Request) -> web.Response:
        run, digest = self._run(request), request.query.get("digest", "")
        content = await _in(self._rollouts, lambda: self._search.image(run, digest))
        return web.Response(body=content, content_type="image/png")

    def _run(self, request: web.Request) -> WatchedRun:
        run = self._table.runs.get(request.query.get("run", ""))
        if run is None:
            raise ConfigError("there is no such run; it may have been deleted")
        return run


@web.middleware
async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """Refuse names of other machines, and turn errors into sentences."""
    host = request.host.rpartition(":")[0] if ":" in request.host else request.host
    if host not in NAMES_OF_THIS_MACHINE:
        return web.Response(status=403, text=f"open this page as http://{NAMES_OF_THIS_MACHINE[0]}:<port>")
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=error.text)
    except (ConfigError, OSError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        response = web.json_response({"error": safe_text(str(error), 300)}, status=400)
    response.headers.update(HEADERS)
    return response


async def _in(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _soon() -> float:
    return time.monotonic() + READING_S


def _json(value: Any) -> web.Response:
    return web.json_response(value)


def _place(text: str) -> tuple[str, int]:
    """Return file and line of `<file>:<line>`. Raises ConfigError."""
    file, _, line = text.rpartition(":")
    if not line.isdecimal() or len(line) > 9:
        raise ConfigError(f"the place of a rollout is {safe_text(text, 80)!r}, expected <file>:<line>")
    return file, int(line)


def _names(runs: list[WatchedRun]) -> list[str]:
    return sorted({name for run in runs for name in run.metric_names} - {"step"})


def _panels(names: list[str]) -> list[dict[str, Any]]:
    """Return the curated panels that the runs have metrics for."""
    return [
        {
            "section": section,
            "title": panel.title,
            "curves": [{"name": curve, "metric": metric} for curve, metric in curves.items()],
            "unit": panel.unit,
            "meaning": panel.meaning,
            "limits": panel.limits,
            "isLog": panel.is_log,
            "isSplit": panel.is_split,
            "hidesZeros": panel.hides_zeros,
            "dashed": panel.dashed,
        }
        for section, panels in SECTIONS.items()
        for panel in panels
        if (curves := panel.metrics(names))
    ]


def serve(roots: Sequence[Path], port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM. Raises OSError if the port is taken.

    roots: folders of runs, or runs. port: 0 for a free one.
    """

    async def run() -> None:
        runner = web.AppRunner(PageServer(*roots).app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        assert runner.addresses
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has started it with SIGINT ignored
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        print(f"http://localhost:{runner.addresses[0][1]}  (Ctrl-C ends)", flush=True)
        try:
            await ended.wait()
        finally:
            await runner.cleanup()

    asyncio.run(run())
