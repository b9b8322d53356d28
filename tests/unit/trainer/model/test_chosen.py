"""Learning rate, token budget, gradient checkpointing and compilation where they are null."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.sharding import Sharding
from lockstep.trainer.model.chosen import FULL_SPEED_TOKENS, with_chosen, with_compilation
from lockstep.trainer.model.memory_plan import GIB, memory_plan
from lockstep.trainer.model.shape import ModelShape

SMOLLM2 = ModelShape(
    parameters=134_515_008, trained=134_515_008, engine_parameters=134_515_008, largest=49_152 * 576, layers=30,
    hidden=576, intermediate=1536, attention=576, key_value=192, vocabulary=49_152, is_tied=True,
)  # fmt: skip
DEMO = replace(SMOLLM2, parameters=600_000, trained=600_000, engine_parameters=600_000, layers=2, hidden=128,
               intermediate=256, attention=128, key_value=64, vocabulary=384, largest=49_152)  # fmt: skip
ONE = Sharding(world_size=1)


def chosen(config: Config, shape: ModelShape, *, gib: float = 23.5) -> tuple[Config, list[str]]:
    said: list[str] = []
    return with_chosen(config, shape, ONE, available=int(gib * GIB), say=said.append), said


def test_a_small_model_gets_the_values_of_the_demo_without_a_word() -> None:
    config, said = chosen(Config(), DEMO)
    assert (config.optimizer.lr, config.token_budget, said) == (3e-4, 16_384, [])


def test_a_pretrained_model_gets_its_own_learning_rate_and_a_budget_that_fits() -> None:
    config, said = chosen(Config(), SMOLLM2)
    assert config.optimizer.lr == 1e-6
    assert config.token_budget == 8192
    assert said == [
        "optimizer.lr=1e-06 for all weights of a model of 135 M parameters",
        "token_budget=8192, which the memory plan leaves",
    ]
    config = Config()
    config.model.lora.rank = 16
    assert chosen(config, SMOLLM2)[0].optimizer.lr == 1e-5


def test_given_values_are_kept() -> None:
    config = Config(token_budget=100_000)
    config.optimizer.lr, config.model.gradient_checkpointing = 0.1, False
    assert chosen(config, SMOLLM2) == (config, [])


@pytest.mark.parametrize("gib", [8, 12, 16, 23.5, 48, 141])
def test_the_budget_is_the_largest_power_of_two_that_the_plan_affords(gib: float) -> None:
    config, _ = chosen(Config(), SMOLLM2, gib=gib)
    tokens = config.token_budget
    assert tokens is not None
    assert tokens & (tokens - 1) == 0
    assert not config.model.is_checkpointed
    plan = memory_plan(SMOLLM2, config, ONE)
    assert plan.advice(available=int(gib * GIB)) is None
    larger = memory_plan(SMOLLM2, replace(config, token_budget=2 * tokens), ONE)
    assert tokens == 16_384 or larger.total > 0.9 * gib * GIB


def test_a_budget_below_the_longest_row_is_not_chosen_because_it_saves_nothing() -> None:
    config = Config()
    config.rollout.max_model_len, config.model.gradient_checkpointing = 3000, False
    small = memory_plan(SMOLLM2, replace(config, token_budget=2048), ONE)
    made = with_chosen(config, SMOLLM2, ONE, available=int(small.total * 1.05), say=lambda _: None)
    assert made.token_budget == 2048, "the smallest, though nine tenths of the memory do not hold it"


QWEN2_5_7B = ModelShape(
    parameters=7_615_616_512, trained=7_615_616_512, engine_parameters=7_615_616_512, largest=152_064 * 3584, layers=28,
    hidden=3584, intermediate=18_944, attention=3584, key_value=512, vocabulary=152_064, is_tied=False,
)  # fmt: skip
EIGHT = Sharding(
    world_size=8, zero_stage=3, uses_deepspeed=True, reduce_bucket=100_000_000, live_parameters=500_000_000
)


def of_80_gb(config: Config, shape: ModelShape, sharding: Sharding) -> tuple[Config, list[str]]:
    said: list[str] = []
    config.model.dtype, config.rollout.engine = "bfloat16", "colocated"
    made = with_chosen(config, shape, sharding, available=int(79.1 * GIB), say=said.append, on_gpu=True)
    return made, said


def test_checkpointing_is_chosen_where_the_plan_needs_it_and_said() -> None:
    config = Config()
    config.rollout.max_model_len = 8192
    made, said = of_80_gb(config, QWEN2_5_7B, EIGHT)
    assert (made.token_budget, made.model.is_checkpointed) == (16_384, True)
    assert said[1:] == ["model.gradient_checkpointing=true, without which the memory plan does not fit"]
    assert memory_plan(QWEN2_5_7B, made, EIGHT, on_gpu=True).total < 0.9 * 79.1 * GIB
    without = replace(made, token_budget=8192, model=replace(made.model, gradient_checkpointing=False))
    assert memory_plan(QWEN2_5_7B, without, EIGHT, on_gpu=True).total > 0.9 * 79.1 * GIB


def test_on_a_gpu_checkpointing_comes_before_packs_that_are_too_short_for_it() -> None:
    shape = replace(QWEN2_5_7B, layers=56)  # activations of 4,096 tokens do not fit
    for on_gpu, expected in ((True, (16_384, True)), (False, (2048, False))):
        config = Config()
        config.model.dtype, config.rollout.engine, config.rollout.urls = "bfloat16", "server", ["http://127.0.0.1:1"]
        made = with_chosen(config, shape, EIGHT, available=60 * GIB, say=lambda _: None, on_gpu=on_gpu)
        assert (made.token_budget, made.model.is_checkpointed) == expected
    assert expected[0] < FULL_SPEED_TOKENS


def test_one_of_the_two_may_be_given() -> None:
    config = Config(token_budget=8192)
    assert of_80_gb(config, QWEN2_5_7B, EIGHT)[0].model.is_checkpointed
    config = Config()
    config.model.gradient_checkpointing, config.rollout.max_model_len = False, 2048
    made, _ = of_80_gb(config, QWEN2_5_7B, EIGHT)
    assert (made.token_budget, made.model.is_checkpointed) == (4096, False)


def test_a_run_that_cannot_fit_is_refused_with_numbers_unless_its_values_are_given() -> None:
    with pytest.raises(ConfigError) as refusal:
        of_80_gb(Config(), QWEN2_5_7B, ONE)
    words = str(refusal.value)
    assert "does not fit into memory: with 512 tokens per pack and gradient checkpointing 144" in words
    assert "GiB are planned per rank and the device has 79.1: model.lora.rank=16" in words
    assert "weights 40.5, gradients 28.4, optimizer 56.7" in words
    assert "set token_budget=512 model.gradient_checkpointing=true" in words
    given = Config(token_budget=512)
    given.model.gradient_checkpointing = True
    assert of_80_gb(given, QWEN2_5_7B, ONE)[0].token_budget == 512


def test_a_refused_run_is_told_to_offload_and_to_move_the_engine() -> None:
    large = replace(QWEN2_5_7B, engine_parameters=4 * QWEN2_5_7B.parameters, layers=112)
    with pytest.raises(ConfigError) as refusal:
        of_80_gb(Config(), large, replace(EIGHT, world_size=1))
    assert "accelerate launch --offload_optimizer_device cpu (about -113 GiB)" in str(refusal.value)
    assert "rollout=server on other devices (about -56.7 GiB)" in str(refusal.value)


def test_a_cache_without_a_size_is_left_as_much_as_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = Config()
    config.rollout.kv_cache_gib = None
    made, _ = chosen(config, SMOLLM2, gib=48)
    plan = memory_plan(SMOLLM2, made, ONE)
    assert made.token_budget is not None
    assert made.token_budget < 16_384
    assert 0.9 * 48 * GIB - plan.total >= plan.activations
    config.rollout.engine = "colocated"  # sleeps while the trainer computes
    assert chosen(config, SMOLLM2, gib=48)[0].token_budget == 16_384


@pytest.mark.parametrize(
    ("given", "device_type", "layers", "compiles", "says"),
    [
        (None, "cuda", 28, True, ""),
        (None, "cuda", 0, False, "transformers marks no layers"),
        (None, "cpu", 28, False, ""),
        (True, "cpu", 28, True, ""),
        (False, "cuda", 28, False, ""),
    ],
)
def test_layers_are_compiled_on_gpus_unless_the_setting_says_otherwise(
    given: bool | None, device_type: str, layers: int, compiles: bool, says: str
) -> None:
    said: list[str] = []
    shape = replace(SMOLLM2, compilable=layers)
    model = with_compilation(ModelConfig(compile=given), shape, device_type=device_type, say=said.append)
    assert model.compile is compiles
    assert len(said) == bool(says)
    assert says in "".join(said)
