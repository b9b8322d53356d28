"""The vLLM plugin. Its processes: tests/integration/test_engine_processes.py."""

from __future__ import annotations

import inspect
import logging

from vllm.model_executor.model_loader.reload import layerwise

from lockstep.rollout.engine.plugin import RELOAD_LOGGER, register


def test_a_tied_head_without_weights_of_its_own_is_not_warned_of() -> None:
    register()
    register()
    logger = logging.getLogger(RELOAD_LOGGER)
    assert layerwise.__name__ == RELOAD_LOGGER
    text = "%s: Failed to load weights"
    assert f'logger.warning("{text}", layer.__class__.__name__)' in inspect.getsource(layerwise)
    for layer, is_logged in (("ParallelLMHead", False), ("QKVParallelLinear", True)):
        record = logger.makeRecord(RELOAD_LOGGER, logging.WARNING, "", 0, text, (layer,), None)
        assert bool(logger.filter(record)) == is_logged
