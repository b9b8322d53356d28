"""Images of prompts in records, shared prompts, training rows and files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.rewards.shaping import turn_states
from lockstep.rollout.episode.rows import extension_count, rows_from_calls
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, PromptIds, Rollout
from lockstep.rollout.saved_rollouts import from_json, read_rollouts, to_json, write_rollouts

CAT, DOG = "c" * 64, "d" * 64
PAD = 9


def span(start: Any, end: Any, digest: Any = CAT) -> ImageSpan:
    return ImageSpan(start=start, end=end, digest=digest)


def a_call(prompt: Sequence[int], sampled: Sequence[int], *images: ImageSpan) -> EngineCall:
    return EngineCall(
        prompt_ids=tuple(prompt),
        images=images,
        sampled_ids=tuple(sampled),
        sampled_logprobs=(-0.5,) * len(sampled),
        finish_reason=FinishReason.STOP,
    )


def a_rollout(*calls: EngineCall) -> Rollout:
    return Rollout(rollout_id=0, group_id=0, calls=calls)


@pytest.mark.parametrize(
    "images",
    [
        [span(3, 6)],
        [span(1, 1)],
        [span(-1, 2)],
        [span(2, 4), span(0, 1)],
        [span(0, 3), span(2, 4)],
        [span(True, 3)],
        [span(0, 2, "abc")],
        [span(0, 2, "C" * 64)],
        [span(0, 2, None)],
    ],
)
def test_images_outside_the_prompt_or_across_each_other_are_refused(images: list[ImageSpan]) -> None:
    with pytest.raises(EvidenceError, match="image"):
        a_call([1, PAD, PAD, 2, 3], [4], *images)


def test_images_that_follow_each_other_are_accepted() -> None:
    images = (span(0, 2), span(2, 3), span(4, 5, DOG))
    assert a_call([1, PAD, PAD, 2, 3], [4], *images).images == images


def test_calls_and_prompts_with_other_images_differ() -> None:
    cat, dog = (a_call([1, PAD, 2], [3], span(1, 2, digest)) for digest in (CAT, DOG))
    assert cat == a_call([1, PAD, 2], [3], span(1, 2))
    assert cat != dog
    assert cat.state != dog.state
    assert a_call([1, PAD, 2], [3]).state == (1, PAD, 2)
    assert turn_states(a_rollout(cat)) != turn_states(a_rollout(dog))
    assert PromptIds([1, PAD], [span(1, 2)]) != PromptIds([1, PAD], [span(1, 2, DOG)])
    assert PromptIds([1, 2]) == [1, 2]
    assert PromptIds([1, 2]) == [1, 2]
    assert PromptIds([1, PAD], [span(1, 2)]) != [1, PAD]


def conversation() -> list[EngineCall]:
    """Make two conversations whose ids are the same: about a cat and then a dog, and about a dog."""
    opening, later = [1, PAD, PAD, 2], [PAD, 4]
    first = a_call(opening, [5, 6], span(1, 3))
    second = a_call([*first.all_ids, *later], [7], span(1, 3), span(6, 7, DOG))
    other = a_call(opening, [5, 6], span(1, 3, DOG))
    third = a_call([*other.all_ids, *later], [7], span(1, 3, DOG), span(6, 7, DOG))
    return [first, second, other, third]


def test_prompts_share_ids_only_up_to_another_image() -> None:
    rollout = a_rollout(*conversation())
    first, second, other, third = rollout.calls
    assert (second.prompt.base, second.prompt.num_shared) == (first, 6)
    assert other.prompt.num_shared == 1
    assert (third.prompt.base, third.prompt.num_shared) == (other, 6)
    assert [call.prompt_ids for call in rollout.calls] == [call.prompt_ids for call in conversation()]
    assert [call.images for call in rollout.calls] == [call.images for call in conversation()]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_rows_hold_the_images_of_their_path_and_no_others(order: tuple[int, ...]) -> None:
    calls = conversation()
    calls = [calls[index] for index in order]
    assert extension_count(calls) == 2
    rows = rows_from_calls(calls)
    assert {row.images for row in rows} == {
        (span(1, 3), span(6, 7, DOG)),
        (span(1, 3, DOG), span(6, 7, DOG)),
    }
    assert all(row.ids.tolist() == [1, PAD, PAD, 2, 5, 6, PAD, 4, 7] for row in rows)
    assert all(row.num_trained == 3 for row in rows)
    assert not any(row.loss_mask[image.start : image.end].any() for row in rows for image in row.images)


def test_files_hold_images_by_their_digests(tmp_path: Path) -> None:
    content = [{"type": "image", "digest": CAT}, {"type": "text", "text": "a"}]
    rollout = Rollout(
        rollout_id=0, group_id=0, calls=tuple(conversation()), messages=({"role": "user", "content": content},)
    )
    write_rollouts(tmp_path / "r.jsonl", [rollout])
    (read,) = read_rollouts(tmp_path / "r.jsonl")
    assert read == rollout
    assert [call.images for call in read.calls] == [call.images for call in conversation()]
    assert read.messages[0]["content"] == content
    example = {"image": {"bytes": bytes(999), "path": None}}
    write_rollouts(tmp_path / "e.jsonl", [Rollout(rollout_id=0, group_id=0, calls=rollout.calls, example=example)])
    assert next(read_rollouts(tmp_path / "e.jsonl")).example["image"]["bytes"] == "<999 bytes>"
    assert "images" not in to_json(a_rollout(a_call([1], [2])))["calls"][0]
    damaged = json.loads((tmp_path / "r.jsonl").read_text())
    damaged["calls"][0]["images"][0][1] = 99
    with pytest.raises(EvidenceError, match="an image ends at token 99 of a prompt of 4"):
        from_json(damaged)
