"""Built-in rewards: values on answers, references and lengths."""

from __future__ import annotations

import re

import pytest

from lockstep.rewards.functions import FUNCTIONS
from lockstep.rewards.functions.built_in import (
    contains,
    demo_answer,
    exact_match,
    numeric,
    regex,
    repetition,
    soft_overlong,
    think_format,
)
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout
from tests.unit.rewards.test_composition import rollout


@pytest.mark.parametrize(
    ("answer", "value"),
    [("The answer is 7", 1), (" The answer is 7\n", 1), ("The answer is 17", 0), ("7", 0), ("The answer is 7.", 0),
     ("", 0)],
)  # fmt: skip
def test_demo_answer_requires_the_answer_and_its_sentence(answer, value):
    assert demo_answer(rollout(answer)) == value


def test_a_rollout_that_ends_with_a_tool_call_has_no_answer():
    ends_in_call = Rollout(
        rollout_id=0,
        group_id=0,
        calls=(),
        messages=({"role": "assistant", "content": "7"}, {"role": "tool", "content": "7"},
                  {"role": "assistant", "content": None, "tool_calls": []}),
        example={"answer": "7"},
    )  # fmt: skip
    assert exact_match(ends_in_call) == 0
    assert demo_answer(Rollout(rollout_id=0, group_id=0, calls=(), example={"answer": "7"})) == 0


def test_exact_match_and_contains():
    assert exact_match(rollout("Paris ", reference="Paris")) == 1
    assert exact_match(rollout("paris", reference="Paris")) == 0
    assert exact_match(rollout("paris", reference="Paris"), ignore_case=True) == 1
    assert contains(rollout("it is 7, I think")) == 1
    for other in ("it is 17", "it is -7", "it is 7.5", "it is 1,007", "it is 0.7"):
        assert contains(rollout(other)) == 0
    assert contains(rollout("it is 7, or 7.")) == 1
    assert contains(rollout("a+b", reference="a+b")) == 1


def test_a_missing_reference_is_an_error_not_a_zero():
    for function in (demo_answer, exact_match, contains, numeric):
        for missing in (None, " "):
            with pytest.raises(DataError, match="'answer'"):
                function(rollout("7", reference=missing))


def test_regex_and_format():
    assert regex(rollout("a\nb"), pattern="a.b") == 1
    assert regex(rollout("xa\nb"), pattern="a.b", full=True) == 0
    assert think_format(rollout("<think>hm</think>7")) == 1
    assert think_format(rollout("7", reasoning_content="hm")) == 1
    for bad in ("7", "<think>hm</think>", "<think>hm", "<think>a</think>b</think>c", "x<think>a</think>7"):
        assert think_format(rollout(bad)) == 0, bad


@pytest.mark.parametrize(("tokens", "value"), [(1, 0), (60, 0), (80, -0.5), (100, -1), (150, -1)])
def test_soft_overlong_follows_dapo(tokens, value):
    assert soft_overlong(rollout(tokens=tokens), max_tokens=100, buffer_tokens=40) == pytest.approx(value)


def test_repetition_is_the_share_of_repeated_ngrams():
    assert repetition(rollout("a b c d e"), ngram=2) == 0
    assert repetition(rollout("a b a b a"), ngram=2) == pytest.approx(-0.5)
    assert repetition(rollout("a"), ngram=2) == 0
    assert repetition(rollout("a " * 200), ngram=4) < -0.99


def test_settings_out_of_range_are_config_errors():
    with pytest.raises(ConfigError, match="buffer_tokens"):
        soft_overlong(rollout(), max_tokens=10, buffer_tokens=20)
    with pytest.raises(ConfigError, match="ngram"):
        repetition(rollout(), ngram=0)


def test_every_built_in_has_a_docstring_and_is_listed_by_its_name():
    for name, function in FUNCTIONS.items():
        assert re.sub(r"(?<=[a-z])(?=[A-Z])", "_", function.__name__).lower() == name
        assert function.__doc__


@pytest.mark.parametrize(
    ("answer", "value"),
    [("so 3 + 4 = 7\n#### 7", 1), ("#### 7. #### 8", 0), ("#### 8 #### 7", 1), ("7", 0), (r"\boxed{7}", 0),
     ("#### 7 and 9 more", 1), ("#### 7####", 1), ("####7", 1), ("#### $1,007", 0), ("#### about 7", 0), ("####", 0)],
)  # fmt: skip
def test_only_the_number_behind_the_marker_counts_where_one_is_set(answer, value):
    assert numeric(rollout(answer, reference="3 + 4 = <<3+4=7>>7\n#### 7"), after="####") == value
