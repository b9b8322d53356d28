"""An engine on every rank: both get the merged weights, sample for their rank, and sleep while the trainer computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, reports
from tests.integration.test_run import demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("colocated")
    save_tiny_model(directory / "model", tied=True)
    return reports(accelerate("zero3"), "tests.integration.workers.colocated", directory, timeout_s=300)


def test_both_engines_get_the_weights_and_sample_with_them(ranks: list[dict]) -> None:
    for rank in ranks:
        assert [sync["version"] for sync in rank["syncs"]] == [1, 2]
        assert max(sync["canary"] for sync in rank["syncs"]) < 1e-4
        for version, sync in enumerate(rank["syncs"], start=1):
            assert sync["versions"] == [version]
            assert sync["mismatch"] < 1e-4
            assert sync["same tokens"], "the tokens of a request do not depend on its engine"


def test_an_engine_allocates_its_cache_after_the_trainer_has_sent_the_weights(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["after sleep"] == [
            "wake weights", "start_weight_update", "finish_weight_update", "wake kv_cache", "resume",
        ]  # fmt: skip


def test_a_sleeping_engine_refuses_to_name_its_version(ranks: list[dict]) -> None:
    for rank in ranks:
        assert "asleep" in rank["asleep"]


def test_a_killed_engine_is_an_error_that_names_it(ranks: list[dict]) -> None:
    assert ranks[0]["killed"] is None
    assert ranks[1]["killed"].startswith("EngineError: cannot sample: the engine is dead (the engine of rank 1)")


@pytest.mark.slow
def test_two_ranks_train_with_an_engine_each(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    train(
        *demo, "rollout=colocated", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "updates=3",
        "eval.every=3", "eval.prompts=4", f"run_root={tmp_path}", "run_name=two", ranks=2,
    )  # fmt: skip
    lines = metrics(tmp_path / "two")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["rollout/delivered"] == 16
        assert line["rollout/token_match_rate"] == line["rollout/trained_fraction"] == 1.0
        assert line["rollout_correction/logp_diff_abs_max"] < 1e-3
        assert line["sync/canary_abs_diff"] < 1e-3
    assert {path.name for path in (tmp_path / "two/logs").glob("engine*")} == {"engine.log", "engine-1.log"}
