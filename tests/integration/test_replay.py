"""Truncated sampling: the trainer's logprobs agree with the engine's if and only if they use its sampling support."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError
from lockstep.rollout.records import EngineCall, Rollout
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.model.policy import Policy
from tests.fixtures.models import tiny_qwen3
from tests.integration.conftest import Served

pytestmark = pytest.mark.engine

TRUNCATED = {"top_k": 12, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8, "max_tokens": 48}


@pytest.fixture(scope="module")
def calls(served_untied: Served) -> list[EngineCall]:
    return [served_untied.generate((3, 5 + i, 8), **TRUNCATED, seed=i) for i in range(6)]


def trainer_logprobs(calls: list[EngineCall]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of engine and trainer, the latter from rows, exchange, packing and the fused head."""
    rollouts = [Rollout(rollout_id=i, group_id=0, calls=(call,)) for i, call in enumerate(calls)]
    batch = StepBatch.of(rollouts, mask_truncated=False)
    packed = collate(batch.rows, range(len(batch.rows)), batch.layout)
    with torch.no_grad():
        logp_T, _ = Policy(tiny_qwen3(tied=False))(packed, temperature=TRUNCATED["temperature"])
    return packed.sampling_logprobs_T, logp_T


def test_the_engine_returns_the_support_of_every_token(calls: list[EngineCall]) -> None:
    sizes = np.concatenate([np.diff(call.support.offsets) for call in calls if call.support is not None])
    assert len(sizes) == sum(len(call.sampled_ids) for call in calls)
    assert sizes.max() <= TRUNCATED["top_k"]
    assert len(set(sizes.tolist())) > 1, "top_p or min_p left tokens out, so the sizes differ"
    for call in calls:
        assert call.support is not None
        for position, token in enumerate(call.sampled_ids):
            low, high = call.support.offsets[position : position + 2]
            assert token in call.support.token_ids[low:high]


def test_with_the_support_trainer_and_engine_agree(calls: list[EngineCall]) -> None:
    engine_T, trainer_T = trainer_logprobs(calls)
    assert float((engine_T - trainer_T).abs().max()) < 1e-4


def test_without_the_support_every_importance_ratio_is_biased(calls: list[EngineCall]) -> None:
    engine_T, trainer_T = trainer_logprobs([replace(call, support=None) for call in calls])
    ratio_T = (trainer_T - engine_T).exp()
    assert bool((ratio_T < 1 + 1e-4).all()), "more tokens in the normalization can only lower a probability"
    assert float(ratio_T.mean()) < 0.9


def test_untruncated_sampling_returns_no_support(served_untied: Served) -> None:
    assert served_untied.generate((3, 5, 8)).support is None
    greedy = served_untied.generate((3, 5, 8), temperature=0.0, top_k=5)
    assert greedy.support is None, "a greedy token is not drawn from a distribution"


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 21}], ids=str)
def test_a_support_that_the_engine_cannot_return_is_refused(served_untied: Served, sampling: dict[str, float]) -> None:
    with pytest.raises(EngineError, match=r"rollout\.top_k"):
        served_untied.generate((3, 5, 8), **sampling)


def test_only_sampling_that_drops_tokens_truncates() -> None:
    assert Sampling(max_tokens=1, top_k=5).truncates
    assert not Sampling(max_tokens=1).truncates
    assert not Sampling(max_tokens=1, temperature=0.0, top_k=5).truncates
