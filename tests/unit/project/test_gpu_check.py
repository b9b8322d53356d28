"""Verdicts, time limits and exit statuses of `scripts/gpu_check.py`, with made-up checks."""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.scripts import gpu_check
from lockstep.scripts.gpu_check import FAILED, PASSED, SKIPPED, Result, main, reason_to_skip, run_check, status
from lockstep.scripts.gpu_checks import CHECKS, Check
from lockstep.scripts.gpu_checks.parcel import TAIL_BYTES, pack
from tests.fixtures.forked_python import forked_python
from tests.fixtures.made_up_checks import made_up
from tests.fixtures.paths import ROOT
from tests.fixtures.processes import wait_until_gone

DOCS = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Check], Result]:
    monkeypatch.setenv("PYTHON_EXEC", forked_python())
    return lambda check: run_check(check, tmp_path, rehearses=True)


def result(verdict: str) -> Result:
    return Result(check=made_up("good"), verdict=verdict)


def test_without_a_gpu_it_says_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "lockstep: this machine has no GPU that torch sees, so nothing can be checked\n"


def test_with_a_gpu_it_does_not_rehearse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["--rehearse"]) == 2
    assert "for machines without a GPU" in capsys.readouterr().err


def test_an_old_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpu_check.json").write_text("{}")
    assert main(["--rehearse", "--out", str(tmp_path)]) == 2
    assert "has files" in capsys.readouterr().err


def test_a_failed_check_is_named_and_the_exit_status_is_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked_python())
    monkeypatch.setattr(gpu_check, "machine", lambda: {"torch": "2.13.0"})
    checks = [made_up("good"), made_up("bad"), made_up("nan", rehearses=False)]
    assert main(["--rehearse", "--out", str(tmp_path / "run")], checks) == 1
    shown = capsys.readouterr().out
    assert "1 passed, 1 failed, 1 skipped" in shown
    table = shown.partition("To paste into an issue:")[2]
    assert "| good | passed | difference: 0.5 (expected < 1)<br>rehearses: True (expected = True) |" in table
    assert r"| bad | failed | small: 0.5 (expected < 1)<br>NOT MET: speed [a\|b]: 0.5 (expected > 1) |" in table
    assert "| nan | skipped | needs a GPU |" in table
    written = json.loads((tmp_path / "run" / "gpu_check.json").read_text())
    assert [one["verdict"] for one in written["results"]] == [PASSED, FAILED, SKIPPED]
    page = (tmp_path / "run" / "index.html").read_text()
    assert '<tr class="missed"><td>speed [a|b]</td><td>0.5</td><td>&gt; 1</td></tr>' in page
    assert '<span class="badge critical">failed</span>' in page


def test_only_runs_the_named_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked_python())
    monkeypatch.setattr(gpu_check, "machine", dict)
    assert main(["--rehearse", "--out", str(tmp_path), "--only", "good"], [made_up("bad"), made_up("good")]) == 0
    assert "1 passed, 0 failed, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty", "measured nothing"),
        ("raising", "ValueError: the weights are gone"),
        ("dying", "ended with status 7"),
    ],
)
def test_a_check_that_measures_nothing_fails(run: Callable[[Check], Result], name: str, reason: str) -> None:
    found = run(made_up(name))
    assert found.verdict == FAILED
    assert reason in found.reason


def test_nan_fails(run: Callable[[Check], Result]) -> None:
    assert run(made_up("nan")).verdict == FAILED


def test_a_check_that_exceeds_its_limit_fails_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "endless" / "pid"

    class Limited(subprocess.Popen[bytes]):
        """A process whose limit of 40 s is over as soon as its check has started a child."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != 40:
                return super().wait(timeout)
            while not (pid.exists() and pid.read_text()):
                assert self.poll() is None, "it ended before its limit"
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    monkeypatch.setattr(subprocess, "Popen", Limited)
    found = run_check(made_up("endless", limit_s=40), tmp_path, rehearses=True)
    assert found.verdict == FAILED
    assert "timed out after 40 s" in found.reason
    wait_until_gone([int(pid.read_text())], timeout_s=5)


def test_a_skipped_check_never_counts_as_passed() -> None:
    assert status([result(PASSED), result(SKIPPED)]) == 0
    assert status([result(SKIPPED)]) == 1
    assert status([]) == 1
    assert status([result(PASSED), result(FAILED)]) == 1


def test_a_check_is_skipped_where_it_cannot_run() -> None:
    one, two, rehearsed = made_up("one", rehearses=False), made_up("two", num_gpus=2), made_up("rehearsed")
    assert reason_to_skip(one, rehearses=True, num_gpus=0) == "needs a GPU"
    assert reason_to_skip(rehearsed, rehearses=True, num_gpus=0) is None
    assert reason_to_skip(two, rehearses=False, num_gpus=1) == "needs 2 GPUs"
    assert reason_to_skip(two, rehearses=False, num_gpus=2) is None


def test_the_page_describes_every_check_in_order() -> None:
    section = DOCS.partition("\n## Checks\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == [check.name for check in CHECKS]
    assert [row[1] for row in rows] == [check.expected.replace("|", r"\|") for check in CHECKS]


def test_the_file_to_send_has_logs_and_machine_but_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = "hf_" + "a1" * 16
    monkeypatch.setenv("HF_TOKEN", key)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    directory = tmp_path / "gpu-check-1"
    (directory / "evidence" / "model").mkdir(parents=True)
    (directory / "evidence" / "log.txt").write_text("x" * TAIL_BYTES + f"the end, with {key} in {Path.home()}/run\n")
    (directory / "evidence" / "model" / "config.json").write_text("{}")
    (directory / "evidence" / "weights.safetensors").write_bytes(b"w")
    with zipfile.ZipFile(pack(directory)) as archive:
        names = set(archive.namelist())
        log, variables = archive.read("evidence/log.txt").decode(), archive.read("machine/environment.txt").decode()
        whole = b"".join(archive.read(name) for name in names).decode()
    assert {"machine/nvidia-smi.txt", "machine/topology.txt", "machine/packages.txt", "machine/limits.txt"} < names
    assert not any("model" in name or "weights" in name for name in names)
    assert log.startswith("[the first ")
    assert log.endswith("run\n")
    assert key not in whole
    assert "HF_TOKEN=<redacted>" in variables
    assert "NCCL_DEBUG=INFO" in variables


def test_quick_runs_only_the_first_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHON_EXEC", forked_python())
    monkeypatch.setattr(gpu_check, "machine", dict)
    checks = [made_up("good", is_quick=True), made_up("bad")]
    assert main(["--rehearse", "--quick", "--out", str(tmp_path / "run")], checks) == 0
    assert [check.name for check in CHECKS if check.is_quick][:2] == ["environment", "first_update"]
