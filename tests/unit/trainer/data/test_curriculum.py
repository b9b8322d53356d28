"""Curriculum: rests and weights by pass rate, the same after a resume, with all rows and shares kept."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.config.groups.data_settings import CurriculumConfig
from lockstep.trainer.data.curriculum import Curriculum, RowRecord, Visit
from lockstep.trainer.data.prompts import Position, Prompts, Row

GROUP = 8


def begin(order: Prompts, count: int) -> list[tuple[int, Row]]:
    """Begin rows; return them with their places."""
    places = order.begin(count)
    return list(zip(places, order.rows(places), strict=True))


def curriculum(*sizes: int, weights: tuple[float, ...] | None = None, seed: int = 0, **rule: Any) -> Prompts:
    sets = [[{"set": which, "i": i} for i in range(size)] for which, size in enumerate(sizes or (6,))]
    return Prompts(sets, seed=seed, shuffle=True, weights=weights, curriculum=CurriculumConfig(**rule))


def resting(n: int = 6, **rule: Any) -> Prompts:
    settings: dict[str, Any] = {"rest_epochs": 1, **rule}
    return curriculum(n, **settings)


def state_of(order: Prompts) -> dict[str, str]:
    assert order.curriculum is not None
    return order.curriculum.state()


def train(order: Prompts, rewards: dict[int, list[float]], steps: int, *, per_step: int = 1) -> list[int]:
    """Take rows and report their rewards, by row. Returns the taken rows."""
    taken = []
    for _ in range(steps):
        begun = begin(order, per_step)
        for place, row in begun:
            order.learn(place, rewards.get(row["i"], [1.0, 0.0]))
            taken.append(row["i"])
        order.finish(place for place, _ in begun)
    return taken


def resume(order: Prompts, **settings: Any) -> Prompts:
    """Continue a run with settings as a checkpoint does."""
    resumed = curriculum(*order.sizes, **settings)
    position = json.loads(json.dumps([order.position.cursor, order.position.skipped, order.position.unfinished]))
    cursor, skipped, unfinished = position
    state = json.loads(json.dumps(state_of(order)))
    place = Position(cursor=cursor, skipped=tuple(skipped), unfinished=tuple(unfinished))
    assert resumed.resume(place, state, order.sizes) is None
    return resumed


# Rest


def test_rows_always_or_never_solved_rest_for_an_epoch_and_come_back() -> None:
    """Row 0 is always solved, row 1 never: both are in epochs 0, 2, 4; the others in every epoch."""
    taken = train(resting(), {0: [1.0, 1.0], 1: [0.0, 0.0]}, 6 + 4 + 6 + 4)
    assert sorted(taken[:6]) == list(range(6))
    assert sorted(taken[6:10]) == [2, 3, 4, 5]
    assert sorted(taken[10:16]) == list(range(6))
    assert sorted(taken[16:]) == [2, 3, 4, 5]


def test_pass_rates_and_the_passing_reward_are_settings() -> None:
    order = resting(max_pass_rate=0.5, min_pass_rate=-1.0, solved_reward=0.7)
    train(order, {i: [0.8, 0.0] if i < 3 else [0.0] for i in range(6)}, 6)
    assert {key for key, text in state_of(order).items() if text.startswith("2")} == {"0:0", "0:1", "0:2"}


def test_rest_follows_the_pass_rate_of_the_window_not_of_the_last_visit() -> None:
    """Row 0 passes half, then all: 2 of 4 rollouts are in between; without the first visit it is solved."""
    order = resting(window=2)
    train(order, {}, 6)
    train(order, {0: [1.0, 1.0]}, 6)
    assert state_of(order)["0:0"] == "0 1/2 2/2"
    train(order, {0: [1.0, 1.0]}, 6)
    assert state_of(order)["0:0"] == "4 2/2 2/2", "visited in epoch 2, so taken again in epoch 4"


@pytest.mark.parametrize("rest_epochs", [3, 10**9])
def test_a_curriculum_in_which_every_row_rests_skips_to_the_end_of_the_rest(rest_epochs: int) -> None:
    order = resting(rest_epochs=rest_epochs)
    taken = train(order, {i: [1.0] for i in range(6)}, 12)
    assert sorted(taken[6:]) == list(range(6))
    assert order.position == Position(cursor=12, skipped=(6 * rest_epochs,))
    assert order.metrics()["data/epoch"] == rest_epochs + 2


def test_without_a_curriculum_nothing_is_recorded() -> None:
    order = curriculum()
    (place, row) = begin(order, 1)[0]
    order.learn(place, [1.0])
    assert row == {"set": 0, "i": row["i"]}
    assert order.curriculum is None
    assert order.metrics() == {"data/epoch": pytest.approx(1 / 6)}


# Weights


WEIGHTS = [
    ({"weighting": "uniform"}, (1.0, 1.0, 1.0, 1.0)),
    ({"weighting": "learnability"}, (0.1, 0.4375, 1.0, 0.1)),
    ({"weighting": "learnability", "min_weight": 0.5}, (0.5, 0.5, 1.0, 0.5)),
    ({"weighting": "pools"}, (0.5, 1.0, 1.0, 0.1)),
    ({"weighting": "pools", "min_pass_rate": 0.125, "max_pass_rate": 0.5, "hard_weight": 0.2}, (0.2, 0.2, 0.1, 0.1)),
]


@pytest.mark.parametrize(("rule", "expected"), WEIGHTS)
def test_weights_are_those_of_the_formula(rule: dict[str, Any], expected: tuple[float, ...]) -> None:
    """By hand for 0, 1, 4 and 8 passes of 8 rollouts: 4 p (1 - p) = 0, 4 * 7/64 = 0.4375, 1, 0."""
    made = Curriculum(CurriculumConfig(**rule), sizes=[4], seed=0)
    records = [RowRecord(visits=(Visit(passes, 8),)) for passes in (0, 1, 4, 8)]
    assert [made.weight(record) for record in records] == list(expected)
    assert made.weight(RowRecord()) == 1.0


def test_the_pass_rate_counts_rollouts_not_visits() -> None:
    """The first visit lost 6 of its 8 rollouts to failures: p is 8 / 10, not the mean of 2/2 and 6/8."""
    assert RowRecord(visits=(Visit(2, 2), Visit(6, 8))).pass_rate == 0.8
    assert RowRecord().pass_rate is None


def test_rows_are_visited_in_the_ratio_of_their_weights() -> None:
    """Rows with c of 8 passes at every visit; per epoch a visit with probability w, so binomial over the epochs."""
    order, epochs = curriculum(9, weighting="learnability"), 2000
    rewards = {c: [1.0] * c + [0.0] * (8 - c) for c in range(9)}
    taken: list[int] = []
    while order.metrics()["data/epoch"] < epochs:
        taken += train(order, rewards, 1)
    visits = Counter(taken)
    for c in range(9):
        weight = max(0.1, 4 * (c / 8) * (1 - c / 8))
        assert visits[c] == pytest.approx(epochs * weight, abs=1 + 4 * math.sqrt(epochs * weight * (1 - weight)))
    assert visits[4] in (epochs, epochs + 1), "weight 1: in every epoch"


def test_visits_of_rows_with_known_solve_probabilities_are_those_of_the_renewal_rate() -> None:
    """A row with k passes at a visit waits for a geometric time of mean 1 / w(k/8) epochs, k binomial."""
    chance, epochs = random.Random(0), 3000
    solve = [0.0, 0.05, 0.25, 0.5, 0.9, 1.0]
    order = curriculum(len(solve), weighting="learnability")
    visits: Counter[int] = Counter()
    while order.metrics()["data/epoch"] < epochs:
        ((place, row),) = begin(order, 1)
        order.learn(place, [float(chance.random() < solve[row["i"]]) for _ in range(GROUP)])
        order.finish([place])
        visits[row["i"]] += 1
    for i, p in enumerate(solve):
        binomial = [math.comb(GROUP, k) * p**k * (1 - p) ** (GROUP - k) for k in range(GROUP + 1)]
        waiting = [1 / max(0.1, 4 * (k / GROUP) * (1 - k / GROUP)) for k in range(GROUP + 1)]
        rate = 1 / sum(share * time for share, time in zip(binomial, waiting, strict=True))
        assert visits[i] == pytest.approx(epochs * rate, abs=4 * math.sqrt(epochs * rate))


def test_weighted_rows_learn_more_from_the_same_number_of_visits() -> None:
    """Each visit moves the logit of a row by p (1 - p), the size of the policy gradient's signal."""

    def learned(weighting: str) -> float:
        chance = random.Random(1)
        logits = [-8.0] * 20 + [8.0] * 20 + [-1.5] * 10
        before = sum(1 / (1 + math.exp(-logit)) for logit in logits)
        order = curriculum(len(logits), weighting=weighting, window=2)
        for _ in range(60):
            begun = begin(order, 5)
            for place, row in begun:
                p = 1 / (1 + math.exp(-logits[row["i"]]))
                order.learn(place, [float(chance.random() < p) for _ in range(GROUP)])
                logits[row["i"]] += p * (1 - p)
            order.finish(place for place, _ in begun)
        return sum(1 / (1 + math.exp(-logit)) for logit in logits) - before

    assert learned("learnability") > 1.5 * learned("uniform")


