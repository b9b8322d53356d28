"""Environment `sandbox`: the model runs Python and shell programs behind walls, until it answers without a call.

    lockstep train environment=sandbox environment.settings.timeout_s=5 ...

All calls of an episode share one sandbox, which is opened by the first: files stay, processes do not. A turn's calls
run in their order. What a program does, its time, memory and output included, is a result that the model reads. A
sandbox that is lost costs its rollout (`EnvironmentFault`), because the model's files are lost with it.

With `max_images`, image files that a program writes to `images/` are shown with the result. Another program in the
sandbox reads them, so they are as untrusted as any output: their size is bounded, and they are decoded as all images.

Not covered: packages for programs (local: those of the interpreter; docker: those of the image); input for programs
that run.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.integrations.sandbox.sandbox_settings import SHOWN, SandboxSettings
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, EnvironmentFault, SandboxError, TemplateError
from lockstep.rollout.records import Message
from lockstep.rollout.sandbox.execution import Ended, Execution, Language, Sandbox

MAX_IMAGE_BYTES = 2**20
"""Size limit of a shown file."""
SHOWS = "Image files that it writes to images/ are shown to you, {most} per call."
COLLECTING = """
import base64, os
mark = "images/.shown"
if os.path.isdir("images"):
    last = os.stat(mark).st_mtime_ns if os.path.exists(mark) else 0
    paths = [f"images/{name}" for name in sorted(os.listdir("images")) if not name.startswith(".")]
    new = [path for path in paths if os.path.isfile(path) and os.stat(path).st_mtime_ns > last]
    open(mark, "w").close()
    print(len(new))
    for path in new[:MOST]:
        with open(path, "rb") as file:
            print(base64.b64encode(file.read(BYTES + 1)).decode())
