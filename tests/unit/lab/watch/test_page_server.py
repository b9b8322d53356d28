"""The server of the live page: what it answers, and whom it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image

from lockstep.lab.watch.page_server import FILES, FOLDER, PageServer
from lockstep.rollout.media.store import ImageStore
from tests.fixtures.paths import ROOT
from tests.unit.lab.pages.test_run_report import line, rollout, write_run

TestClient.__test__ = TestServer.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[TestClient]:
    for name, height in (("one", 1.0), ("two", 2.0)):
        lines = [line(step, **{"reward/mean": height * step}) for step in range(1, 11)]
        write_run(tmp_path / "runs" / name, lines, [rollout(n, float(n)) for n in range(4)])
    async with TestClient(TestServer(PageServer(tmp_path / "runs").app())) as client:
        yield client


async def runs(client: TestClient) -> dict[str, str]:
    """Ids by name."""
    table = await (await client.get("/api/runs")).json()
    return {run["name"]: run["id"] for run in table["runs"]}


async def series(client: TestClient, **wish: Any) -> tuple[dict[str, Any], dict[tuple[str, str], np.ndarray]]:
    whole = {"runs": list((await runs(client)).values()), "metrics": ["reward/mean"], "hours": False, "points": 300}
    body = await (await client.post("/api/series", json=whole | wish)).read()
    size = int.from_bytes(body[:4], "little")
    head, numbers = json.loads(body[4 : 4 + size]), np.frombuffer(body[4 + size :], np.float32)
    assert size % 4 == 0
    blocks, at = {}, 0
    for run, metric, kinds in head["blocks"]:
        blocks[run, metric] = numbers[at : at + kinds * head["count"]].reshape(kinds, -1)
        at += kinds * head["count"]
    assert at == len(numbers)
    return head, blocks


class TestSafety:
    @pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.:1"])
    @pytest.mark.parametrize("path", ["/", "/api/runs", "/files/watch.js"])
    async def test_another_name_than_this_machines_is_refused(self, client: TestClient, host: str, path: str):
        answer = await client.get(path, headers={"Host": host})
        assert answer.status in (400, 403)
        assert "<html" not in await answer.text()

    async def test_this_machines_names_are_answered(self, client: TestClient):
        for host in ("localhost:1234", "127.0.0.1", "localhost"):
            assert (await client.get("/", headers={"Host": host})).status == 200

    @pytest.mark.parametrize("path", ["/", "/api/runs", "/files/watch.js", "/files/none", "/nothing", "/api/rollout"])
    async def test_every_answer_forbids_other_sources_and_readers(self, client: TestClient, path: str):
        headers = (await client.get(path)).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers

    @pytest.mark.parametrize(
        "path", ["/files/../page_server.py", "/files/%2e%2e%2fpage_server.py", "/files/%2Fetc%2Fpasswd"]
    )
    async def test_no_other_file_is_served(self, client: TestClient, path: str):
        def status() -> int:  # aiohttp's client would resolve the dots
            connection = http.client.HTTPConnection("127.0.0.1", client.port or 0, timeout=60)
            connection.request("GET", path)
            return connection.getresponse().status

        assert await asyncio.to_thread(status) == 404

    async def test_nothing_can_be_changed(self, client: TestClient):
        for method in ("PUT", "DELETE", "PATCH"):
            assert (await client.request(method, "/api/runs")).status == 405
        assert (await client.post("/api/runs")).status == 405

    @pytest.mark.parametrize(
        "body", ["", "[]", "{}", "null", "[" * 9000, '{"runs": 1}', '{"runs": [[]]}', b"\xff", "x" * 200_000]
    )
    async def test_a_damaged_request_gets_a_sentence(self, client: TestClient, body: str | bytes):
        answer = await client.post("/api/series", data=body)
        assert answer.status in (400, 413)

    @pytest.mark.parametrize(
        "path",
        [
            *("rollout", "rollouts", "rollouts?run=x", "rollouts?run=RUN&order=x", "rollouts?run=RUN&prompt=x"),
            *("rollouts?run=RUN&file=../../x", "rollout?run=RUN&place=../x:1", "rollout?run=RUN&place=step-1.jsonl:٣"),
            "rollout?run=RUN&place=step-000010.jsonl:99",
        ],
    )
    async def test_a_request_for_what_does_not_exist_gets_a_sentence(self, client: TestClient, path: str):
        answer = await client.get("/api/" + path.replace("RUN", (await runs(client))["one"]))
        assert answer.status == 400
        assert (await answer.json())["error"]

    def test_the_page_never_makes_text_into_markup(self):
        for path in (FOLDER / "page").glob("*"):
            text = path.read_text()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3\.org)", text
            )
            assert not re.search(r"""\son\w+=|style=|<script>""", text)


class TestSeries:
    async def test_numbers_of_all_runs_are_on_one_grid(self, client: TestClient):
        ids = await runs(client)
        head, found = await series(client)
        assert head["share"] == 1
        assert head["grid"] == [1, 1]
        np.testing.assert_array_equal(found[ids["two"], "reward/mean"], [np.arange(2.0, 22.0, 2.0)])
        assert [panel["title"] for panel in head["panels"]][:1] == ["Reward"]
        assert "reward/mean" in head["names"]

    async def test_the_run_in_focus_has_a_band(self, client: TestClient):
        ids = await runs(client)
        _, found = await series(client, focus=ids["one"], points=2)
        assert found[ids["one"], "reward/mean"].shape[0] == 3
        assert found[ids["two"], "reward/mean"].shape[0] == 1
        np.testing.assert_array_equal(found[ids["one"], "reward/mean"][:, 0], [4, 1, 7])  # updates 0 to 7

    async def test_only_runs_that_changed_are_sent_again(self, client: TestClient, tmp_path: Path):
        ids = await runs(client)
        head, _ = await series(client)
        again, found = await series(client, since=head["clock"], grid=head["grid"])
        assert found == {}
        with (tmp_path / "runs/two/metrics.jsonl").open("a") as file:
            file.write(json.dumps(line(11)) + "\n")
        later, found = await series(client, since=again["clock"], grid=head["grid"])
        assert list(found) == [(ids["two"], "reward/mean")]
        assert later["count"] == 11
        _, found = await series(client, since=later["clock"], grid=[0, 4])
        assert len(found) == 2, "another grid"

    @pytest.mark.parametrize("ends", [{"from": 4, "to": 6}, {"from": -1e308, "to": 1e308}, {"from": 9, "to": 2}])
    async def test_a_zoom_stays_within_the_runs(self, client: TestClient, ends: dict[str, float]):
        head, found = await series(client, **ends)
        low, high = max(1, ends["from"]), min(10, max(ends["from"], ends["to"]))
        assert head["grid"][0] == low
        assert all(values.shape[1] == high - low + 1 for values in found.values())

    async def test_unknown_runs_and_metrics_are_left_out(self, client: TestClient):
        head, found = await series(client, runs=["nothing"], metrics=["nothing"])
        assert found == {}
        assert head["panels"] == []
        _, found = await series(client, metrics=["nothing"])
        assert found == {}


async def test_rollouts_are_listed_and_shown(client: TestClient):
    run = (await runs(client))["one"]
    found = await (await client.get(f"/api/rollouts?run={run}&order=best")).json()
    assert [head["reward"] for head in found["rollouts"]] == [3, 2, 1, 0]
    place = f"{found['file']}:{found['rollouts'][0]['line']}"
    one = await (await client.get(f"/api/rollout?run={run}&place={place}")).json()
    assert one["reward"] == 3
    found = await (await client.get(f"/api/rollouts?run={run}&all=1&prompt={place}")).json()
    assert found["count"] == 4


def test_all_files_of_the_page_are_served_and_packaged():
    assert all(path.is_file() for path, _ in FILES.values())
    page = (FOLDER / "page/watch.html").read_text()
    assert set(re.findall(r"/files/([\w.]+)", page)) <= FILES.keys()
    packaged = (ROOT / "pyproject.toml").read_text()
    assert '"lockstep.lab.watch" = ["page/*", "uplot/*"]' in packaged
    assert (
        "MIT License" in (FOLDER / "uplot/LICENSE").read_text() or "The MIT" in (FOLDER / "uplot/LICENSE").read_text()
    )


def test_the_command_loads_no_torch_and_says_where_the_page_is(tmp_path: Path):
    program = (
        "import sys; import lockstep.lab.watch.page_server as s; "
        "print([m for m in ('torch', 'transformers', 'vllm', 'wandb', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    command = [sys.executable, "scripts/watch.py"]
    refused = subprocess.run([*command, str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "is not a directory" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_ends_at_a_signal(tmp_path: Path, number: int):
    """SIGINT is ignored at its start, as in jobs that a script puts into the background."""
    program = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "scripts/watch.py", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", program, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert re.match(r"http://localhost:\d+ ", process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == 0
    finally:
        process.kill()


class TestImages:
    async def test_the_file_of_an_image_is_served(self, client: TestClient, tmp_path: Path):
        digest = ImageStore(tmp_path / "runs/one/media").add(Image.new("RGB", (4, 4)))
        run = (await runs(client))["one"]
        answer = await client.get("/api/image", params={"run": run, "digest": digest})
        assert (answer.status, answer.content_type) == (200, "image/png")
        assert await answer.read() == (tmp_path / f"runs/one/media/{digest}.png").read_bytes()
        assert answer.headers["X-Content-Type-Options"] == "nosniff"

    @pytest.mark.parametrize(
        "digest", ["", "a", "../config", f"../media/{'a' * 64}", "A" * 64, "a" * 65, "a" * 63 + "/"]
    )
    async def test_other_names_are_refused(self, client: TestClient, tmp_path: Path, digest: str):
        (tmp_path / "runs/one/media").mkdir()
        for name in ("a", "A" * 64, "a" * 65, "a" * 64):
            Image.new("RGB", (4, 4)).save(tmp_path / f"runs/one/media/{name}.png")
        answer = await client.get("/api/image", params={"run": (await runs(client))["one"], "digest": digest})
        assert answer.status == 400

    async def test_links_other_files_and_missing_ones_are_refused(self, client: TestClient, tmp_path: Path):
        folder = tmp_path / "runs/one/media"
        folder.mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
        (folder / f"{'a' * 64}.png").symlink_to(tmp_path / "secret.png")
        (folder / f"{'b' * 64}.png").write_text("<script>")
        for digit in "abc":
            params = {"run": (await runs(client))["one"], "digest": digit * 64}
            assert (await client.get("/api/image", params=params)).status == 400
