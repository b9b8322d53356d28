"""Routing of vLLM on a CPU. With an engine: tests/integration/test_model_families.py (minimax_m2)."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from lockstep.rollout.engine.plugin import register

TOKENS, EXPERTS, CHOSEN = 50, 8, 3


def routed(scoring_func: str, bias: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """Return the weight of every expert (tokens, experts), 0 where it was not chosen."""
    register()
    register()
    router = CPURouter(CHOSEN, EXPERTS, scoring_func=scoring_func, e_score_correction_bias=bias)
    weights, ids = router._compute_routing(torch.empty(TOKENS, 1), logits, None)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    return torch.zeros(TOKENS, EXPERTS).scatter(1, ids.long(), weights)


@pytest.mark.parametrize(("scoring", "is_biased"), [("sigmoid", True), ("sigmoid", False), ("softmax", True)])
def test_scores_without_groups(scoring: str, is_biased: bool) -> None:
    """The bias decides which experts are chosen, and has no part in their weights."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    bias = torch.randn(EXPERTS, generator=generator)
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    chosen = (scores + bias if is_biased else scores).topk(CHOSEN).indices
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, scores.gather(1, chosen))
    found = routed(scoring, bias if is_biased else None, logits)
    torch.testing.assert_close(found, expected / expected.sum(1, keepdim=True))


def test_softmax_without_a_bias_is_left_to_vllm() -> None:
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    top, ids = logits.topk(CHOSEN)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, ids, top.softmax(-1))
    torch.testing.assert_close(routed("softmax", None, logits), expected)
