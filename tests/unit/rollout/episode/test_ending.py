"""Tests of the status of an episode that a user's function has run."""

from __future__ import annotations

from lockstep.rollout.episode.ending import ending
from lockstep.rollout.records import RolloutStatus


def test_an_error_that_cannot_be_printed_fails_the_rollout_and_not_the_run():
    error = KeyError(10**5000)  # its text would have more digits than Python writes
    status, reason = ending("the agent", error=error, failure=None, limit=None, calls=())
    assert status is RolloutStatus.FAILED
    assert reason == "the agent raised KeyError: (its message cannot be printed)"
