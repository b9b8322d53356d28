"""Weight sync from a real DeepSpeed ZeRO-3 model on two ranks, and the errors of both ranks after faults."""

from __future__ import annotations

import pytest

from tests.fixtures.ranks import TORCHRUN, reports

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("zero3")
    return reports(TORCHRUN, "tests.integration.zero3_ranks", directory, timeout_s=540, DS_ACCELERATOR="cpu")


def test_the_engine_gets_the_gathered_weights(ranks: list[dict]) -> None:
    for rank in ranks:
        assert [sync["version"] for sync in rank["syncs"]] == [1, 2]
        assert max(sync["mismatch"] for sync in rank["syncs"]) < 1e-4
    assert max(sync["sync/canary_abs_diff"] for sync in ranks[0]["syncs"]) < 1e-4


def test_shards_go_to_the_engine_and_not_to_the_other_rank(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["exchanges"] == []


def test_a_failure_on_one_rank_is_the_same_error_on_all(ranks: list[dict]) -> None:
    errors = [rank["one_rank_fails"] for rank in ranks]

    assert errors[0]["text"] == errors[1]["text"]
    assert "rank 1: OSError: out of host memory" in errors[0]["text"]


def test_a_failure_in_a_gather_is_the_same_error_on_all_ranks_and_none_waits(ranks: list[dict]) -> None:
    errors = [rank["one_rank_fails_in_a_gather"] for rank in ranks]

    assert errors[0]["text"] == errors[1]["text"]
    assert "rank 1: OSError: out of memory in a gather" in errors[0]["text"]
    assert max(error["after_s"] for error in errors) < 20


def test_a_killed_engine_is_an_error_at_once(ranks: list[dict]) -> None:
    for error in (ranks[0]["generate_on_dead"], ranks[0]["generate_again"]):
        assert error["error"] == "EngineError"
        assert "dead" in error["text"]
        assert error["after_s"] < 10


def test_a_push_to_a_killed_engine_is_an_error_on_all_ranks(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["push_on_dead"]["error"] == "SyncError"
        assert rank["push_on_dead"]["after_s"] < 20
        assert "rank 0: cannot join the weight transfer: the engine is dead" in rank["push_on_dead"]["text"]
