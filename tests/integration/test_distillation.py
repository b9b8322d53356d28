"""Runs with a teacher: a student that is its teacher learns nothing new, and steps replay; a student learns from saved
rollouts alone, also beside its own; the policy teaches itself in engines that sleep."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.trainer.batch.saved_scores import FILE_SUFFIX, SavedScores
from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.servers import KEY, KEY_ENV, SETTINGS
from tests.integration.test_replay_run import replay
from tests.integration.test_run import demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("algorithm", ["opd", "opd_topk"])
def test_the_first_step_finds_no_difference_between_a_student_and_itself_as_teacher(
    algorithm: str,
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    (model,) = (setting.partition("=")[2] for setting in demo if setting.startswith("model.path="))
    train(
        *demo, f"algorithm={algorithm}", f"teacher.path={model}", "updates=2", f"run_root={tmp_path}", "run_name=own",
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "checkpoint.every=1", "checkpoint.keep=9",
        "logger.print_rollouts=0",
    )  # fmt: skip
    run = tmp_path / "own"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line.get("teacher/kl") is not None)
    assert abs(first["teacher/kl"]) < 1e-5
    assert first["teacher/kl_k3"] < 1e-7
    if algorithm == "opd_topk":
        assert abs(first["loss/teacher"]) < 1e-5, "less the floor of what the teacher leaves to other tokens"
        assert first["loss/teacher_tokens"] == first["rollout/trained_tokens"]
    status, said = replay(run, "--step", 2)
    assert status == 0, said
    equal, compared = re.findall(r"(\d+) of (\d+) numbers are equal", said)[0]
    assert equal == compared
    assert "teacher/kl" in said
    assert f"teacher.source=model teacher.path={model}, weights of version 0" in " ".join(said.split())
    files = [run / "rollouts" / f"step-{step:06d}{FILE_SUFFIX}" for step in (1, 2)]
    files[1].write_bytes(files[0].read_bytes())
    status, said = replay(run, "--step", 2)
    assert status == 2
    assert "has scores of other tokens than the rollouts" in " ".join(said.split())


@pytest.fixture(scope="module")
def teacher(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run of a model that is better than the student at its end."""
    root = tmp_path_factory.mktemp("teacher")
    train(
        *demo, "updates=3", "optimizer.lr=1e-3", f"run_root={root}", "run_name=teacher", "logger.print_rollouts=0",
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
    )  # fmt: skip
    return root / "teacher"


def test_a_student_learns_from_saved_rollouts_alike_on_two_ranks_and_after_a_resumption(
    demo: tuple[str, ...],  # noqa: F811
    teacher: Path,
    tmp_path: Path,
) -> None:
    settings = (
        demo[0], "algorithm=sft", f"data.path=rollouts:{teacher}", "data.heldout_path=null", "updates=4",
        "demonstrations.rows_per_update=15", "demonstrations.teacher_divergence=forward",
        "demonstrations.teacher_share=0.75", f"teacher.path={teacher}/model", "optimizer.lr=1e-3",
        f"run_root={tmp_path}", "checkpoint.every=2", "token_budget=512", "optimizer.schedule=constant",
    )  # fmt: skip
    train(*settings, "run_name=whole")
    for ranks, name in ((None, "resumed"), (2, "ranks")):
        train(*settings, f"run_name={name}", "updates=2", ranks=ranks)
        train(*settings, f"run_name={name}", "resume=auto", ranks=ranks)
    whole, resumed, ranks = (losses(tmp_path / name) for name in ("whole", "resumed", "ranks"))
    assert len(whole) == 4
    assert resumed == whole, "a resumed run continues with the same bits"
    for line, expected in zip(ranks, whole, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    assert 0 < whole[-1]["loss/demonstrations_teacher"] < whole[0]["loss/demonstrations_teacher"] / 2
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("resumed", "whole")]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


def losses(run: Path) -> list[dict[str, float]]:
    return [{name: line[name] for name in line if name.startswith("loss/")} for line in metrics(run)]


