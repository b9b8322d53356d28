"""Demonstrations as a component: their order, weight and rows on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fixtures.distributed import FakeRank, on_ranks
from tests.integration.workers.component_gradients import fixed_demonstrations
from trainer.batch.step_batch import StepBatch
from trainer.config.schema import AlgorithmConfig, Config
from trainer.sft.cross_entropy import Demonstrations


def config(rows_per_update: int = 2, trains_on: str = "rollouts") -> Config:
    made = Config(algorithm=AlgorithmConfig(trains_on=trains_on), updates=10)
    made.demonstrations.path, made.demonstrations.rows_per_update = "given", rows_per_update
    return made


def ids(batch: StepBatch) -> list[list[int]]:
    return [row.ids.tolist() for row in batch.rows]


def test_each_epoch_takes_every_conversation_once_and_a_resumed_run_goes_on_with_the_next() -> None:
    data = fixed_demonstrations()
    whole = Demonstrations(config(), FakeRank(), [data])
    drawn = [ids(whole.draw()) for _ in range(5)]
    epochs = [one for step in drawn for one in step]
    every = sorted(one.ids.tolist() for (one,) in data)
    assert sorted(epochs[:5]) == sorted(epochs[5:]) == every
    assert epochs[:5] != epochs[5:], "each epoch has an order of its own"
    assert whole.metrics() == {"data/demonstrations_epoch": 2.0}
    resumed = Demonstrations(config(), FakeRank(), [data])
    resumed.cursor = 2 * 2
    assert [ids(resumed.draw()) for _ in range(3)] == drawn[2:]


def test_every_rank_gets_the_rows_of_rank_0() -> None:
    def draw(rank: FakeRank) -> tuple[list[list[int]], int]:
        data = [fixed_demonstrations()] if rank.is_main else None
        demonstrations = Demonstrations(config(), rank, data)
        demonstrations.draw()
        return ids(demonstrations.draw()), demonstrations.cursor

    first, *others = on_ranks(3, draw)
    assert first[1] == 4
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("trains_on", "schedule", "weights"),
    [
        ("rollouts", "constant", [0.4, 0.4, 0.4]),
        ("rollouts", "linear", [0.4, 0.25, 0.13]),
        ("rollouts", "cosine", [0.4, 0.25, 0.1 + 0.3 * (1 + np.cos(0.9 * np.pi)) / 2]),
        ("demonstrations", "constant", [1.0, 1.0, 1.0]),
    ],
)
def test_the_weight_follows_its_schedule_over_the_updates(trains_on: str, schedule: str, weights: list[float]) -> None:
    made = config(trains_on=trains_on)
    settings = made.demonstrations
    settings.weight, settings.final_weight, settings.weight_schedule = 0.4, 0.1, schedule
    demonstrations = Demonstrations(made, FakeRank(), [fixed_demonstrations()])
    batch = demonstrations.draw()
    found = [
        demonstrations.token_set(batch, update=update, routers=None).terms[0].weight  # type: ignore[attr-defined]
        for update in (0, 5, 9)
    ]
    assert found == pytest.approx(weights)
