"""The result of a diagnosis: which case decides, the shape of the JSON, and the console table."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

from rich.console import Console

from lockstep.lab.diagnosis.causes import Cause, Finding, Severity
from lockstep.lab.diagnosis.diagnosis import CaseReport, Diagnosis, conclude, print_diagnosis
from lockstep.rollout.records import Rollout
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from tests.fixtures.made_up_model import FakeEngine, FakeTrainer, examine, two_turns


def printed(diagnosis: Diagnosis) -> str:
    file = StringIO()
    print_diagnosis(diagnosis, Console(file=file, width=300, highlight=False, soft_wrap=True))
    return file.getvalue()


def report(name: str, severity: Severity, cause: Cause | None) -> CaseReport:
    (case, *_) = examine([two_turns()], FakeTrainer()).cases
    return replace(case, name=name, finding=Finding(severity=severity, cause=cause, explanation="because"))


class TestConclude:
    def test_the_worst_severity_counts_and_the_cause_that_invalidates_the_others(self):
        cases = [
            report("first", Severity.OK, None),
            report("second", Severity.CRITICAL, Cause.STALE_WEIGHTS),
            report("third", Severity.WARNING, Cause.SHIFT),
            report("fourth", Severity.WARNING, Cause.SHIFT),
        ]
        finding = conclude(cases, ModelConfig(), CorrectionConfig(), temperature=1.0).finding
        assert finding == Finding(severity=Severity.CRITICAL, cause=Cause.SHIFT, explanation="third: because")

    def test_the_settings_name_what_was_diagnosed(self):
        model, correction = ModelConfig(path="my/model"), CorrectionConfig()
        assert conclude([], model, correction, temperature=0.5, variant=Cause.SHIFT).settings == {
            "model": "my/model",
            "dtype": model.dtype,
            "correction": correction.mode,
            "temperature": 0.5,
            "broken": "shift",
        }


class TestJson:
    def test_it_has_its_documented_shape_and_no_nan(self):
        diagnosis = examine([two_turns()], FakeTrainer(noise=0.4), engine=FakeEngine())
        data = json.loads(json.dumps(diagnosis.to_json(), allow_nan=False))
        assert data.keys() == {
            *("format", "verdict", "cause", "explanation", "thresholds", "settings", "noise_floor", "cases")
        }
        assert (data["format"], data["verdict"], data["cause"]) == (1, "critical", "dropout")
        assert data["settings"].keys() == {"model", "dtype", "correction", "temperature", "broken"}
        floor = {"kl_v1", "kl_v2", "k3_kl", "logp_diff_abs_mean", "logp_diff_abs_max"}
        assert data["noise_floor"].keys() == floor
        case = data["cases"][0]
        assert case.keys() == floor | {
            *("name", "purpose", "note", "verdict", "cause", "explanation", "rollouts", "failed_rollouts", "rows"),
            *("sampled_tokens", "trained_tokens", "match_rate", "id_match_rate", "coverage", "pearson"),
            *("kl_v1_unforced", "kl_v2_unforced", "forced_token_ratio", "ess", "noise_floor", "by_class", "by_turn"),
            *("abs_diff_by_offset", "engine_check", "distributions", "worst"),
        }
        assert case["by_turn"].keys() == {"0", "1"}
        assert case["by_turn"]["0"].keys() == {"tokens", "kl_v1", "kl_v2"}
        assert case["abs_diff_by_offset"].keys() == {"-1", "+0", "+1"}
        assert case["engine_check"].keys() == {
            *("tokens", "record_vs_trainer", "engine_vs_trainer", "engine_vs_record")
        }
        assert case["worst"][0].keys() == {
            *("rollout_id", "row", "position", "turn", "token_class", "token_id", "text", "logp_samp", "logp_train"),
            *("diff", "before", "after"),
        }

    def test_nothing_to_examine_gives_no_false_accusation(self):
        diagnosis = examine([], FakeTrainer(), engine=FakeEngine())
        assert diagnosis.finding.severity is Severity.OK
        data = json.loads(json.dumps(diagnosis.to_json(), allow_nan=False))
        assert "kl_v1" not in data["cases"][0]
        assert data["noise_floor"] == {}
        assert "verdict      ok" in printed(diagnosis)

    def test_rollouts_without_tokens_are_counted_and_do_not_disturb(self):
        failed = Rollout(rollout_id=9, group_id=9, calls=(), error="the tool is gone")
        diagnosis = examine([two_turns(), failed], FakeTrainer())
        assert (diagnosis.cases[0].num_rollouts, diagnosis.cases[0].num_failed) == (1, 1)
        assert "1 (+1 failed)" in printed(diagnosis)


class TestConsole:
    def test_it_shows_every_part_of_the_diagnosis(self):
        diagnosis = examine([two_turns()], FakeTrainer(noise=0.4))
        lines = printed(diagnosis).splitlines()
        first, alignment = lines[1], lines[2]
        assert lines[0].split() == [
            *("case", "rollouts", "tokens", "match", "coverage", "kl_v1", "kl_v2", "|Δ|max", "floor", "kl_v2"),
            "verdict",
        ]
        assert first.startswith("saved_rollouts         1")
        assert "critical (dropout)" in first
        assert alignment.split()[1:] == first.split()[1:]
        text = "\n".join(lines)
        for part in (
            "alignment  mean |Δ log π| by offset",
            "turn 1",
            "special",
            "noise floor  kl_v1",
            "retokenisation  ",
        ):
            assert part in text
        assert lines[-1].startswith("verdict      critical (dropout)  saved_rollouts: the trainer contradicts itself")

    def test_the_largest_differences_are_listed_once(self):
        diagnosis = examine([two_turns()], FakeTrainer(noise=0.4))
        text = printed(diagnosis)
        listed = text.split("worst positions\n")[1].split("\n\n")[0].splitlines()
        assert len(set(listed)) == 5
        assert all("saved_rollouts" in line for line in listed)
        largest = float(diagnosis.cases[0].scored.diff_N.abs().max())
        assert f"{largest:.2e}" in listed[0]

    def test_model_text_cannot_act_on_the_terminal(self):
        rollout = two_turns(said="\x1b[31m[bold]\x1b\x1b\x1b\x1b")
        first, second = rollout.calls
        worst = replace(first, sampled_logprobs=(*first.sampled_logprobs[:-5], *[-50.0] * 5))
        text = printed(examine([replace(rollout, calls=(worst, second))], FakeTrainer()))
        assert "\x1b" not in text
        assert "\\x1b[31m[bold]\\x1b" in text
