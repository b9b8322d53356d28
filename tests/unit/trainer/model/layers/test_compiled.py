"""Compiled layers compute what plain ones do, and packs of other lengths compile nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.decoder import compilable_layers
from lockstep.trainer.model.layers import compiled
from lockstep.trainer.model.layers.compiled import (
    FIRST_UPDATES,
    LATER_GRAPHS,
    GraphCount,
    _compile_on_all_cores,
    compile_layers,
    compiled_layers,
    described,
    num_graphs,
)
from lockstep.trainer.model.lora import add_adapters
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES
from tests.unit.trainer.model.test_critic import ROWS

PACKINGS = ([[0, 1, 2]], [[2], [0, 1]], [[1, 2], [0]])
LAYERS = 4
MOST_GRAPHS = 14
"""Graphs of a model: its layers' two or three stretches between what is not compiled, with and without gradients, and
with LoRA with and without adapters and behind a frozen embedding."""


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def policy_of(family: str, *, lora: bool = False, is_compiled: bool = False) -> Policy:
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.num_hidden_layers, config.layer_types = LAYERS, ["full_attention"] * LAYERS
    model = AutoModelForCausalLM.from_config(config)
    if lora:
        model = add_adapters(model, LoraConfig(rank=4, alpha=8))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, and then A has no gradient
                torch.nn.init.constant_(parameter, 0.1)
    return Policy(model, is_compiled=is_compiled, gradient_checkpointing=is_compiled)


def passes(policy: Policy, packing: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logprobs of all rows, and gradients of their sum by the parameters' names."""
    logp = torch.zeros(len(ROWS), 20)
    policy.zero_grad()
    for indices in packing:
        packed = collate(ROWS, indices)
        with torch.no_grad():
            scored, _ = policy(packed, temperature=0.7)
        for place, index in enumerate(indices):
            own = scored[packed.rollout_T == place]
            logp[index, : len(own)] = own
        policy(packed, temperature=0.7)[0].sum().backward()
    return logp, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "lora"), [("qwen3", False), ("qwen3", True), ("qwen3_moe", False)], ids=["dense", "adapters", "experts"]
)
def test_compiled_layers_equal_plain_ones_in_every_packing(compiler: None, family: str, lora: bool) -> None:
    plain = policy_of(family, lora=lora)
    made = policy_of(family, lora=lora, is_compiled=True)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in plain.named_parameters()]
    before, graphs = num_graphs(), []
    for packing in PACKINGS:
        found, expected = passes(made, packing), passes(plain, packing)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
        assert found[1].keys() == expected[1].keys(), "frozen weights have a gradient, or others have none"
        assert all(("lora_" in name) == lora for name in found[1])
        for name, gradient in expected[1].items():
            assert float((found[1][name] - gradient).norm() / gradient.norm()) < 1e-5, name
        graphs.append(num_graphs() - before)
    assert 0 < graphs[0] <= MOST_GRAPHS, graphs
    assert graphs[-1] == graphs[0], f"other lengths were recompiled: {graphs}"
    if family == "qwen3_moe":
        routes = [policy(collate(ROWS, [0, 1]), with_routes=True)[-1] for policy in (made, plain)]
        assert torch.equal(*routes)
        given = replace(collate(ROWS, [0, 1]), routes=(routes[0] + 1) % FAMILIES[family]().num_experts)
        with torch.no_grad():
            replayed = [policy(given)[0] for policy in (made, plain)]
            assert float((replayed[0] - made(collate(ROWS, [0, 1]))[0]).abs().max()) > 1e-3
        torch.testing.assert_close(*replayed, rtol=0, atol=1e-5)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing to compile; set model\.compile=false"):
        compile_layers(torch.nn.Linear(2, 2))


def test_only_layers_whose_rows_are_computed_together_are_compiled() -> None:
    recurrent = Policy(AutoModelForCausalLM.from_config(FAMILIES["falcon_h1"]()))
    with pytest.raises(ConfigError, match="not recurrent"):
        compile_layers(recurrent)
    policy = policy_of("qwen3")
    assert compiled_layers(policy) == []
    compile_layers(policy)
    assert compiled_layers(policy) == list(policy.causal_lm.get_decoder().layers)
    assert described(policy).startswith(f"compiled       {LAYERS} Qwen3DecoderLayer; experimental: ")
    mixture = policy_of("qwen3_moe").causal_lm.get_decoder()
    layer = mixture.layers[0]
    layer.experts = layer.mlp.experts  # as in Gemma 4, whose layers call their experts themselves
    assert layer not in compilable_layers(mixture)


def test_zero3_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.model.compile, config.model.path = True, "models/calculator-that-is-not-there"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(ConfigError, match="models/calculator") as refusal:
        validate(config, needs_data=False)
    assert "ZeRO" not in str(refusal.value)


def test_many_graphs_after_the_first_updates_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    count = GraphCount(told.append)
    for graphs in (0, 30, 60, 60 + LATER_GRAPHS, 61 + LATER_GRAPHS, 200):
        assert not told or graphs == 200
        monkeypatch.setattr(compiled, "num_graphs", lambda graphs=graphs: graphs)
        assert count.metrics() == {"perf/compiled_graphs": graphs}
    assert len(told) == 1
    assert told[0].startswith(f"torch compiled {LATER_GRAPHS + 1} graphs after the first {FIRST_UPDATES} updates")


def test_kernels_compile_on_all_cores_though_vllm_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as `import vllm` does
    monkeypatch.setattr(config, "compile_threads", 1)
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 16)
    _compile_on_all_cores()
    assert config.compile_threads == 16
