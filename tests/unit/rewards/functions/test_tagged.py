"""Rewards on answers between tags, and on texts that resemble a reference."""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher

import pytest

from lockstep.rewards.functions.tagged import between_tags, question_answer, similarity
from lockstep.rollout.errors import DataError
from tests.unit.rewards.test_composition import rollout


def answered(text, answer="Paris"):
    return rollout(text, reference=answer)


@pytest.mark.parametrize(
    ("text", "inside"),
    [("<answer> Paris </answer>", "Paris"), ("<answer>a</answer> no, <answer>b</answer>", "b"), ("<answer>Paris", None),
     ("Paris</answer>", None), ("", None), ("</answer><answer>", None), ("<answer></answer>", "")],
)  # fmt: skip
def test_the_last_closed_tag_counts(text, inside):
    assert between_tags(text, "answer") == inside


@pytest.mark.parametrize(
    ("text", "value"),
    [("<answer>Paris</answer>", 1), ("<answer>the  PARIS.</answer>", 1), ("<answer>Paris, France</answer>", 0),
     ("Paris", 0), ("<answer>Lyon</answer> <answer>Paris</answer>", 1), ("<answer></answer>", 0)],
)  # fmt: skip
def test_a_question_is_answered_up_to_case_punctuation_articles_and_space(text, value):
    assert question_answer(answered(text)) == value


def test_one_of_several_references_suffices():
    assert question_answer(answered("<answer>city of light</answer>", ["Paris", "The City of Light"])) == 1


def test_the_outcome_of_the_search_environment_decides_over_the_text():
    made = answered("<search>q</search><answer>Paris</answer>")
    assert question_answer(replace(made, outcome={"answer": ""})) == 0
    assert question_answer(replace(made, outcome={"answer": "Paris"})) == 1


@pytest.mark.parametrize("column", [[], [7], 7, {"target": ["Paris"]}])
def test_a_column_without_texts_is_refused(column):
    with pytest.raises(DataError, match="expected a text or a list of texts"):
        question_answer(answered("<answer>Paris</answer>", column))


def test_similarity_is_the_ratio_of_matching_blocks():
    assert similarity(answered("abcd", "abcd")) == 1
    assert similarity(answered("", "abcd")) == 0
    assert similarity(answered("abxd", "abcd")) == pytest.approx(2 * 3 / 8)


def test_reversed_text_is_compared_with_the_prompt_backwards_inside_its_tags():
    row = answered("I think <reversed_text>\n.ti otni\n</reversed_text>", "into it.")
    assert similarity(row, tag="reversed_text", is_reversed=True) == 1
    assert similarity(answered(".ti otni", "into it."), tag="reversed_text", is_reversed=True) == 0


def test_similarity_has_the_published_values():
    prompt = "The community in Bruck was merged into it"
    text = ".ti otni degrem saw kcuBr ni ytinummoc ehT"
    value = similarity(
        answered(f"<reversed_text>\n{text}\n</reversed_text>", prompt), tag="reversed_text", is_reversed=True
    )
    # huggingface.co/sameersegal/Qwen3-0.6B-Reverse-Text-SFT-RLFT shows this answer with this reward.
    assert value == pytest.approx(0.963855421686747)
    assert value == SequenceMatcher(None, text, prompt[::-1]).ratio()
