"""Statistics of scored tokens, and the comparison of rows with the engine's record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.lab.diagnosis import evidence
from lockstep.lab.diagnosis.evidence import TokenMatch, match_rows
from lockstep.rollout.records import FinishReason, Rollout, TrainingRow
from tests.fixtures.made_up_model import TEXTS, FakeTrainer, call, ids_of, letters, scored_tokens, step_batch, two_turns


class TestMatchRows:
    def test_rows_of_the_training_path_are_exact(self):
        rollouts = [two_turns(0), two_turns(1, said="there")]
        rows = step_batch(rollouts).rows
        found = match_rows(rollouts, rows)
        count = sum(rollout.num_sampled for rollout in rollouts)
        assert found == TokenMatch(sampled=count, trained=count, same_id=count, same=count)
        assert found.is_exact
        assert found.match_rate == found.id_match_rate == found.coverage == 1.0

    def test_each_wrong_id_and_each_wrong_logprob_is_counted(self):
        rollout = two_turns()
        (row,) = step_batch([rollout]).rows
        first, second, *_ = np.flatnonzero(row.loss_mask)
        ids, logprobs = row.ids.copy(), row.sampling_logprobs.copy()
        ids[first] += 1
        logprobs[second] -= 1e-6
        found = match_rows([rollout], [replace(row, ids=ids, sampling_logprobs=logprobs)])
        assert (found.trained - found.same_id, found.trained - found.same) == (1, 2)
        assert not found.is_exact

    @pytest.mark.parametrize("keeps_the_beginning", [True, False])
    def test_lost_tokens_are_lost_ends_only_if_the_beginning_of_the_turn_is_right(self, keeps_the_beginning):
        rollout = two_turns()
        (row,) = step_batch([rollout]).rows
        trained = np.flatnonzero(row.loss_mask & (row.turns == 1))
        mask = row.loss_mask.copy()
        mask[trained[-3:] if keeps_the_beginning else trained[:3]] = False
        found = match_rows([rollout], [replace(row, loss_mask=mask)])
        assert found.sampled - found.trained == 3
        assert found.lost_ends == (3 if keeps_the_beginning else 0)

    def test_aborted_calls_are_not_expected_in_rows(self):
        rollout = two_turns()
        first, second = rollout.calls
        aborted = replace(rollout, calls=(first, replace(second, finish_reason=FinishReason.ABORT)))
        assert match_rows([aborted], step_batch([aborted]).rows).sampled == len(first.sampled_ids)

    def test_a_rollout_without_rows_is_counted_as_sampled(self):
        found = match_rows([two_turns()], [])
        assert (found.trained, found.coverage) == (0, 0.0)
        assert not found.is_exact


class TestStatistics:
    def test_kl_v1_and_v2_are_the_mean_and_half_the_mean_square_of_d(self):
        scored = scored_tokens([two_turns()], FakeTrainer(bias=0.25))
        metrics = evidence.mismatch(scored.train_N, scored.samp_N)
        assert metrics["kl_v1"] == pytest.approx(0.25, rel=1e-5)
        assert metrics["kl_v2"] == pytest.approx(0.5 * 0.25**2, rel=1e-5)

    def test_kl_by_class_and_by_turn_add_up_to_the_whole(self):
        scored = scored_tokens([two_turns()], FakeTrainer(noise=0.4))
        whole = evidence.mismatch(scored.train_N, scored.samp_N)
        for parts in (evidence.by_class(scored), evidence.by_turn(scored)):
            assert len(parts) > 1
            tokens = sum(part["tokens"] for part in parts.values())
            assert tokens == len(scored.train_N)
            for name in ("kl_v1", "kl_v2"):
                mean = sum(part[name] * part["tokens"] for part in parts.values()) / tokens
                assert mean == pytest.approx(whole[name], rel=1e-9)

    def test_the_noise_floor_compares_the_two_passes_of_all_cases(self):
        noisy = scored_tokens([two_turns()], FakeTrainer(noise=0.4))
        quiet = scored_tokens([two_turns()], FakeTrainer(bias=5.0))
        floor = evidence.noise_floor([noisy])["kl_v2"]
        assert floor > 0.01
        assert evidence.noise_floor([quiet])["kl_v2"] == 0.0
        assert evidence.noise_floor([noisy, quiet])["kl_v2"] == pytest.approx(floor / 2)

    def test_rows_that_were_scored_once_have_no_noise_floor(self):
        assert evidence.noise_floor([replace(scored_tokens([two_turns()], FakeTrainer()), again_N=None)]) == {}

    def test_offset_zero_fits_best_and_its_neighbors_do_not(self):
        by_offset = evidence.abs_diff_by_offset(scored_tokens([two_turns()], FakeTrainer()))
        assert by_offset[0] < 1e-6
        assert min(by_offset[-1], by_offset[1]) > 0.1

    @pytest.mark.parametrize("places", [1, -1])
    def test_the_offset_tells_to_which_side_logprobs_were_moved(self, places):
        scored = scored_tokens([two_turns()], FakeTrainer())
        by_offset = evidence.abs_diff_by_offset(replace(scored, batch=moved(scored.batch.rows, places, scored)))
        assert min(by_offset, key=lambda offset: by_offset[offset]) == places

    def test_offsets_do_not_reach_into_another_turn_or_row(self):
        said = letters("hi")
        assert len(said) == 2
        short = [Rollout(rollout_id=i, group_id=0, calls=(call(ids_of("the answer"), said),)) for i in range(3)]
        assert evidence.abs_diff_by_offset(scored_tokens(short, FakeTrainer())) == {}

    def test_worst_positions_are_sorted_and_carry_their_context(self):
        scored = scored_tokens([two_turns(0), two_turns(7)], FakeTrainer(noise=0.4))
        worst = evidence.worst_positions(scored)
        sizes = [abs(place["diff"]) for place in worst]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == float(scored.diff_N.abs().max())
        assert {place["rollout_id"] for place in worst} == {0, 7}
        for place in worst:
            row = scored.batch.rows[place["row"]]
            assert row.rollout_id == place["rollout_id"]
            assert row.ids[place["position"]] == place["token_id"]
            assert row.loss_mask[place["position"]]
            assert place["before"].endswith(TEXTS[int(row.ids[place["position"] - 1])])
            assert place["diff"] == pytest.approx(place["logp_samp"] - place["logp_train"])

    def test_weights_are_the_ones_that_correction_applies(self):
        scored = scored_tokens([two_turns()], FakeTrainer(bias=-1.0))
        assert scored.weight_N.tolist() == pytest.approx([2.0] * len(scored.train_N))  # e > 2: truncated


def moved(rows: tuple[TrainingRow, ...], places: int, scored: evidence.ScoredTokens):
    late = [replace(row, sampling_logprobs=np.roll(row.sampling_logprobs, places)) for row in rows]
    return replace(scored.batch, rows=tuple(late))
