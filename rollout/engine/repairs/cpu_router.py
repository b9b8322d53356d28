"""Routing of experts on a CPU by sigmoid scores (MiniMax-M2) or with a correction bias (ERNIE 4.5), without groups.

vLLM's router for CPUs has both for groups of experts alone. Without groups it asserts softmax, and the first request
kills the engine, and it leaves the bias out. One group of all experts is the same routing.
"""

from __future__ import annotations

import functools

import torch

_REPAIRED = "_takes_one_group"


def install() -> None:
    """Route by one group where there are none, in models built later; may be called repeatedly."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    compute = cpu_router.CPURouter._compute_routing
    if _REPAIRED in compute.__dict__:
        return

    @functools.wraps(compute)
    def compute_routing(
        self: cpu_router.CPURouter,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        is_known = self.scoring_func in ("softmax", "sigmoid") and self.custom_routing_function is None
        if self.use_grouped_topk or is_plain or not is_known:
            return compute(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return cpu_router._grouped_topk(
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=self.scoring_func,
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )

    compute_routing.__dict__[_REPAIRED] = True
    cpu_router.CPURouter._compute_routing = compute_routing
