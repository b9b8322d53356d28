"""Every family of models in engine, training and two weight syncs: the trainer scores the engine's logprobs.

Each starts an engine, so all are for `make test-slow`. Tests without an engine (packed rows, gradients, names of sent
weights) are in tests/unit/trainer/model/test_model_families.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.protocol import Sampling
from rollout.episode.rows import rows_from_calls
from rollout.records import EngineCall
from rollout.system.background_loop import BackgroundLoop
from rollout.weights.sync import WeightSync
from tests.fixtures.families import FAMILIES, WINDOW, save_family
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.models import perturb
from trainer.batch.packing import PackedBatch, collate
from trainer.model.policy import Policy

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 2e-3
"""Bound of log π in float32. Wide random weights and softcaps round more than real models."""
CLOSE = {"deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe"}
"""Families held to 1e-4. Measured: 1e-6 to 9e-6."""
PROMPTS = tuple(tuple(range(3, 3 + length)) for length in (2 * WINDOW, 5, WINDOW + 1))


def pack(calls: list[EngineCall]) -> PackedBatch:
    rows = [row for index, call in enumerate(calls) for row in rows_from_calls([call], rollout_id=index)]
    return collate(rows, range(len(rows)))


def scored(policy: Policy, calls: list[EngineCall]) -> torch.Tensor:
    return policy(pack(calls), with_entropy=False)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_trains_and_syncs(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path / "model")
    tolerance = 1e-4 if family in CLOSE else TOLERANCE
    with BackgroundLoop() as loop, forks_for_spawns():
        engine = EmbeddedEngine(
            path, loop=loop, log_path=tmp_path / "engine.log", max_model_len=320, kv_cache_gib=0.0625, num_threads=1
        )
        sync = None
        try:
            policy = Policy.from_pretrained(path)

            def sample() -> list[EngineCall]:
                settings = Sampling(max_tokens=2 * WINDOW, ignore_eos=True, seed=0)
                return [loop.run(engine.generate(prompt, settings), timeout=120) for prompt in PROMPTS]

            def mismatch(calls: list[EngineCall]) -> float:
                sampled = torch.tensor([logprob for call in calls for logprob in call.sampled_logprobs])
                with torch.no_grad():
                    return (scored(policy, calls) - sampled).abs().max().item()

            def canary(ids: list[int]) -> list[float]:
                logits = policy.causal_lm(torch.tensor([ids])).logits[0, :-1].float()
                return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

            calls = sample()
            assert mismatch(calls) < tolerance, "engine and trainer load different models"

            scored(policy, calls).sum().backward()
            without = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
            assert not without, "parameters without a finite gradient"

            sync = WeightSync(module=policy.model, engines=[engine], score_canary=canary, deadline_s=60)
            for version in (1, 2):
                perturb(policy, seed=version)
                assert mismatch(calls) > 0.1, "the perturbation is too small for this test to mean anything"
                assert sync.push(version).canary_abs_diff < tolerance
                calls = sample()
                assert mismatch(calls) < tolerance, f"the engine does not have the weights of update {version}"
        finally:
            if sync is not None:
                sync.close()
            loop.run(engine.close())
