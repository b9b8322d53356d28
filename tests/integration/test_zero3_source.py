"""Reading a ZeRO-3 model on two ranks: exact, in one exchange per bucket, fetched ahead, and none left waiting."""

from __future__ import annotations

import pytest

from tests.fixtures.ranks import TORCHRUN, reports

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


def test_a_rank_that_stops_early_takes_part_in_the_rest(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["stops_early"]["wrong"] == []
        assert rank["stops_early"]["count"] > 10


def test_a_rank_whose_consumer_has_no_room_takes_part_in_the_rest(ranks: list[dict]) -> None:
    assert ranks[0]["no_room"]["asked"] == 3
    assert ranks[0]["no_room"]["wrong"] == []
    assert ranks[0]["no_room"]["count"] > 10
    assert ranks[0]["no_room"]["kept"] == 0


@pytest.mark.parametrize("model", ["dense", "experts", "adapted"])
def test_weights_arrive_where_they_are_wanted_straight_out_of_the_shards(ranks: list[dict], model: str) -> None:
    reader, sender = (rank[model]["placed"] for rank in ranks)
    assert reader["count"] == ranks[0][model]["all"]["count"]
    assert reader["wrong"] == reader["elsewhere"] == []
    assert reader["received"] == sender["sent"] > 10
    assert sender["sent_from_elsewhere"] == 0
    if model != "adapted":  # adapters are not sent on
        assert reader["received_elsewhere"] == 0
    assert sender["count"] == sender["received"] == reader["sent"] == 0

    cast = ranks[0][model]["placed_bfloat16"]
    assert cast["wrong"] == cast["elsewhere"] == []
    assert (cast["received_elsewhere"] == 0) is (model != "adapted"), "cast before they leave, but adapted ones"


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_the_next_bucket_is_begun_when_the_last_tensor_of_one_is_given_away(
    ranks: list[dict], bucket_bytes: int
) -> None:
    """And so once per bucket, in the same order on both ranks; and nothing stays behind."""
    seen, other = (rank["passes"][str(bucket_bytes)] for rank in ranks)
    expected = ["begin"]
    for index, names in enumerate(seen["buckets"]):
        is_last = index + 1 == len(seen["buckets"])
        expected += ["wait", *names[:-1], *([] if is_last else ["begin"]), names[-1]]
    assert seen["events"] == expected
    assert other["events"] == ["begin", *["wait", "begin"] * (len(seen["buckets"]) - 1), "wait"]
    assert seen["kept"] == 0
