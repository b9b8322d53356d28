"""Faults are detected and named through the whole examination, with a made-up model on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from lockstep.lab.diagnosis.causes import Cause, Severity
from lockstep.lab.diagnosis.diagnosis import Diagnosis, conclude
from lockstep.lab.diagnosis.examiner import report_step, retokenization_note
from lockstep.rollout.records import Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.schema import Config
from tests.fixtures.made_up_model import (
    TEXTS,
    FakeEngine,
    FakeTrainer,
    call,
    examine,
    ids_of,
    language,
    step_batch,
    two_turns,
)

ROLLOUTS = [two_turns(i, said=said) for i, said in enumerate(("hello", "there", "the answer is 42"))]
ROW_VARIANTS = [Cause.RETOKENIZE, Cause.MISSING_FINAL, Cause.SHIFT]


def cause_of(diagnosis: Diagnosis) -> Cause | None:
    return diagnosis.finding.cause


def test_a_right_pipeline_is_ok_and_has_no_cause():
    diagnosis = examine(ROLLOUTS, FakeTrainer(), engine=FakeEngine())
    assert (diagnosis.finding.severity, diagnosis.finding.cause) == (Severity.OK, None)
    assert [case.name for case in diagnosis.cases] == ["saved_rollouts", "alignment", "retokenisation"]
    assert all(case.evidence.match.is_exact for case in diagnosis.cases)


@pytest.mark.parametrize("variant", ROW_VARIANTS)
@pytest.mark.parametrize("engine", [FakeEngine(), None], ids=["with an engine", "without"])
def test_each_damage_to_rows_is_detected_and_named(variant, engine):
    """Dropout and stale weights need a model: tests/integration/test_diagnosis.py."""
    diagnosis = examine(ROLLOUTS, FakeTrainer(), variant, engine=engine)
    assert (diagnosis.finding.severity, diagnosis.finding.cause) == (Severity.CRITICAL, variant)


def test_a_shift_in_the_record_itself_is_found():
    """An engine adapter that shifts falsifies the calls too, so that comparing rows with calls shows nothing."""
    rollout = two_turns()
    late = tuple(replace(c, sampled_logprobs=(0.0, *c.sampled_logprobs[:-1])) for c in rollout.calls)
    diagnosis = examine([replace(rollout, calls=late)], FakeTrainer())
    assert diagnosis.cases[0].evidence.match.match_rate == 1.0
    assert cause_of(diagnosis) is Cause.SHIFT


def test_a_canonical_turn_survives_retokenization_and_is_not_accused():
    rollout = Rollout(rollout_id=0, group_id=0, calls=(call(ids_of("the answer"), ids_of("hello")),))
    assert cause_of(examine([rollout], FakeTrainer(), Cause.RETOKENIZE)) is None


def test_a_random_trainer_is_dropout():
    assert cause_of(examine(ROLLOUTS, FakeTrainer(noise=0.5), engine=FakeEngine())) is Cause.DROPOUT


def test_an_engine_that_still_disagrees_has_other_weights():
    assert cause_of(examine(ROLLOUTS, FakeTrainer(bias=0.3), engine=FakeEngine())) is Cause.STALE_WEIGHTS


def test_an_engine_that_agrees_by_now_means_that_the_rollouts_are_old():
    assert cause_of(examine(ROLLOUTS, FakeTrainer(bias=0.3), engine=FakeEngine(bias=0.3))) is Cause.STALE_ROLLOUTS


def test_without_an_engine_old_rollouts_are_suspected():
    assert cause_of(examine(ROLLOUTS, FakeTrainer(bias=0.3))) is Cause.STALE_ROLLOUTS


def test_small_uniform_differences_stay_below_the_thresholds():
    assert examine(ROLLOUTS, FakeTrainer(bias=0.005), engine=FakeEngine()).finding.severity is Severity.OK


class TestEngineCheck:
    def test_it_measures_all_three_distances(self):
        check = examine(ROLLOUTS, FakeTrainer(bias=0.3), engine=FakeEngine(bias=0.1)).cases[0].evidence.engine
        assert check is not None
        assert check.tokens == sum(rollout.num_sampled for rollout in ROLLOUTS)
        assert check.record_vs_trainer == pytest.approx(0.3, abs=1e-6)
        assert check.engine_vs_trainer == pytest.approx(0.2, abs=1e-6)
        assert check.engine_vs_record == pytest.approx(0.1, abs=1e-6)

    def test_only_rows_that_leave_a_token_of_the_context_free_are_sent(self):
        assert [len(row) for row in step_batch(ROLLOUTS).rows] == [34, 34, 45]
        check = examine(ROLLOUTS, FakeTrainer(), engine=FakeEngine(max_model_len=45)).cases[0].evidence.engine
        assert check is not None
        assert check.tokens == sum(rollout.num_sampled for rollout in ROLLOUTS[:2])
        full = FakeEngine(max_model_len=34)
        assert examine(ROLLOUTS, FakeTrainer(), engine=full).cases[0].evidence.engine is None

    def test_it_covers_the_first_four_rows_of_a_case(self):
        rollouts = [two_turns(i) for i in range(5)]
        wrong = [replace(c, sampled_logprobs=(-9.0,) * len(c.sampled_ids)) for c in rollouts[4].calls]
        rollouts[4] = replace(rollouts[4], calls=tuple(wrong))
        check = examine(rollouts, FakeTrainer(), engine=FakeEngine()).cases[0].evidence.engine
        assert check is not None
        assert check.tokens == 4 * rollouts[0].num_sampled
        assert check.record_vs_trainer < 1e-6

    def test_the_record_is_comparable_at_temperature_1_only(self):
        config = Config()
        config.rollout.temperature = 0.5
        check = examine(ROLLOUTS, FakeTrainer(), engine=FakeEngine(), config=config).cases[0].evidence.engine
        assert check is not None
        assert check.engine_vs_record is None


class TestRetokenizationNote:
    def test_it_counts_tokens_and_turns_and_gives_the_first_example(self):
        note = retokenization_note([two_turns()], TEXTS)
        assert "2 of 2 turns would change" in note
        assert "for example 'h' 'e' 'l' would become 'hell' 'o' '<|im_end|>'" in note

    def test_canonical_turns_survive_whole(self):
        rollout = Rollout(rollout_id=0, group_id=0, calls=(call(ids_of("the answer"), ids_of("hello")),))
        assert retokenization_note([rollout], TEXTS) == (
            "100.0% of sampled tokens would survive decode and encode (0 of 1 turns would change)"
        )

    def test_without_sampled_tokens_there_is_no_note(self):
        assert retokenization_note([], TEXTS) == ""


def diagnosis_of_step(rollouts: Sequence[Rollout], batch: StepBatch, train_N: Tensor) -> Diagnosis:
    correction = CorrectionConfig()
    case = report_step(rollouts, batch, train_N, TEXTS, correction)
    return conclude([case], ModelConfig(), correction, temperature=1.0)


class TestReportStep:
    def test_it_takes_the_logprobs_of_the_chosen_rollouts_from_the_step(self):
        batch = step_batch(ROLLOUTS)
        train_N = FakeTrainer(bias=0.25)(batch)
        train_N[: int(batch.layout.token_start[1])] -= 5.0  # the first rollout, which is not chosen
        diagnosis = diagnosis_of_step(ROLLOUTS[1:], batch, train_N)
        (case,) = diagnosis.cases
        assert case.evidence.match.is_exact
        assert case.evidence.match.trained == sum(rollout.num_sampled for rollout in ROLLOUTS[1:])
        assert case.evidence.mismatch["kl_v1"] == pytest.approx(0.25, rel=1e-5)
        assert case.evidence.noise == diagnosis.noise_floor == {}
        assert cause_of(diagnosis) is Cause.STALE_ROLLOUTS

    def test_right_numbers_are_ok(self):
        batch = step_batch(ROLLOUTS)
        assert language(ROLLOUTS[0].calls[0].all_ids).max() < 0
        assert diagnosis_of_step(ROLLOUTS, batch, FakeTrainer()(batch)).finding.severity is Severity.OK
