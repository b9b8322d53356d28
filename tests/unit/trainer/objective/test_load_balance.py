"""Losses about routers against transformers' own functions, and load metrics by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from lockstep.trainer.objective.load_balance import aux_terms, expert_load, fractions, load_metrics, z_terms

LAYERS, TOKENS, EXPERTS, CHOSEN = 3, 40, 6, 2


@pytest.fixture
def logits() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(2 * torch.randn(TOKENS, EXPERTS, generator=generator)).double().requires_grad_() for _ in range(LAYERS)]


def chosen(logits_XTE: list[Tensor]) -> list[Tensor]:
    return [logits_TE.topk(CHOSEN, dim=-1).indices for logits_TE in logits_XTE]


def test_the_aux_loss_of_microbatches_adds_up_to_that_of_transformers(logits: list[Tensor]) -> None:
    mask = torch.ones(1, TOKENS)
    mask[0, 30:] = 0
    expected = load_balancing_loss_func(tuple(logits), EXPERTS, CHOSEN, mask)
    expected_gradients = torch.autograd.grad(expected, logits)
    microbatches = [slice(0, 7), slice(7, 7), slice(7, 30)]
    load_XE = sum(expert_load([c[part] for c in chosen(logits)], EXPERTS) for part in microbatches)
    fraction_E = fractions(load_XE, 30)
    found = sum(aux_terms([one[part] for one in logits], fraction_E).sum() for part in microbatches) / 30
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    for gradient, like in zip(torch.autograd.grad(found, logits), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, like, rtol=1e-5, atol=1e-9)


def test_a_balanced_load_has_an_aux_loss_of_the_number_of_chosen_experts() -> None:
    logits_TE = torch.eye(EXPERTS) + torch.eye(EXPERTS).roll(1, 0)  # each expert is chosen twice
    fraction_E = fractions(expert_load(chosen([logits_TE]), EXPERTS), EXPERTS)
    assert float(aux_terms([logits_TE], fraction_E).mean()) == pytest.approx(CHOSEN)


def test_the_z_loss_is_that_of_transformers(logits: list[Tensor]) -> None:
    expected = router_z_loss_func(torch.stack(logits))
    torch.testing.assert_close(z_terms(logits).mean(), expected)


def test_logits_in_half_precision_are_summed_in_float32(logits: list[Tensor]) -> None:
    half = [one.detach().bfloat16() for one in logits]
    wide = [one.float() for one in half]
    fraction_E = fractions(expert_load(chosen(half), EXPERTS), TOKENS)
    assert torch.equal(aux_terms(half, fraction_E), aux_terms(wide, fraction_E))
    assert torch.equal(z_terms(half), z_terms(wide))


def test_metrics_are_of_the_worst_layer() -> None:
    load_XE = expert_load([torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]]), torch.tensor([[0, 1], [2, 3]] * 2)], 4)
    assert load_XE.tolist() == [[4, 2, 1, 1], [2, 2, 2, 2]]
    assert load_metrics(load_XE) == {
        "router/load_max": 2.0,
        "router/load_cv": pytest.approx(((2**2 + 0 + 1 + 1) / 4) ** 0.5 / 2),
        "router/unused_experts": 0.0,
    }
    assert load_metrics(torch.tensor([[3.0, 0, 0], [1, 2, 0]]))["router/unused_experts"] == 3


def test_a_step_without_tokens_and_a_dense_model_have_finite_metrics() -> None:
    nothing_XE = expert_load([torch.zeros(0, 2, dtype=torch.int64)], 4)
    assert load_metrics(nothing_XE) == {"router/load_max": 0, "router/load_cv": 0, "router/unused_experts": 4}
    assert fractions(nothing_XE, 0).tolist() == [0] * 4
    assert load_metrics(torch.zeros(0, 0)) == {}
