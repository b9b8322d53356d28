"""End of a response for the score: the first stop token that counts."""

from __future__ import annotations

import pytest

from rewards.model.truncation import StopRule

STOP = StopRule(token_ids=frozenset({13}), after=16)


def test_the_first_stop_token_at_or_after_the_minimum_ends_the_response():
    response = [13] * 3 + [1] * 13 + [13, 2, 13, 2, 2, 2, 2, 2]
    assert STOP.end(response) == 17
    assert STOP.truncate(response) == response[:17]
    assert STOP.accepts(response)


def test_stop_tokens_before_the_minimum_do_not_count():
    response = [1] * 15 + [13] + [1] * 8
    assert not STOP.accepts(response)
    assert STOP.truncate(response) == response
    assert STOP.accepts([1] * 23 + [13])


def test_a_stop_rule_without_stop_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one stop token"):
        StopRule(token_ids=frozenset())
