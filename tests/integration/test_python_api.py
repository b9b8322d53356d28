"""`lockstep.train` in scripts, on ranks and in notebooks: the objects of the program are used, and it goes on after."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.trainer.observe.metrics_log import read_metrics
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT
from tests.integration.test_run import demo  # noqa: F401  # makes the demo's model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("demo")]

PROGRAM = """
import lockstep
from lockstep.rollout.errors import LockstepError

MODEL = {model!r}
rows = [{{"question": f"compute {{number}}+1", "answer": str(number + 1)}} for number in range(32)]
seen = []
limit = 40

def short(rollout):
    seen.append(rollout.answer)
    return float(len(rollout.answer) < limit)

SMALL = dict(
    model=MODEL, data=rows, environment="single_turn", rewards=[short], run_root={root!r}, updates=2,
    rollout={{"prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens_per_turn": 16, "kv_cache_gib": 0.25}},
    logger={{"print_rollouts_every": 0}}, eval={{"every": 0}}, optimizer={{"lr": 1e-4}},
)
"""


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., str]:
    def run(text: str, *launcher: str, **environment: str) -> str:
        """Return the output of a program that succeeds, with the objects of `PROGRAM`."""
        program = tmp_path / "program.py"
        begin = PROGRAM.format(model=str(ROOT / "models/calculator"), root=str(tmp_path / "runs"))
        program.write_text(begin + text)
        python = forked_python()
        done = subprocess.run(
            [python, *launcher, str(program)],
            cwd=tmp_path, capture_output=True, text=True, timeout=500,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": python, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout

    return run


def test_a_closure_scores_in_this_process_and_the_run_goes_on(run_program: Callable[..., str], tmp_path: Path) -> None:
    output = run_program(
        """
import json, signal, threading

before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
steps, arrived, evaluations = [], [], []

def on_step(report):
    steps.append(report.update)
    assert all(rollout.calls.rows and rollout.calls.as_json for rollout in report.rollouts), "prepared by the sampler"
    if report.update == 1:
        lockstep.stop()

run = lockstep.train(
    **{**SMALL, "eval": {"every": 1}}, heldout={"first": rows[:2]}, run_name="mine", on_step=on_step,
    on_rollout=lambda rollout: arrived.append(rollout.reward),
    on_evaluation=lambda update, metrics: evaluations.append((update, sorted(metrics))),
)
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
assert steps == [1], steps
assert len(arrived) == 16, arrived
assert [update for update, _ in evaluations] == [1] and "eval/first/reward_mean" in evaluations[0][1], evaluations
assert len(seen) > 16, len(seen)  # the evaluation, too
assert [line["step"] for line in run.history] == [1], run.history
assert len(run.rollouts(1)) == 16
steps.clear()
again = run.resume(updates=3)
assert steps == [2, 3] and again.directory == run.directory, steps
assert [line["step"] for line in again.history] == [1, 2, 3]
assert (again.model / "config.json").is_file()
assert "<svg" in again._repr_html_()

limit = 0
other = []
worker = threading.Thread(target=lambda: other.append(lockstep.train(**SMALL, run_name="threaded")))
worker.start()
worker.join()
assert [line["reward/mean"] for line in other[0].history] == [0.0, 0.0]
try:
    lockstep.train(**SMALL, run_name="mine")
except LockstepError as error:
    print("REFUSED", error)
try:
    lockstep.train(**{**SMALL, "data": rows[:8]}, run_name="mine", resume="auto")
except LockstepError as error:
    print("REFUSED", error)
"""
    )
    assert "stopped after update 1" in output
    assert "lockstep.Run('{}').resume(updates=2), with".format(tmp_path / "runs/mine") in output
    assert "code of your files, run with your rights: object:short" in output
    refusals = re.findall(r"REFUSED (.+)", output)
    assert "exists and is not overwritten" in refusals[0]
    assert "learns another task" in refusals[1]
    run = tmp_path / "runs/mine"
    for update in (1, 2, 3):
        for rollout in read_rollouts(run / f"rollouts/step-{update:06d}.jsonl"):
            assert rollout.rewards == {"short": float(len(rollout.answer) < 40)}


def test_a_failed_run_goes_on_in_the_same_process(run_program: Callable[..., str], tmp_path: Path) -> None:
    """The traceback of the failure is kept, as a notebook does."""
    output = run_program(
        """
import sys

def breaks(rollout):
    if len(seen) >= 16:
        raise KeyError("gold")
    return short(rollout)

try:
    lockstep.train(**{**SMALL, "rewards": [breaks]}, run_name="mine")
except LockstepError as error:
    sys.last_value = error
    print("FAILED", *error.__notes__)

    def breaks(rollout):
        return short(rollout)

    steps = []
    run = lockstep.Run(f"{SMALL['run_root']}/mine").resume(rewards=[breaks], on_step=steps.append)
assert [line["step"] for line in run.history] == [1, 2], run.history
assert [report.update for report in steps] == [2]
"""
    )
    directory = tmp_path / "runs/mine"
    failed = re.search(r"FAILED (.+)", output)
    assert failed is not None
    assert f"update 1 is saved; to go on: in Python: lockstep.Run('{directory}').resume(updates=2)" in failed[1]


def test_copies_score_in_workers(run_program: Callable[..., str], tmp_path: Path) -> None:
    run_program(
        """