# Coverage and shares


RULES = st.fixed_dictionaries(
    {
        "rest_epochs": st.integers(0, 3),
        "weighting": st.sampled_from(["uniform", "learnability", "pools"]),
        "window": st.integers(1, 3),
        "min_weight": st.sampled_from([0.01, 0.1, 1.0]),
        "solved_weight": st.sampled_from([0.01, 0.5]),
    }
).filter(lambda rule: rule["rest_epochs"] or rule["weighting"] != "uniform")


def passes(row: Mapping[str, Any], visit: int) -> list[float]:
    """Return the rewards of a visit, a function of row and visit."""
    chance = random.Random(f"{row} {visit}")
    return [float(chance.random() < (row["i"] % 5) / 4) for _ in range(4)]


def steps(order: Prompts, count: int, per_step: int, *, first: int = 0) -> list[list[tuple[int, int]]]:
    """Train steps; return the rows of each as (set, index)."""
    taken = []
    for step in range(first, first + count):
        begun = begin(order, per_step)
        for place, row in begun:
            order.learn(place, passes(row, step))
        order.finish(place for place, _ in begun)
        taken.append([(row["set"], row["i"]) for _, row in begun])
    return taken


@settings(max_examples=20, deadline=None)
@given(rule=RULES, sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3), per_step=st.integers(1, 9))
def test_every_unseen_row_comes_within_the_epoch_and_no_row_twice_in_a_step(
    rule: dict[str, Any], sizes: list[int], per_step: int
) -> None:
    order = curriculum(*sizes, weights=(1.0,) * len(sizes), **rule)
    taken = steps(order, 30, per_step)
    for which, size in enumerate(sizes):
        drawn = [index for step in taken for found, index in step if found == which]
        assert len(set(drawn[:size])) == min(len(drawn), size), "the first epoch has every row once"
        for step in taken:
            rows = [index for found, index in step if found == which]
            assert len(set(rows)) == min(len(rows), size), "repeats only if the step has more rows than the data set"


