"""The fused head equals the plain computation, in values and gradients, in every variant it covers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lockstep.trainer.model.head import logit_tiles
from lockstep.trainer.model.head.fused_head import FusedHead, fused_logprobs
from lockstep.trainer.model.head.logit_tiles import LogitTransform

N, D, V = 23, 8, 50


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Force several tiles and chunks at this size; V is not a multiple of the tile."""
    monkeypatch.setattr(logit_tiles, "TILE_K", 16)
    monkeypatch.setattr(logit_tiles, "CPU_LOGITS_BUDGET_GIB", TINY_BUDGET_GIB)


TINY_BUDGET_GIB = 5 * 16 * 8 * 2 / 2**30
"""Five tokens a chunk in float64 without a softcap."""


def inputs(*, bias: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "hidden": rand(N, D).requires_grad_(),
        "weight": rand(V, D).requires_grad_(),
        "bias": rand(V).requires_grad_() if bias else None,
        "targets": torch.randint(V, (N,), generator=generator),
    }


def random_support(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    keep = torch.rand(N, V, generator=generator) < 0.1
    keep[torch.arange(N), targets] = True
    return torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)]), keep.nonzero()[:, 1]


def plain(hidden, weight, bias, targets, transform, support):
    """Compute the definition, with full logits."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logits = logits / transform.temperature
    keep = torch.ones(logits.shape, dtype=torch.bool)
    if support is not None:
        offsets, ids = support
        keep[:] = False
        for n in range(N):
            keep[n, ids[offsets[n] : offsets[n + 1]]] = True
        logits = logits.masked_fill(~keep, -torch.inf)
    logp = torch.log_softmax(logits, -1)
    finite = logp.masked_fill(~keep, 0.0)  # p log p is 0 outside the support, and so is its gradient
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * finite).sum(-1)


def gradients(logp, entropy, tensors, with_entropy):
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(2, N, generator=generator, dtype=torch.float64).to(logp.dtype)
    loss = (upstream[0] * logp).sum() + ((upstream[1] * entropy).sum() if with_entropy else 0)
    return torch.autograd.grad(loss, [t for t in tensors if t is not None])


@pytest.mark.parametrize(
    ("bias", "softcap", "restricted", "with_entropy", "is_whole"),
    list(itertools.product([False, True], [None, 3.0], [False, True], [False, True], [False, True])),
)
def test_values_and_gradients_equal_full_logits_in_float64(
    bias, softcap, restricted, with_entropy, is_whole, monkeypatch
):
    if is_whole:  # one tile, whose softmax backward uses
        monkeypatch.setattr(logit_tiles, "TILE_K", 64)
    x = inputs(bias=bias)
    transform = LogitTransform(temperature=0.7, scale=1.3, softcap=softcap)
    support = random_support(x["targets"]) if restricted else None
    expected = plain(x["hidden"], x["weight"], x["bias"], x["targets"], transform, support)
    found = fused_logprobs(
        x["hidden"],
        x["weight"],
        x["targets"],
        bias_V=x["bias"],
        transform=transform,
        support=support,
        with_entropy=with_entropy,
    )
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(
        found[1], expected[1] if with_entropy else torch.zeros_like(found[1]), rtol=0, atol=1e-10
    )
    leaves = (x["hidden"], x["weight"], x["bias"])
    for ours, theirs in zip(
        gradients(*found, leaves, with_entropy), gradients(*expected, leaves, with_entropy), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_logits_are_never_larger_than_one_tile_of_one_chunk():
    x = inputs()
    largest = 0
    original = torch.empty

    with pytest.MonkeyPatch.context() as patch:

        def recording_empty(*shape, **kwargs):
            nonlocal largest
            tensor = original(*shape, **kwargs)
            largest = max(largest, tensor.numel())
            return tensor

        patch.setattr(torch, "empty", recording_empty)
        logp, _ = fused_logprobs(x["hidden"], x["weight"], x["targets"])
        logp.sum().backward()
    assert 0 < largest <= max(5 * 16, 16 * D)
    assert largest < N * V


def test_bfloat16_inputs_are_accumulated_in_float32():
    x = inputs(dtype=torch.bfloat16)
    leaves = (x["hidden"], x["weight"])
    logp, entropy = fused_logprobs(x["hidden"], x["weight"], x["targets"])
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = plain(*wide, None, x["targets"], LogitTransform(), None)
    assert logp.dtype == torch.float32
    # Rounding the logits to bfloat16 (what a bfloat16 matrix product would give) costs about 1e-2 here.
    torch.testing.assert_close(logp.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-5)
    found = gradients(logp, entropy, leaves, True)
    for ours, theirs in zip(found, gradients(*expected, wide, True), strict=True):
        assert ours.dtype == torch.bfloat16
        # One rounding to bfloat16 (2^-9 relative) after the sum over all chunks and tiles.
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-4)


def test_no_tokens_give_empty_values_and_zero_gradients():
    x = inputs(bias=True)
    empty = x["hidden"][:0]
    logp, entropy = fused_logprobs(empty, x["weight"], x["targets"][:0], bias_V=x["bias"])
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert not x["hidden"].grad.any()
    assert not x["weight"].grad.any()
    assert not x["bias"].grad.any()


def test_a_frozen_weight_gets_no_gradient_and_hidden_states_still_do():
    x = inputs()
    frozen = x["weight"].detach()
    logp, _ = fused_logprobs(x["hidden"], frozen, x["targets"])
    expected, _ = plain(x["hidden"], frozen, None, x["targets"], LogitTransform(), None)
    ours, theirs = (torch.autograd.grad(value.sum(), x["hidden"])[0] for value in (logp, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_target_outside_its_support_has_probability_zero():
    x = inputs()
    offsets, ids = torch.arange(N + 1), (x["targets"] + 1) % V
    logp, entropy = fused_logprobs(x["hidden"], x["weight"], x["targets"], support=(offsets, ids))
    assert (logp == -torch.inf).all()
    torch.testing.assert_close(entropy, torch.zeros_like(entropy))


def test_an_id_outside_of_the_vocabulary_has_no_number():
    tensors = inputs()
    tensors["targets"][3] = V
    logprob_N, _ = fused_logprobs(tensors["hidden"], tensors["weight"], tensors["targets"])
    assert logprob_N.isnan().nonzero().flatten().tolist() == [3]


def test_extreme_logits_stay_finite():
    x = inputs(dtype=torch.float32)
    hidden = (x["hidden"].detach() * 1e4).requires_grad_()
    logp, entropy = fused_logprobs(hidden, x["weight"], x["targets"])
    (logp.sum() + entropy.sum()).backward()
    assert all(torch.isfinite(t).all() for t in (logp, entropy, hidden.grad, x["weight"].grad))


def test_the_result_does_not_depend_on_tiles_and_chunks(monkeypatch):
    x = inputs()
    results = []
    for tile, budget in ((16, TINY_BUDGET_GIB), (64, 1.0), (1, 1.0)):
        monkeypatch.setattr(logit_tiles, "TILE_K", tile)
        monkeypatch.setattr(logit_tiles, "CPU_LOGITS_BUDGET_GIB", budget)
        found = fused_logprobs(x["hidden"], x["weight"], x["targets"])
        results.append((*found, *gradients(*found, (x["hidden"], x["weight"]), True)))
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_autocast_rounds_the_operands_and_not_the_logits():
    x = inputs(dtype=torch.float32)
    leaves = (x["hidden"], x["weight"])
    rounded = [leaf.detach().bfloat16().float().requires_grad_() for leaf in leaves]
    expected = fused_logprobs(*rounded, x["targets"])
    with torch.autocast("cpu", torch.bfloat16):
        found = fused_logprobs(*leaves, x["targets"])
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # Rounding the logits, as a linear layer under autocast does, costs about 1e-2 here.
    with torch.autocast("cpu", torch.bfloat16):
        linear = torch.nn.functional.linear(*leaves).float()
    rounded_logp = linear.log_softmax(-1).gather(1, x["targets"][:, None])[:, 0]
    assert float((rounded_logp - found[0]).detach().abs().max()) > 1e-3
    # In backward the gradient of the logits is an operand, too.
    for ours, theirs, leaf in zip(
        gradients(*found, leaves, True), gradients(*expected, rounded, True), leaves, strict=True
    ):
        assert ours.dtype == leaf.dtype
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2e-2)


def test_autocast_leaves_float64_alone():
    x = inputs()
    expected, _ = fused_logprobs(x["hidden"], x["weight"], x["targets"])
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = fused_logprobs(x["hidden"], x["weight"], x["targets"])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_head_module_holds_the_same_parameters_and_stays_a_plain_head():
    linear = nn.Linear(D, V).double()
    fused = FusedHead(linear)
    hidden = torch.randn(2, N, D, dtype=torch.float64)
    assert fused.weight is linear.weight
    assert fused.bias is linear.bias
    assert fused.state_dict().keys() == linear.state_dict().keys()
    torch.testing.assert_close(fused(hidden), linear(hidden))


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"softcap": 0.0}])
def test_meaningless_transforms_are_refused(settings):
    with pytest.raises(ValueError, match="must be positive"):
        LogitTransform(**settings)


def test_a_partitioned_weight_is_refused_with_its_reason():
    with pytest.raises(ValueError, match="ZeRO-3 partition"):
        fused_logprobs(torch.randn(N, D), torch.empty(0), torch.zeros(N, dtype=torch.int64))
