"""Results of rollouts: metrics, tables, files, comparisons."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.trainer.evaluate.results import (
    SetResult,
    compare,
    comparison_lines,
    prompt_results,
    read_results,
    result_lines,
    rollout_facts,
    write_results,
)

CALL = EngineCall(prompt_ids=(1,), sampled_ids=(2, 3), sampled_logprobs=(-1.0, -1.0), finish_reason=FinishReason.STOP)
SETTINGS = {"seed": 0, "eval.temperature": 1.0}


def rollout(group: int, sample: int, reward: float, *, environment: str | None = None, **fields: object) -> Rollout:
    example: dict[str, object] = {"question": f"q{group}"} | ({"environment": environment} if environment else {})
    made = Rollout(
        rollout_id=2 * group + sample, group_id=group, calls=(CALL,), reward=reward, example=example,
        rewards={"right": reward, "short": 0.5},
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


def result(rewards: list[list[float]], *, name: str = "", environments: list[str] | None = None) -> SetResult:
    rollouts = [
        rollout(group, sample, reward, environment=environments[group] if environments else None)
        for group, row in enumerate(rewards)
        for sample, reward in enumerate(row)
    ]
    prompts = prompt_results(rollouts, label_column="environment", pass_reward=None, pass_threshold=1.0)
    return SetResult(name=name, prompts=prompts, facts=rollout_facts(rollouts))


def test_metrics_of_two_prompts_by_hand() -> None:
    metrics = result([[1.0, 0.0], [1.0, 1.0]]).metrics()
    assert metrics["eval/reward_mean"] == 0.75
    assert metrics["eval/reward_stderr"] == pytest.approx(0.25)  # of 0.5 and 1.0
    assert metrics["eval/pass@1"] == 0.75
    assert metrics["eval/pass@2"] == 1.0
    assert metrics["eval/pass@2_low"] < 1.0 == metrics["eval/pass@2_high"]
    assert metrics["eval/reward/short/mean"] == 0.5
    assert metrics["eval/sampled_tokens_mean"] == 2.0
    assert metrics["eval/completed_fraction"] == 1.0
    assert metrics["eval/prompts"] == 2.0
    assert metrics["eval/rollouts"] == 4.0


def test_a_failed_rollout_does_not_pass_and_has_reward_0() -> None:
    rollouts = [rollout(0, 0, 1.0), rollout(0, 1, 5.0, status=RolloutStatus.FAILED)]
    (prompt,) = prompt_results(rollouts, label_column="environment", pass_reward=None, pass_threshold=1.0)
    assert prompt.rewards == (1.0, 0.0)
    assert prompt.passed == (True, False)
    assert rollout_facts(rollouts)["failed_fraction"] == 0.5


def test_one_reward_function_can_decide_what_passes() -> None:
    rollouts = [rollout(0, 0, 0.7, rewards={"right": 1.0, "short": -0.3})]

    def passed(function: str | None, threshold: float) -> tuple[bool, ...]:
        return prompt_results(rollouts, label_column="", pass_reward=function, pass_threshold=threshold)[0].passed

    assert passed(None, 1.0) == (False,)
    assert passed("right", 1.0) == (True,)
    assert passed("absent", -9.0) == (False,)
    assert passed("short", -0.5) == (True,)


def test_data_sets_and_labels_have_their_own_metrics() -> None:
    mixed = result([[1.0, 1.0], [0.0, 0.0]], name="mine", environments=["tools", "chat"])
    metrics = mixed.metrics()
    assert metrics["eval/mine/tools/reward_mean"] == 1.0
    assert metrics["eval/mine/chat/pass@1"] == 0.0
    table = list(result_lines([mixed]))
    assert [line.split()[:2] for line in table[1:4]] == [["mine", "2"], ["tools", "1"], ["chat", "1"]]
    assert "mean@2" in table[0]
    assert "pass@2" in table[0]
    assert "one prompt" in table[2], "one prompt has no interval"
    assert all(len(line) <= 120 for line in table)


def test_a_comparison_is_paired_by_prompt() -> None:
    before = result([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    after = result([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    (found,) = compare([before], [after])
    assert found.differences["reward_mean"].value == pytest.approx(1 / 3)
    assert found.differences["pass@1"].value == pytest.approx(1 / 3)
    assert found.differences["pass@2"].value == pytest.approx(1 / 3)
    assert (found.better, found.worse, found.count) == (2, 0, 3)
    (back,) = compare([after], [before])
    assert back.differences["reward_mean"].low == pytest.approx(-found.differences["reward_mean"].high)
    text = "\n".join(comparison_lines([found], "old", "new"))
    assert "new minus old, on the same prompts with the same seeds\nheld-out data  reward +0.333" in text
    assert "better on 2 prompts, worse on 0, equal on 1" in text


@pytest.mark.parametrize(
    "other",
    [
        result([[1.0, 1.0]]),
        result([[1.0], [0.0]]),
        result([[1.0, 1.0], [0.0, 0.0]], environments=["a", "b"]),  # other rows
        result([[1.0, 1.0], [0.0, 0.0]], name="elsewhere"),
    ],
)
def test_unequal_evaluations_are_not_compared(other: SetResult) -> None:
    with pytest.raises(DataError, match="evaluate both"):
        compare([result([[1.0, 1.0], [0.0, 0.0]])], [other])


def test_results_survive_a_round_trip(tmp_path: Path) -> None:
    results = [result([[1.0, 0.0], [1.0, 1.0]], environments=["a", "b"]), result([[0.0, 0.0]], name="other")]
    path = tmp_path / "deep" / "results.json"
    comparisons = compare(results, results)
    write_results(path, results, model="m", settings=SETTINGS, comparisons=comparisons, compared_to="n")
    assert read_results(path, SETTINGS) == results
    content = json.loads(path.read_text())
    assert content["sets"][0]["metrics"]["eval/pass@2"] == 1.0
    single = content["comparison"]["results"][1]["differences"]["reward_mean"]
    assert single == {"value": 0.0, "low": None, "high": None}, "JSON has no infinity"


def test_results_with_other_sampling_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, [result([[1.0]])], model="m", settings=SETTINGS)
    with pytest.raises(DataError, match=r"eval\.temperature=1\.0, this evaluation with eval\.temperature=0\.5"):
        read_results(path, SETTINGS | {"eval.temperature": 0.5})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 9}', '{"schema": 1, "settings": {}, "sets": [{"name": 1}]}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"eval\.output=|evaluate again"):
        read_results(path, {})


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("prompts",), []),
        (("name",), ["x"]),
        (("name",), {"x": 1}),
        (("facts",), 5),
        (("prompts", 0, "rewards"), [math.nan, 1.0]),
        (("prompts", 0, "rewards"), [1e308, 1e308]),
        (("prompts", 0, "rewards"), ["1", "2"]),
        (("prompts", 0, "rewards"), [True, False]),
        (("prompts", 0, "passed"), ["", 0]),
        (("prompts", 0, "prompt"), 5),
        (("prompts", 0, "label"), ["x"]),
        (("prompts", 1), {"prompt": "b", "label": None, "rewards": [1.0], "passed": [True]}),
    ],
)
def test_results_of_another_form_are_refused(tmp_path: Path, place: tuple[str | int, ...], value: object) -> None:
    path = tmp_path / "results.json"
    write_results(path, [result([[1.0, 0.0], [1.0, 1.0]])], model="m", settings=SETTINGS)
    content = json.loads(path.read_text())
    *outer, last = place
    node = content["sets"][0]
    for key in outer:
        node = node[key]
    node[last] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="is not the result of an evaluation"):
        read_results(path, SETTINGS)
