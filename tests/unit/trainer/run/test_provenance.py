"""Provenance of a run."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.changes import changes
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.run.provenance import code_version, with_hashes
from tests.fixtures.distributed import FakeRank, on_ranks


def test_code_outside_git_has_no_commit(tmp_path: Path):
    assert code_version(tmp_path) == {"commit": None, "is_changed": None}


def test_a_run_records_the_hash_of_its_loss_so_that_a_resumed_one_sees_the_change(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text("def fn(inputs): ...\n")
    config = Config(algorithm=AlgorithmConfig(loss=f"{file}:fn"))
    before = replace(config, algorithm=with_hashes(config.algorithm, FakeRank()))
    assert before.algorithm.loss_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert before.algorithm.advantage_sha256 is None
    file.write_text("def fn(inputs): return 1\n")
    after = replace(config, algorithm=with_hashes(config.algorithm, FakeRank()))
    assert list(changes(plain(before), plain(after))) == ["algorithm.loss_sha256"]


def test_built_in_names_have_no_hash():
    assert with_hashes(AlgorithmConfig(), FakeRank()) == AlgorithmConfig()


def test_ranks_with_different_files_end_together(tmp_path: Path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(f"def fn(inputs): return {name!r}\n")

    def work(distributed: FakeRank) -> str:
        path = tmp_path / ("a.py", "b.py")[distributed.rank]
        with pytest.raises(ConfigError, match="rank 1 has another file than rank 0"):
            with_hashes(AlgorithmConfig(loss=f"{path}:fn"), distributed)
        return "ended"

    assert on_ranks(2, work) == ["ended", "ended"]
