"""Every command of README and docs stands in a bash block, and the block is run by a test or says what it needs.

Who runs them: `tests/integration/test_page_commands.py` (slow), block by block, as they stand. What that test leaves to
others is in `RUN_ELSEWHERE`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fixtures.pages import PAGES, ROOT, bash_blocks, commands_outside_of_blocks
from tests.integration.test_page_commands import RUN_ELSEWHERE, RUN_HERE

BLOCKS = [block for page in PAGES for block in bash_blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_stands_in_a_bash_block(page: Path):
    assert not commands_outside_of_blocks(page)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_by_a_test_or_says_what_it_needs(block):
    if block.needs is not None:
        assert re.search(r"GPU|hub|package index|verifiers", block.needs), f"{block} needs {block.needs}: not here?"
        return
    assert block.commands, f"{block} has no command; is it bash?"
    for command in block.commands:
        by = [test for pattern, test in (RUN_HERE | RUN_ELSEWHERE).items() if re.match(pattern, command)]
        assert by, f"{block}: no test runs {command!r}"


@pytest.mark.parametrize("test", sorted({*RUN_ELSEWHERE.values()}))
def test_a_test_that_is_named_is_there(test: str):
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    assert name in text, test
