"""What libraries say goes into a file of the run; the console belongs to the run itself.

Covered: everything that goes through Python's logging and warnings, and what C extensions and compilers write to the
process's own output inside `held_output` and `output_to_file`. vLLM has a file of its own (`logs/engine.log`,
rollout/engine/embedded.py). What Lockstep itself logs as a warning is printed. Not covered: a library that prints
outside of these two, and what `accelerate launch` says before it starts the ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from rollout.errors import ConfigError
from rollout.system.captured_output import redirect_output

OWN = ("trainer", "rollout", "rewards")
TALKATIVE = ("deepspeed", "DeepSpeed", "accelerate", "datasets", "torch.distributed", "transformers", "wandb")
"""Loggers of libraries that bring handlers of their own, or levels that nobody asked for."""
RENAMED_COLLECTIVES = r"torch\.distributed"
"""torch warns of collectives that DeepSpeed calls by their old names, once per call."""
HELD_RECORDS = 10_000
SHOWN_LINES = 15
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class ThirdPartyLog:
    """Holds what libraries say until there is a file for it, then writes it there."""

    def __init__(self) -> None:
        """Takes over the root logger of this process, Python's warnings, and the loggers of known libraries."""
        self.path: Path | None = None
        self._output = ""
        self._held = MemoryHandler(HELD_RECORDS, flushLevel=logging.CRITICAL + 1)
        self._own = _Own()
        root = logging.getLogger()
        root.addHandler(self._held)
        root.setLevel(logging.INFO)
        for name in OWN:
            logging.getLogger(name).addHandler(self._own)
        take_over_loggers()
        logging.captureWarnings(True)

    def open(self, path: Path, warn: Callable[[str], None]) -> None:
        """From now on into this file, with what was held until now; own warnings also to `warn`."""
        self.path = path
        take_over_loggers()  # again: some libraries were imported since
        if self._output:
            with path.open("a", encoding="utf-8") as log:  # that of a resumed run is there already
                log.write(self._output)
        file = logging.FileHandler(path, delay=True)
        file.setFormatter(logging.Formatter(FORMAT))
        self._held.setTarget(file)
        self._held.flush()
        self._held.close()
        root = logging.getLogger()
        root.removeHandler(self._held)
        root.addHandler(file)
        self._own.warn = warn

    @contextmanager
    def held_output(self) -> Iterator[None]:
        """As `output_to_file`, before there is a file. If what is inside fails, its output is printed."""
        with tempfile.NamedTemporaryFile(prefix="lockstep-output-") as held:
            try:
                with redirect_output(Path(held.name)):
                    yield
            except BaseException:
                print(_text(Path(held.name)), file=sys.stderr, end="")
                raise
            self._output += _text(Path(held.name))

    @contextmanager
    def output_to_file(self) -> Iterator[None]:
        """For calls into libraries that write to the process's output: compilers, C extensions."""
        assert self.path is not None, "open the log first"
        with redirect_output(self.path):
            yield

    @contextmanager
    def shown_on_failure(self) -> Iterator[None]:
        """If what is inside fails, its end goes to stderr before the error does: the cause may be there."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, ConfigError) and (tail := self.tail()):
                print(tail, file=sys.stderr)
            raise

    def tail(self) -> str:
        """The last lines, for a person who wants to know why a run failed; empty if nothing was said."""
        if self.path is None or not self.path.is_file():
            return ""
        lines = _text(self.path).splitlines()[-SHOWN_LINES:]
        return "\n".join([f"the last lines of {self.path}:", *(f"  {line}" for line in lines)])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


class _Own(logging.Handler):
    """Warnings of Lockstep's own modules, for the console."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.warn: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.warn is not None:
            self.warn(record.getMessage())


def take_over_loggers() -> None:
    """Libraries that were imported report to the root logger, and to nobody else."""
    quiet_progress_bars()
    for name in TALKATIVE:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def quiet_third_parties() -> None:
    """For commands without a run directory: libraries report errors only."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed says, at its import, that it found no GPU
    quiet_progress_bars()
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_progress_bars() -> None:
    """transformers draws bars of its own, over those of a run; tokenizers warn of forks."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module=RENAMED_COLLECTIVES)
