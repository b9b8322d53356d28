"""The diagnosis with a scoring function made up here: what is detected, how it is named, what is left alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from demo.tokenizer import train_tokenizer
from rollout.episode.rows import rows_from_calls
from rollout.records import EngineCall, FinishReason, Rollout, TrainingRow, VersionSpan
from rollout.system.terminal_text import terminal_safe
from trainer.diagnosis import statistics
from trainer.diagnosis.bench import Bench
from trainer.diagnosis.cases import saved_cases
from trainer.diagnosis.causes import Cause, EngineCheck, Evidence, Verdict, judge, verdict_of
from trainer.diagnosis.classes import CLASSES, TokenTexts, classify
from trainer.diagnosis.match import TokenMatch, match
from trainer.diagnosis.report import Diagnosis, print_report
from trainer.diagnosis.scored import CorrectionSettings, score_rows
from trainer.diagnosis.variants import Variant, broken, shifted, without_final_tokens

TOKENIZER = train_tokenizer(["hello world hello there", "the answer is 42"] * 4)
TEXTS = TokenTexts(TOKENIZER)


def language(ids: Sequence[int]) -> np.ndarray:
    """log π of every token but the first under a made-up model: any function of the last two ids."""
    pairs = np.array(ids[:-1]) * 7919 + np.array(ids[1:]) * 104729
    return -(0.05 + (pairs % 997) / 400.0)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def letters(text: str) -> tuple[int, ...]:
    """One id per character: not how the tokenizer would write it, but what a model may sample."""
    return tuple(token for character in text for token in ids_of(character))


def call(prompt: Sequence[int], sampled: Sequence[int], *, version: int = 0) -> EngineCall:
    logprobs = language([*prompt, *sampled])[len(prompt) - 1 :]
    return EngineCall(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        sampled_logprobs=tuple(logprobs.tolist()),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=version, start=0, end=len(sampled)),),
    )


def two_turns(rollout_id: int = 0, *, said: str = "hello") -> Rollout:
    first = call(ids_of("<|im_start|>user\nhello<|im_end|>\n"), (*letters(said), *ids_of("<|im_end|>")))
    second = call(
        (*first.all_ids, *ids_of("\n<|im_start|>user\nthere")), (*letters("world there"), *ids_of("<|im_end|>"))
    )
    return Rollout(rollout_id=rollout_id, group_id=0, calls=(first, second))


class FakeScorer:
    """The made-up model as a trainer: off by `bias` per token, and by noise that differs from pass to pass."""

    def __init__(self, *, bias: float = 0.0, noise: float = 0.0) -> None:
        self.bias, self.noise = bias, noise
        self._generator = np.random.default_rng(0)

    def __call__(
        self, rows: Sequence[TrainingRow], *, temperature: float | None = None, alone: bool = False
    ) -> list[np.ndarray]:
        scores = []
        for row in rows:
            logp = language(row.ids.tolist())[np.flatnonzero(row.loss_mask) - 1]
            scores.append(logp - self.bias + self.noise * self._generator.standard_normal(len(logp)))
        return scores


class FakeEngineScores:
    """The engine asked again: the made-up model, or what `bias` makes of it."""

    max_tokens = 1000

    def __init__(self, *, bias: float = 0.0) -> None:
        self.bias = bias

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [(language(ids) - self.bias).tolist() for ids in sequences]


def bench(scorer: FakeScorer, engine: FakeEngineScores | None = None) -> Bench:
    return Bench(
        policy=nn.Embedding(4, 2),
        scorer=scorer,
        tokenizer=TOKENIZER,
        engine_scores=engine,
        temperature=1.0,
        correction=CorrectionSettings(),
        settings={"model": "made up", "dtype": "float32"},
    )


def examine(scorer: FakeScorer, variant: Variant | None = None, engine: FakeEngineScores | None = None) -> Diagnosis:
    rollouts = [two_turns(i, said=said) for i, said in enumerate(("hello", "there", "the answer is 42"))]
    return bench(scorer, engine or FakeEngineScores()).examine(saved_cases(rollouts), variant)


def scored_rows(rollouts: Sequence[Rollout], scorer: FakeScorer):
    rows = [row for r in rollouts for row in rows_from_calls(r.calls, rollout_id=r.rollout_id)]
    return score_rows(rows, scorer, TEXTS, CorrectionSettings())


class TestVerdicts:
    def test_a_right_pipeline_is_ok_and_has_no_cause(self):
        diagnosis = examine(FakeScorer())
        assert (diagnosis.verdict, diagnosis.cause) == (Verdict.OK, None)
        assert all(case.match.is_exact for case in diagnosis.cases)

    @pytest.mark.parametrize(
        ("kl", "expected"),
        [
            (0.0, Verdict.OK),
            (0.0099, Verdict.OK),
            (0.011, Verdict.WARNING),
            (0.0999, Verdict.WARNING),
            (0.11, Verdict.CRITICAL),
            (float("nan"), Verdict.CRITICAL),
        ],
    )
    def test_thresholds_are_those_of_the_seed(self, kl, expected):
        assert verdict_of(kl) is expected

    def test_a_mismatch_that_cancels_in_kl_v1_is_still_seen(self):
        finding = judge(Evidence(match=exact(10), mismatch={"kl_v1": 0.0, "kl_v2": 0.5}))
        assert finding.verdict is Verdict.CRITICAL

    def test_a_negative_kl_v1_counts_like_a_positive_one(self):
        assert judge(Evidence(match=exact(10), mismatch={"kl_v1": -0.05, "kl_v2": 0.0})).verdict is Verdict.WARNING

    def test_rows_that_contradict_the_record_are_critical_without_any_divergence(self):
        lost = TokenMatch(sampled=10, trained=9, same_id=9, same=9, lost_ends=1)
        assert judge(Evidence(match=lost, mismatch={"kl_v1": 0.0, "kl_v2": 0.0})).verdict is Verdict.CRITICAL

    def test_a_trainer_that_contradicts_itself_is_seen_even_if_its_mean_agrees(self):
        finding = judge(Evidence(match=exact(10), mismatch={"kl_v1": 0.0, "kl_v2": 0.005}, noise={"kl_v2": 0.02}))
        assert (finding.verdict, finding.cause) == (Verdict.WARNING, Cause.DROPOUT)


class TestBrokenVariants:
    """Row variants, found through the whole bench. Dropout and stale weights need a model: tests/integration."""

    @pytest.mark.parametrize("variant", [Variant.RETOKENISE, Variant.MISSING_FINAL, Variant.SHIFT])
    def test_each_is_detected_and_named(self, variant):
        diagnosis = examine(FakeScorer(), variant)
        assert diagnosis.verdict is Verdict.CRITICAL
        assert diagnosis.cause == variant.value

    @pytest.mark.parametrize("variant", [Variant.RETOKENISE, Variant.MISSING_FINAL, Variant.SHIFT])
    def test_each_is_named_also_without_an_engine_to_ask(self, variant):
        rollouts = [two_turns()]
        assert bench(FakeScorer(), None).examine(saved_cases(rollouts), variant).cause == variant.value

    def test_a_shift_is_found_in_the_record_itself(self):
        """Not only by comparison with the calls: an engine adapter that shifts would falsify these too."""
        rollout = two_turns()
        late = tuple(
            replace(c, sampled_logprobs=(0.0, *c.sampled_logprobs[:-1]), version_spans=c.version_spans)
            for c in rollout.calls
        )
        diagnosis = bench(FakeScorer()).examine(saved_cases([replace(rollout, calls=late)]))
        assert diagnosis.cases[0].match.match_rate == 1.0
        assert diagnosis.cause is Cause.SHIFT

    def test_a_canonical_turn_survives_retokenisation_and_is_not_accused(self):
        said = ids_of("hello")
        rollout = Rollout(rollout_id=0, group_id=0, calls=(call(ids_of("the answer"), said),))
        assert bench(FakeScorer()).examine(saved_cases([rollout]), Variant.RETOKENISE).cause is None

    def test_variants_leave_the_record_alone(self):
        rollout = two_turns()
        calls = rollout.calls
        examine(FakeScorer(), Variant.RETOKENISE)
        bench(FakeScorer()).examine(saved_cases([rollout]), Variant.SHIFT)
        assert rollout.calls == calls

    def test_missing_final_loses_the_end_of_the_last_turn_only(self):
        rollout = two_turns()
        rows = without_final_tokens(rows_from_calls(rollout.calls))
        found = match([rollout], rows)
        assert found.same == found.trained < found.sampled
        assert found.lost_ends == found.sampled - found.trained <= len(rollout.calls[-1].sampled_ids)

    def test_shift_moves_logprobs_and_nothing_else(self):
        (row,) = rows_from_calls(two_turns().calls)
        late = shifted(row)
        assert (late.ids == row.ids).all()
        assert (late.loss_mask == row.loss_mask).all()
        inside = row.loss_mask[1:] & row.loss_mask[:-1]
        assert (late.sampling_logprobs[1:][inside] == row.sampling_logprobs[:-1][inside]).all()

    def test_stale_weights_and_dropout_put_the_policy_back_to_the_bit(self):
        policy = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
        before = {name: value.clone() for name, value in policy.state_dict().items()}
        expected = policy(torch.arange(8))
        for variant in (Variant.STALE_WEIGHTS, Variant.DROPOUT):
            with broken(variant, tokenizer=TOKENIZER, policy=policy):
                assert not torch.equal(policy(torch.arange(8)), expected)
            assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
            assert torch.equal(policy(torch.arange(8)), expected)

    def test_the_policy_is_put_back_when_scoring_fails(self):
        policy = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
        expected = policy(torch.arange(8))
        with contextlib.suppress(ZeroDivisionError), broken(Variant.STALE_WEIGHTS, tokenizer=TOKENIZER, policy=policy):
            raise ZeroDivisionError
        assert torch.equal(policy(torch.arange(8)), expected)


class TestCauses:
    def test_a_random_trainer_is_dropout(self):
        assert examine(FakeScorer(noise=0.5)).cause is Cause.DROPOUT

    def test_an_engine_that_still_disagrees_has_other_weights(self):
        assert examine(FakeScorer(bias=0.3)).cause is Cause.STALE_WEIGHTS

    def test_an_engine_that_agrees_by_now_means_that_the_rollouts_are_old(self):
        assert examine(FakeScorer(bias=0.3), engine=FakeEngineScores(bias=0.3)).cause is Cause.STALE_ROLLOUTS

    def test_without_an_engine_old_rollouts_are_suspected(self):
        diagnosis = bench(FakeScorer(bias=0.3), None).examine(saved_cases([two_turns()]))
        assert diagnosis.cause is Cause.STALE_ROLLOUTS

    def test_small_uniform_differences_stay_below_the_thresholds(self):
        assert examine(FakeScorer(bias=0.005)).verdict is Verdict.OK

    def test_replaced_logprobs_with_the_right_ids_are_not_explained_away(self):
        check = EngineCheck(tokens=5, record_vs_trainer=0.5, engine_vs_trainer=0.5, engine_vs_record=0.5)
        wrong = TokenMatch(sampled=10, trained=10, same_id=10, same=4)
        finding = judge(Evidence(match=wrong, mismatch={"kl_v1": 0.5, "kl_v2": 0.5}, engine=check))
        assert finding.cause is Cause.UNKNOWN

    def test_wrong_ids_are_named_before_everything_that_follows_from_them(self):
        wrong = TokenMatch(sampled=10, trained=8, same_id=3, same=3)
        noise = {"kl_v2": 9.0}
        assert judge(Evidence(match=wrong, mismatch={"kl_v1": 1.0, "kl_v2": 1.0}, noise=noise)).cause is (
            Cause.RETOKENISE
        )


class TestStatistics:
    def test_classes_are_a_partition_in_the_order_of_the_specification(self):
        text = "\n".join(["The answer", '<tool_call>\n{"name": "calculator"}\n</tool_call> done<|im_end|>'])
        sampled = ids_of(text)
        (row,) = rows_from_calls([call(ids_of("hello"), sampled)])
        names = [CLASSES[index] for index in classify(row, TEXTS)]
        pieces = [TEXTS[token] for token in sampled]
        assert names[0] == "first_of_turn"
        assert names[-1] == "special"
        for piece, name in zip(pieces[1:], names[1:], strict=True):
            if piece in ("<tool_call>", "</tool_call>", "<|im_end|>"):
                assert name == "special"
        opened, closed = pieces.index("<tool_call>"), pieces.index("</tool_call>")
        assert set(names[opened + 1 : closed]) == {"tool_call"}
        assert set(names[closed + 1 : -1]) == {"other"}

    def test_a_tool_call_that_was_cut_short_lasts_to_the_end_of_its_turn(self):
        (row,) = rows_from_calls([call(ids_of("hello"), ids_of('answer <tool_call>\n{"name'))])
        names = [CLASSES[index] for index in classify(row, TEXTS)]
        assert names[-1] == "tool_call"

    def test_every_turn_has_its_own_first_token(self):
        (row,) = rows_from_calls(two_turns().calls)
        assert (classify(row, TEXTS) == CLASSES.index("first_of_turn")).sum() == 2

    def test_kl_by_class_and_by_turn_add_up_to_the_whole(self):
        scored = scored_rows([two_turns()], FakeScorer(noise=0.4))
        whole = statistics.mismatch(scored)
        for parts in (statistics.by_class(scored), statistics.by_turn(scored)):
            tokens = sum(part["tokens"] for part in parts.values())
            assert tokens == sum(len(s.position_T) for s in scored)
            for name in ("kl_v1", "kl_v2"):
                mean = sum(part[name] * part["tokens"] for part in parts.values()) / tokens
                assert mean == pytest.approx(whole[name], rel=1e-9)

    def test_kl_v1_and_v2_are_those_of_the_seed(self):
        scored = scored_rows([two_turns()], FakeScorer(bias=0.25))
        metrics = statistics.mismatch(scored)
        assert metrics["kl_v1"] == pytest.approx(0.25, rel=1e-5)
        assert metrics["kl_v2"] == pytest.approx(0.5 * 0.25**2, rel=1e-5)

    def test_offset_zero_fits_best_and_its_neighbours_do_not(self):
        by_offset = statistics.abs_diff_by_offset(scored_rows([two_turns()], FakeScorer()))
        assert by_offset[0] < 1e-6
        assert min(by_offset[-1], by_offset[1]) > 0.1

    @pytest.mark.parametrize(("places", "offset"), [(1, 1), (-1, -1)])
    def test_the_offset_tells_to_which_side_logprobs_were_moved(self, places, offset):
        (scored,) = scored_rows([two_turns()], FakeScorer())
        moved = replace(scored, logp_samp_T=np.roll(scored.logp_samp_T, places))
        by_offset = statistics.abs_diff_by_offset([moved])
        assert min(by_offset, key=lambda o: by_offset[o]) == offset

    def test_worst_positions_are_sorted_and_carry_their_context(self):
        scored = scored_rows([two_turns()], FakeScorer(noise=0.4))
        worst = statistics.worst_positions(scored, TEXTS, count=3)
        sizes = [abs(place.diff) for place in worst]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == max(np.abs(scored[0].diff_T))
        row = scored[0].row
        for place in worst:
            assert row.ids[place.position] == place.token_id
            assert row.loss_mask[place.position]
            assert place.before.endswith(TEXTS[int(row.ids[place.position - 1])])

    def test_weights_are_the_ones_that_correction_applies(self):
        (scored,) = scored_rows([two_turns()], FakeScorer(bias=-1.0))
        assert scored.weight_T == pytest.approx(np.full(len(scored.position_T), 2.0))  # e > 2: truncated


class TestReport:
    def test_json_has_its_documented_shape_and_no_nan(self):
        data = json.loads(json.dumps(examine(FakeScorer(noise=0.4)).to_json(), allow_nan=False))
        assert data.keys() == {
            *("format", "verdict", "cause", "explanation", "thresholds", "settings", "noise_floor", "cases")
        }
        case = data["cases"][0]
        assert {
            *("name", "verdict", "cause", "kl_v1", "kl_v2", "match_rate", "coverage", "by_class", "by_turn"),
            *("worst", "noise_floor", "engine_check", "abs_diff_by_offset", "forced_token_ratio"),
        } <= case.keys()
        assert {"position", "turn", "token_id", "text", "logp_samp", "logp_train", "before", "after"} <= (
            case["worst"][0].keys()
        )

    def test_rollouts_without_tokens_are_counted_and_do_not_disturb(self):
        failed = Rollout(rollout_id=9, group_id=9, calls=(), error="the tool is gone")
        report = bench(FakeScorer()).examine(saved_cases([two_turns(), failed])).cases[0]
        assert (report.num_rollouts, report.num_failed) == (1, 1)

    def test_nothing_to_examine_gives_no_false_accusation(self):
        diagnosis = bench(FakeScorer()).examine(saved_cases([]))
        assert diagnosis.verdict is Verdict.OK
        json.dumps(diagnosis.to_json(), allow_nan=False)

    def test_the_console_shows_model_text_that_cannot_act_on_it(self):
        console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
        rollout = two_turns(said="\x1b[31m[bold]red")
        print_report(bench(FakeScorer(noise=0.4)).examine(saved_cases([rollout])), console)
        text = console.export_text()
        assert "\x1b" not in text
        assert "worst positions" in text

    def test_control_characters_are_spelled_out(self):
        assert terminal_safe("a\n\x1b[0m\u202e") == "a⏎\\x1b[0m\\x202e"


def exact(count: int) -> TokenMatch:
    return TokenMatch(sampled=count, trained=count, same_id=count, same=count)
