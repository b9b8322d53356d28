"""Routing replay in the trainer: given experts, the gate's gradient, checkpointing, shared prefixes, critics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from lockstep.rollout.errors import ConfigError, TrainingError
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.packing import NO_ROUTE, PackedBatch, collate, row_places, whole_row
from lockstep.trainer.batch.prefixes import MIN_SHARED
from lockstep.trainer.config.groups.model_settings import LoraConfig, ModelConfig
from lockstep.trainer.model.critic import ActorCritic, Critic
from lockstep.trainer.model.layers.routing import refuse_dense
from lockstep.trainer.model.lora import add_adapters
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES
from tests.fixtures.models import save_tiny_model

SPARSE = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "granitemoe", "gpt_oss", "qwen3_next")
DAMPED = ("granite_hybrid", "lfm2_moe")
"""Families whose experts move the logprobs of these tiny models so little that a flip does not stand out."""
HALF_DENSE = ("glm4_moe", "lfm2_moe")
"""Families whose first layer is dense here."""


def policy_of(family: str, **setup: bool) -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(FAMILIES[family]()), **setup)  # type: ignore[arg-type]


def rows(*lengths: int, seed: int = 1) -> list[TrainingRow]:
    generator = torch.Generator().manual_seed(seed)
    return [whole_row(torch.randint(1, 500, (length,), generator=generator).tolist()) for length in lengths]


def packed_rows() -> PackedBatch:
    return collate(rows(20, 13), [0, 1])


def traced(policy: Policy, packed: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return logprobs and experts of a pass."""
    with torch.no_grad():
        logp_T, _, routes = policy(packed, with_routes=True)
    return logp_T, routes


def perturb_gates(policy: Policy, scale: float) -> None:
    """Change the routers alone, so that some tokens are routed otherwise."""
    generator = torch.Generator().manual_seed(5)
    changed = 0
    for name, parameter in policy.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
            changed += 1
    assert changed


def gradients(policy: Policy, packed: PackedBatch) -> dict[str, Tensor]:
    policy.zero_grad()
    logp_T, _ = policy(packed)
    (logp_T * torch.linspace(-1, 1, len(logp_T))).sum().backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", [*SPARSE, *DAMPED])
def test_own_routes_change_nothing_and_others_do(family: str) -> None:
    policy, packed = policy_of(family), packed_rows()
    logp_T, routes = traced(policy, packed)
    assert routes.shape == (33, 2, 2)
    assert routes.dtype == torch.uint8
    assert torch.equal(policy(packed)[0], logp_T)
    own = replace(packed, routes=routes.short())
    assert torch.equal(policy(own)[0], logp_T)
    expected, found = gradients(policy, packed), gradients(policy, own)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    other = replace(packed, routes=(routes.short() + 1) % 4)
    assert (policy(other)[0] - logp_T).abs().max() > 0.1
    assert torch.equal(traced(policy, other)[1], (routes + 1) % 4) or family in HALF_DENSE


@pytest.mark.parametrize("family", SPARSE)
def test_the_mismatch_of_a_perturbed_gate_is_that_of_equal_routes(family: str) -> None:
    """A gate that differs as little as by rounding flips routes near a tie; given routes leave its weights' change."""
    policy, packed = policy_of(family), collate(rows(*[150] * 10, seed=2), range(10))
    before, routes = traced(policy, packed)
    perturb_gates(policy, 2e-4)
    after, moved = traced(policy, packed)
    assert (moved != routes).any(), "no route has flipped: the test shows nothing"
    with torch.no_grad():
        replayed, _ = policy(replace(packed, routes=routes.short()))
    k3, k3_replayed = (mean_k3(logp_T - before) for logp_T in (after, replayed))
    assert k3_replayed < k3 / 20, f"k3 {k3:.2e} without replay, {k3_replayed:.2e} with it"


def mean_k3(log_ratio_T: Tensor) -> float:
    return float((log_ratio_T.double().exp() - 1 - log_ratio_T.double()).mean())


