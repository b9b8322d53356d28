"""Prompts of a teacher with a context: another beginning, and then the ids of the student, unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.token_scores import token_scores
from lockstep.rollout.episode.demonstration import demonstrated_calls
from lockstep.rollout.errors import ConfigError, DataError, EvidenceError
from lockstep.rollout.records import Prompt, Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import TeacherRow, TeacherScores
from lockstep.trainer.engines.teacher_prompts import TeacherPrompts, _with_context
from tests.fixtures.policies import CHAT
from tests.fixtures.vision import image_processing, picture, save_tiny

TEMPLATE = "An answer of someone else: {answer}"


def rollout(number: int, *, answer: Any = "42", turns: int = 1, reward: float = 0.0, said: str = "41") -> Rollout:
    """A rollout in one of two groups."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{number}*7?"}]
    for turn in range(turns):
        messages += [{"role": "assistant", "content": f"{said}, turn {turn}"}, {"role": "user", "content": "Sure?"}]
    messages = messages[:-1]
    return Rollout(
        rollout_id=number,
        group_id=number % 2,
        calls=tuple(demonstrated_calls(CHAT, messages)),
        messages=tuple(messages),
        example={"answer": answer},
        outcome={"feedback": "too small", "turns": 2} if number else {},
        reward=reward,
    )


def prompts(template: str = TEMPLATE, *, max_tokens: int = 9999) -> TeacherPrompts:
    return TeacherPrompts(CHAT, template=template, solved_reward=1.0, max_tokens=max_tokens, tools_of=lambda row: ())


def texts(template: str, *rollouts: Rollout) -> tuple[list[str], float]:
    """Return what the teacher reads for each row, and the share of rollouts with a context."""
    batch = StepBatch.of(rollouts, mask_truncated=False)
    made, share = prompts(template).rows(batch.rows, rollouts)
    return [CHAT.decode(row.ids.tolist()) for row in made], share


@pytest.mark.parametrize("turns", [1, 3])
def test_the_teacher_reads_the_context_and_then_the_tokens_of_the_student(turns: int) -> None:
    student = rollout(3, turns=turns)
    batch = StepBatch.of([student], mask_truncated=False)
    ((made,), share) = prompts().rows(batch.rows, [student])
    (row,) = batch.rows
    start = len(student.calls[0].prompt)
    assert made.start == start
    np.testing.assert_array_equal(made.ids[start + made.shift :], row.ids[start:])
    text = CHAT.decode(made.ids[: start + made.shift].tolist())
    assert "3*7?\n\nAn answer of someone else: 42<|im_end|>" in text
    assert text.count("42") == 1
    assert share == 1


def test_only_scores_at_the_students_own_tokens_are_taken() -> None:
    student = rollout(3, turns=2)
    batch = StepBatch.of([student], mask_truncated=False)
    ((made,), _) = prompts().rows(batch.rows, [student])

    def scored(ids: np.ndarray) -> Any:
        logprobs = -np.arange(1, len(ids)) / 64
        return token_scores(ids.tolist(), ids[1:], logprobs, top_k=0, version=0, vocab_size=10**6, source="it")

    found = TeacherScores.of(batch.rows, [scored(made.ids)], top_k=0, computed=[made])
    targets = np.flatnonzero(batch.rows[0].loss_mask)
    np.testing.assert_allclose(found.logp, -(targets + made.shift) / 64, rtol=1e-6)
    changed = made.ids.copy()
    changed[-1] += 1
    with pytest.raises(EvidenceError, match="scores of other tokens"):
        TeacherScores.of(batch.rows, [scored(changed)], top_k=0, computed=[made])
    with pytest.raises(EvidenceError, match="scores of other tokens"):
        TeacherScores.of(batch.rows, [scored(made.ids[:-1])], top_k=0, computed=[made])
    late = replace(made, start=int(targets[0]) + 1)
    with pytest.raises(EvidenceError, match="scores of other tokens"):
        TeacherScores.of(batch.rows, [scored(made.ids)], top_k=0, computed=[late])


def test_a_rollout_that_does_not_fit_with_its_context_is_read_without_it() -> None:
    students = [rollout(1), rollout(2, turns=3)]
    batch = StepBatch.of(students, mask_truncated=False)
    made, share = prompts().rows(batch.rows, students)
    assert share == 1
    longest = max(len(one.ids) for one in made)
    assert prompts(max_tokens=longest).rows(batch.rows, students)[1] == 1
    (short, long), share = prompts(max_tokens=longest - 1).rows(batch.rows, students)
    assert share == 0.5
    np.testing.assert_array_equal(short.ids, made[0].ids)
    np.testing.assert_array_equal(long.ids, TeacherRow.plain(batch.rows[1]).ids)


def test_a_rollout_without_a_value_is_read_as_the_student_read_it() -> None:
    (given, empty, null), share = texts(TEMPLATE, rollout(1), rollout(2, answer=" "), rollout(3, answer=None))
    assert "someone else: 42" in given
    assert "someone else" not in empty + null
    assert share == pytest.approx(1 / 3)


def test_numbers_of_a_row_and_texts_of_the_environment_are_values() -> None:
    (text,), _ = texts("{answer} is right; {feedback}", rollout(1, answer=0))
    assert "0 is right; too small<|im_end|>" in text


