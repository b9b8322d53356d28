"""Planted faults of an advantage are named, and built-in estimators pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.lab.finding import Verdict
from lockstep.lab.losses.advantage_checks import examine_advantage
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.own.lookup import advantage_named

FAULTS = {
    "by_place": (
        "r - torch.arange(len(r)).double() / 10",
        "Advantages change by",
    ),
    "by_number_of_group": ("r - inputs.group_S.double()", "with other numbers of groups"),
    "rounding": ("(r - g.mean_S) / (g.std(1) + 1e-30)", "A group of three rewards 0.1 has the advantage"),
    "wrong_shape": ("r.mean()", "returned the shape (), expected (10,): one advantage per rollout"),
    "divides_by_zero": ("(r - g.mean_S) / g.std(1)", "returned the advantage nan at index 9"),
    "empty": ("r - r.max()", "fails: RuntimeError in line 10"),
    "random": ("r * torch.rand(())", "Two calls with the same rewards differ"),
    "in_place": ("r.sub_(1.0)", "It changes its inputs in place"),
    "nothing": ("0 * r", "All advantages are 0"),
    "wrong_sign": ("g.mean_S - r", "The best rollout of a group has a smaller advantage than the worst"),
    "overflow": ("(r * 1e3).exp()", "returned the advantage inf"),
}
HEAD = """
import torch
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, GroupStatistics
from lockstep.trainer.objective.advantages.critic import Credit, TokenAdvantages
from lockstep.trainer.objective.declare import advantage
"""


def write(tmp_path: Path, body: str, decorator: str = "") -> str:
    path = tmp_path / "own.py"
    path.write_text(
        f"{HEAD}\n{decorator}\ndef fn(inputs: AdvantageInputs, *, scale: float = 1.0):\n"
        f"    r, g = inputs.rewards_S, GroupStatistics.of(inputs)\n    return scale * ({body})\n"
    )
    return f"{path}:fn"


def findings(spec: str, verdict: Verdict = Verdict.FAILS) -> list[str]:
    return [f.sentence for f in examine_advantage(advantage_named(spec), {}) if f.verdict is verdict]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_built_in_estimator_passes(name: str) -> None:
    found = list(examine_advantage(ADVANTAGES[name], {}))
    assert len(found) >= 3
    assert [finding for finding in found if finding.verdict is not Verdict.OK] == []


def test_the_rollouts_that_an_estimator_compares_are_shown() -> None:
    measured = {
        name: next(f.measured for f in examine_advantage(ADVANTAGES[name], {}) if "compares" in f.check)
        for name in ("grpo", "reinforce_plus_plus")
    }
    assert measured == {"grpo": "its group", "reinforce_plus_plus": "the whole step"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path) -> None:
    body, sentence = FAULTS[fault]
    found = findings(write(tmp_path, body, "@advantage(compares_group=True)"))
    assert any(sentence in one for one in found), found


def test_an_estimator_of_a_file_passes(tmp_path: Path) -> None:
    spec = write(tmp_path, "(r - g.mean_S).masked_fill(g.is_flat_S, 0.0)", "@advantage(compares_group=True)")
    assert findings(spec) == findings(spec, Verdict.NOTE) == []


def test_an_estimator_that_compares_groups_is_told_to_declare_it(tmp_path: Path) -> None:
    spec = write(tmp_path, "(r - g.mean_S).masked_fill(g.is_flat_S, 0.0)")
    assert "@advantage(compares_group=True)" in findings(spec, Verdict.NOTE)[0]


CRITIC = """
@advantage(needs_critic=True)
def fn(credit: Credit, chosen_N):
    values_N = credit.rewards_N - credit.values_N
    return {result}
"""


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ("TokenAdvantages(values_N, values_N)", "Tokens outside of chosen_N have advantages"),
        ("values_N", "expected TokenAdvantages"),
        ("TokenAdvantages(values_N[chosen_N], values_N)", "one advantage per trained token of the step"),
        ("TokenAdvantages(values_N * chosen_N, values_N / 0)", "returned the return"),
        ("TokenAdvantages(values_N * chosen_N, values_N * chosen_N)", None),
    ],
)
def test_faults_of_an_estimator_with_a_critic_are_named(tmp_path: Path, result: str, sentence: str | None) -> None:
    (tmp_path / "own.py").write_text(HEAD + CRITIC.format(result=result))
    found = findings(f"{tmp_path}/own.py:fn")
    assert found == [] if sentence is None else sentence in found[0]
