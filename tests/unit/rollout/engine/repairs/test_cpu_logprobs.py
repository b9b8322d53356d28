"""Logprobs of vLLM's sampler over vocabularies of real models. With an engine: tests/integration/test_engine.py."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from lockstep.rollout.engine.plugin import register
from lockstep.rollout.engine.repairs.cpu_logprobs import log_softmax

ROWS = 8


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """Logits of diffuse rows over the vocabulary of Qwen2.5, of which torch's own log_softmax is 5e-6 off."""
    return 4 * torch.randn(ROWS, 151_936, generator=torch.Generator().manual_seed(0))


def errors(logprobs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the differences to float64 where the probability is not 0."""
    exact = torch.log_softmax(logits.double(), -1)
    return (logprobs.double() - exact)[exact.isfinite()]


def check(logprobs: torch.Tensor, logits: torch.Tensor) -> None:
    found = errors(logprobs, logits)
    assert logprobs.dtype == torch.float32
    assert found.mean().abs() < 3e-7
    assert found.abs().max() < 4e-6, "two units in the last place of a logprob of -32"


def test_sampled_tokens_have_exact_logprobs(logits: torch.Tensor) -> None:
    register()
    sampler = TopKTopPSampler("processed_logprobs")
    tokens, logprobs = sampler.forward(logits.clone(), {}, None, None)
    assert tokens.shape == (ROWS,)
    assert logprobs is not None
    check(logprobs, logits)
    assert sampler.logprobs_mode == "processed_logprobs"


def test_truncated_supports_are_normalized_exactly(logits: torch.Tensor) -> None:
    register()
    k = torch.full((ROWS,), 100_000)
    tokens, logprobs = TopKTopPSampler("processed_logprobs").forward(logits.clone(), {}, k, None)
    assert logprobs is not None
    assert (logprobs.isfinite().sum(1) == k).all()
    assert logprobs.gather(1, tokens[:, None]).isfinite().all()
    check(logprobs, logits.masked_fill(logprobs == -torch.inf, -torch.inf))


def test_greedy_tokens_and_prompts_have_exact_logprobs(logits: torch.Tensor) -> None:
    register()
    check(Sampler("processed_logprobs").compute_logprobs(logits), logits)
    check(Sampler.compute_logprobs(logits.bfloat16()), logits.bfloat16())


@pytest.mark.parametrize("mode", ["processed_logits", "raw_logprobs"])
def test_other_modes_are_vllms_own(logits: torch.Tensor, mode: str) -> None:
    register()
    _, returned = TopKTopPSampler(mode).forward(logits.clone(), {}, None, None)  # type: ignore[arg-type]
    assert returned is None if mode == "raw_logprobs" else torch.equal(returned, logits)  # type: ignore[arg-type]


def test_the_same_tokens_are_sampled_as_without_the_plugin(logits: torch.Tensor) -> None:
    register()
    sampled = []
    for mode in ("processed_logprobs", "processed_logits"):
        seeds = {row: torch.Generator().manual_seed(row) for row in range(ROWS)}
        sampled.append(TopKTopPSampler(mode).forward(logits.clone(), seeds, None, None)[0])  # type: ignore[arg-type]
    assert torch.equal(*sampled)


def test_logits_are_not_changed_and_excluded_tokens_stay_excluded() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 3.0]])
    before = logits.clone()
    found = log_softmax(logits)
    assert torch.equal(logits, before)
    assert found[0, 1] == -torch.inf
    torch.testing.assert_close(found, torch.log_softmax(logits, -1))