def test_the_solution_is_that_of_another_solved_rollout_of_the_group() -> None:
    group = [rollout(number, reward=float(number in (2, 4)), said=f"by {number}") for number in (0, 2, 4)]
    alone = [rollout(1, reward=1.0, said="by 1"), rollout(3, reward=0.5, said="by 3")]
    found, share = texts("See: {solution}", *group, *alone)
    assert share == 1
    for number, source in {0: 2, 2: 4, 4: 2, 1: 1, 3: 1}.items():
        (text,) = (text for text in found if f"{number}*7?" in text)
        assert f"See: by {source}, turn 0<|im_end|>" in text
    unsolved, share = texts("See: {solution}", rollout(0), rollout(2))
    assert "See:" not in "".join(unsolved)
    assert share == 0


def test_control_tokens_in_a_context_stay_text() -> None:
    student = rollout(1, answer="<|im_end|>")
    ((made,), _) = prompts().rows(StepBatch.of([student], mask_truncated=False).rows, [student])
    ((plain,), _) = prompts().rows(StepBatch.of([rollout(1)], mask_truncated=False).rows, [rollout(1)])
    end = CHAT.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (made.ids == end).sum() == (plain.ids == end).sum()


def test_a_name_that_no_row_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"names \{anwser\}, which no row .* expected names of answer, feedback, solu"
    ):
        texts("{anwser}", rollout(1))


def test_a_first_prompt_that_cannot_be_rendered_again_is_refused() -> None:
    other = replace(rollout(1), messages=({"role": "user", "content": "something else"},))
    with pytest.raises(DataError, match="first prompt of rollout 1 is not what its first messages render to"):
        texts(TEMPLATE, other)


def test_a_branch_without_the_first_prompt_is_refused() -> None:
    student = rollout(1)
    batch = StepBatch.of([student], mask_truncated=False)
    row = replace(batch.rows[0], ids=np.concatenate([batch.rows[0].ids[:1] + 1, batch.rows[0].ids[1:]]))
    with pytest.raises(DataError, match=r"does not begin with its first prompt.*set environment\.history=keep"):
        prompts().rows([row], [student])


def test_a_plain_row_ends_with_the_last_trained_token() -> None:
    (row,) = StepBatch.of([rollout(1, turns=2)], mask_truncated=False).rows
    mask = row.loss_mask.copy()
    mask[-2:] = False
    plain = TeacherRow.plain(replace(row, loss_mask=mask))
    assert (plain.start, plain.shift, len(plain.ids)) == (0, 0, int(np.flatnonzero(mask)[-1]) + 1)


def test_the_context_follows_the_question_behind_worked_examples() -> None:
    examples = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    messages = (*examples, {"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"})
    sampled = demonstrated_calls(CHAT, messages)[-1]
    shown = Rollout(
        rollout_id=1,
        group_id=0,
        calls=(replace(sampled, prompt=Prompt(own_ids=tuple(CHAT.prompt(messages[:-1])))),),
        messages=messages,
        example={"answer": "42"},
        reward=1.0,
    )
    (text,), share = texts(TEMPLATE, shown)
    assert "1+1?<|im_end|>" in text
    assert f"3+4?\n\n{TEMPLATE.format(answer='42')}<|im_end|>" in text
    assert share == 1.0
    (solution,), _ = texts("Solved: {solution}", shown)
    assert "3+4?\n\nSolved: 7<|im_end|>" in solution


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    directory = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return Chat.from_pretrained(directory, images=image_processing(directory))


PICTURES = [{"type": "image", "image": picture(number)} for number in (1, 2, 3)]
ASKS = {"type": "text", "text": "what is it?"}


@pytest.mark.parametrize("parts", [[PICTURES[0], ASKS], [ASKS, *PICTURES[:2]], [PICTURES[0]]])
def test_images_keep_their_place_beside_the_context(seeing: Chat, parts: list[Any]) -> None:
    asked, again = {"role": "user", "content": parts}, {"role": "user", "content": [PICTURES[2], ASKS]}
    answer = {"role": "assistant", "content": "a cat"}
    messages = tuple(seeing.with_digests([asked, answer, again, answer]))
    student = replace(rollout(1), calls=tuple(demonstrated_calls(seeing, messages)), messages=messages)
    (row,) = StepBatch.of([student], mask_truncated=False).rows
    maker = TeacherPrompts(seeing, template=TEMPLATE, solved_reward=1.0, max_tokens=9999, tools_of=lambda example: ())
    ((made,), share) = maker.rows([row], [student])
    assert share == 1
    assert [image.digest for image in made.images] == [image.digest for image in row.images]
    assert seeing.images is not None
    is_image = made.ids == seeing.images.image_token_id
    assert np.flatnonzero(is_image).tolist() == [at for image in made.images for at in range(image.start, image.end)]
    text = seeing.decode(made.ids[~is_image].tolist())
    before = "what is it?\n\n" if parts[-1] is ASKS else ""
    assert f"{before}{TEMPLATE.format(answer=42)}<" in text.replace(">\n", "<")
    np.testing.assert_array_equal(made.ids[made.start + made.shift :], row.ids[made.start :])

    shown = tuple(replace(image, digest="0" * 64) for image in row.images)
    with pytest.raises(DataError, match="does not begin with its first prompt"):
        maker.rows([replace(row, images=shown)], [student])


def test_a_first_message_without_text_or_parts_is_refused() -> None:
    with pytest.raises(DataError, match="content of the type NoneType, expected a text or parts"):
        _with_context({"role": "user", "content": None}, "more")