@settings(max_examples=20, deadline=None)
@given(rule=RULES, weights=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=3))
def test_data_sets_keep_their_shares_whatever_is_skipped(rule: dict[str, Any], weights: list[float]) -> None:
    order = curriculum(*(7, 30, 3)[: len(weights)], weights=tuple(weights), **rule)
    uniform = curriculum(*(7, 30, 3)[: len(weights)], weights=tuple(weights))
    which = [[row for row, _ in step] for step in steps(order, 40, 6)]
    assert which == [[row["set"] for row in uniform.take(6)] for _ in range(40)]


def test_a_solved_data_set_keeps_its_share_and_its_rows_come_back_sooner() -> None:
    order = curriculum(4, 4, weights=(1.0, 1.0), rest_epochs=2)
    taken = []
    for _ in range(20):
        begun = begin(order, 2)
        for place, row in begun:
            order.learn(place, [1.0] if row["set"] else [1.0, 0.0])
        order.finish(place for place, _ in begun)
        taken += [row["set"] for _, row in begun]
    assert Counter(taken) == {0: 20, 1: 20}
    assert order.position.skipped[0] == 0
    assert order.position.skipped[1] >= 4 * 2 * 3


# Resume


@settings(max_examples=30, deadline=None)
@given(
    rule=RULES,
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    stopped_after=st.integers(0, 25),
    per_step=st.integers(1, 9),
)
def test_a_resumed_run_takes_the_same_rows(
    rule: dict[str, Any], sizes: list[int], stopped_after: int, per_step: int
) -> None:
    weights = (1.0,) * len(sizes)
    whole = curriculum(*sizes, weights=weights, **rule)
    expected = steps(whole, 40, per_step)
    order = curriculum(*sizes, weights=weights, **rule)
    before = steps(order, stopped_after, per_step)
    resumed = resume(order, weights=weights, **rule)
    after = steps(resumed, 40 - stopped_after, per_step, first=stopped_after)
    assert before + after == expected
    assert resumed.position == whole.position
    assert state_of(resumed) == state_of(whole)
    assert resumed.metrics() == whole.metrics()


