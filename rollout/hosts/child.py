"""Program of a host: reads requests from its standard input, line by line, and answers on its standard output.

    python child.py <path of a program>

A program is a module with `answer(do, **arguments)`, a function or a coroutine function. Requests are
{"id", "do", "arguments"}, answers {"id", "value"} or {"id", "error": text, "is_setting": bool}. The interpreter may be
any with the package of the environment, so this file and the programs import nothing of Lockstep. A program raises an
error of a class `WrongSetting` for settings that no episode can be played with. What a package prints
goes to the standard error. The process ends with its input.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from typing import Any, TextIO


async def serve(program: Any, answers: TextIO) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = asyncio.create_task(reply(program, json.loads(line), answers))
        running.add(task)
        task.add_done_callback(running.discard)


async def reply(program: Any, request: dict[str, Any], answers: TextIO) -> None:
    answer = {"id": request["id"]}
    try:
        value = program.answer(request["do"], **request["arguments"])
        answer["value"] = await value if inspect.isawaitable(value) else value
        text = json.dumps(answer)
    except Exception as error:
        is_setting = type(error).__name__ == "WrongSetting"
        message = str(error) if is_setting else f"{type(error).__name__}: {error}"
        text = json.dumps({"id": request["id"], "error": message, "is_setting": is_setting})
    answers.write(text + "\n")
    answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    sys.path[0], name = os.path.split(sys.argv[1])  # beside the program, not beside this file
    try:
        asyncio.run(serve(importlib.import_module(name.removesuffix(".py")), answers))
    finally:
        os._exit(0)  # threads of packages would keep the process


if __name__ == "__main__":
    main()