run = lockstep.train(**{**SMALL, "updates": 1}, reward={"isolation": "process"}, run_name="mine")
assert seen == []
for rollout in run.rollouts(1):
    assert rollout.rewards == {"short": float(len(rollout.answer) < 40)}
"""
    )


def test_a_loaded_model_an_environment_and_tools_are_used(run_program: Callable[..., str], tmp_path: Path) -> None:
    run_program(
        """
import asyncio, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

asked = []

def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: one
        b: other
    '''
    asked.append((a, b))
    return a + b

model = AutoModelForCausalLM.from_pretrained(MODEL)
before = {name: value.clone() for name, value in model.state_dict().items()}
settings = {key: value for key, value in SMALL.items() if key not in ("model", "environment")}
run = lockstep.train(
    **settings, model=model, tokenizer=AutoTokenizer.from_pretrained(MODEL), tools=[add], run_name="mine"
)
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
trained = AutoModelForCausalLM.from_pretrained(run.model)
assert any(not torch.equal(value, before[name]) for name, value in trained.state_dict().items())


class Echo:
    tools = ()

    def __init__(self):
        self.turns = []

    async def reset(self, example):
        assert self.turns == []
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message):
        from lockstep.rollout.episode.environment import Step

        self.turns.append(message)
        return Step(messages=({"role": "user", "content": "again"},), done=len(self.turns) == 2)


settings["environment"] = {"name": Echo(), "max_turns": 2}
run = lockstep.train(**{**settings, "updates": 1}, model=MODEL, run_name="echo")
assert {rollout.num_turns for rollout in run.rollouts(1)} == {2}
"""
    )


@pytest.mark.distributed
def test_two_ranks_train_with_their_own_objects(run_program: Callable[..., str], tmp_path: Path) -> None:
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs/accelerate/zero3.yaml")]
    run_program(
        """
import os
run = lockstep.train(**SMALL, run_name="mine")
assert [line["step"] for line in run.history] == [1, 2]
open(f"seen-{os.environ['RANK']}", "w").write(str(len(seen)))
""",
        *launcher, "--num_processes", "2", "--main_process_port", "0",
    )  # fmt: skip
    assert sum(int((tmp_path / f"seen-{rank}").read_text()) for rank in (0, 1)) == 32
    lines = read_metrics(tmp_path / "runs/mine/metrics.jsonl")
    assert all(0 <= line["reward/mean"] <= 1 for line in lines)


@pytest.mark.distributed
def test_a_function_of_a_notebook_trains_on_forks(run_program: Callable[..., str], tmp_path: Path) -> None:
    output = run_program(
        """
from accelerate import notebook_launcher

notebook_launcher(lambda: lockstep.train(**SMALL, run_name="mine"), num_processes=2)
"""
    )
    assert "2 rank(s)" in output
    assert len(read_metrics(tmp_path / "runs/mine/metrics.jsonl")) == 2


@pytest.mark.slow
def test_a_notebook_shows_progress_and_curves(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    begin = PROGRAM.format(model=str(ROOT / "models/calculator"), root=str(tmp_path / "runs"))
    cells = [
        begin,
        "run = lockstep.train(**SMALL, run_name='mine')",
        "len(seen), [line['step'] for line in run.history]",
        "run",
        "limit = 0\nrun = run.resume(updates=3)\nrun.history[-1]['reward/mean']",
        "await __import__('asyncio').sleep(0, 'the loop of the kernel lives')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3", resources={})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    client.execute(cwd=str(tmp_path), env=environment)
    outputs: list[list[dict[str, Any]]] = [cell["outputs"] for cell in notebook.cells]

    text = "".join(output.get("text", "") for output in outputs[1] if output["output_type"] == "stream")
    assert "run directory" in text
    assert re.search(r"step 2\b|2/2", text), text
    displays = [output for output in outputs[1] if output["output_type"] == "display_data"]
    assert len(displays) == 1, "one picture, drawn again"
    assert "<svg" in displays[0]["data"]["text/html"]
    assert "update 2 of 2" in displays[0]["data"]["text/html"]
    assert outputs[2][0]["data"]["text/plain"] == "(32, [1, 2])"
    assert "<svg" in outputs[3][0]["data"]["text/html"]
    assert outputs[4][-1]["data"]["text/plain"] == "0.0"
    assert "lives" in outputs[5][0]["data"]["text/plain"]
    assert json.loads(nbformat.writes(notebook))


def test_the_page_trains(tmp_path: Path) -> None:
    """The first block of docs/python.md, with one update and few rollouts."""
    block = re.search(r"```python\n(.+?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert block is not None
    program = tmp_path / "program.py"
    text = block[1].replace("updates=20", "updates=1, eval={'every': 0}, rollout={'kv_cache_gib': 0.25}")
    program.write_text(text.replace('"models/calculator"', repr(str(ROOT / "models/calculator"))))
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert 0.05 < float(done.stdout.split()[-1]) <= 1, "the example does not fit the model of the demo"
