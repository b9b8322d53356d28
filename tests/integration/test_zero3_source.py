"""Reading a ZeRO-3 model on two ranks: exact, in one exchange per bucket, fetched ahead, and none left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("source")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "tests.integration.workers.zero3_source", str(directory)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    files = [directory / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(file.read_text()) for file in files]


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


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
def test_the_next_bucket_is_begun_when_the_last_tensor_of_one_is_given_away(
    ranks: list[dict], bucket_bytes: int
) -> None:
    """And so once per bucket, in the same order on both ranks, into a buffer smaller than the largest bucket."""
    seen, other = (rank["passes"][str(bucket_bytes)] for rank in ranks)
    expected = ["begin"]
    for index, names in enumerate(seen["buckets"]):
        is_last = index + 1 == len(seen["buckets"])
        expected += ["wait", *names[:-1], *([] if is_last else ["begin"]), names[-1]]
    assert seen["events"] == expected
    assert other["events"] == ["begin", *["wait", "begin"] * (len(seen["buckets"]) - 1), "wait"]
    assert seen["buffer_afterwards"] == other["buffer_afterwards"] == 0
    padding = 16 * max(map(len, seen["buckets"]))
    assert 0 < seen["buffer"] <= seen["largest_bucket"] / 2 + padding
