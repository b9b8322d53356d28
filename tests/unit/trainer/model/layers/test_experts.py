"""Mixed precision of mixtures of experts: which dtype experts compute in, and the gradients that they give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.model import families
from lockstep.trainer.model.layers.experts import CAST_GROUPED_MM
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES

GROUPED = (
    *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "granitemoe", "gpt_oss", "granite_hybrid"),
    *("qwen3_next", "qwen3_5_moe", "lfm2_moe", "deepseek_v2", "deepseek_v3", "minimax_m2"),
)
"""Families with experts that transformers computes by `grouped_mm`."""

FLOAT32_ROUTERS = ("glm4_moe", "deepseek_v2", "deepseek_v3")
"""Families whose routers, one in each model of the tests, cast to float32 themselves."""


class Products(TorchDispatchMode):
    """Recorder of the dtypes of the operands of matrix products, by the product's name."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func).removeprefix("aten.").split(".")[0]
        if name in ("mm", "addmm", "_grouped_mm"):
            self.operands += [
                (name, one.dtype) for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()
            ]
        return func(*args, **(kwargs or {}))


def policy_of(family: str) -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(FAMILIES[family]()), compute_dtype="bfloat16")


def packed_rows() -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    rows = [whole_row(torch.randint(1, 500, (length,), generator=generator).tolist()) for length in (40, 23)]
    return collate(rows, [0, 1])


def test_every_family_with_experts_is_here() -> None:
    sparse = {kind for one in families.FAMILIES if one.has_experts for kind in one.model_types}
    assert {FAMILIES[name]().model_type for name in GROUPED} == sparse - {"llama4_text"}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_of_a_decoder_is_in_float32_under_autocast(family: str) -> None:
    """Forward and backward, over float32 weights; but for routers that cast to float32 themselves."""
    policy, products = policy_of(family), Products()
    with products:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = policy.hidden_states(packed_rows())
        hidden.sum().backward()
    assert ("mm", torch.bfloat16) in products.operands
    assert (("_grouped_mm", torch.bfloat16) in products.operands) == (family in GROUPED)
    wide = [name for name, dtype in products.operands if dtype != torch.bfloat16]
    routers = 1 if family in FLOAT32_ROUTERS else 0
    assert wide == ["mm"] * 2 * 3 * routers  # two operands, forward and for both gradients


@pytest.mark.parametrize("family", GROUPED)
def test_experts_give_the_gradients_of_bfloat16_weights(family: str) -> None:
    """Float32 gradients of float32 weights, as near to those of a float32 computation as bfloat16 weights come."""
    policy, packed = policy_of(family), packed_rows()
    with torch.no_grad():  # a router near a tie would choose other experts in half precision
        packed = replace(packed, routes=policy(packed, with_routes=True)[-1].to(torch.int16))
    assert policy.causal_lm.config.get_text_config()._experts_implementation == CAST_GROUPED_MM

    def gradients(made: Policy, *, is_cast: bool) -> dict[str, torch.Tensor]:
        made.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            logp_T, _ = made(packed)
        logp_T.sum().backward()
        named = {name: p.grad for name, p in made.named_parameters() if ".experts." in name and p.grad is not None}
        assert len(named) >= 2
        return named

    def distance(found: dict[str, torch.Tensor]) -> float:
        one, other = (torch.cat([named[name].flatten().double() for name in exact]) for named in (found, exact))
        return float((one - other).norm() / other.norm())

    exact = gradients(copy.deepcopy(policy), is_cast=False)
    cast, half = gradients(policy, is_cast=True), gradients(copy.deepcopy(policy).bfloat16(), is_cast=False)
    assert {one.dtype for one in cast.values()} == {torch.float32}
    assert 0 < distance(cast) < 1.5 * distance(half)


def test_without_autocast_nothing_is_cast() -> None:
    policy, products = policy_of("qwen3_moe"), Products()
    with products:
        policy.hidden_states(packed_rows())
    assert {dtype for _, dtype in products.operands} == {torch.float32}


@pytest.mark.parametrize("family", sorted({*GROUPED} - {"lfm2_moe", "minimax_m2"}))  # their routers take a bias
def test_routers_under_autocast_give_the_logits_of_bfloat16_weights(family: str) -> None:
    """Routers of DeepSeek and its relatives cast to float32 themselves; autocast rounds the others."""
    policy = policy_of(family)
    routers = [module for module in policy.modules() if type(module).__name__.endswith("Router")]
    assert routers
    for router in routers:
        states = torch.randn(9, next(router.parameters()).shape[-1]).bfloat16()
        half = copy.deepcopy(router).bfloat16()
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.copy_(parameter.bfloat16())
            with torch.autocast("cpu", torch.bfloat16):
                cast = router(states)
            rounded = half(states)
        for one, other in zip(_tensors(cast), _tensors(rounded), strict=True):
            assert torch.equal(one.float(), other.float())


def _tensors(output: Any) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)
