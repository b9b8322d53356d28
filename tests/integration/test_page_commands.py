"""The bash blocks of README and docs, run unchanged in a reader's directory.

Covered: every block that does not state a need for GPUs, the hub, the package index or an optional package. Files on a
page are written first; settings behind the reader's own cut runs to two small updates. Not covered: the printed output.
All are for `make test-slow`; tests/unit/project/test_docs_names.py refuses a command that is not known here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.demo.make import make_demo
from tests.fixtures.forked_python import forked_python
from tests.fixtures.pages import PAGES, ROOT, Block, bash_blocks, page_files

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

RUN = (
    r"(OMP_NUM_THREADS=\d )?(lockstep [a-z-]+|python (benchmarks/retained_weight\.py|examples/one_step\.py|\w+\.py))|"
    r"python -m scripts\.published\.prove \"|"
    r"accelerate launch --config_file configs/accelerate/zero3\.yaml (--num_processes 2 )?-m lockstep |"
    r"make (train|model|report|plot|help)\b"
)
"""Commands that are run here, as a pattern of their beginnings."""
PLANNED = r"make (check|test|test-unit|lint|install|format|docs|reproduce)\b|bash \.ci/run\b"
"""Commands that are only planned here (`make -n`): they change the checkout, run these tests, or have their own."""

SHORT = {
    "RUN": "updates=2 rollout.prompts_per_step=2 rollout.samples_per_prompt=4 eval.prompts=4",
    "EVALUATION": "eval.prompts=4",
    "REWARD_MODEL": "data.max_comparisons=64 normalization.num_samples=8",
}
SHORTENED = """
python() {
    "$FORK" "$@"
}
lockstep() {
    case "$*" in
        "train "*) "$FORK" -m lockstep "$@" $RUN ;;
        "evaluate "*) "$FORK" -m lockstep "$@" $EVALUATION ;;
        "train-reward-model "*) "$FORK" -m lockstep "$@" $REWARD_MODEL ;;
        diagnose*--break* | check-loss*:averaged) "$FORK" -m lockstep "$@" || test $? = 1 ;;
        *) "$FORK" -m lockstep "$@" ;;
    esac
}
accelerate() {
    case "$*" in
        *train-reward-model*) "$FORK" -m accelerate.commands.accelerate_cli "$@" $REWARD_MODEL ;;
        *) "$FORK" -m accelerate.commands.accelerate_cli "$@" $RUN ;;
    esac
}
make() {
    local words=() args=
    for word in "$@"; do
        case $word in ARGS=*) args=${word#ARGS=} ;; *) words+=("$word") ;; esac
    done
    case $1 in
        train) args="$args $RUN" ;;
        test | test-unit | lint | install | format | docs | reproduce) words+=(--dry-run) ;;
    esac
    command make "${words[@]}" SKIP_INSTALL=1 VENV=$VENV ARGS="$args"
}
"""


def rows(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 8))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the demo's model, one finished run, and the files of a reader that pages name."""
    place = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if entry.name not in ("models", "data", "runs", "site", ".venv") and not entry.name.startswith(".git"):
            (place / entry.name).symlink_to(entry)
    made = make_demo(
        "calculator", ROOT / "models/calculator", ROOT / "data/demo/calculator", 0, Console(file=sys.stderr)
    )
    shutil.copytree(made.model_dir, place / "models/calculator")
    (place / "models/teacher").symlink_to("calculator")
    shutil.copytree(made.data_dir, place / "data/demo/calculator")
    for name in ("my", "my_test", "gsm8k"):
        rows(
            place / f"{name}.jsonl", {"question": "compute 12+3*4", "answer": "24"}, {"question": "1+1", "answer": "2"}
        )
    for name in ("x", "hard"):
        rows(place / f"{name}.jsonl", {"problem": "1+1", "solution": "2"})
    rows(place / "pairs.jsonl", {"prompt": "say yes", "chosen": "yes", "rejected": "no"})
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"problem": ["1+1", "2+2"] * 8, "solution": ["2", "4"] * 8})
    pyarrow.parquet.write_table(table, place / "problems.parquet")
    first = (
        "python -m lockstep train experiment=demo run_name=earlier updates=12 checkpoint.every=4 checkpoint.keep=9 "
        "rollout.prompts_per_step=2 rollout.samples_per_prompt=4 "
        "optimizer.spike=dump optimizer.spike_factor=1.001 optimizer.spike_window=8"
    )
    done = bash(first, place)
    assert done.returncode == 0, done.stdout[-3000:]
    dump, *_ = sorted((place / "runs/earlier/dumps").iterdir())
    dump.rename(dump.with_name("update-000012-try-1"))  # the name on the page
    return place


def environment() -> dict[str, str]:
    binaries = Path(sys.executable).parent
    return {
        **os.environ,
        **SHORT,
        "FORK": forked_python(),
        "PYTHON_EXEC": forked_python(),
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "VENV": str(binaries.parent),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }


def bash(script: str, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=place, env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=550,
    )  # fmt: skip


def served(script: str, place: Path) -> None:
    """Start a server, wait until it prints its URL, and end it as Ctrl-C does."""
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script], cwd=place, env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "base URL" in line:
                return
        raise AssertionError("".join(said)[-3000:])
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in bash_blocks(page) if block.needs is None], ids=str
)
def test_a_block_runs_unchanged(block: Block, workplace: Path) -> None:
    if not any(re.match(f"{RUN}|make ", command) for command in block.commands):
        pytest.skip("only planned")
    for page in (ROOT / "docs/tutorials/own_tools.md", block.page):  # the tutorials build on its tools
        for name, text in page_files(page).items():
            (workplace / name).write_text(text)
    latest = workplace / "runs/latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to("earlier")
    text = block.text.replace("model.path=...", "model.path=models/calculator")
    text = text.replace("data.path=...", "data.path=data/demo/calculator/train.jsonl").replace("--step 20", "--step 2")
    for name in re.findall(r"run_name=([\w-]+)", text) if "resume=" not in text else ():
        shutil.rmtree(workplace / "runs" / name, ignore_errors=True)  # of another page
    script = f"{SHORTENED}\n{text}"
    if re.search(r"lockstep serve\b(?!-)", text):
        served(script, workplace)
        return
    done = bash(script, workplace)
    expected = 2 if block.is_mistake else 0
    assert done.returncode == expected, done.stdout[-4000:]
