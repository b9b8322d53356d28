"""Benchmarks without an engine in their smallest form, and the harness that compares two trainers."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time

import psutil
import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.sandbox.sandbox import isolation_problem
from tests.fixtures.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as Python does for a script

from harness.busy import SPIN, busy_cores  # noqa: E402
from harness.curves import CurveFile, draw, reward_at  # noqa: E402
from harness.results import fitted_exponent  # noqa: E402
from harness.turns import Opponent  # noqa: E402

pytestmark = pytest.mark.long


def result_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--quick", "--json", *arguments])
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == name
    assert {"cpu", "cores", "versions", "date"} <= result["machine"].keys()
    return result


def test_packing_gives_the_gradient_of_padding(monkeypatch, capsys):
    assert result_of("packing", monkeypatch, capsys)["gradient_difference"] < 1e-5


def test_the_product_of_ratios_loses_weight(monkeypatch, capsys):
    result = result_of("retained_weight", monkeypatch, capsys)
    assert result["sequence_product_truncate_at_64"] < result["token_truncate_at_64"]


def test_an_update_is_measured_against_the_bound_and_trl(monkeypatch, capsys):
    pytest.importorskip("trl")
    result = result_of("update", monkeypatch, capsys)
    assert [row["side"] for row in result["rows"]] == ["bound", "lockstep", "trl"]
    assert result["overhead"] > -1


def test_shared_prompts_give_the_gradient_of_rows_apart(monkeypatch, capsys):
    result = result_of("prefixes", monkeypatch, capsys)
    assert result["gradient_difference"] < 1e-5
    assert result["rows"][0]["tokens"] < 0.5


def test_the_gateway_is_measured_with_and_without_ids(monkeypatch, capsys):
    result = result_of("gateway", monkeypatch, capsys)
    assert {"exponent with ids", "exponent without ids"} <= result.keys()
    assert result["last request with ids [KiB]"] < 4 * result["last request without ids [KiB]"]


def test_calls_in_a_sandbox_are_measured_against_bare_processes(monkeypatch, capsys):
    if isolation_problem() is not None:
        pytest.skip("this system allows no namespaces")
    result = result_of("sandbox_calls", monkeypatch, capsys)
    assert {"python_ratio", "shell_ratio", "opening_ms"} <= result.keys()


def test_growth_measures_a_point():
    point = runpy.run_path(str(BENCHMARKS / "growth.py"))["point"]
    sizes = {"length": 16, "rows": 4, "group": 2, "turns": 2, "vocabulary": 64, "hidden": 32, "layers": 1, "budget": 64}
    assert point(sizes, 1)["trained tokens/CPU s"] > 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sync_is_measured_against_its_copy(monkeypatch, capsys):
    result = result_of("sync", monkeypatch, capsys, "--repeats", "1")
    assert [row["side"] for row in result["rows"]] == ["copy", "parameter", "group", "lockstep"]
    assert result["over_copy"] > 0


def test_the_fitted_exponent_is_the_exponent_of_a_power_law():
    assert fitted_exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)


TRAINER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from harness.turns import Turn
turn = Turn()
for update in range(3):
    turn.over(trained_tokens=10 * update, reward=0.5, longest=1)
if sys.argv[2] == "fails":
    raise SystemExit("out of cake")
turn.over(trained_tokens=30)
"""


