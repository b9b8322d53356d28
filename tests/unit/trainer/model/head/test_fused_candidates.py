"""Candidates of the fused head, and a teacher's divergence over them, equal a table over the whole vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch

from lockstep.trainer.model.head import logit_tiles
from lockstep.trainer.model.head.fused_head import REST_FLOOR, FusedHead, fused_candidates, fused_logprobs
from lockstep.trainer.model.head.logit_tiles import LogitTransform
from lockstep.trainer.objective.distillation.divergence import DIVERGENCES, divergence

N, D, V, E = 23, 8, 50, 5
TRANSFORM = LogitTransform(temperature=0.7, scale=1.3)
TINY_BUDGET_GIB = 5 * 16 * 8 * 2 / 2**30
"""Five tokens a chunk in float64 without a softcap."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Force several tiles and chunks at this size; V is not a multiple of the tile."""
    monkeypatch.setattr(logit_tiles, "TILE_K", 16)
    monkeypatch.setattr(logit_tiles, "CPU_LOGITS_BUDGET_GIB", TINY_BUDGET_GIB)


def leaves(dtype: torch.dtype = torch.float64, *, scale: float = 1.0) -> list[torch.Tensor]:
    """Return hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((N, D), (V, D), (V,))
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()
        for shape in shapes
    ]


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return targets, the teacher's most probable tokens, and their logprobs."""
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(V, (N,), generator=generator)
    teacher = torch.randn(N, V, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1).topk(E)
    return targets, teacher.indices, teacher.values


def full_table(hidden, weight, bias, transform: LogitTransform) -> torch.Tensor:
    """Return (N, V) log π by the definition."""
    logits = (hidden @ weight.T + bias) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return (logits / transform.temperature).log_softmax(-1)


def restricted(table_NV: torch.Tensor, ids_NE: torch.Tensor) -> torch.Tensor:
    """Return (N, E + 1) log π of the candidates and of all others together."""
    others_NV = table_NV.scatter(1, ids_NE, -torch.inf)
    return torch.cat([table_NV.gather(1, ids_NE), others_NV.logsumexp(1, keepdim=True)], 1)


