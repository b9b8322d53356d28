"""A step on several ranks: all ranks have the numbers, and a rank has the rows that it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.rollout.errors import EvidenceError, LockstepError
from lockstep.rollout.records import (
    EngineCall,
    FinishReason,
    ImageSpan,
    Rollout,
    SamplingSupport,
    TrainingRow,
    VersionSpan,
)
from lockstep.trainer.batch import dealt_batch
from lockstep.trainer.batch.assignment import Plan, plan
from lockstep.trainer.batch.batch_bytes import encode, row_arrays, rows_of
from lockstep.trainer.batch.dealt_batch import DealtBatch, RowsOfRank, dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.fixtures.families import FAMILIES
from tests.fixtures.teachers import made_up_scores

RANKS = 3


def rollouts(count: int = 12, *, turns: int = 2) -> list[Rollout]:
    """Make rollouts of several turns in groups of 2; tokens of a turn come from two versions of the weights."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        prompt = tuple(rng.integers(5, 100, 20 + number % 3).tolist())
        calls = []
        for _ in range(turns):
            length = int(rng.integers(2, 9))
            call = EngineCall(
                prompt_ids=prompt,
                sampled_ids=tuple(rng.integers(5, 100, length).tolist()),
                sampled_logprobs=tuple(rng.normal(-2, 0.1, length).tolist()),
                finish_reason=FinishReason.STOP,
                version_spans=(
                    VersionSpan(version=number, start=0, end=1),
                    VersionSpan(version=number + 1, start=1, end=length),
                ),
            )
            calls.append(call)
            prompt = (*call.all_ids, 3, 4)
        made.append(
            Rollout(rollout_id=number, group_id=number // 2, calls=tuple(calls), reward=float(number * number % 5))
        )
    return made


def a_batch(count: int = 12, **settings: Any) -> StepBatch:
    return StepBatch.of(rollouts(count), mask_truncated=False, with_states=True, **settings)


def with_everything() -> StepBatch:
    """Return a batch whose rows have supports, experts and images."""
    batch = a_batch()
    rows = []
    for number, row in enumerate(batch.rows):
        count = row.num_trained
        support = SamplingSupport(
            offsets=np.arange(0, 2 * count + 1, 2), token_ids=np.arange(2 * count, dtype=np.int32) + number
        )
        image = ImageSpan(start=number % 3, end=4, digest=f"{number:064x}")
        experts = np.full((len(row) - 1, 2, 2), number, dtype=np.uint8)
        images = () if number % 2 else (image,)
        rows.append(replace(row, support=support, images=images, routes=experts))
    return replace(batch, rows=tuple(rows), teacher=made_up_scores(batch, top_k=2, vocab_size=100))


def plan_of(batch: StepBatch, *, token_budget: int = 80, ranks: int = RANKS) -> Plan:
    return plan(batch.row_lengths.tolist(), num_ranks=ranks, token_budget=token_budget)


def same_row(one: TrainingRow, other: TrainingRow) -> bool:
    for field in fields(TrainingRow):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, SamplingSupport):
            if not (np.array_equal(a.offsets, b.offsets) and np.array_equal(a.token_ids, b.token_ids)):
                return False
        elif isinstance(a, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif a != b:
            return False
    return True


class CountingRank(FakeRank):
    """A rank that counts the bytes that reach it."""

    received = 0

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        self.received += tensor.numel() * tensor.element_size()
        return super().receive(tensor, rank)

    def broadcast_bytes(self, payload: bytes) -> bytes:
        result = super().broadcast_bytes(payload)
        self.received += len(result)
        return result


def counting(rank: FakeRank) -> CountingRank:
    return CountingRank(rank=rank.rank, world_size=rank.world_size, meeting=rank._meeting)


@pytest.mark.parametrize("batch", [a_batch(), with_everything(), a_batch(0)], ids=["plain", "everything", "empty"])
def test_all_ranks_have_the_numbers_of_all_rows(batch: StepBatch) -> None:
    def numbers(rank: FakeRank) -> list[Any]:
        mine = dealt(batch if rank.is_main else a_batch(0), rank)
        tensors = (mine.sampling_logprobs_N, mine.versions_N, mine.turns_N, mine.rollout_N)
        layout = (mine.layout.token_start, mine.layout.rollout_index, mine.row_lengths)
        of_rollouts = [getattr(mine, one.name) for one in fields(StepBatch) if one.name not in ("rows", "teacher")]
        scores = mine.teacher
        teacher = [] if scores is None else [scores.logp_N, scores.version, scores.top_mass_N]
        dtypes = [tensor.dtype for tensor in tensors if len(tensor)]
        return [*map(np.asarray, (*tensors, *layout, *of_rollouts, *teacher)), dtypes, len(mine.rows)]

    expected = numbers(FakeRank())
    for found in on_ranks(RANKS, numbers):
        assert found[-2:] == expected[-2:]
        for one, other in zip(found[:-2], expected[:-2], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("batch", [a_batch(), with_everything()], ids=["plain", "everything"])
def test_a_rank_has_the_rows_of_its_packs_and_refuses_others(batch: StepBatch) -> None:
    expected = plan_of(batch)

    def deal(rank: FakeRank) -> int:
        mine = dealt(batch, rank)
        share = mine.share(lambda: plan_of(batch), rank)
        assert share == expected.share(rank.rank)
        own = {row for pack in share.packs for row in pack}
        assert all(same_row(mine.rows[row], batch.rows[row]) for row in own)
        if batch.teacher is not None:
            assert mine.teacher is not None
            is_own = np.isin(np.repeat(np.arange(len(batch.rows)), np.diff(batch.layout.token_start)), list(own))
            np.testing.assert_array_equal(mine.teacher.top_ids[is_own], batch.teacher.top_ids[is_own])
            np.testing.assert_array_equal(mine.teacher.top_logp[is_own], batch.teacher.top_logp[is_own])
            if not rank.is_main:
                mine.teacher.top_at(torch.from_numpy(np.flatnonzero(is_own)))
                with pytest.raises(EvidenceError, match="most probable tokens of these rows are on other ranks"):
                    mine.teacher.top_at(torch.from_numpy(np.flatnonzero(~is_own)[:1]))
        if rank.is_main:
            assert all(same_row(mine.rows[row], batch.rows[row]) for row in range(len(batch.rows)))
            return len(own)
        assert isinstance(mine.rows, RowsOfRank)
        assert mine.rows.here.keys() == own
        other = next(row for row in range(len(batch.rows)) if row not in own)
        with pytest.raises(EvidenceError, match=rf"row {other} of the step is not on this rank, which has {len(own)}"):
            mine.rows[other]
        with pytest.raises(IndexError):
            mine.rows[len(batch.rows)]
        return len(own)

    assert sum(on_ranks(RANKS, deal)) == len(batch.rows)


def test_a_row_travels_to_a_rank_once() -> None:
    batch = a_batch(60)

    def deal(rank: FakeRank) -> list[int]:
        counted = counting(rank)
        mine = dealt(batch, counted)
        received = []
        for budget in (80, 80, 50):
            before = counted.received
            share = mine.share(lambda budget=budget: plan_of(batch, token_budget=budget), counted)
            received.append(counted.received - before)
            assert all(same_row(mine.rows[row], batch.rows[row]) for pack in share.packs for row in pack)
        return received

    _, *others = on_ranks(RANKS, deal)
    for first, second, third in others:
        assert second < first / 4, "packs and metrics, and no row"
        assert second < third < first, "another plan moves some rows"


def test_bytes_of_rows_per_rank_do_not_grow_with_ranks() -> None:
    received = {}
    for ranks in (2, 4):
        batch = a_batch(20 * ranks)

        def deal(rank: FakeRank, batch: StepBatch = batch, ranks: int = ranks) -> tuple[int, int]:
            counted = counting(rank)
            mine = dealt(batch, counted)
            numbers = counted.received
            mine.share(lambda: plan_of(batch, ranks=ranks), counted)
            return numbers, counted.received - numbers

        _, *others = on_ranks(ranks, deal)
        received[ranks] = max(rows for _, rows in others)
        assert all(numbers < 0.5 * len(encode(batch)) for numbers, _ in others)
    assert received[4] < 1.2 * received[2]


def test_a_plan_that_fails_ends_all_ranks() -> None:
    def fail() -> Plan:
        raise EvidenceError("no plan")

    def deal(rank: FakeRank) -> str:
        with pytest.raises(LockstepError) as raised:
            dealt(a_batch(), rank).share(fail, rank)
        return str(raised.value)

    assert all("no plan" in text for text in on_ranks(RANKS, deal))


def test_experts_of_a_pass_go_to_rank_0_and_from_there_to_other_ranks() -> None:
    batch = with_everything()
    ends = np.cumsum([0, *batch.row_lengths])
    experts = np.random.default_rng(0).integers(0, 9, (int(ends[-1]), 2, 2)).astype(np.uint8)
    of_rows = {row: experts[ends[row] : ends[row + 1]] for row in range(len(batch.rows))}
    expected = batch.with_routes(of_rows, FakeRank())

    def route(rank: FakeRank) -> int:
        mine = dealt(batch, rank)
        passed = mine.share(lambda: plan_of(batch), rank)
        routed = mine.with_routes({row: of_rows[row] for pack in passed.packs for row in pack}, rank)
        share = routed.share(lambda: plan_of(batch, token_budget=50), rank)
        rows = {row for pack in share.packs for row in pack}
        assert all(same_row(routed.rows[row], expected.rows[row]) for row in rows)
        return len(rows)

    assert sum(on_ranks(RANKS, route)) == len(batch.rows)


def test_a_rank_without_rows_has_no_experts_to_send() -> None:
    batch = a_batch(2)
    of_rows = {row: np.full((len(batch.rows[row]), 1, 1), row, dtype=np.uint8) for row in range(len(batch.rows))}

    def route(rank: FakeRank) -> bool:
        mine = dealt(batch, rank)
        share = mine.share(lambda: plan_of(batch, token_budget=1000, ranks=5), rank)
        routed = mine.with_routes({row: of_rows[row] for pack in share.packs for row in pack}, rank)
        share = routed.share(lambda: plan_of(batch, token_budget=1000, ranks=5), rank)
        return all(routed.rows[row].routes[0, 0, 0] == row for pack in share.packs for row in pack)

    assert all(on_ranks(5, route))


def test_one_rank_keeps_its_batch() -> None:
    batch = a_batch()
    assert dealt(batch, FakeRank()) is batch


def a_policy() -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(FAMILIES["qwen3"]()).double())


@pytest.mark.parametrize("share_prefixes", ["auto", "never"])
def test_dealt_rows_give_the_same_logprobs_and_gradients(share_prefixes: str) -> None:
    """Bit for bit those of ranks that have all rows; with two minibatches, whose plans move rows."""
    copies = [a_policy() for _ in range(2 * RANKS)]
    whole = a_batch()

    def update(rank: FakeRank, *, is_dealt: bool) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        policy = copies[rank.rank + RANKS * is_dealt]
        mine = FakeRank(policy, rank=rank.rank, world_size=rank.world_size, meeting=rank._meeting)
        config = Config(algorithm=AlgorithmConfig(minibatches=2), token_budget=64, share_prefixes=share_prefixes)
        updater = Updater(policy, mine, config)
        batch = dealt(whole, mine) if is_dealt else whole
        assert isinstance(batch, DealtBatch) is is_dealt
        repacked = updater.scorer.score_repacked(batch)
        logprobs = Logprobs(old=Recomputed(updater.scorer.score(batch)))
        correction = StepCorrection.of(batch, logprobs.old, config.correction)
        targets, _ = rollout_targets(batch, logprobs, correction, config.algorithm)
        metrics = dict(updater.update(batch, targets).metrics)
        return torch.cat([repacked, logprobs.old.logp_N]), mine.gradient, metrics  # type: ignore[list-item]

    by_rows = [
        on_ranks(RANKS, lambda rank, is_dealt=is_dealt: update(rank, is_dealt=is_dealt)) for is_dealt in (False, True)
    ]
    for (logp_N, gradient, metrics), (dealt_N, of_dealt, metrics_of_dealt) in zip(*by_rows, strict=True):
        assert torch.equal(logp_N, dealt_N)
        assert torch.equal(gradient, of_dealt)
        assert metrics == metrics_of_dealt
        assert gradient.abs().max() > 0


def test_a_row_that_has_changed_on_its_way_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other_ids(arrays: Any) -> list[TrainingRow]:
        return [replace(row, ids=row.ids + (row.ids == row.ids[5])) for row in rows_of(arrays)]

    monkeypatch.setattr(dealt_batch, "rows_of", with_other_ids)
    batch = a_batch()

    def deal(rank: FakeRank) -> bool:
        mine = dealt(batch, rank)
        with pytest.raises(EvidenceError, match=r"row \d+ of the step, of rollout \d+, has changed on its way here"):
            mine.share(lambda: plan_of(batch), rank)
        return True

    assert on_ranks(RANKS, deal) == [True] * RANKS


def test_rank_0_tells_all_ranks_that_it_cannot_send_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that have theirs already."""
    batch, calls = a_batch(), []

    def fails_once(rows: Any, **settings: Any) -> Any:
        calls.append(rows)
        if len(calls) == 2:
            raise EvidenceError("no row")
        return row_arrays(rows, **settings)

    monkeypatch.setattr(dealt_batch, "row_arrays", fails_once)

    def deal(rank: FakeRank) -> bool:
        mine = dealt(batch, rank)
        with pytest.raises(LockstepError, match="no row"):
            mine.share(lambda: plan_of(batch, ranks=4), rank)
        return True

    assert on_ranks(4, deal) == [True] * 4


def test_passes_over_one_plan_send_no_row_again() -> None:
    copies, batch = [a_policy() for _ in range(2)], a_batch(60)

    def score(rank: FakeRank) -> list[int]:
        counted = counting(rank)
        scorer = Scorer(copies[rank.rank], counted, temperature=1.0, token_budget=64)
        mine = dealt(batch, counted)
        received = []
        for _ in range(2):
            before = counted.received
            scorer.score(mine)
            received.append(counted.received - before)
        return received

    _, (first, second) = on_ranks(2, score)
    assert second < first / 4