def test_trainers_take_turns_and_a_failure_is_reported(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    sides = {
        name: Opponent(script, [str(BENCHMARKS), name], log=tmp_path / f"{name}.log", environment={})
        for name in ("works", "fails")
    }
    for side in sides.values():
        assert side.first_turn()["trained_tokens"] == 0
    for update in (1, 2):
        assert [side.turn()["trained_tokens"] for side in sides.values()] == [10 * update] * 2
    assert sides["works"].turn()["trained_tokens"] == 30
    with pytest.raises(RuntimeError, match=r"status 1(.|\n)*out of cake"):
        sides["fails"].turn()
    for side in sides.values():
        side.close()


RANK = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harness.ranks import start_other_ranks
from harness.turns import Turn
turn = Turn()
start_other_ranks(3)
from torch import distributed
distributed.init_process_group("gloo")
turn.over(ranks=int(os.environ["WORLD_SIZE"]))
place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
Path(sys.argv[2], f"{turn.is_heard}-{os.environ['RANK']}").write_text(" ".join(place))
"""


def test_all_ranks_of_a_trainer_wait_during_the_other_trainers_turn(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    places = tmp_path / "places"
    places.mkdir()
    side = Opponent(script, [str(BENCHMARKS), str(places)], log=tmp_path / "log", environment={})
    answer = side.first_turn()
    assert answer["ranks"] == 3
    time.sleep(0.5)
    assert not list(places.iterdir()), "a rank that continues computes in the other trainer's turn"
    side.close()
    expected = {"True-0", "False-1", "False-2"}
    give_up_at = time.monotonic() + 60
    while {path.name for path in places.iterdir() if path.read_text()} != expected and time.monotonic() < give_up_at:
        time.sleep(0.05)
    said = {path.name: path.read_text().split() for path in places.iterdir()}
    assert set(said) == expected
    for name, (rank, local_rank, here, address, _) in said.items():
        assert rank == local_rank == name[-1]
        assert (here, address) == ("3", "127.0.0.1")
    assert len({place[-1] for place in said.values()}) == 1


def test_the_ratio_compares_trained_tokens_per_second():
    compare = runpy.run_path(str(BENCHMARKS / "compare_trl.py"))
    first = {"seconds": 60.0, "trained_tokens": 1, "longest": 1, "reward": 0.0, "cpu_s": 2.0}
    said = {
        "lockstep": [first, *({**first, "seconds": s, "trained_tokens": 300} for s in (1.0, 2.0))],
        "trl": [first, *({**first, "seconds": s, "trained_tokens": 400} for s in (4.0, 4.0))],
    }
    rows, ratio = compare["summary"](compare["WORKLOADS"]["multi_lognormal"], said, {"lockstep": 2, "trl": 1})
    assert [row["threads"] for row in rows] == [2, 1]
    assert ratio == pytest.approx(2.0)
    assert [row["trained tokens/s"] for row in rows] == [200.0, 100.0]
    assert [row["trained tokens/CPU s"] for row in rows] == [150.0, 200.0]
    assert compare["curve"](said["lockstep"]) == [(60.0, 0.0), (61.0, 0.0), (63.0, 0.0)]


class Trial:
    """A side that is faster with two threads, and once as slow as with one."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def turn(self, threads: int) -> dict[str, float]:
        self.asked.append(threads)
        return {"seconds": 4.0 if threads == 1 or len(self.asked) == 2 else 1.0, "trained_tokens": 8}


def test_each_side_gets_the_threads_with_which_it_was_faster():
    best_threads = runpy.run_path(str(BENCHMARKS / "compare_trl.py"))["best_threads"]
    side = Trial()
    assert best_threads(side, [1, 2], rounds=2) == 2
    assert side.asked == [1, 2, 1, 2]
    assert best_threads(side, [1], rounds=2) == 1
    assert len(side.asked) == 4


def seed_result(end: float, reward: float) -> dict:
    side = {"curve": [(end / 2, 0.1), (end, reward)], "trained_tokens": [10, 20], "heldout": reward}
    return {"lockstep": side, "trl": side}


def test_curves_go_on_at_the_first_missing_seed(tmp_path):
    path, settings = tmp_path / "curves.json", {"updates": 2}
    first = CurveFile(path, settings)
    first.note(heldout_before=0.1, threads={"lockstep": 2, "trl": 1})
    first.add(0, seed_result(10.0, 0.5))
    again = CurveFile(path, settings)
    assert again.missing([0, 1, 2]) == [1, 2]
    assert again.facts == {"heldout_before": 0.1, "threads": {"lockstep": 2, "trl": 1}}
    again.add(2, seed_result(20.0, 0.7))
    draw(CurveFile(path, settings), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="curves of other settings"):
        CurveFile(path, {"updates": 3})


def test_between_updates_a_curve_has_the_reward_of_the_last_one():
    curve = [(10.0, 0.1), (20.0, 0.4)]
    assert [reward_at(curve, at) for at in (0.0, 10.0, 19.9, 20.0)] == [0.1, 0.1, 0.1, 0.4]


ENDLESS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from harness.turns import Turn
turn = Turn()
while True:
    turn.over(pid=os.getpid())
"""


def test_a_trainer_takes_the_threads_of_its_turn_and_ends_with_its_benchmark(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(ENDLESS)
    benchmark = tmp_path / "benchmark.py"
    benchmark.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from harness.turns import Opponent\n"
        "side = Opponent(Path(sys.argv[2]), [sys.argv[1]], log=Path(sys.argv[3]), environment={})\n"
        "side.first_turn()\n"
        "threads = [side.turn(count)['threads'] for count in (2, 1, 3)]\n"
        "print(int(side.turn()['pid']), *threads, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(benchmark), str(BENCHMARKS), str(script), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid, *threads = map(int, process.stdout.readline().split())
        assert threads == [2, 1, 3]
        process.kill()
    wait_until_ended(pid)


def wait_until_ended(pid: int) -> None:
    give_up_at = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_busy_processes_compute_on_their_core_and_end_on_an_error():
    core = min(os.sched_getaffinity(0))
    busy = busy_cores([core, core])
    busy.__enter__()
    spinning = [child for child in psutil.Process().children() if SPIN in child.cmdline()]
    assert [child.cpu_affinity() for child in spinning] == [[core]] * 2
    assert not busy.__exit__(ValueError, ValueError("out of cake"), None), "it must not swallow the error"
    assert not any(child.is_running() for child in spinning)


def test_a_busy_process_ends_with_a_killed_benchmark(tmp_path):
    script = tmp_path / "benchmark.py"
    script.write_text(
        "import os, sys, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import psutil\n"
        "from harness.busy import busy_cores\n"
        "with busy_cores([min(os.sched_getaffinity(0))]):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script), str(BENCHMARKS)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until_ended(pid)


def test_the_ratio_of_a_busy_core_is_per_trained_token():
    busy_core = runpy.run_path(str(BENCHMARKS / "busy_core.py"))
    idle = {"seconds": 4.0, "time/update": 2.0, "trained_tokens": 100, "threads": 2}
    busy = {"seconds": 16.0, "time/update": 12.0, "trained_tokens": 200, "threads": 2}
    rows, ratios = busy_core["summary"]("real", {"lockstep": {0: [idle], 1: [busy]}, "trl": {0: [idle], 1: [busy]}})
    assert ratios == {
        "real_lockstep_update_1_busy": 3.0,
        "real_lockstep_step_1_busy": 2.0,
        "real_trl_step_1_busy": 2.0,
    }
    assert [row["1 busy / idle"] for row in rows] == [3.0, 2.0, 2.0]


def test_the_time_per_token_from_engine_to_loss_is_measured(monkeypatch, capsys):
    result = result_of("records", monkeypatch, capsys)
    assert result["us_per_token"] > 0
    assert len(result["rows"]) == 6
