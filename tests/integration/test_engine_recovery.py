"""An embedded engine that is killed in a run is restarted, and the run ends with the same results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.kills import Recipe, differences
from tests.fixtures.processes import descendants
from tests.integration.test_exact_resume import recipe
from tests.integration.test_run import demo, metrics  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

COUNTER = "rollout/engine_restarts"


def engine_of(pid: int) -> int:
    """Return the pid of the engine in the run with this pid."""
    (engine,) = (child for child in descendants(pid) if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes())
    return engine


def run_with_deaths(runs: Recipe, name: str, *, after_updates: tuple[int, ...]) -> Path:
    """Start a run and kill its engine after each of these updates."""
    process = runs.start(name)
    log, run = runs.root / f"{name}.log", runs.root / name
    try:
        for update in after_updates:
            while not (run / "metrics.jsonl").exists() or len(metrics(run)) < update:
                assert process.poll() is None, log.read_text()[-4000:]
                time.sleep(0.02)
            os.kill(engine_of(process.pid), signal.SIGKILL)
        assert process.wait(timeout=300) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=8",)], ids=["whole weights", "adapters"])
def test_a_killed_engine_is_started_again_and_changes_nothing(
    lora: tuple[str, ...],
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    runs = recipe(demo, tmp_path, *lora, "updates=4")
    whole = runs.finish("whole")
    found = differences(whole, run_with_deaths(runs, "struck", after_updates=(2,)))
    assert [line for line in found if COUNTER not in line] == []
    assert [line[COUNTER] for line in metrics(tmp_path / "struck")] == [0, 0, 1, 1]
    assert "an engine died and was started again (1 of 2)" in (tmp_path / "struck.log").read_text()


@pytest.mark.slow
def test_an_engine_that_dies_again_while_it_gets_the_weights_changes_nothing(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    runs = recipe(demo, tmp_path, "updates=4")
    whole = runs.finish("whole")
    process = runs.start("struck")
    log, run = tmp_path / "struck.log", tmp_path / "struck"

    def wait_for(is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.002)

    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 2)
        os.kill(engine_of(process.pid), signal.SIGKILL)
        wait_for(lambda: "started again (1 of 2)" in log.read_text())  # printed between the restart and the push
        process.send_signal(signal.SIGSTOP)
        os.kill(engine_of(process.pid), signal.SIGKILL)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=300) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
    assert [line for line in differences(whole, run) if COUNTER not in line] == []
    assert [line[COUNTER] for line in metrics(run)] == [0, 0, 2, 2]
    assert "an engine died and was started again (2 of 2): weight sync failed" in log.read_text()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_go_on_and_a_third_death_ends_both(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    runs = recipe(demo, tmp_path, "updates=100", "rollout.max_staleness=1", ranks=2)
    with pytest.raises(AssertionError):
        run_with_deaths(runs, "struck", after_updates=(1, 3, 5))
    assert [line[COUNTER] for line in metrics(tmp_path / "struck")][-1] == 2
    said = [line for line in (tmp_path / "struck.log").read_text().splitlines() if line.startswith("lockstep: ")]
    sentences = [line for line in said if "the engine is dead" in line]
    assert len(sentences) == 2
    assert sentences[0] == sentences[1]
