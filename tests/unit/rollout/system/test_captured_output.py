"""The end of what children write: it is kept within a limit, and no child waits for a reader."""

from __future__ import annotations

import subprocess
import sys
import threading

from lockstep.rollout.system.captured_output import OutputTail

FLOODS = "import sys; [sys.stderr.write('x' * 2**20) for _ in range(64)]; sys.stderr.write('\\nlast words\\n')"


def test_the_end_of_a_flood_is_kept_within_the_limit_and_the_child_ends():
    process = subprocess.Popen([sys.executable, "-c", FLOODS], stderr=subprocess.PIPE)
    tail = OutputTail(100).follow(process.stderr)
    assert process.wait(60) == 0
    assert tail.text(wait_s=60) == "x" * 88 + "\nlast words"
    assert process.stderr is not None
    assert process.stderr.closed


def test_the_outputs_of_a_child_and_of_its_successor_are_one_text():
    tail = OutputTail()
    for words in ("first", "second"):
        process = subprocess.Popen([sys.executable, "-c", f"print({words!r})"], stdout=subprocess.PIPE)
        tail.follow(process.stdout).text(wait_s=60)
        process.wait()
    assert tail.text() == "first\nsecond"
    tail.clear()
    assert tail.text() == ""


def test_a_grandchild_that_holds_the_output_open_is_not_waited_for():
    sleeps = f"import subprocess; print('a', flush=True); subprocess.Popen([{sys.executable!r}, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", sleeps], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tail = OutputTail().follow(process.stdout)
    process.wait(60)
    assert tail.text(wait_s=0.05) == "a"
    readers = [thread for thread in threading.enumerate() if thread.name == "output-tail"]
    assert all(reader.daemon for reader in readers)
    assert process.stdin is not None
    process.stdin.close()
    assert tail.text(wait_s=60).startswith("a")
