"""Learning rate and token budget where they are null."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.sharding import Sharding
from lockstep.trainer.model.chosen import affordable_tokens, with_chosen
from lockstep.trainer.model.memory_plan import GIB, advice, memory_plan
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
    config.optimizer.lr = 0.1
    assert chosen(config, SMOLLM2) == (config, [])


@pytest.mark.parametrize("gib", [8, 12, 16, 23.5, 48, 141])
def test_the_budget_is_the_largest_power_of_two_that_the_plan_affords(gib: float) -> None:
    config, _ = chosen(Config(), SMOLLM2, gib=gib)
    tokens = config.token_budget
    assert tokens is not None
    assert tokens & (tokens - 1) == 0
    plan = memory_plan(SMOLLM2, config, ONE)
    assert advice(plan, config, available=int(gib * GIB), zero_stage=0) is None
    larger = memory_plan(SMOLLM2, replace(config, token_budget=2 * tokens), ONE)
    assert tokens == 16_384 or larger.total > 0.9 * gib * GIB


def test_a_budget_below_the_longest_row_is_not_chosen_because_it_saves_nothing() -> None:
    config = Config()
    config.rollout.max_model_len = 3000
    assert affordable_tokens(config, SMOLLM2, ONE, available=0) == 2048


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
