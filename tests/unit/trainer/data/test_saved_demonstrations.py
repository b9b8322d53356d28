"""Saved rollouts as demonstrations: the rows they were sampled as, and the files and students that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.demonstrations import Demonstration, load_demonstrations
from tests.fixtures.tokenizers import chat_tokenizer

CHAT = Chat(chat_tokenizer("qwen3"))
VOCAB_SIZE = 500


def call(prompt: list[int], sampled: list[int], reason: FinishReason = FinishReason.STOP) -> EngineCall:
    return EngineCall(
        prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), sampled_logprobs=(-0.5,) * len(sampled),
        finish_reason=reason,
    )  # fmt: skip


ONE = call([1, 2, 3], [4, 5])
ROLLOUTS = [
    # Two turns with an answer of a tool between them, and a turn that does not extend them: a branch.
    Rollout(rollout_id=0, group_id=0, reward=1.0, calls=(ONE, call([1, 2, 3, 4, 5, 9, 9], [6]), call([1, 2], [7, 8]))),
    Rollout(rollout_id=1, group_id=0, reward=0.5, calls=(ONE, call([9], [9], FinishReason.ABORT))),
    Rollout(rollout_id=2, group_id=0, reward=1.0, calls=(ONE,), status=RolloutStatus.FAILED, error="x"),
    Rollout(rollout_id=3, group_id=0, reward=0.0, calls=(call([1], [2] * 30),)),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of a teacher, in two steps."""
    run = tmp_path / "teacher"
    (run / "rollouts").mkdir(parents=True)
    write_rollouts(run / "rollouts" / "step-000001.jsonl", ROLLOUTS[:2])
    write_rollouts(run / "rollouts" / "step-000002.jsonl", ROLLOUTS[2:])
    (run / "config.yaml").write_text(f"model:\n  path: {tmp_path}/sampler\n  chat_template: null\n")
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "sampler")
    return run


def load(path: Path, said: list[str] | None = None, **settings: object) -> list[Demonstration]:
    say = (lambda text: None) if said is None else said.append
    chosen = {"max_tokens": None, "vocab_size": VOCAB_SIZE} | settings
    return load_demonstrations(DataSetConfig(path=f"rollouts:{path}"), CHAT, say=say, **chosen)  # type: ignore[arg-type]


def test_the_rows_are_those_of_the_rollouts(run: Path) -> None:
    said: list[str] = []
    found = load(run, said)
    trained = [rollout for rollout in ROLLOUTS if rollout.is_trainable]
    assert len(found) == len(trained) == 3
    assert len(found[0]) == 2, "a row per branch"
    for rows, rollout in zip(found, trained, strict=True):
        for row, expected in zip(rows, rows_from_calls(rollout.calls), strict=True):
            for name in ("ids", "loss_mask", "turns"):
                np.testing.assert_array_equal(getattr(row.row(0), name), getattr(expected, name))
    assert "3 demonstrations, " in said[0]
    assert said[0].endswith("; 1 failed are left out")


@pytest.mark.parametrize(
    ("place", "count"),
    [(".", 3), ("rollouts", 3), ("rollouts/step-000001.jsonl", 2), ("rollouts/step-000002.jsonl", 1)],
)
def test_a_run_a_directory_and_a_file_are_read(place: str, count: int, run: Path) -> None:
    assert len(load(run / place)) == count


def test_rewards_and_lengths_choose_rollouts_with_a_report(run: Path) -> None:
    said: list[str] = []
    assert len(load(run, said, min_reward=0.5)) == 2
    assert said[0].endswith("; 1 failed, 1 with a reward below 0.5 are left out")
    assert len(load(run, min_reward=0.6)) == 1
    assert len(load(run, max_tokens=20)) == 2
    with pytest.raises(DataError, match="no demonstrations are left without 3 with a reward below 2, 1 failed"):
        load(run, min_reward=2.0)


def test_a_student_with_another_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    other = chat_tokenizer("llama3")
    other.save_pretrained(tmp_path / "sampler")
    with pytest.raises(
        DataError, match=r"has another tokenizer than the student: \d+ tokens differ, such as .* set model"
    ):
        load(run)


def test_a_student_with_another_chat_template_is_refused(run: Path, tmp_path: Path) -> None:
    """Also if the run replaced the template of its model."""
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("null", f"{tmp_path}/own.jinja"))
    with pytest.raises(DataError, match=r"has another chat template than the student, .* set model.chat_template="):
        load(run)


def test_the_tokenizer_beside_the_trained_model_is_read_if_that_of_the_first_model_is_gone(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "sampler").rename(run / "elsewhere")
    with pytest.raises(
        DataError, match=r"cannot be compared with the student's: .* copy its files into .*teacher/model"
    ):
        load(run)
    (run / "elsewhere").rename(run / "model")
    assert len(load(run)) == 3


def test_the_results_of_an_evaluation_name_the_model_that_sampled(run: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    write_rollouts(samples, ROLLOUTS[:1])
    with pytest.raises(
        DataError, match=r"the model that sampled these rollouts is unknown .* samples.json of the eval"
    ):
        load(samples)
    samples.with_suffix(".json").write_text(json.dumps({"model": f"{tmp_path}/sampler", "chat_template": None}))
    assert len(load(samples)) == 1


def test_ids_that_the_student_lacks_are_refused(run: Path) -> None:
    beyond = replace(ROLLOUTS[0], calls=(call([1], [VOCAB_SIZE]),))
    write_rollouts(run / "rollouts" / "step-000003.jsonl", [beyond])
    with pytest.raises(DataError, match=f"has the token id {VOCAB_SIZE}, but the model has {VOCAB_SIZE} ids"):
        load(run)


def test_a_place_without_rollouts_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no saved rollouts .looked for .jsonl files in"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rollout: rollout.update(group_id=2**80), "not 64-bit integers"),
        (lambda rollout: rollout.update(rollout_id=-(2**80)), "not 64-bit integers"),
        (lambda rollout: rollout["calls"][0].update(version_spans=[[2**80, 0, 2]]), "32-bit integers"),
        (lambda rollout: rollout["calls"][0].update(version_spans=[["4" * 5000, 0, 2]]), "32-bit integers"),
    ],
)
def test_numbers_that_no_batch_holds_are_refused_by_file_and_line(
    run: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = run / "rollouts" / "step-000002.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    change(second)
    path.write_text("".join(json.dumps(one) + "\n" for one in (first, second)))
    with pytest.raises(DataError, match=f"{path}:2 .*{said}") as refused:
        load(run)
    assert len(str(refused.value)) < 1000


def test_a_call_without_ids_of_its_own_adds_nothing(run: Path) -> None:
    path = run / "rollouts" / "step-000001.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    first["calls"][1] = {**first["calls"][1], "own_prompt_ids": [], "sampled_ids": [], "sampled_logprobs": []}
    path.write_text("".join(json.dumps(one) + "\n" for one in (first, second)))
    whole, *_ = load(run)[0]
    assert whole.ids.tolist() == [1, 2, 3, 4, 5], "the call before it"
