"""Environment `sandbox`: whole episodes with real programs, and the settings that are refused."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from typing import Any

import pytest
from PIL import Image

from lockstep.integrations.environments.sandbox import SandboxEnvironment, result_text
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.environment import ChecksSystem, Closes
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.sandbox.execution import Ended, Execution
from tests.fixtures.policies import Policy, play, tool_call
from tests.fixtures.turns import use
from tests.unit.rollout.sandbox.test_program_session import launchers, mark
from tests.unit.rollout.sandbox.test_sandbox import contained, named, processes, wait_until


def script(*turns: str) -> Policy:
    """Return a policy that says these turns one after another, whatever it reads."""
    return Policy(lambda prompt: turns[prompt.count("<|im_start|>assistant\n") - 1])


def results(rollout: Rollout) -> list[str]:
    return [str(message["content"]) for message in rollout.messages if message["role"] == "tool"]


async def episode(*turns: str, **settings: Any) -> Rollout:
    return await play(make_environment("sandbox", **settings), script(*turns, "Done."), max_turns=len(turns) + 1)


def both(*calls: str) -> str:
    return "\n".join(calls)


@contained
class TestEpisodes:
    async def test_files_live_for_the_episode(self):
        first = await episode(
            tool_call("python", code="open('notes.txt', 'w').write('seven')"),
            tool_call("shell", command="cat notes.txt"),
        )
        assert (first.status, first.error) == (RolloutStatus.COMPLETED, None)
        assert results(first) == ["exit status 0", "exit status 0\nseven"]
        assert first.outcome == {"tool_calls": 2, "tool_errors": 0, "programs_failed": 0, "programs_timed_out": 0}
        assert sum(row.num_trained for row in rows_from_calls(first.calls)) == first.num_sampled > 0
        second = await episode(tool_call("shell", command="cat notes.txt"))
        assert results(second) == ["exit status 1\nstderr:\ncat: notes.txt: No such file or directory"]
        assert second.outcome["programs_failed"] == 1
        assert second.outcome["tool_errors"] == 0

    async def test_calls_of_a_turn_run_in_their_order(self):
        numbered = [tool_call("shell", command=f"sleep 0.0{9 - n}; echo {n} >> log") for n in range(4)]
        rollout = await episode(both(*numbered), tool_call("shell", command="cat log"))
        assert results(rollout)[-1] == "exit status 0\n0\n1\n2\n3"

    async def test_what_a_program_does_is_a_result(self):
        rollout = await episode(
            tool_call("python", code="while True: pass"),
            tool_call("python", code="import os\nos.kill(os.getpid(), 11)"),
            tool_call("shell", command="yes"),
            tool_call("python", code="1 / 0"),
            tool_call("python", code="x = bytearray(2**31)"),
            tool_call("shell", command="echo on"),
            tool_call("python", program="print(1)"),
            tool_call("shell", command=7),
            timeout_s=4.0, output_bytes=200,
        )  # fmt: skip
        found = results(rollout)
        assert found[0] == "killed after 4 s"
        assert found[1] == "killed by signal 11 (SIGSEGV)"
        assert found[2] == "killed after 4 s\n" + "\n".join("y" * 100) + "\n[output cut here]"
        assert found[3].startswith("exit status 1\nstderr:\nTraceback (most recent call last):\n")
        assert found[3].endswith("ZeroDivisionError: division by zero")
        assert "MemoryError" in found[4]
        assert found[5] == "exit status 0\non"
        assert found[6].startswith("error: wrong arguments for python")
        assert found[7].startswith("error: wrong arguments for shell")
        assert rollout.outcome == {
            "tool_calls": 8, "tool_errors": 2, "tool_errors_bad_arguments": 2, "programs_failed": 5,
            "programs_timed_out": 2,
        }  # fmt: skip

    async def test_time_of_an_episode_is_bounded(self):
        started = time.monotonic()
        calls = both(*[tool_call("python", code="while True: pass")] * 6)
        rollout = await episode(calls, timeout_s=1.0, episode_timeout_s=2.0)
        assert time.monotonic() - started < 30
        assert results(rollout)[0] == "killed after 1 s"
        assert results(rollout)[-1] == "error: TimeoutError: the programs of this episode have used their 2 s"

    async def test_an_episode_without_calls_starts_nothing(self):
        before = launchers()
        environment = make_environment("sandbox")
        assert isinstance(environment, SandboxEnvironment)
        await environment.reset({"question": "go"})
        assert launchers() == before
        await environment.close()

    async def test_one_tool_is_offered(self):
        rollout = await episode(tool_call("python", code="print(1)"), tools=["shell"])
        assert results(rollout) == ["error: there is no tool 'python'; tools: shell"]

    async def test_other_episodes_go_on_during_a_call(self):
        async def ticks() -> int:
            count = 0
            while True:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    return count
                count += 1

        counting = asyncio.create_task(ticks())
        started = time.monotonic()
        sleeps = [episode(tool_call("shell", command="sleep 4")) for _ in range(4)]
        assert [results(rollout) for rollout in await asyncio.gather(*sleeps)] == [["exit status 0"]] * 4
        assert time.monotonic() - started < 14
        counting.cancel()
        assert await counting > 40

    async def test_sandboxes_at_once_are_limited(self):
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, launchers())
                await asyncio.sleep(0.02)

        before, watching = launchers(), asyncio.create_task(watch())
        await asyncio.gather(*(episode(tool_call("shell", command="sleep 0.3"), max_concurrent=2) for _ in range(6)))
        watching.cancel()
        assert most - before == 2


@contained
class TestEnds:
    async def test_after_an_episode_nothing_is_left(self):
        before, name = launchers(), mark("e")
        await episode(tool_call("python", code=named(name) + "if os.fork() == 0: time.sleep(60)"))
        assert (launchers(), processes(name)) == (before, 0)

    async def test_a_canceled_episode_ends_its_programs(self):
        before, name = launchers(), mark("n")
        task = asyncio.create_task(episode(tool_call("python", code=named(name) + "time.sleep(60)"), timeout_s=60.0))
        await asyncio.to_thread(wait_until, lambda: processes(name) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert processes(name) == 0
        assert launchers() == before

    @pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06])
    async def test_a_cancellation_during_the_opening_leaves_nothing(self, delay_s):
        before = launchers()
        task = asyncio.create_task(episode(tool_call("shell", command="sleep 60"), timeout_s=60.0))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: launchers() == before)

    async def test_a_sandbox_that_is_lost_costs_its_rollout(self):
        environment = make_environment("sandbox")
        assert isinstance(environment, SandboxEnvironment)
        await environment.reset({"question": "go"})
        await environment.step(use("shell", command="echo kept > file"))
        sandbox: Any = environment._sandbox
        sandbox._session._process.kill()
        rollout = await play(environment, script(both(*[tool_call("shell", command="cat file")] * 2)))
        assert rollout.status is RolloutStatus.FAILED
        assert "EnvironmentFault: sandbox: " in str(rollout.error)
        assert sandbox._session.is_closed

    async def test_a_system_without_namespaces_costs_the_rollout_and_names_the_setting(self, monkeypatch):
        monkeypatch.setattr("lockstep.rollout.sandbox.sandbox.refusing_filter", lambda: bytes(8))
        rollout = await episode(tool_call("shell", command="ls"))
        assert rollout.status is RolloutStatus.FAILED
        assert "so it did not run; allow user namespaces" in str(rollout.error)
        assert "set environment.settings.unsafe=true" in str(rollout.error)
        problem = await made().problem()
        assert "environment.settings.unsafe=true" in str(problem)
        monkeypatch.undo()
        assert await made().problem() is None


def made(**settings: Any) -> SandboxEnvironment:
    return SandboxEnvironment(**settings)


def test_it_has_the_optional_parts_of_an_environment():
    assert isinstance(made(), Closes)
    assert isinstance(made(), ChecksSystem)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sandbox": "vm"}, "'vm' is not one of local, docker, remote; set environment.settings.sandbox=local"),
        ({"tools": []}, r"environment.settings.tools=\[\] must be one or both of python, shell"),
        ({"tools": ["bash"]}, "must be one or both of python, shell"),
        ({"tools": "python"}, r"tools='python' must be .*; set environment.settings.tools=\[python\]"),
        ({"timeout_s": 0}, "timeout_s=0 must be a number above 0 .*; set it under environment.settings"),
        ({"timeout_s": "5"}, "timeout_s='5' must be a number"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be a number"),
        ({"memory_mib": 1.5}, "memory_mib=1.5 must be an integer"),
        ({"processes": True}, "processes=True must be an integer"),
        ({"disk_mib": 10**9}, "disk_mib=1000000000 must be an integer above 0 and at most"),
        ({"output_bytes": -1}, "output_bytes=-1"),
        ({"episode_timeout_s": 5}, "episode_timeout_s=5 must be at least timeout_s=10.0"),
        ({"episode_timeout_s": "long"}, "episode_timeout_s='long' must be"),
        ({"max_concurrent": 0}, "max_concurrent=0 must be an integer"),
        ({"unsafe": "false"}, "unsafe='false' is not true or false"),
        ({"image": "a"}, "image is for sandbox=docker, found sandbox=local; leave it out, or set .*sandbox=docker"),
        ({"sandbox": "docker"}, "sandbox=docker has no image; set environment.settings.image=python:3.12-slim"),
        ({"sandbox": "docker", "image": ""}, "image='' is not a text"),
        ({"sandbox": "docker", "image": "a", "unsafe": True}, "unsafe is for sandbox=local"),
        ({"sandbox": "remote"}, r"url=None is not the address .*serve-sandbox\); set environment.settings.url=http"),
        ({"sandbox": "remote", "url": "ftp://a"}, "url=ftp://a is not the address"),
        ({"sandbox": "remote", "url": "http://a", "token_env": "NO_SUCH"}, "token_env=NO_SUCH is not set"),
        ({"sandboxes": 1}, "unexpected keyword argument 'sandboxes'"),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_environment("sandbox", **settings)


def test_without_isolation_root_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="not run as root without isolation, found unsafe=true"):
        made(unsafe=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    made(unsafe=True)


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        ({}, "exit status 0"),
        ({"stdout": "a\n\n"}, "exit status 0\na"),
        ({"stdout": "a", "stderr": "b\n", "status": 3}, "exit status 3\na\nstderr:\nb"),
        ({"stdout": "a", "stderr": "b", "is_cut": True, "is_stderr_cut": True},
         "exit status 0\na\n[output cut here]\nstderr:\nb\n[stderr cut here]"),
        ({"ended": Ended.TIMEOUT, "status": -9, "stdout": "a"}, "killed after 2.5 s\na"),
        ({"ended": Ended.KILLED, "status": -40}, "killed by signal 40 (unnamed)"),
    ],
)  # fmt: skip
def test_the_text_of_a_result(execution, text):
    whole = {"ended": Ended.EXITED, "status": 0, "stdout": "", "stderr": "", **execution}
    assert result_text(Execution(**whole), 2.5) == text


def image_file(width: int, height: int, color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, format="PNG")
    return buffer.getvalue()


def writes(**files: bytes) -> str:
    """Return a program that writes PNG files to images/."""
    lines = [
        f"open('images/{name}.png', 'wb').write(bytes.fromhex('{content.hex()}'))" for name, content in files.items()
    ]
    return "\n".join(["import os", "os.makedirs('images', exist_ok=True)", *lines])


async def shown(*programs: str, sees_images: bool = True, **settings: Any) -> list[Any]:
    """Return the content of the results of Python programs of one episode."""
    environment = make_environment("sandbox", **{"max_images": 2, **settings})
    assert isinstance(environment, SandboxEnvironment)
    environment.sees_images = sees_images
    calls = [
        {"id": str(n), "function": {"name": "python", "arguments": {"code": code}}} for n, code in enumerate(programs)
    ]
    try:
        await environment.reset({"question": "go"})
        step = await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    finally:
        await environment.close()
    return [message["content"] for message in step.messages]


def summary(content: Any) -> list[Any]:
    """Return texts, and colors and sizes of images."""
    if isinstance(content, str):
        return [content]
    return [
        part["text"] if part["type"] == "text" else (part["image"].getpixel((0, 0)), part["image"].size)
        for part in content
    ]


@contained
class TestImages:
    async def test_new_files_are_shown_once_with_the_result(self):
        red, blue = image_file(3, 2), image_file(5, 4, color="blue")
        found = await shown(
            "print(1)", writes(b=blue, a=red), "print(2)", writes(b=red), "import os; print(os.listdir('images'))"
        )
        assert summary(found[0]) == ["exit status 0\n1"]
        assert summary(found[1]) == ["exit status 0", ((255, 0, 0), (3, 2)), ((0, 0, 255), (5, 4))]
        assert summary(found[2]) == ["exit status 0\n2"]
        assert summary(found[3]) == ["exit status 0", ((255, 0, 0), (3, 2))]
        assert "a.png" in found[4], "files stay"

    async def test_more_images_than_are_shown_are_counted(self):
        (found,) = await shown(writes(a=image_file(1, 1), b=image_file(2, 2), c=image_file(3, 3)))
        assert summary(found)[1:] == [
            ((255, 0, 0), (1, 1)), ((255, 0, 0), (2, 2)), "[images/ has 3 new files, 2 are shown]"
        ]  # fmt: skip

    async def test_files_that_are_no_usable_image_are_named(self):
        bomb = image_file(9000, 9000)
        large = "open('images/a.png', 'wb').write(bytes(2 * 2**20))"
        found = await shown(
            writes(a=b"no image", b=image_file(1, 1)),
            writes(a=bomb),
            f"{writes()}\n{large}",
            "import os\nos.mkdir('images/c.png')\nos.symlink('/nowhere', 'images/d.png')\nos.mkfifo('images/e.png')",
        )
        text, problem, image = summary(found[0])
        assert (text, image) == ("exit status 0", ((255, 0, 0), (1, 1)))
        assert problem.startswith("[new file 1 of images/: the image cannot be read: cannot identify image file")
        assert "it has 9000 x 9000 pixels" in found[1]
        assert found[2] == "exit status 0\n[new file 1 of images/ is larger than 1048576 bytes]"
        assert found[3] == "exit status 0"

    async def test_a_folder_that_cannot_be_read_is_a_text(self):
        lies = r"""