def test_servers_score_demonstrations_as_an_engine_of_the_run_does(
    demo: tuple[str, ...],  # noqa: F811
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = (
        "updates=3", f"teacher.path={teacher}/model", "demonstrations.teacher_divergence=forward",
        f"run_root={tmp_path}", f"rollout.max_model_len={int(SETTINGS['rollout.max_model_len']) - 1}",
        "logger.print_rollouts=0",
    )  # fmt: skip
    alone = (demo[0], "algorithm=sft", f"data.path=rollouts:{teacher}", "data.heldout_path=null", *settings)
    beside = (
        *demo, "algorithm=opd_topk", f"demonstrations.path=rollouts:{teacher}", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", *settings,
    )  # fmt: skip
    monkeypatch.setenv(KEY_ENV, KEY)
    with ForkedServers(teacher / "model", tmp_path).running(2) as servers:
        urls = f"teacher.urls=[{','.join(server.url for server in servers)}]"
        train(*alone, urls, "run_name=alone_served", ranks=2)
        train(*beside, urls, "run_name=beside_served")
    train(*alone, "run_name=alone")
    train(*beside, "run_name=beside")
    for name in ("alone", "beside"):
        served, expected = losses(tmp_path / f"{name}_served"), losses(tmp_path / name)
        assert len(served) == 3
        for line, other in zip(served, expected, strict=True):
            assert line == pytest.approx(other, rel=1e-3)
        assert all(line["teacher/canary_abs_diff"] < 1e-4 for line in metrics(tmp_path / f"{name}_served"))


def test_saved_scores_teach_as_the_teacher_does_that_made_them(
    demo: tuple[str, ...],  # noqa: F811
    teacher: Path,
    tmp_path: Path,
) -> None:
    train(
        *demo, "algorithm=opd_topk", f"teacher.path={teacher}/model", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "updates=2", f"run_root={tmp_path}", "run_name=taught",
    )  # fmt: skip
    settings = (
        demo[0], "algorithm=sft", f"data.path=rollouts:{tmp_path}/taught", "data.heldout_path=null", "updates=3",
        "demonstrations.teacher_divergence=jsd", "demonstrations.teacher_share=0.5", f"run_root={tmp_path}",
    )  # fmt: skip
    train(*settings, "teacher.source=saved", "run_name=saved", ranks=2)
    train(*settings, f"teacher.path={teacher}/model", "run_name=scored")
    for line, other in zip(losses(tmp_path / "saved"), losses(tmp_path / "scored"), strict=True):
        assert line["loss/demonstrations_teacher"] > 0
        assert line == pytest.approx(other, rel=1e-4)


def test_saved_rollouts_train_beside_those_of_a_run_whose_teacher_scores_only_them(
    demo: tuple[str, ...],  # noqa: F811
    teacher: Path,
    tmp_path: Path,
) -> None:
    """With a critic, which does not learn from a teacher itself."""
    said = train(
        *demo, "algorithm=ppo", f"demonstrations.path=rollouts:{teacher}/rollouts", "demonstrations.min_reward=1",
        "demonstrations.teacher_divergence=jsd", f"teacher.path={teacher}/model", "updates=2", f"run_root={tmp_path}",
        "run_name=mixed", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "logger.print_rollouts=0",
    )  # fmt: skip
    saved = [one for path in sorted((teacher / "rollouts").glob("*.jsonl")) for one in read_rollouts(path)]
    below = sum(rollout.reward < 1 for rollout in saved)
    assert 0 < below < len(saved)
    assert f"{below} with a reward below 1 are left out" in " ".join(said.split())
    for line in metrics(tmp_path / "mixed"):
        assert line["loss/demonstrations_teacher"] > 0
        assert line["loss/demonstrations_teacher_weight"] == 0.1
        assert "teacher/kl" not in line
        assert "loss/teacher" not in line


def test_the_policy_teaches_itself_in_engines_that_sleep_also_on_rows_that_fill_the_context(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    limit = 37  # a token less than the first turn of rollouts that call the tool
    train(
        *demo, "algorithm=opd_topk", "teacher.source=policy", 'teacher.context="{answer}"', "rollout=colocated",
        f"rollout.max_model_len={limit}", "rollout.max_tokens_per_turn=30", "rollout.request_timeout_s=60",
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "updates=2", f"run_root={tmp_path}",
        "run_name=self", "logger.print_rollouts=0", ranks=2,
    )  # fmt: skip
    run = tmp_path / "self"
    lengths = []
    for update in (1, 2):
        path = run / "rollouts" / f"step-{update:06d}.jsonl"
        assert SavedScores.open(path.with_suffix(FILE_SUFFIX)).version == update - 1, "before the update"
        rows = [row for rollout in read_rollouts(path) for row in rows_from_calls(rollout.calls)]
        lengths += [len(row) for row in rows if row.loss_mask[-1]]
    assert max(lengths) == limit, "no sampled token is the last of the context"
    assert all(0 < line["teacher/with_context"] < 1 for line in metrics(run))
