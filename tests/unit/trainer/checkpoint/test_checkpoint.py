"""Checkpoints under kills, full disks and damaged files: complete, or skipped."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.checkpoint import checkpoint, stored
from lockstep.trainer.checkpoint.checkpoint import MANIFEST, TrainerState
from tests.fixtures.mutations import JSON, mutated
from tests.fixtures.paths import ROOT
from tests.fixtures.saved_state import SavedState, save_for_ever

KILLS = 20


def state(update: int) -> TrainerState:
    return TrainerState(step=update, update=update, data_cursor=8 * update)


def save(directory: Path, *updates: int, keep: int = 2) -> SavedState:
    saved = SavedState()
    for update in updates:
        saved.fill(update)
        checkpoint.save(directory, state(update), saved, keep=keep)
    return saved


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint_at_most_one_save_old(tmp_path):
    moments = random.Random(7)
    processes = multiprocessing.get_context("forkserver")  # imports torch once, not per kill
    processes.set_forkserver_preload(["torch._dynamo", "tests.fixtures.saved_state"])  # optimizers import the first
    announced = 0
    for _ in range(KILLS):
        ours, theirs = processes.Pipe(duplex=False)
        saver = processes.Process(target=save_for_ever, args=(tmp_path, announced + 1, theirs))
        saver.start()
        theirs.close()
        announced = ours.recv()
        time.sleep(moments.uniform(0.0, 0.1))
        saver.kill()
        saver.join()
        with contextlib.suppress(EOFError):
            while True:
                announced = ours.recv()

        path, _ = stored.find("auto", tmp_path)
        assert path is not None
        restored = SavedState()
        loaded = stored.load(path, restored)
        assert loaded.update in (announced, announced + 1)  # the last announced, or the one after it
        assert restored.values() == {float(loaded.update)}
        announced = loaded.update
    assert len(list(tmp_path.glob("step-*"))) <= 4


def test_old_checkpoints_go_and_latest_points_at_the_newest(tmp_path):
    save(tmp_path, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2", "step-3"]
    assert (tmp_path / "latest").resolve() == tmp_path / "step-3"
    manifest = json.loads((tmp_path / "step-3" / MANIFEST).read_text())
    assert manifest["versions"]["torch"] == metadata.version("torch")
    assert set(manifest["files"]) == {"optimizer.pt", "parameters.safetensors", "state.json"}


def test_retention_never_removes_the_checkpoint_just_saved_nor_the_last_good_one(tmp_path):
    save(tmp_path, 20)
    save(tmp_path, 11, keep=1)  # a run resumed from an older checkpoint
    assert [path.name for path in stored.complete(tmp_path)[0]] == ["step-11"]
    save(tmp_path, 11, keep=1)  # the same update again
    assert [path.name for path in stored.complete(tmp_path)[0]] == ["step-11"]
    (tmp_path / "step-11" / "optimizer.pt").write_bytes(b"")
    save(tmp_path, 12, keep=3)
    assert [path.name for path in stored.complete(tmp_path)[0]] == ["step-12"]


def test_a_checkpoint_moved_to_another_disk_loses_only_its_link(tmp_path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    save(run, 1, 2)
    for update in (1, 2):
        shutil.move(run / f"step-{update}", disk / f"step-{update}")
        (run / f"step-{update}").symlink_to(disk / f"step-{update}")
    (run / "step-0").write_text("a note of the user")
    save(run, 2, keep=2)  # the same update again: its link is replaced
    save(run, 3, keep=1)
    assert sorted(path.name for path in run.iterdir()) == ["latest", "step-0", "step-3"]
    assert sorted(path.name for path in disk.iterdir()) == ["step-1", "step-2"]


def test_latest_is_replaced_only_if_it_is_a_link(tmp_path):
    (tmp_path / "latest").mkdir()
    save(tmp_path, 1, 2)
    assert not (tmp_path / "latest").is_symlink()
    assert stored.find("auto", tmp_path)[0] == tmp_path / "step-2"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_failed_save_keeps_the_earlier_checkpoint(tmp_path, keep, monkeypatch):
    saved = save(tmp_path, 1)
    for broken in ("fingerprint", "_fsync", "_put_in_place"):
        with monkeypatch.context() as patch:

            def fails(*_: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(checkpoint, broken, fails)
            with pytest.raises(CheckpointError, match="No space left"):
                checkpoint.save(tmp_path, state(2), saved, keep=keep)
        assert stored.find("auto", tmp_path)[0] == tmp_path / "step-1"


def test_a_full_disk_is_a_checkpoint_error(tmp_path):
    saved = save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="step-2"):
            checkpoint.save(tmp_path, state(2), saved, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    path, skipped = stored.find("auto", tmp_path)
    assert path == tmp_path / "step-1"
    assert skipped == []  # the partial save is gone: the next one needs the space


FILLS = """
    import sys
    from pathlib import Path
    from lockstep.rollout.errors import CheckpointError
    from tests.fixtures.saved_state import SavedState
    from lockstep.trainer.checkpoint import checkpoint, stored
    from lockstep.trainer.checkpoint.checkpoint import TrainerState

    directory, saved = Path(sys.argv[1]), SavedState()
    for update in range(1, 99):
        saved.fill(update)
        try:
            checkpoint.save(directory, TrainerState(step=update, update=update, data_cursor=0), saved, keep=99)
        except CheckpointError as error:
            print(update - 1, "0.0 MiB are free" in str(error))
            break
    saved.fill(update - 1)
    whole, skipped = stored.complete(directory)
    restored = SavedState()
    stored.load(whole[-1], restored)
    print(len(whole), skipped, restored.values() == {float(update - 1)})
    checkpoint.shutil.rmtree(whole[0])  # free space for one
    saved.fill(update)
    checkpoint.save(directory, TrainerState(step=update, update=update, data_cursor=0), saved, keep=99)
    print([path.name for path in stored.complete(directory)[0]][-1] == f"step-{update}")
