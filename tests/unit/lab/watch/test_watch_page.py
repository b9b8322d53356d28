"""The live page in a browser: charts with values, filters, zoom, rollouts, hostile text, no request to other hosts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from lockstep.lab.watch.page_server import PageServer
from lockstep.rollout.saved_rollouts import write_rollouts
from tests.fixtures.browser import needs_chromium
from tests.fixtures.chromium_page import ChromiumPage, chromium_page
from tests.fixtures.watched_runs import metrics, write_runs
from tests.unit.lab.pages.test_run_report import HOSTILE, rollout

COMPLETE = "document.body?.dataset.complete === 'true'"
LABEL = "document.querySelector('#sections figure .plot')?.getAttribute('aria-label')"
HAS_PIXELS = "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((value) => value)"
BOX = "JSON.parse(JSON.stringify(document.querySelector('.u-over').getBoundingClientRect()))"
TITLES = "[...document.querySelectorAll('#sections .slot:not([hidden]) figcaption > b')].map((e) => e.textContent)"


@asynccontextmanager
async def opened(root: Path, profile: Path, words: str = "", *, width: int = 1280) -> AsyncIterator[ChromiumPage]:
    """Open the page on a folder of runs; at the end check that it asked this machine alone and met no error."""
    runner = web.AppRunner(PageServer(root).app())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with chromium_page(profile) as page:
            await page.open(address + words, width=width)
            await page.until(COMPLETE)
            yield page
            assert page.problems == []
            assert page.addresses
            assert [one for one in page.addresses if not one.startswith(address)] == []
    finally:
        await runner.cleanup()


@needs_chromium
async def test_charts_show_the_numbers_of_the_runs_and_follow_them(tmp_path: Path):
    first, _ = write_runs(tmp_path / "runs", 2, 30, now=time.time())
    async with opened(tmp_path / "runs", tmp_path / "profile") as page:
        assert await page.evaluate("document.querySelectorAll('#runs tbody tr').length") == 2
        await page.until(f"{LABEL}?.startsWith('Reward; last: ')")
        last = json.loads((first / "metrics.jsonl").read_text().splitlines()[-1])["reward/mean"]
        assert f"{first.name} {float(f'{last:.3g}')}" in await page.evaluate(LABEL)
        drawn = "[...document.querySelectorAll('#sections figure canvas')].filter(hasPixels).length"
        await page.evaluate(f"void (window.hasPixels = {HAS_PIXELS})")
        assert await page.evaluate(drawn) >= 3
        assert "Reward functions: correct" in await page.evaluate(TITLES)
        line = {
            "step": 31,
            **metrics(31, 0.5, random.Random(0)),
            "reward/mean": 0.125,
            "time/unix": time.time(),
        }
        with (first / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        await page.until(f"{LABEL}.includes('{first.name} 0.125')")


@needs_chromium
async def test_search_zoom_and_choice_of_runs_work_and_are_in_the_address(tmp_path: Path):
    write_runs(tmp_path / "runs", 3, 200, now=time.time())
    async with opened(tmp_path / "runs", tmp_path / "profile") as page:
        await page.type("search", "^optim/")
        await page.until(f'JSON.stringify({TITLES}) === \'["optim/grad_norm","optim/lr"]\'')
        await page.until("document.querySelectorAll('#sections canvas').length === 2")
        box = await page.evaluate(BOX)
        left, top, width, height = (box[name] for name in ("left", "top", "width", "height"))
        await page.drag((left + width * 0.25, top + height / 2), (left + width * 0.5, top + height / 2))
        await page.until("!document.getElementById('reset').hidden")
        address = await page.evaluate("location.hash")
        words = dict(pair.split("=") for pair in address[1:].split("&"))
        assert abs(int(words["from"]) - 50) < 5
        assert abs(int(words["to"]) - 100) < 5
        await page.evaluate("document.querySelector('#runs tbody input').click()")
        await page.until("document.getElementById('legend').children.length === 2")
        await page.evaluate("document.getElementById('reset').click()")
        await page.until("!location.hash.includes('from')")
        await page.type("search", "(")
        await page.until("document.getElementById('search').getAttribute('aria-invalid') === 'true'")
        await page.type("name-filter", "lr-3")
        assert await page.evaluate("document.querySelectorAll('#runs tbody tr').length") == 1


@needs_chromium
async def test_rollouts_are_filtered_and_opened_and_their_text_stays_text(tmp_path: Path):
    (run,) = write_runs(tmp_path / "runs", 1, 3, now=time.time())
    run = run.rename(run.with_name("<img src=x onerror=alert(1)>"))
    (run / "rollouts").mkdir()
    rollouts = [rollout(n, n / 8, said=HOSTILE if n == 5 else f"answer {n}") for n in range(8)]
    write_rollouts(run / "rollouts/step-000003.jsonl", rollouts)
    async with opened(tmp_path / "runs", tmp_path / "profile", "#view=rollouts", width=420) as page:
        await page.until("document.querySelectorAll('#r-list li').length === 8")
        await page.type("r-text", "onerror")
        await page.until("document.querySelectorAll('#r-list li').length === 1")
        await page.evaluate("document.querySelector('#r-list button').click()")
        await page.until("document.querySelector('#r-one .message')")
        assert "<script>" in await page.evaluate("document.getElementById('r-one').textContent")
        assert await page.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert await page.evaluate("document.title") == "Lockstep watch"
        assert await page.evaluate("document.querySelectorAll('#r-one .sampled').length") == 4
        assert await page.evaluate("document.documentElement.scrollWidth") <= 420
        assert await page.evaluate("location.hash.includes('place=step-000003.jsonl')")
