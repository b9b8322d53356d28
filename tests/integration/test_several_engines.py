"""Several embedded engines on shared cores: the samples of a single engine, and independent restarts."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.start import engine_settings, start_embedded
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.models import save_tiny_model
from tests.integration.test_run import SMALL, demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = (5, 6, 7, 8)
TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


def sampled(run: Path, step: int) -> list[list[int]]:
    rollouts = read_rollouts(run / f"rollouts/step-{step:06}.jsonl")
    return [list(call.sampled_ids) for rollout in rollouts for call in rollout.calls]


@TWO
@pytest.mark.parametrize(
    "is_compiled",
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=[pytest.mark.slow, COMPILER])],
)
def test_two_engines_train_as_one_does(demo: tuple[str, ...], tmp_path: Path, is_compiled: bool) -> None:  # noqa: F811
    settings = (*demo, *SMALL, "updates=2", f"run_root={tmp_path}", "checkpoint.every=0")
    train(*settings, "run_name=one")
    output = train(*settings, "run_name=two", "rollout.num_engines=2", f"rollout.compile_engine={is_compiled}")
    assert "starting 2 engines" in output
    assert {path.name for path in (tmp_path / "two/logs").glob("engine*")} == {"engine.log", "engine-1.log"}
    for log in ("engine.log", "engine-1.log"):
        assert f"enforce_eager={not is_compiled}" in (tmp_path / "two/logs" / log).read_text()
    assert sampled(tmp_path / "two", 1) == sampled(tmp_path / "one", 1)
    for line in metrics(tmp_path / "two"):
        assert line["rollout_correction/logp_diff_abs_max"] < 1e-3
        assert line["sync/canary_abs_diff"] < 1e-3


@TWO
def test_each_engine_samples_the_same_and_is_restarted_alone(tmp_path: Path) -> None:
    config = Config()
    config.model.path = str(save_tiny_model(tmp_path / "model", tied=True))
    config.rollout.num_engines, config.rollout.max_model_len = 2, 320
    config.rollout.kv_cache_gib = 0.0625
    context = config.engine_context
    settings = engine_settings(config.model, config.rollout, config.correction, seed=config.seed, context=context)
    sampling = Sampling(max_tokens=16, ignore_eos=True, seed=3)

    with BackgroundLoop() as loop:
        with forks_for_spawns():
            first, second = start_embedded(settings, 2, loop=loop, log_path=tmp_path / "engine.log")
        assert [first.name, second.name] == ["embedded engine 0", "embedded engine 1"]
        one, other = (loop.run(engine.generate(PROMPT, sampling)) for engine in (first, second))
        assert one.sampled_ids == other.sampled_ids

        assert isinstance(second, EmbeddedEngine)
        os.kill(second.llm.engine_core.resources.engine_manager.processes[0].pid, signal.SIGKILL)
        give_up_at = time.monotonic() + 30
        while not second.llm.errored and time.monotonic() < give_up_at:
            time.sleep(0.05)
        with pytest.raises(EngineError, match=r"(?s)engine is dead.*/engine-1\.log"):
            loop.run(second.generate(PROMPT, sampling))
        assert loop.run(first.generate(PROMPT, sampling)).sampled_ids == one.sampled_ids
        with forks_for_spawns():
            assert [engine.restart_if_dead() for engine in (first, second)] == [False, True]
        assert loop.run(second.generate(PROMPT, sampling)).sampled_ids == one.sampled_ids
        for engine in (first, second):
            loop.run(engine.close())