"""


def test_a_full_disk_fails_the_save_and_damages_nothing(tmp_path):
    """Save on a small file system until it is full."""
    small = 'mount -t tmpfs -o size=600k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", small, "sh", str(tmp_path)]
    probe = subprocess.run([*command, "true", ""], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    done = subprocess.run(
        [*command, sys.executable, textwrap.dedent(FILLS)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    filled, whole, again = done.stdout.splitlines()
    saved = int(filled.split()[0])
    assert 3 < saved < 90
    assert filled == f"{saved} True"
    assert whole == f"{saved} [] True"
    assert again == "True"


def test_a_directory_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be created"):
        save(tmp_path / "file" / "checkpoints", 1)


DAMAGE = {
    "truncated": (lambda d: os.truncate(d / "parameters.safetensors", 10), "is not what was written"),
    "one bit": (lambda d: flip(d / "optimizer.pt"), "optimizer.pt is not what was written"),
    "missing": (lambda d: (d / "optimizer.pt").unlink(), "lacks optimizer.pt"),
    "no manifest": (lambda d: (d / MANIFEST).unlink(), "no readable manifest"),
    "half a manifest": (lambda d: os.truncate(d / MANIFEST, 50), "no readable manifest"),
    "added": (lambda d: (d / "extra.pt").write_bytes(b"x"), "holds extra.pt"),
}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, damage):
    save(tmp_path, 1, 2)
    harm, says = DAMAGE[damage]
    harm(tmp_path / "step-2")
    path, skipped = stored.find("auto", tmp_path)
    assert path == tmp_path / "step-1"
    assert len(skipped) == 1
    assert "step-2" in skipped[0]
    assert says in skipped[0]
    with pytest.raises(CheckpointError, match=says):
        stored.find(str(tmp_path / "step-2"), tmp_path)
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        stored.find("auto", tmp_path)


def test_a_manifest_truncated_at_any_byte_is_refused(tmp_path):
    save(tmp_path, 1)
    manifest = tmp_path / "step-1" / MANIFEST
    whole = manifest.read_bytes()
    for length in range(len(whole)):
        manifest.write_bytes(whole[:length])
        assert "no readable manifest" in str(stored.check(tmp_path / "step-1")), length
    manifest.write_bytes(whole)
    assert stored.check(tmp_path / "step-1") is None


def test_a_clock_that_goes_backwards_does_not_change_the_order(tmp_path):
    """The update number determines the newest checkpoint, not file times."""
    saved = save(tmp_path, 1, 2, 3, keep=3)
    for update in (1, 2, 3):
        for file in [*(tmp_path / f"step-{update}").iterdir(), tmp_path / f"step-{update}"]:
            os.utime(file, (10**9 - update, 10**9 - update))
    assert stored.find("auto", tmp_path)[0] == tmp_path / "step-3"
    checkpoint.save(tmp_path, state(4), saved, keep=2)
    assert [path.name for path in stored.complete(tmp_path)[0]] == ["step-3", "step-4"]


def test_a_run_killed_in_its_first_save_starts_from_the_beginning(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-1").rename(tmp_path / ".partial-step-1")
    path, skipped = stored.find("auto", tmp_path)
    assert path is None
    assert skipped == [".partial-step-1: was never finished"]


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("name", ["optimizer.pt", "parameters.safetensors", "state.json", MANIFEST])
def test_a_pickle_bomb_in_any_file_does_not_go_off(tmp_path, name):
    save(tmp_path, 1)
    fired = tmp_path / "fired"
    path = tmp_path / "step-1"
    torch.save({"state": Bomb(fired)}, path / name)
    if name != MANIFEST:  # an attacker updates the manifest too
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["files"][name] = checkpoint.fingerprint(path / name)
        (path / MANIFEST).write_text(json.dumps(manifest))
    found = stored.check(path)
    if found is None and name != "state.json":  # the loader never reads state.json
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            stored.load(path, SavedState())
    else:
        assert name == "state.json" or "manifest" in str(found)
    assert not fired.exists()
    with (path / name).open("rb") as file:
        torch.load(file, weights_only=False)
    assert fired.exists()  # the bomb works


WHOLE = {
    "schema": 1, "state": asdict(TrainerState(step=1, update=1, data_cursor=8, kl_coef=0.1, grad_norms=[1.0])),
    "world_size": 1, "zero_stage": 0, "files": {"optimizer.pt": {"bytes": 1, "sha256": "0"}}, "config_hash": None,
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(manifest=(mutated(WHOLE) | JSON).map(json.dumps) | st.text() | st.just("[" * 100_000))
def test_any_manifest_is_accepted_or_reported(tmp_path_factory, manifest):
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "step-1").mkdir()
    (directory / "step-1" / MANIFEST).write_text(manifest, errors="replace")
    whole, skipped = stored.complete(directory)
    assert len(whole) + len(skipped) == 1


def test_a_manifest_cannot_name_files_outside(tmp_path):
    save(tmp_path, 1)
    manifest = json.loads((tmp_path / "step-1" / MANIFEST).read_text())
    manifest["files"]["../../../etc/passwd"] = {}
    (tmp_path / "step-1" / MANIFEST).write_text(json.dumps(manifest))
    assert "outside" in str(stored.check(tmp_path / "step-1"))


@pytest.mark.parametrize(
    "values",
    [
        {"resting_rows": ["a"]},
        {"resting_rows": None},
        {"resting_rows": {"a": "x"}},
        {"resting_rows": {"a": -1}},
        {"update": 2**63},
        {"data_cursor": 10**30},
        {"unfinished": [2**63]},
        {"data_skipped": [-1]},
        {"data_rows": 7},
        {"curriculum": ["0:1"]},
        {"curriculum": {"0:1": 3}},
    ],
)
def test_a_state_that_a_resumed_run_cannot_use_is_refused(tmp_path, values):
    save(tmp_path, 1)
    manifest = json.loads((tmp_path / "step-1" / MANIFEST).read_text())
    manifest["state"] |= values
    (tmp_path / "step-1" / MANIFEST).write_text(json.dumps(manifest))
    assert stored.check(tmp_path / "step-1") == "has no readable manifest (ValueError)"


def test_pipes_and_deep_nesting_neither_block_nor_end_a_resume(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-1" / "config.json").write_text("[" * 100_000)
    assert stored.saved_settings(tmp_path / "step-1") is None
    (tmp_path / "step-2").mkdir()
    os.mkfifo(tmp_path / "step-2" / MANIFEST)
    assert stored.complete(tmp_path)[1] == ["step-2: has no readable manifest (OSError)"]
