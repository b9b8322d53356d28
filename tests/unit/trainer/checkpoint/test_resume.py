"""Continuing, going back, and forking from a checkpoint, with reports of changed settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.errors import CheckpointError, ConfigError
from lockstep.trainer.checkpoint import checkpoint, stored
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.checkpoint.resume import restore
from lockstep.trainer.checkpoint.run_dir import open_run
from lockstep.trainer.checkpoint.user_files import UserFiles
from lockstep.trainer.config.changes import changes, settings_hash
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from tests.fixtures.saved_state import SavedState


def config(**changed: Any) -> Config:
    return Config(algorithm=AlgorithmConfig(kl_coef=0.05, kl_target=0.5), **changed)


def save(checkpoints: Path, update: int, of: Config, **state: Any) -> Path:
    made = TrainerState(step=update, update=update, data_cursor=8 * update, kl_coef=0.0712, wandb_id="old", **state)
    saved = SavedState()
    saved.fill(update)
    return checkpoint.save(checkpoints, made, saved, keep=9, config=asdict(of))


def resumed(now: Config, checkpoints: Path, *, files: UserFiles | None = None, data_rows: Sequence[int] = ()) -> Any:
    path, _ = stored.find(now.resume, checkpoints)
    assert path is not None
    return restore(path, now, checkpoints, SavedState(), files=files or UserFiles(), data_rows=data_rows)


def test_the_hash_covers_training_settings_but_not_the_name_of_the_run() -> None:
    plain = asdict(Config())
    for same in (
        Config(resume="auto"), Config(run_name="b"), Config(updates=1), Config(run_root="x"), Config(max_hours=1.0)
    ):  # fmt: skip
        assert settings_hash(asdict(same)) == settings_hash(plain)
    assert settings_hash(asdict(Config(seed=1))) != settings_hash(plain)


def test_changed_settings_are_reported(tmp_path: Path) -> None:
    save(tmp_path, 4, config())
    now = config(resume="auto", run_name="a", updates=9, token_budget=128)
    now.optimizer.lr = 1e-5
    found = resumed(now, tmp_path)
    (sentence,) = found.warnings
    assert "optimizer.lr None -> 1e-05, token_budget None -> 128" in sentence
    assert "updates" not in sentence
    assert not found.is_fork


@pytest.mark.parametrize(
    ("seed", "content", "data_rows", "remain"),
    [(0, "a", (5, 6), True), (1, "a", (5, 6), False), (0, "b", (5, 6), False), (0, "a", (5, 7), False)],
)
def test_batches_are_trained_again_only_if_settings_data_and_files_are_the_same(
    seed: int, content: str, data_rows: Sequence[int], remain: bool, tmp_path: Path
) -> None:
    batches, checkpoints = tmp_path / "batches", tmp_path / "checkpoints"
    batches.mkdir()
    UserFiles(hashes={"my.py": "a"}).save(save(checkpoints, 4, config(), data_rows=(5, 6)))
    now = config(resume="auto", run_name="a", seed=seed)
    found = resumed(now, checkpoints, files=UserFiles(hashes={"my.py": content}), data_rows=data_rows)
    assert batches.exists() == remain
    assert any("sampled again" in sentence for sentence in found.warnings) == (not remain)


def test_the_state_of_another_optimizer_is_refused_before_it_is_read(tmp_path: Path) -> None:
    save(tmp_path, 4, config())
    now = config(resume="auto", run_name="a")
    now.optimizer.name = "sgd"
    with pytest.raises(CheckpointError, match=r"state of adamw that .*step-.*4 holds; set optimizer\.name=adamw"):
        resumed(now, tmp_path)


def test_the_number_of_updates_counts_as_changed_if_the_schedule_depends_on_it() -> None:
    before, after = Config(updates=4), Config(updates=8)
    assert changes(asdict(before), asdict(after)) == {}
    before.optimizer.schedule = after.optimizer.schedule = "linear"
    assert changes(asdict(before), asdict(after)) == {"updates": (4, 8)}


def test_a_setting_unknown_to_the_saving_version_is_not_reported() -> None:
    before = asdict(Config())
    del before["token_budget"]
    assert changes(before, asdict(Config())) == {}


def test_the_controllers_coefficient_continues_unless_the_user_changed_it(tmp_path: Path) -> None:
    save(tmp_path, 4, config())
    assert resumed(config(resume="auto", run_name="a"), tmp_path).kl_coef == 0.0712
    now = config(resume="auto", run_name="a")
    now.algorithm.kl_coef = 0.2
    found = resumed(now, tmp_path)
    assert found.kl_coef == 0.2
    assert any("changed from 0.05 to 0.2" in sentence and "0.0712" in sentence for sentence in found.warnings)
    now.algorithm.kl_target = None
    assert resumed(now, tmp_path).kl_coef == 0.2


def test_the_entropy_controller_continues_unless_the_user_changed_its_coefficient(tmp_path: Path) -> None:
    def adaptive(coef: float) -> Config:
        return Config(algorithm=AlgorithmConfig(entropy_coef=coef, entropy_target=0.2), resume="auto", run_name="a")

    save(tmp_path, 4, adaptive(0.0), entropy_coef=0.035, entropy=0.1875)
    found = resumed(adaptive(0.0), tmp_path)
    assert (found.entropy_coef, found.state.entropy, found.warnings) == (0.035, 0.1875, ())
    changed = resumed(adaptive(0.01), tmp_path)
    assert changed.entropy_coef == 0.01
    assert any("algorithm.entropy_coef was changed from 0.0 to 0.01" in sentence for sentence in changed.warnings)


def test_all_counters_are_restored(tmp_path: Path) -> None:
    state = {"noise_floor": {"a": 1e-9}, "grad_norms": [1.0, 2.5], "skipped_updates": 3, "skipped_in_a_row": 1}
    save(tmp_path, 4, config(), **state)
    found = resumed(config(resume="auto", run_name="a"), tmp_path).state
    assert {name: getattr(found, name) for name in state} == state
    assert (found.update, found.data_cursor) == (4, 32)


@pytest.mark.parametrize("wrong", [{"step": -1}, {"grad_norms": ["a"]}, {"grad_norms": [float("nan")]},
                                   {"noise_floor": 3}, {"kl_coef": float("inf")}, {"wandb_id": 5},
                                   {"entropy": float("nan")}, {"entropy_coef": "a"}])  # fmt: skip
def test_an_invalid_state_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = save(tmp_path, 4, config())
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["state"] |= wrong
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    assert "no readable manifest" in str(stored.check(path))


def test_the_newer_of_two_checkpoints_of_one_update_is_taken(tmp_path: Path) -> None:
    """A kill between the two renames of a save leaves both."""
    path = save(tmp_path, 4, config())
    shutil.copytree(path, path.with_name("step-4.replaced"))
    found, _ = stored.find("auto", tmp_path)
    assert found == path
    shutil.rmtree(path)
    found, _ = stored.find("auto", tmp_path)
    assert found is not None
    assert found.name == "step-4.replaced"


def test_going_back_reports_newer_checkpoints(tmp_path: Path) -> None:
    for update in (2, 4, 6):
        save(tmp_path, update, config())
    found = resumed(config(resume=str(tmp_path / "step-2"), run_name="a"), tmp_path)
    assert found.state.update == 2
    assert any("step-4, step-6 came after step-2" in sentence for sentence in found.warnings)


def test_a_checkpoint_of_another_run_is_a_fork_and_needs_a_new_run_name(tmp_path: Path) -> None:
    first = config(run_root=str(tmp_path), run_name="a")
    directory, lock = open_run(first, SavedState())
    assert lock is not None
    path = save(directory.checkpoints, 4, first)
    before = sorted((file, file.stat().st_mtime_ns) for file in directory.path.rglob("*"))

    fork = config(run_root=str(tmp_path), run_name="b", resume=str(path))
    other, other_lock = open_run(fork, SavedState())
    found = resumed(fork, other.checkpoints)
    assert found.is_fork
    assert found.state.update == 4
    assert sorted((file, file.stat().st_mtime_ns) for file in directory.path.rglob("*")) == before
    with pytest.raises(ConfigError, match="is a checkpoint of another run"):
        open_run(fork, SavedState())  # repeating the command would discard the fork's progress
    with pytest.raises(ConfigError, match=r"this process is running in .*/a; set run_name="):
        open_run(config(run_root=str(tmp_path), run_name="a", resume="auto"), SavedState())
    (directory.path / ".lock").write_text("1")
    with pytest.raises(ConfigError, match="another process is running in"):
        open_run(config(run_root=str(tmp_path), run_name="a", resume="auto"), SavedState())
    lock.close()
    back, back_lock = open_run(config(run_root=str(tmp_path), run_name="a", resume=str(path)), SavedState())
    assert back.path == directory.path
    for held in (other_lock, back_lock):
        assert held is not None
        held.close()


def test_only_zero_checkpoints_are_resharded_for_other_ranks(tmp_path: Path) -> None:
    """tests/integration/test_reshard.py tests the resharding itself."""
    path = save(tmp_path, 4, config())
    two = SavedState(world_size=2)
    stored.load(path, two)
    assert two.values() == {4.0}
    assert not stored.is_resharded(path, two)
    assert stored.is_resharded(path, SavedState(zero_stage=3))
    manifest = json.loads((path / checkpoint.MANIFEST).read_text()) | {"world_size": 2, "zero_stage": 3}
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    ranks = [SavedState(world_size=size, zero_stage=stage) for size, stage in ((2, 3), (4, 3), (2, 2), (1, 0))]
    assert [stored.is_resharded(path, rank) for rank in ranks] == [False, True, True, True]


@pytest.mark.parametrize(("schedule", "is_said"), [("linear", True), ("constant", False)])
def test_more_updates_move_the_schedule_of_the_learning_rate(schedule: str, is_said: bool, tmp_path: Path) -> None:
    def of(updates: int) -> Config:
        made = config(resume="auto", run_name="a", updates=updates)
        made.optimizer.schedule = schedule
        return made

    save(tmp_path, 4, of(4))
    said = [sentence for sentence in resumed(of(8), tmp_path).warnings if "schedule over 8 updates" in sentence]
    assert bool(said) == is_said
