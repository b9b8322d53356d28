"""Files of the user beside a checkpoint: which of them were changed, and until when the earlier content was used."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.trainer.checkpoint.user_files import NAME, UserFiles
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import code_of_files
from tests.fixtures.composed import composed


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("rewards.py", "tools.py", "agent.py", "rows.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("first\n")
    (tmp_path / "folder.jsonl").mkdir()
    words = ("data.path=rows.jsonl", "data.heldout_path=heldout.jsonl", "reward.functions=[rewards.py:score,numeric]")
    tools = "environment.settings={files: ['tools.py:search,other'], deep: {agent: 'agent.py:main'}}"
    one = composed("model.path=my/model", *words, "environment.name=tools", tools, "eval.sets.more.path=folder.jsonl")
    assert "tools.py:search,other" in code_of_files(one.environment, one.reward, one.algorithm)
    return one


def test_every_file_that_a_run_names_is_compared(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ("rewards.py", "tools.py", "agent.py", "rows.jsonl", "heldout.jsonl")
    before = UserFiles.of(config)
    assert set(before.hashes) == set(files)
    for name in files:
        (tmp_path / name).write_text("second\n")
        assert UserFiles.of(config).changed_since(before) == [name]
        (tmp_path / name).write_text("first\n")
    (tmp_path / "rewards.py").unlink()
    assert UserFiles.of(config).changed_since(before) == [], "what is missing is reported by the checks"


def test_changes_are_kept_from_checkpoint_to_checkpoint(tmp_path: Path) -> None:
    first = UserFiles(hashes={"rewards.py": "a", "rows.jsonl": "b"})
    first.save(tmp_path)
    second = UserFiles(hashes={"rewards.py": "c", "rows.jsonl": "b"}).after(UserFiles.read(tmp_path), update=14)
    assert second.changes == {"rewards.py": 14}
    second.save(tmp_path)
    third = UserFiles(hashes={"rewards.py": "c", "rows.jsonl": "d"}).after(UserFiles.read(tmp_path), update=20)
    assert third.changes == {"rewards.py": 14, "rows.jsonl": 20}
    assert UserFiles(hashes={"rewards.py": "c"}).after(third, update=30).changes == third.changes


@pytest.mark.parametrize("content", [None, "{", "[]", '{"hashes": {}}', '{"hashes": {}, "changes": {"a": "b"}}'])
def test_a_checkpoint_without_a_readable_record_has_no_changes(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / NAME).write_text(content)
    assert UserFiles.read(tmp_path) == UserFiles()
    assert UserFiles(hashes={"rewards.py": "a"}).after(UserFiles.read(tmp_path), update=3).changes == {}
