"""Load balance of a mixture of experts: two terms of the loss about its routers, and metrics of the load.

    aux loss = E · Σ_i f_i · P_i            f_i = Σ_x Σ_t 1[token t chooses expert i in layer x] / (X · N_tok)
                                            P_i = Σ_x Σ_t softmax(h_xt)_i                        / (X · N_tok)
    z-loss   = Σ_x Σ_t (log Σ_i exp h_xti)² / (X · N_tok)

h_xt are the logits of a router, E its experts, X the layers with experts. The aux loss is that of Switch Transformers
(Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6) as transformers computes it in `load_balancing_loss_func`: over all
layers together, with a softmax also where the router gates by a sigmoid; each token chooses K experts, so it is K if
all have the same load. The z-loss is that of ST-MoE (Zoph et al. 2022, arXiv 2202.08906, eq. 5), averaged over layers.

Both are means over the trained tokens of an optimizer step: over the router inputs from which they are predicted, which
are the same however rows are divided, packed, and branched, and whether they share prefixes. f is a constant of the
step, without gradient. Given f, both losses are sums over tokens, so microbatches and ranks add up to the whole.

Dimensions: `_X` layers with experts, `_E` experts, `_K` chosen experts of a token, `_T` trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def expert_load(chosen_XTK: Sequence[Tensor], num_experts: int) -> Tensor:
    """Return (X, E) float64 numbers of tokens that chose each expert.

    chosen_XTK: per layer (T, K) int64 experts.
    """
    counts = []
    for chosen_TK in chosen_XTK:
        experts = chosen_TK.flatten()
        zeros_E = torch.zeros(num_experts, dtype=torch.float64, device=experts.device)
        counts.append(zeros_E.scatter_add(0, experts, torch.ones_like(experts, dtype=torch.float64)))
    return torch.stack(counts)


def fractions(load_XE: Tensor, num_tokens: int) -> Tensor:
    """Return (E,) f. load_XE: of the whole optimizer step. num_tokens: N_tok."""
    return load_XE.sum(0) / max(len(load_XE) * num_tokens, 1)


def aux_terms(logits_XTE: Sequence[Tensor], fraction_E: Tensor) -> Tensor:
    """Return (T,) terms, whose mean over the trained tokens of the step is the aux loss.

    logits_XTE: per layer (T, E). fraction_E: f.
    """
    terms = []
    for logits_TE in logits_XTE:
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        probabilities_TE = torch.softmax(logits_TE, dim=-1, dtype=wide)
        terms.append(probabilities_TE @ fraction_E.to(logits_TE.device, wide))
    return len(fraction_E) * torch.stack(terms).mean(0)


def z_terms(logits_XTE: Sequence[Tensor]) -> Tensor:
    """Return (T,) terms, whose mean over the trained tokens of the step is the z-loss. logits_XTE: per layer (T, E)."""
    wide = torch.promote_types(logits_XTE[0].dtype, torch.float32)
    return torch.stack([logits_TE.to(wide).logsumexp(-1).square() for logits_TE in logits_XTE]).mean(0)


def load_metrics(load_XE: Tensor) -> dict[str, float]:
    """Return metrics of the load of an optimizer step, empty without experts.

    * `router/load_max`: load of the busiest expert over the mean load of its layer; of the worst layer. 1: balanced.
    * `router/load_cv`: standard deviation over the mean of the loads of a layer; of the worst layer. 0: balanced.
    * `router/unused_experts`: experts that no token chose, over all layers.
    """
    if not load_XE.numel():
        return {}
    mean_X = load_XE.mean(1)
    is_used_X = mean_X > 0
    safe_X = mean_X.clamp(min=1e-12)
    return {
        "router/load_max": float((load_XE.amax(1) / safe_X * is_used_X).max()),
        "router/load_cv": float((load_XE.std(1, correction=0) / safe_X * is_used_X).max()),
        "router/unused_experts": float((load_XE == 0).sum()),
    }
