"""Routing of experts on a CPU by sigmoid scores without groups, as MiniMax-M2 has it.

vLLM's router for CPUs has sigmoid scores, with or without a correction bias, for groups of experts alone; without
groups it asserts softmax, and the first request kills the engine. One group of all experts is the same routing.
"""

from __future__ import annotations

import functools

import torch

_REPAIRED = "_takes_sigmoid"


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
        if self.use_grouped_topk or self.scoring_func != "sigmoid" or self.custom_routing_function is not None:
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