"""
"""Program that prints the number of files in images/ that are new since it ran last, and the first of them."""

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


class SandboxEnvironment(ToolEnvironment):
    """`ToolEnvironment` with the tools `python` and `shell`."""

    declaration = Declaration(
        reads="prompt", max_turns=8, opens="a sandbox", runs_programs=True, is_deterministic=False
    )

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("python", "shell"),
        episode_timeout_s: float = 120.0,
        max_concurrent: int = 64,
        max_images: int = 0,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
        **sandbox: Any,
    ):
        """tools: those that are offered. episode_timeout_s: of all calls of an episode together. max_concurrent:
        sandboxes at once; other episodes wait with their first call. max_images: that a call shows, of the files that
        its program writes to images/. sandbox: arguments of `SandboxSettings.of`.

        Raises `ConfigError`: a setting is wrong.
        """
        self._settings = SandboxSettings.of(**sandbox)
        limits = self._settings.limits
        names = tuple(Language)
        if isinstance(tools, str) or not tools or any(name not in names for name in tools):
            raise ConfigError(
                f"{SHOWN}.tools={tools!r} must be one or both of {', '.join(names)}; set {SHOWN}.tools=[python]"
            )
        is_number = isinstance(episode_timeout_s, int | float) and not isinstance(episode_timeout_s, bool)
        if not is_number or not episode_timeout_s >= limits.timeout_s:
            raise ConfigError(
                f"{SHOWN}.episode_timeout_s={episode_timeout_s!r} must be at least timeout_s="
                f"{limits.timeout_s}, the time of one call; set {SHOWN}.episode_timeout_s={12 * limits.timeout_s:g}"
            )
        if not isinstance(max_concurrent, int) or max_concurrent < 1:
            raise ConfigError(f"{SHOWN}.max_concurrent={max_concurrent!r} must be an integer from 1 on; leave it out")
        if not isinstance(max_images, int) or isinstance(max_images, bool) or not 0 <= max_images <= 64:
            raise ConfigError(f"{SHOWN}.max_images={max_images!r} must be an integer from 0 to 64; leave it out")
        self._max_images, self._output_bytes = max_images, limits.output_bytes
        if max_images:  # their files come as the output of a program
            room = max(limits.output_bytes, max_images * 2 * MAX_IMAGE_BYTES)
            self._settings = replace(self._settings, limits=replace(limits, output_bytes=room))
        self._languages = tuple(Language(name) for name in dict.fromkeys(tools))
        self._timeout_s, self._left_s, self._episode_timeout_s = limits.timeout_s, episode_timeout_s, episode_timeout_s
        self._max_concurrent = max_concurrent
        self._sandbox: Sandbox | None = None
        self._place: asyncio.Semaphore | None = None
        self._turn = asyncio.Lock()  # serves those who wait in their order
        self._fault: SandboxError | None = None
        self._facts: dict[str, int] = {}
        # The sandbox has deadlines of its own, and calls wait for each other; `output_bytes` limits results.
        super().__init__(
            [{Language.PYTHON: self.python, Language.SHELL: self.shell}[language] for language in self._languages],
            tool_timeout_s=math.inf, max_result_chars=2 * limits.output_bytes + 500, prompt_column=prompt_column,
            system_prompt=system_prompt,
        )  # fmt: skip
        if max_images:
            shows = SHOWS.format(most=max_images)
            functions = [schema["function"] for schema in self._toolbox.schemas]
            self._toolbox.schemas[:] = [
                {"type": "function", "function": {**one, "description": f"{one['description']} {shows}"}}
                for one in functions
            ]

    async def problem(self) -> str | None:
        return await self._settings.problem(self._languages)

    async def python(self, code: str) -> str:
        """Run a Python program and return its exit status and what it printed. Files stay for later calls.

        Args:
            code: program text; only what it prints is returned
        """
        return await self._run(Language.PYTHON, code)

    async def shell(self, command: str) -> str:
        """Run shell commands and return their exit status and output. Files stay for later calls, processes do not.

        Args:
            command: one or more lines for sh
        """
        return await self._run(Language.SHELL, command)

    async def step(self, message: Message) -> Step:
        """Run the calls of a turn. Raises `EnvironmentFault` if the sandbox cannot be opened, or is lost."""
        self._facts = {"programs_failed": 0, "programs_timed_out": 0}
        step = await super().step(message)
        if self._fault is not None:
            raise EnvironmentFault(f"sandbox: {self._fault}") from self._fault
        return Step(messages=step.messages, done=step.done, outcome={**step.outcome, **self._facts})

    async def close(self) -> None:
        """End the sandbox with everything inside."""
        sandbox, place = self._sandbox, self._place
        self._sandbox = self._place = None
        try:
            if sandbox is not None:
                await sandbox.close()
        finally:
            if place is not None:
                place.release()

    async def _run(self, language: Language, text: str) -> Any:
        """Return the result as text, with images in a list with it."""
        async with self._turn:
            timeout_s = min(self._timeout_s, self._left_s)
            if timeout_s <= 0:
                raise TimeoutError(f"the programs of this episode have used their {self._episode_timeout_s:g} s")
            if self._fault is not None:
                raise self._fault
            try:
                sandbox = await self._opened()
                start = time.monotonic()
                result = await sandbox.run(language, text, timeout_s=timeout_s)
                image_parts = await self._images(sandbox) if self._max_images else []
            except SandboxError as error:
                self._fault = error
                raise
            self._left_s -= time.monotonic() - start
            self._facts["programs_failed"] += result.status != 0
            self._facts["programs_timed_out"] += result.ended is Ended.TIMEOUT
            parts = [result_text(_cut(result, self._output_bytes), timeout_s), *image_parts]
            return "\n".join(parts) if all(isinstance(part, str) for part in parts) else parts

    async def _images(self, sandbox: Sandbox) -> list[Any]:
        """Return the new images of images/, and texts about those that are not shown. Raises `SandboxError`."""
        program = COLLECTING.replace("MOST", str(self._max_images)).replace("BYTES", str(MAX_IMAGE_BYTES))
        result = await sandbox.run(Language.PYTHON, program, timeout_s=self._timeout_s)
        count, *files = result.stdout.split() or ["0"]
        files = files[: self._max_images]
        parts = [await asyncio.to_thread(_image, file, number) for number, file in enumerate(files, 1)]
        if result.status:
            parts.append(f"[images/ could not be read: {result.stderr.strip()[-200:] or result.ended}]")
        elif count != str(len(files)):
            parts.append(f"[images/ has {count[:9]} new files, {len(files)} are shown]")
        return parts

    async def _opened(self) -> Sandbox:
        if self._sandbox is None:
            places = _places.setdefault(asyncio.get_running_loop(), {})
            place = places.setdefault(self._max_concurrent, asyncio.Semaphore(self._max_concurrent))
            await place.acquire()
            self._place = place
            self._sandbox = await self._settings.open()
        return self._sandbox


def _image(encoded: str, number: int) -> Any:
    """Return the image of a file, or a text that says why there is none."""
    from lockstep.rollout.media.image_files import read_image  # runs without images do not load it

    try:
        content = base64.b64decode(encoded, validate=True)
        if len(content) > MAX_IMAGE_BYTES:
            raise TemplateError(f"new file {number} of images/ is larger than {MAX_IMAGE_BYTES} bytes")
        return read_image({"type": "image", "image": content}, f"new file {number} of images/")
    except (TemplateError, binascii.Error) as error:
        return f"[{error}]"


def _cut(result: Execution, most: int) -> Execution:
    """Return a result with at most `most` bytes of each output."""
    out, err = result.stdout.encode(), result.stderr.encode()
    return replace(
        result,
        stdout=out[:most].decode(errors="replace"),
        stderr=err[:most].decode(errors="replace"),
        is_cut=result.is_cut or len(out) > most,
        is_stderr_cut=result.is_stderr_cut or len(err) > most,
    )


def result_text(result: Execution, timeout_s: float) -> str:
    """Return what the model reads: the end of the program, then its outputs."""
    match result.ended:
        case Ended.TIMEOUT:
            end = f"killed after {timeout_s:.3g} s"
        case Ended.KILLED:
            end = f"killed by signal {-result.status} ({_signal_name(-result.status)})"
        case Ended.EXITED:
            end = f"exit status {result.status}"
    parts = [end, result.stdout.rstrip("\n")]
    if result.is_cut:
        parts.append("[output cut here]")
    if result.stderr:
        parts += ["stderr:", result.stderr.rstrip("\n")]
    if result.is_stderr_cut:
        parts.append("[stderr cut here]")
    return "\n".join(part for part in parts if part)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "unnamed"
