"""Reward functions from files in worker processes: each failure is typed, counted, and ends in time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.rewards.composition import FaultTolerance, RewardSet, make_reward_set
from lockstep.rewards.outcomes import Outcome
from lockstep.rewards.workers import pool as isolation
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from tests.fixtures.vision import images_in, picture

HOSTILE = """
import os, pathlib, signal, subprocess, sys, time

def good(rollout):
    return float(rollout.messages[-1]["content"] == rollout.example["answer"])

def sleeps(rollout):
    time.sleep(60)

def hangs_in_c(rollout):  # holds the interpreter lock, so that no thread of this process runs
    return sum(range(10**14))

def ignores_sigterm(rollout):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)

def raises(rollout):
    raise ZeroDivisionError("oh")

def exits(rollout):
    sys.exit(3)

def nan(rollout):
    return float("nan")

def none(rollout):
    return None

def text(rollout):
    return "1.0"

def too_few(completions, **columns):
    return [1.0]

def dies(rollout):
    print("last words", flush=True)
    os._exit(7)

def aborts(rollout):
    os.abort()

def hoards(rollout):
    return float(len(bytearray(10 * 2**30)))

def prints(rollout):
    line = "x" * 2**20
    for _ in range(100):
        print(line)
        os.write(2, line.encode())
    return 1.0

def vandal(rollout):
    rollout.messages[-1]["content"] = "7"
    rollout.example["answer"] = "8"
    return 0.0

def forks(rollout):
    os.fork()
    return 1.0

def closes_everything(rollout):
    os.closerange(0, 2**16)
    return 1.0

def leaves_a_child(rollout):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    pathlib.Path(rollout.example["file"]).write_text(f"{os.getpid()} {child.pid}")
    return 1.0

def pid(rollout):
    return float(os.getpid())

def sleeps_then_leaves(rollout):
    leaves_a_child(rollout)
    time.sleep(60)

def write_to_sockets(data):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view):]
        except OSError:
            continue

def forges(rollout):
    write_to_sockets(b'{"verdicts": 7}\\n')
    return 1.0

def floods(rollout):
    write_to_sockets(b"x" * (17 * 2**20))

async def async_good(rollout):
    return good(rollout)

def with_alarm(rollout):  # as math-verify does: an error off the main thread
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(0)
    return 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "hostile.py"
    file.write_text(HOSTILE)
    return file


def rollout(said: str = "7", /, *, number: int = 0, **example: object) -> Rollout:
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-0.5,), finish_reason=FinishReason.STOP)
    return Rollout(
        rollout_id=number,
        group_id=0,
        calls=(call,),
        messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": said}),
        example={"answer": "7", **example},
    )


def make(functions: Path, *names: str, timeout_s: float = 30.0, workers: int = 2, memory_gib: float = 2.0) -> RewardSet:
    return make_reward_set(
        [f"{functions}:{name}" for name in names],
        tolerance=FaultTolerance(timeout_s=timeout_s, max_error_rate=1.0),
        isolation=Isolation(workers=workers, memory_gib=memory_gib),
    )


def score(rewards: RewardSet, *rollouts: Rollout) -> list[Rollout]:
    return asyncio.run(rewards.score(rollouts))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_running, pids))


CASES = [
    ("sleeps", Outcome.TIMEOUT, "no answer in 1 s"),
    ("hangs_in_c", Outcome.TIMEOUT, "no answer"),
    ("ignores_sigterm", Outcome.TIMEOUT, "no answer"),
    ("raises", Outcome.EXCEPTION, "hostile.py: oh"),
    ("exits", Outcome.EXCEPTION, "hostile.py: 3"),
    ("nan", Outcome.NON_FINITE, "nan"),
    ("text", Outcome.WRONG_TYPE, "'1.0'"),
    ("too_few", Outcome.WRONG_LENGTH, "1 rewards for 2"),
    ("dies", Outcome.CRASHED, "exited with status 7; its output ends: last words"),
    ("aborts", Outcome.CRASHED, "SIGABRT"),
    ("hoards", Outcome.EXCEPTION, "MemoryError"),
    ("closes_everything", Outcome.CRASHED, "its process "),
    ("forges", Outcome.CRASHED, "its process sent something that is not a "),
    ("floods", Outcome.CRASHED, "its process sent more than 16777216 bytes"),
]


