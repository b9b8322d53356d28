"""Two real servers and two ZeRO-3 ranks: they train, and a fault on one rank ends both with the same error."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.models import perturb
from tests.fixtures.remote import trained
from tests.fixtures.runs import check_run, launch_run, run_directory
from tests.fixtures.servers import KEY, EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def servers(forked_servers: ForkedServers) -> Iterator[list[EngineServer]]:
    with forked_servers.running(2) as servers:
        yield servers


def weight_version(server: EngineServer) -> str:
    request = urllib.request.Request(f"{server.url}/weight_info", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["weight_version"]


def test_one_sync_reaches_both_servers(servers: list[EngineServer]):
    with trained(servers) as both:
        perturb(both.model, seed=1)
        report = both.push()
        assert report.canary_abs_diff < 1e-4
        assert report.bytes == 4 * sum(param.numel() for param in both.model.parameters()), "once, not once per server"
        for engine in both.engines:
            call = both.generate(tuple(range(10, 180)), engine)
            assert both.mismatch(call) < 1e-4
            assert call.oldest_version == both.version
        pool = EnginePool(both.engines)
        call = both.loop.run(pool.generate((5, 6), Sampling(max_tokens=8, seed=0, affinity=(1, 2))))
        assert both.mismatch(call) < 1e-4


def test_two_ranks_under_zero3_train_two_updates_with_two_servers(
    servers: list[EngineServer], forked_servers: ForkedServers, tmp_path: Path
):
    run = launch_run([server.url for server in servers], forked_servers.model, tmp_path)
    output, errors = run.communicate(timeout=540)
    assert run.returncode == 0, output[-2000:] + errors[-5000:]
    check_run(run_directory(tmp_path), updates=2)
    assert [weight_version(server) for server in servers] == ["2", "2"]


def test_a_driver_per_server_has_the_rollouts_and_weights_of_one_driver(
    servers: list[EngineServer], forked_servers: ForkedServers, tmp_path: Path
):
    runs = []
    for drivers in (1, 2):
        directory = tmp_path / str(drivers)
        directory.mkdir()
        urls = [server.url for server in servers]
        settings = {"rollout.drivers": drivers, "rollout.prompts_per_step": 3, "updates": 3, "eval.every": 3}
        settings["data.heldout_path"] = directory / "rows.jsonl"
        (directory / "first.py").write_text("def first(rollout): return float(rollout.calls[0].sampled_ids[0] % 3)\n")
        settings["reward.functions"] = f"[{directory}/first.py:first]"
        run = launch_run(urls, forked_servers.model, directory, **settings)
        output, errors = run.communicate(timeout=540)
        assert run.returncode == 0, output[-2000:] + errors[-5000:]
        assert [weight_version(server) for server in servers] == ["3", "3"]
        runs.append(run_directory(directory))
    files = sorted(path.relative_to(runs[0]) for path in runs[0].rglob("*/*.jsonl"))
    assert len(files) == 4, "three steps, and an evaluation"
    for file in files:
        expected, found = ([replace(each, duration_s=0.0) for each in read_rollouts(run / file)] for run in runs)
        assert found == expected, file
    expected_weights, found_weights = (load_file(run / "model/model.safetensors") for run in runs)
    start = load_file(forked_servers.model / "model.safetensors")
    assert any(not torch.equal(found_weights[name], start[name]) for name in found_weights), "else nothing was trained"
    for name, expected_weight in expected_weights.items():
        assert torch.equal(found_weights[name], expected_weight), name


@pytest.mark.parametrize(
    ("fault", "settings", "limit_s", "said"),
    [
        ("gathered", {}, 30, "failed in sending the weights: .*rank 1: MemoryError: no memory for another bucket"),
        ("absent", {"sync.timeout_s": 20}, 60, "failed in sending the weights: .*rank 1: MemoryError: no memory for"),
        ("producer", {"rollout.max_staleness": 1}, 30, "EngineError: out of luck with another group"),
    ],
)
def test_a_fault_on_one_rank_ends_both_with_the_same_error_and_trains_nothing_more(
    servers: list[EngineServer],
    forked_servers: ForkedServers,
    tmp_path: Path,
    fault: str,
    settings: dict,
    limit_s: float,
    said: str,
):
    run = launch_run(
        [server.url for server in servers],
        forked_servers.model,
        tmp_path,
        ["tests/integration/workers/failing_run.py", fault],
        updates=100,
        **settings,
    )
    output, errors = run.communicate(timeout=540)
    assert run.returncode != 0
    assert len(re.findall(f"lockstep: .*{said}", errors)) == 2, output[-2000:] + errors[-5000:]
    if fault == "producer":
        assert (run_directory(tmp_path) / "metrics.jsonl").read_text().count("reward/mean") <= 2
    else:
        check_run(run_directory(tmp_path), updates=1)
    ended_at = max(path.stat().st_mtime for path in run_directory(tmp_path).rglob("*.jsonl"))
    assert time.time() - ended_at < limit_s
    with trained(servers) as next_trainer:
        next_trainer.push()
        assert next_trainer.mismatch(next_trainer.generate((5, 6, 7))) < 1e-4


def test_memory_that_runs_out_on_one_rank_under_zero3_ends_the_run_with_its_message(
    servers: list[EngineServer], forked_servers: ForkedServers, tmp_path: Path
):
    """The other rank waits in a gather of the same forward pass, where no message reaches it."""
    worker = ["tests/integration/workers/failing_run.py", "memory"]
    run = launch_run([server.url for server in servers], forked_servers.model, tmp_path, worker, updates=100)
    output, errors = run.communicate(timeout=200)
    assert run.returncode == 1, output[-2000:] + errors[-5000:]
    assert len(re.findall("lockstep: TrainingError: out of memory in a pack .* set token_budget=", errors)) == 1
    check_run(run_directory(tmp_path), updates=1)
