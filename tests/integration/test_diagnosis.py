"""Diagnosis with a real engine and a real policy: every variant on one engine, and the command line."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.demo.tokenizer import train_tokenizer
from lockstep.demo.warm_start import new_model
from lockstep.lab.diagnose import open_scorer
from lockstep.lab.diagnosis.cases import Case, sample_cases
from lockstep.lab.diagnosis.causes import VARIANTS, Cause, Severity
from lockstep.lab.diagnosis.diagnosis import REEXAMINED, Diagnosis
from lockstep.lab.diagnosis.examiner import Examiner
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.build import make_chat
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.start import open_engine
from tests.fixtures.forked_python import forked_python, forks_for_spawns

ROOT = Path(__file__).resolve().parents[2]
CASES = ("simple_text", "single_turn", "multi_turn", "training_path", *REEXAMINED)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A random model of the demo's architecture with the demo's kind of tokenizer, and two questions."""
    directory = tmp_path_factory.mktemp("diagnosis")
    tokenizer = train_tokenizer(["The answer is 1353", "compute 64*22-55", "What is the answer?"] * 8)
    new_model(tokenizer, seed=0).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = [{"question": "compute 64*22-55", "answer": "1353"}, {"question": "compute 1+1+1", "answer": "3"}]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config()
    config.model.path = str(directory / "model")
    config.data.path = str(directory / "train.jsonl")
    config.rollout.max_tokens_per_turn = 16
    return config


@pytest.fixture(scope="module")
def examined(config: Config) -> Iterator[tuple[Examiner, list[Case]]]:
    chat = make_chat(config.model, history=config.environment.history)
    with forks_for_spawns(), open_engine(config) as engine:
        cases = engine.loop.run(sample_cases(config, engine=engine, chat=chat))
        with open_scorer(config, chat.images) as (policy, score):
            yield (
                Examiner(
                    model=config.model,
                    correction=config.correction,
                    temperature=config.rollout.temperature,
                    with_routes=False,
                    chat=chat,
                    policy=policy,
                    score=score,
                    engine=engine,
                ),
                cases,
            )


@pytest.fixture(scope="module")
def broken(examined: tuple[Examiner, list[Case]]) -> Callable[[Cause], Diagnosis]:
    """Examine the pipeline with a variant, once for all tests."""
    examiner, cases = examined
    return functools.cache(
        lambda variant: examiner.examine(cases[:4], variant)
    )  # the others repeat the fourth's rollouts


@pytest.mark.engine
def test_a_right_pipeline_agrees_to_rounding_in_every_case(examined):
    examiner, cases = examined
    diagnosis = examiner.examine(cases)
    assert (diagnosis.finding.severity, diagnosis.finding.cause) == (Severity.OK, None)
    assert tuple(case.name for case in diagnosis.cases) == CASES
    for case in diagnosis.cases:
        assert case.evidence.match.is_exact
        assert case.evidence.mismatch["logp_diff_abs_max"] < 1e-4
        assert case.evidence.engine is not None
        assert case.evidence.engine.engine_vs_trainer < 1e-4
    assert diagnosis.noise_floor["logp_diff_abs_max"] < 1e-4


@pytest.mark.engine
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_broken_variant_is_detected_and_named(examined, broken, variant):
    examiner, cases = examined
    diagnosis = broken(variant)
    assert diagnosis.finding.severity is not Severity.OK
    assert diagnosis.finding.cause is variant
    assert examiner.examine(cases[:1]).finding.severity is Severity.OK, "the variant left something broken"


@pytest.mark.engine
def test_each_variant_shows_in_its_own_evidence(broken):
    found = {variant: broken(variant).cases[0].evidence for variant in VARIANTS}
    assert found[Cause.RETOKENIZE].match.id_match_rate < 1
    assert found[Cause.MISSING_FINAL].match.coverage < 1
    assert found[Cause.MISSING_FINAL].mismatch["kl_v2"] < 1e-6, "the remaining tokens are right"
    offsets = found[Cause.SHIFT].abs_diff_by_offset
    assert offsets[1] < 1e-4 < offsets[0]
    assert found[Cause.DROPOUT].noise["kl_v2"] > found[Cause.DROPOUT].mismatch["kl_v2"] / 4
    stale = found[Cause.STALE_WEIGHTS]
    assert stale.noise["kl_v2"] < 1e-8
    assert stale.match.is_exact
    assert stale.engine is not None
    assert stale.engine.engine_vs_record is not None
    assert stale.engine.engine_vs_record < 1e-4 < stale.engine.engine_vs_trainer


def diagnose(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forked_python(), ROOT / "scripts" / "diagnose.py", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.engine
def test_saved_rollouts_are_diagnosed_from_the_command_line_with_the_settings_of_their_run(examined, config, tmp_path):
    _, cases = examined
    run = tmp_path / "runs" / "my-run"
    (run / "rollouts").mkdir(parents=True)
    write_rollouts(run / "rollouts" / "step-000001.jsonl", cases[0].rollouts)
    (run / "config.yaml").write_text(
        f"model:\n  path: {config.model.path}\nrollout:\n  temperature: 1.0\ndata:\n  path: {config.data.path}\n"
    )
    page = tmp_path / "view.html"
    arguments = ["--rollouts", str(run), "--json", "--html", str(page)]
    right = diagnose(arguments, tmp_path)
    assert right.returncode == 0, right.stderr
    data = json.loads(right.stdout)
    assert data["verdict"] == "ok"
    assert data["settings"]["model"] == config.model.path
    assert data["cases"][0]["name"] == "saved_rollouts"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")

    colder = diagnose([*arguments, "rollout.temperature=0.5"], tmp_path)
    assert colder.returncode == 1
    assert json.loads(colder.stdout)["cause"] == Cause.STALE_ROLLOUTS


def test_mistakes_on_the_command_line_are_one_line_and_status_2(tmp_path):
    missing = diagnose(["--rollouts", str(tmp_path / "nothing")], tmp_path)
    assert missing.returncode == 2
    assert "neither" in missing.stderr
    assert "Traceback" not in missing.stderr
