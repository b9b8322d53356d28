"""`model.compile`: compiled layers equal plain ones in every packing, and unsupported cases are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.decoder import _compile_on_all_cores, compile_layers
from lockstep.trainer.model.policy import Policy
from tests.fixtures.models import tiny_qwen3
from tests.unit.trainer.model.test_critic import ROWS

PACKINGS = ([[0, 1, 2]], [[2], [0, 1]], [[1, 2], [0]])


@pytest.fixture(scope="module")
def compiled() -> Policy:
    return Policy(tiny_qwen3(tied=True), is_compiled=True, gradient_checkpointing=True)


def passes(policy: Policy, packing: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return logprobs of all rows, and gradients of their sum."""
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
    return logp, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.slow
def test_compiled_layers_equal_plain_ones_in_every_packing(compiled: Policy) -> None:
    plain = Policy(tiny_qwen3(tied=True))
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    stats = torch._dynamo.utils.counters["stats"]
    graphs = []
    for packing in PACKINGS:
        found, expected = passes(compiled, packing), passes(plain, packing)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
        assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-5
        graphs.append(stats["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs[-1] == graphs[0], f"other lengths were recompiled: {graphs}"


def test_a_partitioned_model_and_one_without_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing to compile"):
        compile_layers(torch.nn.Linear(2, 2))
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    next(model.parameters()).ds_shape = (16, 8)  # type: ignore[attr-defined]  # as ZeRO-3 leaves it
    with pytest.raises(ConfigError, match=r"zero2\.yaml, or set model\.compile=false"):
        compile_layers(model)


def test_zero3_is_refused_before_anything_heavy_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.model.compile = True
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    for stage, says in (("2", "models/calculator"), ("3", r"model\.compile=true does not work under ZeRO-3")):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
        config.model.path = "models/calculator-that-is-not-there"
        with pytest.raises(ConfigError, match=says) as refusal:
            validate(config, needs_data=False)
        assert ("ZeRO-3" in str(refusal.value)) == (stage == "3")


def test_optimizers_that_cannot_work_are_refused_before_anything_heavy_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.optimizer.name = "adamw_8bit"
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        validate(config, needs_data=False)
    config.optimizer.name = "muon"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    with pytest.raises(ConfigError, match=r"ddp\.yaml"):
        validate(config, needs_data=False)


def test_kernels_compile_on_all_cores_though_vllm_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as `import vllm` does
    monkeypatch.setattr(config, "compile_threads", 1)
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 16)
    _compile_on_all_cores()
    assert config.compile_threads == 16
