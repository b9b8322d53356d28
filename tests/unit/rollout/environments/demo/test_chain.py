"""Chains of look-ups."""

from __future__ import annotations

import pytest

from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import DataError
from tests.fixtures.turns import use


async def test_lookup_reads_the_links_of_its_own_row():
    row = {"question": "find c42", "links": [{"key": "c42", "value": "go e17"}, {"key": "e17", "value": "value 731"}]}
    first, second = make_environment("chain"), make_environment("chain")
    await first.reset(row)
    await second.reset({"question": "find c42", "links": [{"key": "c42", "value": "value 1"}]})
    assert (await first.step(use("lookup", key="c42"))).messages[0]["content"] == "go e17"
    assert (await second.step(use("lookup", key="c42"))).messages[0]["content"] == "value 1"
    missing = await first.step(use("lookup", key="zz"))
    assert "nothing is known about zz" in missing.messages[0]["content"]
    assert missing.outcome["tool_errors"] == 1
    with pytest.raises(DataError, match="links"):
        await make_environment("chain").reset({"question": "find c42"})