print('9' * 9000 + '\nA' * 9)
def b64encode(_): return b'-'
"""
        blocked, shadowed, lying = await shown(
            f"{writes()}\nos.mkfifo('images/.shown')",
            "import os\nos.remove('images/.shown')\nopen('base64.py', 'w').write('raise ValueError(7)')",
            f"open('base64.py', 'w').write({lies!r})",
            timeout_s=4.0,
        )
        assert blocked == "exit status 0\n[images/ could not be read: timeout]"
        assert shadowed.startswith("exit status 0\n[images/ could not be read: ")
        assert "ValueError: 7" in shadowed
        assert lying.count("[Invalid base64-encoded string") == 2
        assert lying.endswith("[images/ has 999999999 new files, 2 are shown]")

    async def test_outputs_keep_their_limit(self):
        (found,) = await shown("import sys\nprint('x' * 500)\nprint('y' * 500, file=sys.stderr)", output_bytes=100)
        assert found == f"exit status 0\n{'x' * 100}\n[output cut here]\nstderr:\n{'y' * 100}\n[stderr cut here]"

    async def test_a_model_of_text_is_told_that_it_sees_none(self):
        (found,) = await shown(writes(a=image_file(1, 1)), sees_images=False)
        assert found == "error: python: it returned an image, which the model does not see"

    async def test_without_the_setting_nothing_is_read(self):
        (found,) = await shown(writes(a=image_file(1, 1)), max_images=0)
        assert found == "exit status 0"


def test_only_with_images_the_tools_say_so() -> None:
    plain, showing = SandboxEnvironment(), SandboxEnvironment(max_images=3)
    for one, other in zip(plain.tools, showing.tools, strict=True):
        text = one["function"]["description"]
        assert "images" not in text
        assert (
            other["function"]["description"]
            == f"{text} Image files that it writes to images/ are shown to you, 3 per call."
        )


@pytest.mark.parametrize("value", [-1, True, "2", 65])
def test_a_wrong_number_of_images_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"environment\.settings\.max_images=.* must be an integer from 0 to 64"):
        make_environment("sandbox", max_images=value)
