"""Files of the user beside a checkpoint: which of them were changed, and until when the earlier content was used."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.rollout.system.user_functions import keep
from lockstep.trainer.checkpoint.user_files import NAME, UserFiles

FILES = ("rewards.py", "tools.py", "rows.jsonl")


def test_every_file_that_a_run_names_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).write_text("first\n")
    Path("folder.jsonl").mkdir()

    def found() -> UserFiles:
        return UserFiles.of(["rewards.py:score", "tools.py:search,other"], ["rows.jsonl", "folder.jsonl", "my/data"])

    before = found()
    assert set(before.hashes) == set(FILES)
    for name in FILES:
        Path(name).write_text("second\n")
        assert found().changed_since(before) == [name]
        Path(name).write_text("first\n")
    Path("rewards.py").unlink()
    assert found().changed_since(before) == [], "what is missing is reported by the checks"


def test_an_object_of_the_program_is_compared_by_its_source() -> None:
    keep({"files_score": lambda rollout: 1.0})
    before = UserFiles.of(["object:files_score"], [])
    keep({"files_score": lambda rollout: 2.0 + len(rollout)})
    assert UserFiles.of(["object:files_score"], []).changed_since(before) == ["object:files_score"]


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
