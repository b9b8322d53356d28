"""Bounds of `make gpu-check` on emulated numbers of a healthy GPU, and on planted faults.

An engine on a GPU holds its weights and residuals in bfloat16, and computes logits in float32; the trainer computes in
mixed precision. Both can be computed on a CPU, so a bound is tested without a GPU: it accepts the emulated engine, and
refuses one with a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.rollout.records import EngineCall, FinishReason
from lockstep.scripts.gpu_checks import numerics
from lockstep.scripts.gpu_checks.measured import within_floor
from lockstep.scripts.gpu_checks.subject import Served, Subject
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.model.policy import Policy

TOKENS = 96


class InBfloat16(Subject):
    """The subject of a GPU, on a CPU."""

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def dtype(self) -> str:
        return "bfloat16"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    subject = InBfloat16(directory=tmp_path_factory.mktemp("subject"), rehearses=True)
    policy = subject.new_policy(hidden_size=256, intermediate_size=768, vocab_size=2048, initializer_range=256**-0.5)
    return Served(subject=subject, engine=None, policy=policy)


def sampled(served: Served, break_engine: Callable[[torch.nn.Module], None] = lambda model: None) -> list[EngineCall]:
    """Return calls of an emulated engine with the policy's weights in bfloat16: sampled from its own distribution."""
    model = copy.deepcopy(served.policy.causal_lm).to(torch.bfloat16)
    break_engine(model)
    calls = []
    for seed, prompt in enumerate(served.subject.prompts(4, 24)):
        torch.manual_seed(seed)
        ids = list(prompt)
        continued = torch.randint(1, 500, (TOKENS,)).tolist()  # any tokens do: their logprobs are compared
        with torch.no_grad():
            states = model.get_decoder()(torch.tensor([ids + continued]), use_cache=False).last_hidden_state[0]
        logits = states.float() @ model.get_output_embeddings().weight.float().T
        logprobs = torch.log_softmax(logits, -1)[len(ids) - 1 : -1].gather(1, torch.tensor(continued)[:, None])[:, 0]
        calls.append(
            EngineCall(
                prompt_ids=tuple(ids),
                sampled_ids=tuple(continued),
                sampled_logprobs=tuple(logprobs.tolist()),
                finish_reason=FinishReason.LENGTH,
            )
        )
    return calls


def is_accepted(served: Served, calls: list[EngineCall]) -> bool:
    return all(one.is_met for one in served.agreement("engine and trainer", served.mismatch(calls), calls))


def test_a_healthy_engine_is_accepted(served: Served) -> None:
    assert is_accepted(served, sampled(served))


def test_the_floor_is_that_of_bfloat16(served: Served) -> None:
    calls = sampled(served)
    floor = (served.trained_logprobs(calls) - served.rounded_logprobs(calls)).abs().mean().item()
    assert 1e-3 < floor < 0.1


def test_a_healthy_engine_is_accepted_after_updates(served: Served) -> None:
    moved = Served(subject=served.subject, engine=None, policy=copy.deepcopy(served.policy))
    for seed in range(4):
        moved.perturb(seed)
    assert is_accepted(moved, sampled(moved))


def scale_a_layer(model: torch.nn.Module) -> None:
    model.get_submodule("model.layers.2.mlp.down_proj").weight.data.mul_(1.5)


def forget_a_norm(model: torch.nn.Module) -> None:
    model.get_submodule("model.layers.1.input_layernorm").weight.data.mul_(0.7)


def keep_old_weights(model: torch.nn.Module) -> None:
    torch.manual_seed(9)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * 256**-0.5 * torch.randn_like(parameter))


def rotate_by_another_base(model: torch.nn.Module) -> None:
    model.get_submodule("model.rotary_emb").inv_freq.mul_(1.2)


@pytest.mark.parametrize("fault", [scale_a_layer, forget_a_norm, keep_old_weights, rotate_by_another_base])
def test_an_engine_with_a_fault_is_refused(served: Served, fault: Callable[[torch.nn.Module], None]) -> None:
    assert not is_accepted(served, sampled(served, fault))


@pytest.mark.parametrize(("factor", "accepted"), [(0.9, True), (1.9, True), (2.2, False), (4.0, False)])
def test_the_mean_may_be_twice_the_floor(factor: float, accepted: bool) -> None:
    floor = torch.linspace(0, 0.1, 100)
    means = within_floor("any", factor * floor, floor, least=0.0)[0]
    assert means.is_met == accepted


def test_one_large_difference_is_refused_though_the_mean_is_small() -> None:
    floor = torch.full((1000,), 0.02)
    differences = floor.clone()
    differences[7] = 0.5
    mean, largest = within_floor("any", differences, floor, least=0.0)
    assert mean.is_met
    assert not largest.is_met


def test_a_floor_of_zero_leaves_the_least_bound() -> None:
    none = torch.zeros(10)
    assert [one.is_met for one in within_floor("any", none + 1e-6, none, least=1e-5)] == [True, True]
    assert [one.is_met for one in within_floor("any", none + 1e-3, none, least=1e-5)] == [False, False]


def test_a_missing_value_is_refused() -> None:
    floor = torch.full((10,), 0.02)
    assert not any(one.is_met for one in within_floor("any", floor * torch.nan, floor, least=1e-5))


def test_rounded_logprobs_leave_the_policy_as_it_was(served: Served) -> None:
    served.rounded_logprobs(sampled(served))
    assert {parameter.dtype for parameter in served.policy.parameters()} == {torch.float32}
    assert isinstance(served.policy, Policy)


def unmet(directory: Path) -> set[str]:
    """Return the cases of the check of attention that are refused, in small sizes and bfloat16."""
    found = numerics.attention(InBfloat16(directory=directory, rehearses=True))
    return {one.name.partition(":")[0] for one in found if not one.is_met}


def test_attention_that_rounds_in_bfloat16_is_accepted(tmp_path: Path) -> None:
    assert unmet(tmp_path) == set()


def test_attention_to_the_row_before_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_one_row(*arguments: Any, share_prefixes: bool, **settings: Any) -> PackedBatch:
        packed = collate(*arguments, share_prefixes=share_prefixes, **settings)
        ends = packed.cu_seqlens[[0, -1]]
        return packed if share_prefixes else replace(packed, cu_seqlens=ends, row_lengths=(packed.num_tokens,))

    monkeypatch.setattr(numerics, "collate", as_one_row)
    assert {"full, whole rows", "weights in half, whole rows"} <= unmet(tmp_path)
