"""Reading a ZeRO-3 model on two ranks: exact, one exchange per bucket, prefetched, and no rank is left waiting."""

from __future__ import annotations

import pytest

from tests.fixtures.ranks import TORCHRUN, reports

BUCKET_BYTES = 64 * 1024

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("source")
    return reports(TORCHRUN, "tests.integration.workers.zero3_source", directory, timeout_s=280, DS_ACCELERATOR="cpu")


@pytest.mark.parametrize("model", ["dense", "experts", "adapted"])
def test_every_reader_gets_the_whole_weights_bit_by_bit(ranks: list[dict], model: str) -> None:
    for rank in ranks:
        for readers in ("all", "all_bfloat16"):
            assert rank[model][readers]["wrong"] == []
            assert rank[model][readers]["count"] > 10
        assert rank[model]["still_sharded"], "reading leaves the training weights alone"
    assert ranks[1][model]["last"] == ranks[1][model]["all"]
    assert ranks[0][model]["last"]["count"] == 0, "a rank that does not read gets nothing"


def test_after_a_step_the_new_weights_are_read(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["after_a_step"] == {"differing": [], "unmoved": []}


def test_a_rank_that_stops_early_joins_the_remaining_exchanges(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["stops_early"]["wrong"] == []
        assert rank["stops_early"]["count"] > 10


@pytest.mark.parametrize("model", ["dense", "experts", "adapted"])
def test_a_rank_that_fails_before_it_begins_joins_all_exchanges(ranks: list[dict], model: str) -> None:
    """As when an engine refuses the update: the others wait in an exchange of the base weights of adapters."""
    for rank in ranks:
        assert rank[model]["never_begins"]["wrong"] == []
        assert rank[model]["never_begins"]["seconds"] < 10


@pytest.mark.parametrize("model", ["dense", "experts", "adapted"])
def test_the_parts_of_the_ranks_are_the_whole_weights_and_views_of_the_shards(ranks: list[dict], model: str) -> None:
    for kind in ("parts", "parts_bfloat16", "gives_up"):
        for rank in ranks:
            assert rank[model][kind]["wrong"] == []
            assert rank[model][kind]["not_sent"] == 0
            assert rank[model][kind]["count"] == ranks[0][model]["all"]["count"]
            assert rank[model][kind]["sent"] > 10
    for first, second in ((rank[model]["parts"], rank[model]["parts_bfloat16"]) for rank in ranks):
        if model == "adapted":  # base weights of adapters are fetched and sent from new memory
            assert first["exchanges"] > 0
        else:
            assert first["exchanges"] == second["exchanges"] == first["sent_from_elsewhere"] == 0
            assert second["sent_from_elsewhere"] == second["sent"], "cast before they leave"
    assert ranks[1][model]["parts"]["sent_from_elsewhere"] == 0


def test_no_exchange_is_larger_than_a_bucket_and_there_are_few(ranks: list[dict]) -> None:
    for rank in ranks:
        sizes, of_tensors = rank["exchanged"]["sizes"], rank["exchanged"]["of_tensors"]
        assert max(of_tensors) > BUCKET_BYTES, "the embedding is fetched by itself"
        assert max(sizes) <= max(of_tensors) / 2
        assert sum(sizes) == pytest.approx(sum(of_tensors) / 2, rel=0.02)
        assert len(sizes) < len(of_tensors) / 2
        assert set(rank["exchanged"]["counts"]) == {1}, "one message from each owner to each reader"


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_the_next_bucket_is_fetched_when_the_last_tensor_of_one_is_taken(ranks: list[dict], bucket_bytes: int) -> None:
    """Once per bucket, in the same order on both ranks; no memory is kept."""
    seen, other = (rank["passes"][str(bucket_bytes)] for rank in ranks)
    expected = ["begin"]
    for index, names in enumerate(seen["buckets"]):
        is_last = index + 1 == len(seen["buckets"])
        expected += ["wait", *names[:-1], *([] if is_last else ["begin"]), names[-1]]
    assert seen["events"] == expected
    assert other["events"] == ["begin", *["wait", "begin"] * (len(seen["buckets"]) - 1), "wait"]
    assert seen["kept"] == 0


def test_adapters_alone_are_whole_and_named_for_the_engine(ranks: list[dict]) -> None:
    for rank in ranks:
        alone = rank["adapters_alone"]
        assert alone["all"]["wrong"] == alone["parts"]["wrong"] == []
        assert alone["parts"]["not_sent"] == 0
        assert alone["all"]["count"] == len(alone["names"]) == 2 * 2 * 4
    assert ranks[0]["adapters_alone"]["names"][0] == "model.layers.0.mlp.down_proj.lora_A.weight"
