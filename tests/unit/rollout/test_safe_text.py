"""Text from outside: valid in every encoding, without control characters, of limited length."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.rollout.errors import ConfigError, LockstepError
from lockstep.rollout.records import Rollout
from lockstep.rollout.safe_text import MAX_CHARS, error_text, print_error, safe_text, terminal_safe

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)


@given(text=ANY_TEXT)
@example(text="\ud800\udfff\x1b[31m\r\x00\u202e\x85\u2028")
def test_safe_text_is_valid_everywhere_and_stays_the_same_when_cleaned_again(text: str) -> None:
    clean = safe_text(text)
    clean.encode()
    assert clean.replace("\n", "").replace("\t", "").isprintable()
    assert safe_text(clean) == clean
    assert terminal_safe(text).isprintable()


def test_ordinary_text_is_unchanged() -> None:
    text = "a line\n\tand Δ logπ, 日本語, a \\ and a 'quote'"
    assert safe_text(text) == text
    assert terminal_safe("a\nb") == "a⏎b"


def test_control_characters_and_surrogates_are_spelled_out() -> None:
    assert safe_text("\x1b[2J\ud800 \u202e") == "\\x1b[2J\\ud800 \\u202e"
    assert terminal_safe("\x1b\ud800") == "\\x1b\\ud800"


@pytest.mark.parametrize("length", [MAX_CHARS, MAX_CHARS + 1, 10 * MAX_CHARS])
def test_long_text_keeps_its_beginning_and_its_end(length: int) -> None:
    text = "begin" + "x" * (length - 8) + "end"
    clean = safe_text(text)
    assert len(clean) <= MAX_CHARS
    assert clean.startswith("begin")
    assert clean.endswith("end")
    assert (clean == text) == (length <= MAX_CHARS)
    assert safe_text(clean) == clean
    assert len(safe_text("\ud800" * length)) <= MAX_CHARS


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_has_one() -> None:
    assert error_text(Unprintable()) == "(its message cannot be printed)"
    assert error_text(ValueError("\ud800")) == "\\ud800"


def test_every_error_of_lockstep_has_safe_text() -> None:
    error = ConfigError("server said \x1b[2J\ud800")
    assert str(error) == "server said \\x1b[2J\\ud800"
    assert str(LockstepError()) == ""
    assert isinstance(error, ValueError)


def test_the_error_of_a_rollout_is_safe_text() -> None:
    rollout = Rollout(rollout_id=0, group_id=0, calls=(), error="judge: \ud800\x1b")
    assert rollout.error == "judge: \\ud800\\x1b"
    assert Rollout(rollout_id=0, group_id=0, calls=()).error is None


def test_an_error_is_printed_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ValueError("one\ntwo \x1b[2J"))
    assert capsys.readouterr().err == "lockstep: one\nlockstep: two \\x1b[2J\n"