@pytest.mark.parametrize(("name", "outcome", "says"), CASES, ids=[case[0] for case in CASES])
def test_a_hostile_function_drops_its_rollouts_and_nothing_else(functions, name, outcome, says):
    rewards = make(functions, name, "good", timeout_s=1.0)
    try:
        started = time.monotonic()
        scored = score(rewards, rollout(number=0), rollout(number=1))
        assert time.monotonic() - started < 30
        for one in scored:
            assert one.status is RolloutStatus.FAILED
            assert one.rewards == {}
            assert f"reward {name}: {outcome}" in (one.error or "")
            assert says in (one.error or "")
        metrics = rewards.take_metrics()
        assert metrics[f"reward/errors/{outcome}"] == 2
        assert sum(value for key, value in metrics.items() if key.startswith("reward/errors/")) == 2
        assert metrics["reward/good/mean"] == 1.0
    finally:
        rewards.close()


def test_a_hundred_megabytes_of_output_are_read_and_discarded(functions):
    rewards = make(functions, "prints")
    (scored,) = score(rewards, rollout())
    rewards.close()
    assert scored.reward == 1.0


def test_a_function_can_change_only_its_copy(functions):
    rewards = make(functions, "vandal", "good", workers=1)
    given = rollout("8")
    (scored,) = score(rewards, given)
    rewards.close()
    assert scored.rewards == {"vandal": 0.0, "good": 0.0}
    assert given.messages[-1]["content"] == "8"
    assert given.example["answer"] == "7"


def test_workers_are_reused_and_replaced_after_a_death(functions):
    rewards = make(functions, "pid", workers=1)
    first, second = (score(rewards, rollout())[0].reward for _ in range(2))
    assert first == second != os.getpid()
    os.kill(int(first), signal.SIGKILL)
    gone(int(first))
    third = score(rewards, rollout())[0].reward  # the death of an idle worker is not an error
    rewards.close()
    assert third not in (0.0, first)


def test_a_killed_worker_that_still_looks_alive_is_replaced(functions, monkeypatch):
    """Until the last thread of a killed process has ended, its socket is open and its pid exists."""
    monkeypatch.setattr(isolation._Worker, "is_alive", True)
    rewards = make(functions, "pid", workers=1)
    first = score(rewards, rollout())[0].rewards["pid"]
    os.kill(int(first), signal.SIGKILL)
    gone(int(first))
    scored = score(rewards, rollout())[0]
    rewards.close()
    assert scored.rewards["pid"] not in (0.0, first)
    assert not any(value for key, value in rewards.take_metrics().items() if key.startswith("reward/errors/"))


def test_a_function_that_forks_answers_once(functions):
    rewards = make(functions, "forks", "pid", workers=1)
    scored = [score(rewards, rollout())[0] for _ in range(3)]
    rewards.close()
    assert [one.rewards["forks"] for one in scored] == [1.0] * 3
    assert len({one.rewards["pid"] for one in scored}) == 1


def test_async_functions_and_functions_that_need_the_main_thread(functions):
    rewards = make(functions, "async_good", "with_alarm")
    first, second = score(rewards, rollout("7"), rollout("8"))
    rewards.close()
    assert first.rewards == {"async_good": 1.0, "with_alarm": 1.0}
    assert second.rewards == {"async_good": 0.0, "with_alarm": 1.0}


def test_closing_ends_the_workers_and_their_children(functions, tmp_path):
    file = tmp_path / "pids"
    rewards = make(functions, "leaves_a_child")
    score(rewards, rollout(file=str(file)))
    pids = [int(pid) for pid in file.read_text().split()]
    assert all(map(is_running, pids))
    rewards.close()
    assert gone(*pids)


async def cancelled(rewards: RewardSet, given: Rollout, file: Path) -> None:
    task = asyncio.create_task(rewards.score([given]))
    while not (file.exists() and len(file.read_text().split()) == 2):
        await asyncio.sleep(0.05)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_cancelled_call_gives_up_its_worker(functions, tmp_path):
    file = tmp_path / "pids"
    rewards = make(functions, "sleeps_then_leaves", timeout_s=300.0)
    asyncio.run(cancelled(rewards, rollout(file=str(file)), file))
    assert gone(*[int(pid) for pid in file.read_text().split()])
    rewards.close()