def defined(kind: str, q_NF: torch.Tensor, teacher_NE: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the divergence over E + 1 outcomes by its definition in probabilities."""
    t = torch.cat([teacher_NE.exp(), 1 - teacher_NE.exp().sum(1, keepdim=True)], 1)
    q = q_NF.exp()
    m = beta * t + (1 - beta) * q
    if kind == "forward":
        return (t * (t / q).log()).sum(1)
    if kind == "reverse":
        return (q * (q / t).log()).sum(1)
    return beta * (t * (t / m).log()).sum(1) + (1 - beta) * (q * (q / m).log()).sum(1)


@pytest.mark.parametrize(
    ("kind", "softcap", "with_entropy", "is_whole"),
    list(itertools.product(DIVERGENCES, [None, 3.0], [False, True], [False, True])),
)
def test_divergences_and_their_gradients_equal_a_float64_table(kind, softcap, with_entropy, is_whole, monkeypatch):
    if is_whole:  # one tile and one chunk, whose exponentials backward uses
        monkeypatch.setattr(logit_tiles, "TILE_K", 64)
        monkeypatch.setattr(logit_tiles, "CPU_LOGITS_BUDGET_GIB", 1.0)
    transform = LogitTransform(temperature=0.7, scale=1.3, softcap=softcap)
    own = leaves()
    targets, ids, teacher = tokens()
    logp, entropy, student = fused_candidates(
        own[0], own[1], targets, ids, bias_V=own[2], transform=transform, with_entropy=with_entropy
    )
    table = full_table(*own, transform)
    expected_student = restricted(table, ids)
    torch.testing.assert_close(student, expected_student, rtol=0, atol=1e-11)
    found = divergence(kind, student, teacher, beta=0.3)
    expected = defined(kind, expected_student, teacher, 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)

    upstream = torch.randn(3, N, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loss = (upstream[0] * found + upstream[1] * logp).sum()
    expected_loss = (upstream[0] * expected + upstream[1] * table.gather(1, targets[:, None])[:, 0]).sum()
    if with_entropy:
        loss = loss + (upstream[2] * entropy).sum()
        expected_loss = expected_loss - (upstream[2] * (table.exp() * table).sum(1)).sum()
    for ours, theirs in zip(torch.autograd.grad(loss, own), torch.autograd.grad(expected_loss, own), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_gradients_equal_finite_differences(kind):
    targets, ids, teacher = tokens()

    def loss(*own: torch.Tensor) -> torch.Tensor:
        student = fused_candidates(own[0], own[1], targets, ids, bias_V=own[2], transform=TRANSFORM)[2]
        return divergence(kind, student, teacher)

    assert torch.autograd.gradcheck(loss, leaves(), fast_mode=True)


def test_a_student_almost_sure_of_the_candidates_keeps_its_digits_in_float32():
    # All others have 1e-12: 1 - Σ q has no digit of it in float32.
    logits = torch.full((1, V), -27.0, dtype=torch.float64)
    logits[0, :E] = torch.arange(E).double()
    ids, teacher = torch.arange(E)[None], torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.1]]).double().log()
    expected_own = logits.clone().requires_grad_()
    expected = divergence("forward", restricted(expected_own.log_softmax(-1), ids), teacher)
    expected.sum().backward()

    hidden = torch.ones(1, 1)
    weight = logits.T.float().requires_grad_()
    student = fused_candidates(hidden, weight, torch.zeros(1, dtype=torch.int64), ids)[2]
    found = divergence("forward", student, teacher)
    found.sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(weight.grad.T.double(), expected_own.grad, rtol=1e-4, atol=1e-7)


def test_extreme_logits_stay_finite():
    hidden, weight, bias = leaves(torch.float32, scale=200.0)
    targets, ids, teacher = tokens()
    for kind in DIVERGENCES:
        student = fused_candidates(hidden, weight, targets, ids, bias_V=bias)[2]
        assert student[:, -1].min() >= REST_FLOOR - 1e-3
        found = torch.autograd.grad(divergence(kind, student, teacher).sum(), (hidden, weight, bias))
        assert all(torch.isfinite(gradient).all() for gradient in found)


def test_logits_are_never_larger_than_one_tile_of_one_chunk():
    own = leaves()
    targets, ids, teacher = tokens()
    largest = 0
    original = torch.empty

    with pytest.MonkeyPatch.context() as patch:

        def recording_empty(*shape, **kwargs):
            nonlocal largest
            tensor = original(*shape, **kwargs)
            largest = max(largest, tensor.numel())
            return tensor

        patch.setattr(torch, "empty", recording_empty)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _seen(saved, t), lambda t: t):
            saved: list[int] = []
            student = fused_candidates(own[0], own[1], targets, ids, bias_V=own[2])[2]
            divergence("jsd", student, teacher).sum().backward()
    assert 0 < largest <= max(5 * 16, 16 * D)
    assert max(saved) <= max(V * D, N * D, N * (E + 1))


def _seen(saved: list[int], tensor: torch.Tensor) -> torch.Tensor:
    saved.append(tensor.numel())
    return tensor


def test_targets_and_entropy_equal_those_without_candidates():
    hidden, weight, bias = leaves()
    targets, ids, _ = tokens()
    logp, entropy, _ = fused_candidates(hidden, weight, targets, ids, bias_V=bias, transform=TRANSFORM)
    expected = fused_logprobs(hidden, weight, targets, bias_V=bias, transform=TRANSFORM)
    torch.testing.assert_close((logp, entropy), expected, rtol=0, atol=0)


def test_no_tokens_give_empty_tables_and_zero_gradients():
    hidden, weight, bias = leaves()
    none = torch.zeros(0, dtype=torch.int64)
    student = fused_candidates(hidden[:0], weight, none, none.view(0, E), bias_V=bias)[2]
    student.sum().backward()
    assert student.shape == (0, E + 1)
    assert not weight.grad.any()


def test_the_head_module_takes_candidates():
    linear = torch.nn.Linear(D, V).double()
    targets, ids, _ = tokens()
    hidden = leaves()[0]
    found = FusedHead(linear)(hidden, targets, candidate_ids_NE=ids, with_entropy=False)
    expected = restricted(full_table(hidden, linear.weight, linear.bias, LogitTransform()), ids)
    torch.testing.assert_close(found[2], expected, rtol=0, atol=1e-11)


def test_candidates_of_another_number_of_tokens_are_refused():
    hidden, weight, _ = leaves()
    targets, ids, _ = tokens()
    with pytest.raises(ValueError, match=r"expected \(23, entries\)"):
        fused_candidates(hidden, weight, targets, ids[:-1])
