"""`scripts/check_loss.py` runs the trainer's update on one rank and on two; faults that only ranks show are named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.lab.finding import Finding, Verdict
from lockstep.lab.losses import check_update
from lockstep.lab.losses.check_objective import check_objective
from lockstep.lab.losses.check_update import examine_update
from tests.fixtures.pages import ROOT, page_files

FAULTY = ROOT / "tests/unit/lab/losses/faulty_losses.py"
OF_RANK = """
import time
import torch.distributed as dist

def rank():
    return dist.get_rank() if dist.is_initialized() else 0

def of_rank(inputs):
    return (inputs.rewards_S - inputs.rewards_S.mean()) * (1 + rank())

def first_group_of_rank(inputs):
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mine = inputs.group_S % ranks == rank()
    return inputs.rewards_S - inputs.rewards_S[mine].mean()

def waits(inputs):
    if rank():
        time.sleep(1000)
    return -(inputs.logp_T - inputs.old_logp_T).clamp(-20, 20).exp() * inputs.advantages_T

def fails(inputs):
    if rank():
        raise ValueError("no data on this rank")
    return -(inputs.logp_T - inputs.old_logp_T).clamp(-20, 20).exp() * inputs.advantages_T
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OF_RANK)
    return path


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    yield
    ranks = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_rank(pid)]
    assert ranks == []


def is_rank(pid: str) -> bool:
    """Return True for a process that the fork server of this process has started."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        above = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
        command = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
    return above == str(os.getpid()) and b"multiprocessing.forkserver" in command


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in findings}


def failures(findings: list[Finding]) -> list[str]:
    return [finding.sentence for finding in findings if finding.verdict is Verdict.FAILS]


def test_the_loss_of_the_tutorial_passes_with_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in page_files(ROOT / "docs/tutorials/own_loss.md").items():
        Path(name).write_text(text)
    assert check_objective("my_loss.py:quadratic", [])
    found = capsys.readouterr().out
    assert "update, 2 ranks x 3 microbatches                 ok" in found
    assert "25 of 25 checks passed" in found


def test_a_mean_over_the_microbatch_is_named_with_every_division_that_changes_it() -> None:
    cause = "it divides by the number of tokens in the microbatch"
    found = list(examine_update({"loss": f"{FAULTY}:divided_by_tokens"}, cause, is_loss=True))
    assert {check for check, verdict in verdicts(found).items() if verdict is Verdict.OK} == {
        "update, shared prefixes",
        "update, extreme log ratios",
    }
    assert all(sentence.endswith(f"against one microbatch: {cause}.") for sentence in failures(found))
    assert len(failures(found)) == 6


def test_one_number_for_the_microbatch_is_refused_by_the_update() -> None:
    (sentence,) = failures(list(examine_update({"loss": f"{FAULTY}:mean_of_microbatch"}, is_loss=True)))
    assert "fails with 1 rank x 1 microbatch: " in sentence
    assert "returned the shape (), expected (" in sentence


@pytest.mark.parametrize(
    ("kind", "function"),
    [("loss", f"{FAULTY}:world_size"), ("advantage", "of_rank"), ("advantage", "first_group_of_rank")],
)
def test_a_dependence_on_ranks_changes_the_gradient_on_two_ranks_only(kind: str, function: str, own: Path) -> None:
    name = function if ":" in function else f"{own}:{function}"
    found = verdicts(list(examine_update({kind: name}, is_loss=kind == "loss")))
    failed = {check for check, verdict in found.items() if verdict is Verdict.FAILS}
    assert failed == {check for check in found if "2 ranks" in check or "different ranks" in check}
    assert len(failed) == 4


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("waits", "fails with 2 ranks x 1 microbatch: no result within 15 s"),
        ("fails", "fails with 2 ranks x 1 microbatch: "),
    ],
)
def test_a_rank_that_waits_or_fails_is_named(
    function: str, sentence: str, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_update, "TIMEOUT_S", 15.0)
    (found,) = failures(list(examine_update({"loss": f"{own}:{function}"}, is_loss=True)))
    assert sentence in found
    if function == "fails":
        assert "ValueError in line" in found
        assert "no data on this rank" in found
