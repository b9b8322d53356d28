"""One answer to what was sampled: `Rollout` in rollout/records.py. No other module looks for assistant turns."""

from __future__ import annotations

import ast

from tests.fixtures.paths import ROOT

PACKAGES = ("lab", "integrations", "rollout", "rewards", "trainer", "scripts", "benchmarks", "examples")
ALLOWED = {
    "lab/environments/exploit_checks.py": "a scripted player reads what the environment says",
    "rollout/records.py": "the accessor",
    "rollout/chat/": "writes turns in the format of a model, or checks that the last one can be written",
    "integrations/gateway/": "reads and writes the formats of APIs, and finds the turn that a request extends",
    "rollout/environments/prompt.py": "refuses a prompt that ends with an assistant turn",
    "rollout/episode/demonstration.py": "trains all assistant turns of a conversation that was not sampled",
    "trainer/checks/conversations.py": "refuses demonstrations without a turn to train",
    "trainer/tools/starter.py": "refuses to propose a run on demonstrations",
    "lab/reward_model/data.py": "reads comparisons, which were not sampled",
    "trainer/observe/transcript.py": "gives roles colors",
    "rollout/episode/contract.py": "checks the messages that an environment returns",
}
"""Modules that name the role for something else, and what for."""


def looks_for_assistant(source: str) -> list[int]:
    """Return the lines that name the role, but not as the role of a message that they write."""
    tree = ast.parse(source)
    written = {
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "role"
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == "assistant" and id(node) not in written
    ]


def test_only_the_accessor_looks_for_what_was_sampled() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    found = {str(file.relative_to(ROOT)): lines for file in files if (lines := looks_for_assistant(file.read_text()))}
    others = {path: lines for path, lines in found.items() if not path.startswith(tuple(ALLOWED))}
    assert others == {}, "ask the rollout: prompt, completion, sampled_turns, answer (rollout/records.py)"
    unused = [place for place in ALLOWED if not any(path.startswith(place) for path in found)]
    assert unused == [], "these name no role any more; take them off the list"