def test_the_gate_has_the_gradient_of_a_computation_by_hand() -> None:
    torch.manual_seed(0)
    config = FAMILIES["mixtral"]()
    assert isinstance(config, MixtralConfig)
    policy = Policy(AutoModelForCausalLM.from_config(config))
    block = policy.causal_lm.get_decoder().layers[1].mlp
    assert isinstance(block, MixtralSparseMoeBlock)
    packed = packed_rows()
    routes = (traced(policy, packed)[1].short() + 1) % 4
    seen: list[tuple[Tensor, Tensor]] = []
    handle = block.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    logp_T, _ = policy(replace(packed, routes=routes))
    handle.remove()
    ((states, output),) = seen
    upstream, found = torch.autograd.grad(logp_T.sum(), (output, block.gate.weight))
    expected = mixed_by_hand(block, states[0].detach(), routes[:, 1].long())
    assert torch.allclose(expected, output[0], atol=1e-6)
    (by_hand,) = torch.autograd.grad(expected, block.gate.weight, upstream[0])
    assert by_hand.abs().max() > 1e-3
    assert torch.allclose(found, by_hand, atol=1e-5 * float(by_hand.abs().max()))


def mixed_by_hand(block: MixtralSparseMoeBlock, states: Tensor, routes: Tensor) -> Tensor:
    """Return (L, D) means of the given experts, weighted by the softmax over all, normalized over the given ones."""
    probabilities = torch.softmax(states @ block.gate.weight.T, -1)
    weights = torch.stack([probabilities[torch.arange(len(states)), expert] for expert in routes.T], 1)
    weights = weights / weights.sum(1, keepdim=True)
    outputs = []
    for state, chosen in zip(states, routes.tolist(), strict=True):
        of_experts = []
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ state).chunk(2)
            of_experts.append(block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
        outputs.append(torch.stack(of_experts))
    return torch.einsum("lk,lkd->ld", weights, torch.stack(outputs))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_gradient_checkpointing_repeats_the_given_routes(family: str) -> None:
    packed = packed_rows()
    plain, checkpointed = policy_of(family), policy_of(family, gradient_checkpointing=True)
    routes = (traced(plain, packed)[1].short() + 1) % 4
    routed = replace(packed, routes=routes)
    expected = gradients(plain, routed)
    gradients(checkpointed, packed)
    found = gradients(checkpointed, routed)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_tokens_without_a_route_are_routed_by_the_model() -> None:
    policy, packed = policy_of("olmoe"), packed_rows()
    own = traced(policy, packed)[1].short()
    some = (own + 1) % 4
    some[10:] = NO_ROUTE
    chosen = traced(policy, replace(packed, routes=some))[1]
    assert torch.equal(chosen[:10], ((own + 1) % 4)[:10].byte())
    assert torch.equal(chosen[20:], own[20:].byte()), "the second row sees nothing of the first"


def test_a_pass_without_routes_is_not_affected_by_the_one_before() -> None:
    policy, packed = policy_of("mixtral"), packed_rows()
    logp_T, routes = traced(policy, packed)
    policy(replace(packed, routes=(routes.short() + 1) % 4))
    assert torch.equal(policy(packed)[0], logp_T)
    assert torch.isfinite(policy.causal_lm(packed.ids[None]).logits).all(), "the model's own forward still works"


def test_shared_prefixes_carry_the_routes_of_their_rows() -> None:
    """Two rows of one prompt with given routes: packed with a shared prefix, they are what they are alone."""
    policy = policy_of("qwen3_moe")
    (prompt,) = rows(24, seed=3)
    ends = rows(9, 14, seed=4)
    whole = [whole_row([*prompt.ids.tolist(), *end.ids.tolist()]) for end in ends]
    alone = [traced(policy, collate([row], [0]))[1].short() for row in whole]
    other = [((routes + 1) % 4).byte().numpy() for routes in alone]  # equal in the prompt
    routed = [replace(row, routes=routes[:-1]) for row, routes in zip(whole, other, strict=True)]
    shared = collate(routed, [1, 0], share_prefixes=True)
    assert shared.prefixes is not None
    assert shared.routes is not None
    assert len(shared.routes) == 24 + 9 + 14
    expected = torch.cat([policy(collate([routed[i]], [0]))[0] for i in (1, 0)])
    assert torch.allclose(policy(shared)[0], expected, atol=1e-5)


def test_tokens_with_other_routes_are_not_shared() -> None:
    """Two requests with one prompt, of which one token was routed otherwise in the second one."""
    long = rows(60)[0]
    routes = torch.randint(0, 4, (59, 3, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()
    for position in (0, 20, 40, 58):
        flipped = routes.copy()
        flipped[position, 2, 1] ^= 1
        pair = [replace(long, routes=routes), replace(long, routes=flipped)]
        packed = collate(pair, [0, 1], share_prefixes=True)
        num_shared = position if position >= MIN_SHARED else 0
        assert packed.num_tokens == 120 - num_shared
        assert packed.routes is not None
        places = row_places(pair, [0, 1], share_prefixes=True, with_routes=True)
        for row, place in zip(pair, places, strict=True):
            assert packed.ids[place].tolist() == row.ids.tolist()
            assert np.array_equal(packed.routes[place[:59]].numpy(), row.routes)
            assert (packed.routes[place[59]] == NO_ROUTE).all()
        assert collate(pair, [0, 1], share_prefixes=True, with_routes=False).num_tokens == 60
    short = replace(whole_row(long.ids[:20].tolist()), routes=routes[:19])
    assert collate([short, replace(long, routes=routes)], [0, 1], share_prefixes=True).num_tokens == 61


def test_adapters_train_with_given_routes() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"]())
    policy = Policy(add_adapters(model, LoraConfig(rank=4)))
    packed = packed_rows()
    _, routes = traced(policy, packed)
    other = replace(packed, routes=(routes.short() + 1) % 4)
    assert (policy(other)[0] - policy(packed)[0]).abs().max() > 0.1
    assert gradients(policy, other)


def test_a_separate_critic_routes_by_itself_and_a_shared_one_with_the_policy() -> None:
    policy = policy_of("mixtral")
    trunk = AutoModelForCausalLM.from_config(FAMILIES["mixtral"]()).get_decoder()
    packed = packed_rows()
    _, routes = traced(policy, packed)
    other = replace(packed, routes=(routes.short() + 1) % 4)
    for module, follows in ((ActorCritic(policy, Critic(trunk)), False), (ActorCritic.shared(policy), True)):
        for head in (module.critic.head if isinstance(module.critic, Critic) else module.critic,):
            nn.init.normal_(head.linear.weight)
        with torch.no_grad():
            own_T, other_T = (module(one, with_values=True)[2] for one in (packed, other))
            *_, chosen = module(other, with_values=True, with_routes=True)
        assert ((own_T - other_T).abs().max() > 1e-3) == follows
        assert torch.equal(chosen, other.routes.byte())


def test_routes_of_another_model_are_refused() -> None:
    policy, packed = policy_of("mixtral"), packed_rows()
    with pytest.raises(TrainingError, match="routes of 3 layers, but the model has 2"):
        policy(replace(packed, routes=torch.zeros(33, 3, 2, dtype=torch.int16)))
    with pytest.raises(TrainingError, match="of another model"):
        policy(replace(packed, routes=torch.zeros(33, 2, 3, dtype=torch.int16)))


def test_routes_that_reach_no_layer_are_refused() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["mixtral"]())
    routed = replace(packed_rows(), routes=torch.zeros(33, 2, 2, dtype=torch.int16))
    for policy in (Policy(model, attn_implementation="sdpa"), policy_of("qwen3")):
        with pytest.raises(TrainingError, match="not given the routes of their pack"):
            policy(routed)


def test_a_block_that_does_not_choose_by_topk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, packed = policy_of("mixtral"), packed_rows()
    router = policy.causal_lm.get_decoder().layers[0].mlp.gate

    def by_sorting(states: Tensor) -> tuple[Tensor, ...]:
        logits = torch.nn.functional.linear(states.reshape(-1, 64), router.weight)
        scores, indices = logits.softmax(-1).sort(descending=True)
        return logits, scores[:, :2], indices[:, :2]

    monkeypatch.setattr(router, "forward", by_sorting)
    with pytest.raises(TrainingError, match=r"among its 4 experts in 0 calls of torch\.topk, expected 1"):
        policy(replace(packed, routes=torch.zeros(33, 2, 2, dtype=torch.int16)))


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(path=str(save_tiny_model(tmp_path, tied=True)))
    refuse_dense(model, "off")
    with pytest.raises(ConfigError, match=r"dense model; set correction\.routing_replay=off"):
        refuse_dense(model, "engine")
