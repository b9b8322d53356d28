"""Prompts that share their beginning with an earlier call: equal ids, stored once, in memory and in files."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import DataError, EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, Prompt, PromptSharing, Rollout, VersionSpan
from lockstep.rollout.saved_rollouts import from_json, read_rollouts, to_json, write_rollouts

OWN, SAMPLED = 3, 5
TURNS = 2000


def a_call(prompt: Sequence[int], sampled: Sequence[int]) -> EngineCall:
    return EngineCall(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        sampled_logprobs=(-0.5,) * len(sampled),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=1, start=0, end=len(sampled)),),
    )


def a_rollout(calls: Sequence[EngineCall]) -> Rollout:
    return Rollout(rollout_id=0, group_id=0, calls=tuple(calls))


def long_rollout(turns: int) -> Rollout:
    """Make a conversation in which each prompt is all tokens so far and three more."""
    sharing, calls, path = PromptSharing(), [], ()
    for turn in range(turns):
        call = a_call((*path, *range(turn, turn + OWN)), range(turn, turn + SAMPLED))
        path = call.all_ids
        calls.append(sharing.add(call))
    return a_rollout(calls)


def stored(rollout: Rollout) -> int:
    return sum(len(call.prompt.own_ids) + len(call.sampled_ids) for call in rollout.calls)


def test_memory_and_files_are_linear_in_turns(tmp_path: Path) -> None:
    sizes = []
    for turns in (TURNS // 2, TURNS):
        rollout = long_rollout(turns)
        assert stored(rollout) == turns * (OWN + SAMPLED)
        assert len(rollout.calls[-1].prompt_ids) == (turns - 1) * (OWN + SAMPLED) + OWN
        write_rollouts(tmp_path / "r.jsonl", [rollout])
        sizes.append((tmp_path / "r.jsonl").stat().st_size)
        (read,) = read_rollouts(tmp_path / "r.jsonl")
        assert stored(read) == stored(rollout)
        assert read.calls[-1] == rollout.calls[-1]
    assert sizes[1] < 2.2 * sizes[0]  # numbers have more digits


def test_calls_without_sharing_are_shared_when_they_become_a_rollout() -> None:
    whole = [a_call(call.prompt_ids, call.sampled_ids) for call in long_rollout(30).calls]
    rollout = a_rollout(whole)
    assert rollout.calls == tuple(whole)
    assert stored(rollout) == 30 * (OWN + SAMPLED)
    assert replace(rollout, reward=1.0).calls is rollout.calls


tokens = st.integers(0, 2)


@st.composite
def call_lists(draw: st.DrawFn) -> list[EngineCall]:
    """Draw calls whose prompts extend or cut earlier ones, or begin another conversation."""
    calls: list[EngineCall] = []
    for _ in range(draw(st.integers(1, 25))):
        path = draw(st.sampled_from(calls)).all_ids if calls else ()
        start = path[: draw(st.integers(0, len(path)))] if draw(st.booleans()) else path
        prompt = (*start, *draw(st.lists(tokens, min_size=1, max_size=3)))
        calls.append(a_call(prompt, draw(st.lists(tokens, max_size=3))))
    return calls


@settings(max_examples=200, deadline=None)
@given(call_lists())
def test_shared_calls_equal_whole_ones(calls: list[EngineCall]) -> None:
    rollout = a_rollout(calls)
    assert [call.prompt_ids for call in rollout.calls] == [call.prompt_ids for call in calls]
    assert [call.all_ids for call in rollout.calls] == [call.all_ids for call in calls]
    assert rollout.calls == tuple(calls)
    assert list(map(hash, rollout.calls)) == list(map(hash, calls))
    assert [len(call.prompt) for call in rollout.calls] == [len(call.prompt_ids) for call in calls]
    assert repr(rollout.calls) == repr(tuple(calls))
    for shares in (True, False):
        data = json.loads(json.dumps(to_json(rollout, shares_prompts=shares)))
        assert from_json(data).calls == tuple(calls)
        assert shares or [one["prompt_ids"] for one in data["calls"]] == [list(call.prompt_ids) for call in calls]
    for row, whole in zip(rows_from_calls(rollout.calls), rows_from_calls(calls), strict=True):
        assert row.ids.tolist() == whole.ids.tolist()
        assert row.loss_mask.tolist() == whole.loss_mask.tolist()


def test_a_prompt_shares_the_beginning_of_a_branch_and_of_interleaved_conversations() -> None:
    base = a_call(range(50), [1, 2, 3])
    other = a_call(range(100, 150), [4])
    goes_on, other_goes_on = a_call([*base.all_ids, 7], [8]), a_call([*other.all_ids, 7], [8])
    branch = a_call([*range(40), 9, 9], [8])
    rollout = a_rollout([base, other, goes_on, other_goes_on, branch])
    assert [len(call.prompt.own_ids) for call in rollout.calls] == [50, 50, 1, 1, 2]
    assert rollout.calls == (base, other, goes_on, other_goes_on, branch)


def test_a_call_of_a_long_rollout_can_be_copied_changed_and_shown() -> None:
    call = long_rollout(TURNS).calls[-1]
    assert copy.deepcopy(call) == copy.copy(call) == call
    assert replace(call, finish_reason=FinishReason.LENGTH).prompt_ids == call.prompt_ids
    assert replace(call, prompt_ids=(1, 2)).prompt_ids == (1, 2)
    assert "own_ids" not in repr(call)


def test_files_of_earlier_versions_hold_whole_prompts_and_are_read(tmp_path: Path) -> None:
    rollout = long_rollout(5)
    (tmp_path / "old.jsonl").write_text(json.dumps(to_json(rollout), default=str) + "\n")
    (read,) = read_rollouts(tmp_path / "old.jsonl")
    assert read.calls == rollout.calls
    assert stored(read) == stored(rollout)


@pytest.mark.parametrize(
    "extends", [[1, 2], [2, 2], [-1, 2], [0, 9], [0, -1], [False, 2], [0, True], ["0", 2], [0], [0, 1, 2], None, 0]
)
def test_a_file_whose_call_extends_no_earlier_one_is_refused(tmp_path: Path, extends: object) -> None:
    data = to_json(long_rollout(2), shares_prompts=True)
    assert list(data["calls"][1]["extends"]) == [0, OWN + SAMPLED]
    data["calls"][1]["extends"] = extends
    (tmp_path / "bad.jsonl").write_text(json.dumps(data, default=str) + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:1 is not a saved rollout"):
        list(read_rollouts(tmp_path / "bad.jsonl"))


def test_a_prompt_cannot_share_more_ids_than_its_base_has() -> None:
    base = a_call([1, 2], [3])
    for num_shared in (4, -1):
        with pytest.raises(EvidenceError, match=f"shares {num_shared} ids with a call that has 3"):
            Prompt(own_ids=(5,), base=base, num_shared=num_shared)
