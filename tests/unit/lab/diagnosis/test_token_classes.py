"""Texts of tokens, and the classes that partition the trained ones."""

from __future__ import annotations

from lockstep.lab.diagnosis.token_classes import CLASSES, classify
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.trainer.observe.token_texts import TokenTexts
from tests.fixtures.made_up_model import TEXTS, TOKENIZER, call, ids_of, two_turns


def names_of(sampled: tuple[int, ...]) -> list[str]:
    (row,) = rows_from_calls([call(ids_of("hello"), sampled)])
    return [CLASSES[index] for index in classify(row, TEXTS)]


def test_the_first_class_that_fits_counts():
    text = "\n".join(["The answer", '<tool_call>\n{"name": "calculator"}\n</tool_call> done<|im_end|>'])
    sampled = ids_of(text)
    names, pieces = names_of(sampled), [TEXTS[token] for token in sampled]
    assert names[0] == "first_of_turn"
    assert names[-1] == "special"
    for piece, name in zip(pieces[1:], names[1:], strict=True):
        if piece in ("<tool_call>", "</tool_call>", "<|im_end|>"):
            assert name == "special"
    opened, closed = pieces.index("<tool_call>"), pieces.index("</tool_call>")
    assert set(names[opened + 1 : closed]) == {"tool_call"}
    assert set(names[closed + 1 : -1]) == {"other"}


def test_a_tool_call_that_was_cut_short_lasts_to_the_end_of_its_turn():
    assert names_of(ids_of('answer <tool_call>\n{"name'))[-1] == "tool_call"


def test_every_turn_has_its_own_first_token():
    (row,) = rows_from_calls(two_turns().calls)
    assert (classify(row, TEXTS) == CLASSES.index("first_of_turn")).sum() == 2


def test_parts_of_a_character_and_unknown_ids_have_a_text():
    texts = TokenTexts(TOKENIZER)
    pieces = TOKENIZER.encode("é", add_special_tokens=False)
    assert len(pieces) == 2
    assert all(texts[token] and "\ufffd" not in texts[token] for token in pieces)
    assert texts[10**6] == "[1000000]"
