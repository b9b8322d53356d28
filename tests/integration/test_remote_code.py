"""An engine does not run code in a model directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.errors import EngineError
from lockstep.rollout.system.background_loop import BackgroundLoop
from tests.unit.project.test_security import evil_model  # noqa: F401  # a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("model_type", ["qwen3", "evil"])
def test_the_engine_does_not_run_code_that_ships_with_a_model(
    evil_model: Path,  # noqa: F811
    tmp_path: Path,
    model_type: str,
) -> None:
    config = json.loads((evil_model / "config.json").read_text())
    (evil_model / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with BackgroundLoop() as loop:
        try:
            engine = EmbeddedEngine(
                EngineSettings(model=evil_model, max_model_len=64, kv_cache_gib=0.0625, num_threads=1),
                loop=loop,
                log_path=tmp_path / "engine.log",
            )
        except EngineError:  # an unknown model type cannot be loaded without its code
            assert model_type == "evil"
        else:
            loop.run(engine.close())
    assert not (tmp_path / "fired").exists()
