"""The curated charts name metrics that runs write."""

from __future__ import annotations

import ast
import re

import pytest

from lockstep.lab.pages.panels import SECTIONS, Panel
from lockstep.rollout.records import Cause, RolloutStatus
from tests.fixtures.paths import ROOT

PANELS = [panel for panels in SECTIONS.values() for panel in panels]


def written_names() -> list[str]:
    """Patterns of the names in the code that writes metrics: what an f-string inserts may be any word."""
    patterns = []
    for path in [*ROOT.glob("trainer/**/*.py"), *ROOT.glob("rollout/**/*.py"), *ROOT.glob("rewards/**/*.py")]:
        if path.name == "alarms.py":  # it reads them
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                patterns.append(re.escape(node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else r"[\w-]+" for p in node.values]  # type: ignore[arg-type]
                patterns.append("".join(parts))
    return [pattern for pattern in patterns if re.match(r"[a-z_]+/[\w\[]", pattern)]


def documented(name: str) -> bool:
    """True if a page names it: whole, or by its last part in the page about correction, which has one prefix."""
    if name.startswith("rollout_correction/"):
        return f"`{name.split('/')[1]}`" in (ROOT / "docs/correction.md").read_text()
    return any(re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", page.read_text()) for page in ROOT.glob("docs/**/*.md"))


PLAIN = sorted(
    {name for panel in PANELS for name in [*panel.curves.values(), *filter(None, [panel.band])] if "(" not in name}
)
WRITTEN = written_names()


@pytest.mark.parametrize("name", PLAIN)
def test_each_metric_is_one_that_the_code_writes_or_a_page_lists(name: str):
    assert documented(name) or any(re.fullmatch(pattern, name) for pattern in WRITTEN), name


def test_a_metric_that_no_code_writes_is_noticed():
    assert not documented("reward/men")
    assert not any(re.fullmatch(pattern, "reward/men") for pattern in WRITTEN)


def panel(title: str) -> Panel:
    (found,) = [panel for panel in PANELS if panel.title == title]
    return found


def test_patterns_take_what_runs_write_and_nothing_else():
    names = ["reward/mean", "reward/std", "reward/demo_answer/mean", "reward/errors/crashed", "reward/a/b/mean"]
    assert panel("Reward functions").metrics(names) == {
        "a/b": "reward/a/b/mean",
        "demo answer": "reward/demo_answer/mean",
    }
    names = ["eval/reward_mean", "eval/math/reward_mean", "eval/pass_at_1"]
    assert panel("Held-out reward").metrics(names) == {
        "held out math": "eval/math/reward_mean",
        "held out": "eval/reward_mean",
    }
    names = ["loss/policy", "loss/policy_weight", "loss/policy_tokens", "loss/demonstrations", "loss/teacher_rest"]
    assert list(panel("Loss").metrics(names).values()) == ["loss/demonstrations", "loss/policy"]


def test_each_cause_and_each_end_of_a_rollout_has_a_curve():
    drops = [f"rollout/dropped_{cause}" for cause in Cause]
    found = panel("Rollouts that are not trained").metrics([*drops, "rollout/dropped_fraction"])
    assert sorted(found.values()) == sorted(drops)
    ends = {f"rollout/{status}_fraction" for status in RolloutStatus}
    assert set(panel("How episodes end").curves.values()) == ends


def test_titles_are_unique_and_each_panel_says_what_it_means():
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    assert all(panel.meaning.endswith(".") for panel in PANELS)
