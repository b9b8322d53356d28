"""Redirection of library output to a log file, so that the console shows only the run.

Covered: Python's logging and warnings, and output of C extensions and compilers inside `held_output` and
`output_to_file`. vLLM has its own file (`logs/engine.log`, rollout/engine/embedded.py). Lockstep's own warnings are
printed. Not covered: libraries that print outside these two blocks, and output of `accelerate launch` before it starts
the ranks.
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

from lockstep.rollout.errors import ConfigError, DataError, RewardError, TrainingError
from lockstep.rollout.system.captured_output import redirect_output
from lockstep.rollout.system.user_functions import is_of_user

OWN = ("lockstep",)
VERBOSE_LIBRARIES = (
    "deepspeed",
    "DeepSpeed",
    "accelerate",
    "datasets",
    "torch.distributed",
    "transformers",
    "wandb",
    "mlflow",
    "alembic",
)
"""Loggers of libraries that install their own handlers or levels."""
RENAMED_COLLECTIVES = r"torch\.distributed"
"""Module whose FutureWarnings are ignored: one per call of a collective that DeepSpeed calls by its old name."""
OF_USERS = (ConfigError, DataError, RewardError, TrainingError)
"""Errors that no library causes."""
HELD_RECORDS = 10_000
SHOWN_LINES = 15
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class ThirdPartyLog:
    """Collector of library output: held in memory until `open`, then written to a file."""

    def __init__(self) -> None:
        """Take over the root logger, Python's warnings, and the loggers of known libraries."""
        self.path: Path | None = None
        self._output = ""
        self._held = MemoryHandler(HELD_RECORDS, flushLevel=logging.CRITICAL + 1)
        self._own = _WarningPrinter()
        root = logging.getLogger()
        root.addHandler(self._held)
        root.setLevel(logging.INFO)
        for name in OWN:
            logging.getLogger(name).addHandler(self._own)
        _take_over_loggers()
        logging.captureWarnings(True)

    def open(self, path: Path, warn: Callable[[str], None]) -> None:
        """Write held and all further output to this file; pass Lockstep's own warnings to `warn`."""
        self.path = path
        _take_over_loggers()  # again: libraries were imported since
        if self._output:
            with path.open("a", encoding="utf-8") as log:  # append: a resumed run has one already
                log.write(self._output)
        file = logging.FileHandler(path, encoding="utf-8", delay=True, errors="backslashreplace")
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
        """Hold the output of the block until `open`. Print it if the block fails."""
        with tempfile.NamedTemporaryFile(prefix="lockstep-output-") as output_file:
            try:
                with redirect_output(Path(output_file.name)):
                    yield
            except BaseException:
                print(_text(Path(output_file.name)), file=sys.stderr, end="")
                raise
            self._output += _text(Path(output_file.name))

    @contextmanager
    def output_to_file(self) -> Iterator[None]:
        """Append the output of the block to the file: compilers, C extensions."""
        assert self.path is not None, "open the log first"
        with redirect_output(self.path):
            yield

    @contextmanager
    def shown_on_failure(self) -> Iterator[None]:
        """Print the end of the file if the block fails, unless the error names its cause: the file may show it."""
        try:
            yield
        except Exception as error:
            is_of_library = not isinstance(error, OF_USERS) and not is_of_user(error)
            if is_of_library and self.path is not None and self.path.is_file():
                lines = _text(self.path).splitlines()[-SHOWN_LINES:]
                print(f"the last lines of {self.path}:", *lines, sep="\n  ", file=sys.stderr)
            raise


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


class _WarningPrinter(logging.Handler):
    """Handler that passes warnings of Lockstep's own modules to the console."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.warn: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.warn is not None:
            self.warn(record.getMessage())


def _take_over_loggers() -> None:
    """Route the loggers of imported libraries to the root logger only."""
    _quiet_progress_bars()
    for name in VERBOSE_LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def quiet_third_parties() -> None:
    """Limit libraries to errors, for commands without a run directory."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; transformers uses it directly for GGUF

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed reports at import that it found no GPU
    _quiet_progress_bars()
    for name in VERBOSE_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)


def _quiet_progress_bars() -> None:
    """Disable the progress bars of transformers and the fork warnings of tokenizers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module=RENAMED_COLLECTIVES)