def test_unfinished_rows_of_a_curriculum_come_first_and_keep_their_row() -> None:
    """Places stay rows although records changed after their beginning."""
    order = curriculum(12, weighting="learnability", min_weight=0.01)
    for _ in range(4):
        train(order, {i: [1.0] for i in range(12)}, 1, per_step=5)
    begun = begin(order, 5)
    order.learn(begun[0][0], [1.0])
    order.finish([begun[0][0], begun[3][0]])
    resumed = resume(order, weighting="learnability", min_weight=0.01)
    assert begin(resumed, 3) == [begun[1], begun[2], begun[4]]
    assert resumed.position == order.position


def test_a_row_in_flight_is_not_begun_again() -> None:
    order = curriculum(4, weighting="pools")
    first = begin(order, 3)
    order.finish([first[0][0]])
    assert len({row["i"] for _, row in [*first[1:], *begin(order, 2)]}) == 4
    resumed = curriculum(4, weighting="pools")
    resumed.restore(Position(cursor=4, unfinished=(1, 2)))
    again = begin(resumed, 1)
    assert len({row["i"] for _, row in [*again, *begin(resumed, 3)]}) == 4


def test_rows_that_rested_in_an_older_checkpoint_rest_on() -> None:
    """`cursor` then counted the places of resting rows, too: the next place is the same."""
    order = resting()
    everything = train(order, {0: [1.0], 1: [0.0]}, 9)
    old_cursor = order.position.cursor + order.position.skipped[0]
    resumed = resting()
    assert resumed.resume(Position(cursor=old_cursor), {"0:0": "2", "0:1": "2"}, ()) is None
    whole = resting()
    assert train(whole, {0: [1.0], 1: [0.0]}, 10)[:9] == everything
    continued = train(resumed, {}, 1)
    assert continued == train(order, {}, 1)


def test_a_window_made_smaller_counts_fewer_visits() -> None:
    order = resting(window=3)
    train(order, {}, 18)
    assert state_of(order)["0:0"] == "0 1/2 1/2 1/2"
    assert state_of(resume(order, rest_epochs=1, window=2))["0:0"] == "0 1/2 1/2"


@pytest.mark.parametrize(
    ("sizes", "skipped", "records"),
    [
        ((9,), (3,), {"0:1": "0 1/2"}),
        ((), (3,), {"0:6": "0 1/2"}),
        ((), (3,), {"1:0": "0 1/2"}),
        ((6, 6), (3, 4), {"0:1": "0 1/2"}),
    ],
)
def test_a_curriculum_of_other_data_starts_again_with_a_warning(
    sizes: tuple[int, ...], skipped: tuple[int, ...], records: dict[str, str]
) -> None:
    order = resting()
    warning = order.resume(Position(cursor=5, skipped=skipped), records, sizes)
    assert warning is not None
    assert "this run's have [6]: it starts again" in warning
    assert state_of(order) == {}
    assert order.position == Position(cursor=5, skipped=(0,))
    assert order.metrics()["data/unseen_share"] == 1.0


def test_a_run_without_a_curriculum_goes_on_from_the_place_of_one_that_had_one() -> None:
    order = resting()
    train(order, {i: [1.0] for i in range(4)}, 8)
    resumed = curriculum(6)
    assert resumed.resume(order.position, state_of(order), order.sizes) is None
    assert resumed.metrics() == {"data/epoch": order.metrics()["data/epoch"]}


@pytest.mark.parametrize("text", ["", "-1", "0 1", "0 3/2", "0 1/0", "0 a/b", "0  1/2", "1/2", "0 ١/٢"])
def test_a_record_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"record of row '0:1'.*weighting=uniform"):
        resting().resume(Position(), {"0:1": text}, (6,))


@pytest.mark.parametrize("key", ["", "0", "0:", "a:1", "0:-1", "0:1@2"])
def test_a_key_that_does_not_name_a_row_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="expected the key"):
        resting().resume(Position(), {key: "0 1/2"}, (6,))


# Metrics


def test_metrics_are_shares_of_all_rows_by_their_window() -> None:
    """Two of 6 rows have no visit; row 3 was solved and then not, so that only its window is in between."""
    order = curriculum(6, rest_epochs=1, window=2)
    assert order.curriculum is not None
    for row, rewards in ((0, [0.0]), (1, [1.0]), (2, [1.0, 0.0]), (3, [1.0]), (3, [0.0])):
        order.curriculum.learn((0, row), 0, rewards)
    assert order.metrics() == {
        "data/epoch": 0.0,
        "data/resting_rows": 2.0,
        "data/unseen_share": pytest.approx(2 / 6),
        "data/too_hard_share": pytest.approx(1 / 6),
        "data/between_share": pytest.approx(2 / 6),
        "data/solved_share": pytest.approx(1 / 6),
    }
