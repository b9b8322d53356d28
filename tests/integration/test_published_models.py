"""Models with published settings in the engine: short and long rows agree with the trainer, before and after syncs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import EngineCall
from lockstep.trainer.model.policy import Policy
from tests.fixtures.models import perturb
from tests.fixtures.published import CONTEXT, ORIGINAL, PUBLISHED, save_published
from tests.integration.test_model_families import TOLERANCE, engine_of, mismatch, synced

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = ((5, 8), (24, CONTEXT - 56), (2 * ORIGINAL, 20))
"""Tokens of prompt and answer: within and beyond windows, chunks and original lengths."""


def sample(engine: EmbeddedEngine) -> list[EngineCall]:
    return [
        engine.loop.run(
            engine.generate(
                tuple(range(3, 3 + prompt)), Sampling(max_tokens=answer, ignore_eos=True, seed=0)
            ),
            timeout=120,
        )
        for prompt, answer in ROWS
    ]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_short_and_long_rows_agree_before_and_after_two_syncs(name: str, tmp_path: Path) -> None:
    path = save_published(name, tmp_path / "model")
    with engine_of(path, tmp_path, max_model_len=CONTEXT) as engine:
        policy = Policy.from_pretrained(path, engine_context=CONTEXT)
        calls = sample(engine)
        assert mismatch(policy, calls) < TOLERANCE, "engine and trainer load different models"
        with synced(policy, engine) as sync:
            for version in (1, 2):
                perturb(policy, seed=version)
                assert mismatch(policy, calls) > 0.1, "the perturbation is too small for this test to mean anything"
                assert sync.push(version).canary_abs_diff < TOLERANCE
                calls = sample(engine)
                assert mismatch(policy, calls) < TOLERANCE, f"the engine does not have the weights of update {version}"