def test_a_pool_that_is_garbage_ends_its_workers_and_their_children(functions, tmp_path):
    file = tmp_path / "pids"
    rewards = make(functions, "leaves_a_child")
    score(rewards, rollout(file=str(file)))
    pids = [int(pid) for pid in file.read_text().split()]
    assert all(map(is_running, pids))
    del rewards
    gc.collect()
    assert gone(*pids)


TRAINER = """
    import asyncio, json, sys
    from lockstep.rewards.composition import FaultTolerance, make_reward_set
    from lockstep.rollout.saved_rollouts import from_json
    rewards = make_reward_set([sys.argv[1]], tolerance=FaultTolerance(timeout_s=60, max_error_rate=1.0))
    asyncio.run(rewards.score([from_json(json.loads(sys.argv[2]))]))
"""


@pytest.mark.parametrize("name", ["leaves_a_child", "sleeps_then_leaves"])
def test_no_process_is_left_when_the_trainer_ends_or_is_killed(functions, tmp_path, name):
    from lockstep.rollout.saved_rollouts import to_json

    file = tmp_path / "pids"
    line = json.dumps(to_json(rollout(file=str(file))))
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINER), f"{functions}:{name}", line])
    end = time.monotonic() + 60
    while not (file.exists() and len(file.read_text().split()) == 2) and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(pid) for pid in file.read_text().split()]
    if name == "sleeps_then_leaves":  # in the middle of a call
        trainer.kill()
    trainer.wait(timeout=60)
    assert gone(*pids)


def test_loading_happens_in_a_worker_and_its_errors_are_config_errors(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\nwhere = os.getpid()\ndef score(rollout, limit):\n    return float(where)\n")
    with pytest.raises(ConfigError, match=r"missing a required argument: 'limit'.*reward.settings.score"):
        make_reward_set([f"{file}:score"])
    with pytest.raises(ConfigError, match="has no function 'other'; it has score"):
        make_reward_set([f"{file}:other"])
    with pytest.raises(ConfigError, match="no file"):
        make_reward_set([f"{tmp_path}/none.py:score"])
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(4)\n")
    with pytest.raises(ConfigError, match="exited with status 4"):
        make_reward_set([f"{broken}:score"])
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ConfigError, match="took longer than 2 s"):
        make_reward_set([f"{slow}:score"], isolation=Isolation(start_timeout_s=2.0))
    rewards = make_reward_set([f"{file}:score"], settings={"score": {"limit": 1}})
    (scored,) = score(rewards, rollout())
    rewards.close()
    assert scored.reward != os.getpid()


def test_thread_isolation_runs_files_in_this_process(functions):
    rewards = make_reward_set([f"{functions}:pid"], isolation=Isolation(mode="thread"))
    (scored,) = score(rewards, rollout())
    assert scored.reward == os.getpid()


def test_a_regex_with_exponential_time_is_killed():
    rewards = make_reward_set(
        ["regex"],
        settings={"regex": {"pattern": "(a+)+b"}},
        tolerance=FaultTolerance(timeout_s=1.0, max_error_rate=1.0),
    )
    scored = score(rewards, rollout("a" * 60), rollout("aab"))
    rewards.close()
    assert "regex: timeout" in (scored[0].error or "")
    assert scored[1].reward == 1.0


@pytest.mark.parametrize("settings", [{"mode": "vm"}, {"workers": 0}, {"memory_gib": -1.0}])
def test_invalid_isolation_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="reward"):
        Isolation(**settings)


def test_a_function_in_a_worker_opens_the_images_of_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digest = images_in(tmp_path / "media", monkeypatch).add(picture(1))
    (tmp_path / "seen.py").write_text(
        "import os\n"
        "from lockstep.rollout.media.run_images import open_image, run_images\n"
        "def width(rollout):\n"
        f"    assert os.getpid() != {os.getpid()}\n"
        "    return float(open_image(run_images(rollout.prompt)[0]).width)\n"
    )
    given = rollout()
    prompt = {"role": "user", "content": [{"type": "image", "digest": digest}]}
    given = replace(given, messages=(prompt, *given.messages[1:]))
    rewards = make_reward_set([f"{tmp_path}/seen.py:width"], isolation=Isolation(workers=1, memory_gib=2.0))
    try:
        assert score(rewards, given)[0].reward == picture(1).width
    finally:
        rewards.close()
