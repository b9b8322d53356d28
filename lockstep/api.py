"""Training from Python: `lockstep.train` does what the command does, with objects of the program in its settings.

Keyword arguments are the content of a settings file (docs/settings_file.md). Where a setting takes the path of a file,
it takes an object: rows, and functions and classes in place of `path/to/file.py:name`. The object is kept under the
name that the setting holds (`rollout/system/user_functions.py`), and everything else is the run that the command would
start.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lockstep.arguments import Arguments, refuse_no_reward
from lockstep.python_words import CALLBACKS, in_python
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.system.user_functions import COPY, is_object, keep, name_of, object_named
from lockstep.trainer.cli import composed, end_with_launcher, explain
from lockstep.trainer.command_line import SUFFIXES, called_with
from lockstep.trainer.config.hints import brief
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.settings_file import of_content, settings_file

if TYPE_CHECKING:
    from lockstep.rollout.records import Rollout
    from lockstep.trainer.observe.step_metrics import StepReport

    __version__: str

__all__ = ["ConfigError", "Run", "Step", "__version__", "configure", "stop", "train"]
CALL = Path("lockstep.train(...)")
"""Name in errors, in place of that of a settings file."""
INTERRUPTED = (
    "the run was ended at once, because it had no update to finish, or by a second interrupt; if it has saved a "
    "checkpoint, lockstep.Run('<its directory>').resume() goes on from there"
)
_stop = threading.Event()


def __getattr__(name: str) -> str:
    """Return the version when it is asked for: folders on the path of Python may have none."""
    if name == "__version__":
        return version("lockstep-rl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Run:
    """A run that has ended: at its last update, or where it was stopped. Also any other run, by its directory."""

    def __init__(
        self,
        directory: str | Path,
        objects: Mapping[str, Any] | None = None,
        callbacks: Mapping[str, Any] | None = None,
    ) -> None:
        """objects, callbacks: those of the call, for `resume`. Raises `ConfigError` without a run."""
        self.directory = Path(directory)
        """Holds everything that the run has written."""
        self._objects = dict(objects or {})
        self._callbacks = dict(callbacks or {})
        if not (self.directory / "config.yaml").is_file():
            raise ConfigError(f"{directory} is not the directory of a run: it has no config.yaml")

    def __reduce__(self) -> tuple[Any, ...]:
        return Run, (self.directory,)  # objects and callbacks belong to this process

    def __repr__(self) -> str:
        return f"lockstep.Run({str(self.directory)!r})"

    @property
    def model(self) -> Path:
        """Path of the trained model."""
        return self.directory / "model"

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics of each update by name, with the number of the update as `step`."""
        from lockstep.trainer.observe.metrics_log import read_metrics

        return read_metrics(self.directory / "metrics.jsonl")

    def rollouts(self, update: int) -> list[Rollout]:
        """Return the rollouts of an update, if `logger.save_rollouts` is on. Raises `DataError` and OSError."""
        from lockstep.rollout.saved_rollouts import read_rollouts

        folder = self.directory / "rollouts"
        file = folder / f"step-{update:06d}.jsonl"
        if not file.is_file():
            updates = sorted(int(one.stem.removeprefix("step-")) for one in folder.glob("step-*.jsonl"))
            saved = ", ".join(map(str, updates)) or "none; logger={'save_rollouts': True} saves them"
            raise DataError(f"{self.directory} has no rollouts of update {update}; it has those of {brief(saved)}")
        return list(read_rollouts(file))

    @in_python()
    def resume(self, **arguments: Any) -> Run:
        """Go on from the last checkpoint, and return the run. arguments: changes, for example `updates=80`.

        Raises as `train`, which also takes `resume="auto", run_name=...` and the same objects in another process.
        """
        keep(self._objects)
        callbacks = {**self._callbacks, **{name: arguments.pop(name) for name in CALLBACKS if name in arguments}}
        place = {"run_root": str(self.directory.parent), "run_name": self.directory.name, "resume": "auto"}
        content, objects = _content({**arguments, **place})
        return _train(content, {**self._objects, **objects}, callbacks)

    def _repr_html_(self) -> str:
        """Return the curves of the run, for notebooks."""
        from lockstep.lab.pages.notebook import picture

        return picture(self.directory.name, self.history)


@in_python()
def train(
    config: Config | str | Path | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    heldout: Any = None,
    columns: Mapping[str, str | None] | None = None,
    rewards: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    on_step: Callable[[StepReport], Any] | None = None,
    on_rollout: Callable[[Rollout], Any] | None = None,
    on_evaluation: Callable[[int, Mapping[str, float]], Any] | None = None,
    **settings: Any,
) -> Run:
    """Train, and return the run. An interrupt, or `stop`, ends it after the current update; `Run.resume` goes on.

    Args:
        config: result of `configure`, or path of a settings file on top of which the other arguments go.
        model: path, id of the hub or preset, or a loaded model of transformers with its `tokenizer`: its
            processor, if it sees images.
        data: path, id of the hub or preset, a `datasets.Dataset`, a list of dictionaries, or a function that yields
            them.
        heldout: the same, for evaluation.
        columns: columns of the rows by the names that are read here, for example `{"prompt": "question"}`.
        rewards: reward function or a list: names of built-in ones, `path/to/file.py:name`, or functions; a dictionary
            from them to their weights.
        tools: functions that the model may call.
        on_step: called on all ranks after each update with its `StepReport`.
        on_rollout: called with each rollout as it arrives.
        on_evaluation: called with the number of the update and the metrics of its evaluation.
        settings: content of a settings file: `updates=40`, `optimizer={"lr": 1e-4}`, `algorithm="dr_grpo"` for a
            preset; functions and classes where a setting takes `path/to/file.py:name`, such as
            `environment=MyEnvironment`.

    Raises `ConfigError` before anything heavy starts, and the other errors of `lockstep.rollout.errors`.
    """
    callbacks = {"on_step": on_step, "on_rollout": on_rollout, "on_evaluation": on_evaluation}
    defaults = {"model": model, "tokenizer": tokenizer, "data": data, "heldout": heldout, "columns": columns}
    defaults["rewards"] = rewards
    arguments = {name: value for name, value in defaults.items() if value is not None}
    if isinstance(config, Config):
        names = [*arguments, *settings, *(["tools"] if tools else [])]
        if names:
            raise ConfigError(f"found a Config and {', '.join(names)}; give them to lockstep.configure")
        from lockstep.trainer.run.next_steps import changed_words

        return _run(config, changed_words(plain(config)), {}, callbacks)
    content, objects = _content({**arguments, **({"tools": tools} if tools else {}), **settings}, file=config)
    return _train(content, objects, callbacks)


@in_python()
def configure(config: str | Path | None = None, **arguments: Any) -> Config:
    """Return the checked configuration that `train` would use, to look at or to change. Arguments as those of `train`,
    without callbacks. Raises `ConfigError`."""
    return _composed(_content(arguments, file=config)[0])[0]


def stop() -> None:
    """End the run that trains in this process after its current update, as an interrupt does. From any thread."""
    _stop.set()


def _train(content: Mapping[str, Any], objects: Mapping[str, Any], callbacks: Mapping[str, Any]) -> Run:
    config, words = _composed(content)
    return _run(config, words, objects, callbacks)


def _run(config: Config, words: Sequence[str], objects: Mapping[str, Any], callbacks: Mapping[str, Any]) -> Run:
    from lockstep.trainer.run.run import Callbacks, run

    if config.dry_run:
        raise ConfigError("found dry_run=True, which only the command takes; type: lockstep train ... dry_run=true")
    functions = {name: function for name, function in callbacks.items() if function is not None}
    for name, function in functions.items():
        _refuse_other_parameters(name, function)
    end_with_launcher()
    _stop.clear()
    with called_with(words), _own_signals():
        own_callbacks = Callbacks(stops=_stop.is_set, ends_process=False, **_with_picture(config, functions))
        try:
            directory = run(config, callbacks=own_callbacks)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(INTERRUPTED) from None
    return Run(directory, objects, callbacks)


def _refuse_other_parameters(name: str, function: Any) -> None:
    """Raise `ConfigError` for a callback that cannot be called with what it gets."""
    if not callable(function):
        raise ConfigError(f"{name}: found {type(function).__name__}, expected a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in
        return
    try:
        signature.bind(*CALLBACKS[name])
    except TypeError:
        own = getattr(function, "__name__", "function")
        raise ConfigError(f"{name}: found {own}{signature}, expected def {own}({', '.join(CALLBACKS[name])})") from None


def _with_picture(config: Config, callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the callbacks; in a notebook with a picture that follows the run."""
    if not _in_notebook() or "TORCHELASTIC_RUN_ID" in os.environ:  # forks of a kernel cannot draw
        return dict(callbacks)
    from lockstep.lab.pages.notebook import LivePicture

    picture = LivePicture(total=config.updates)
    on_step = callbacks.get("on_step", lambda report: None)
    on_evaluation = callbacks.get("on_evaluation", lambda update, metrics: None)

    def step(report: StepReport) -> None:
        picture.add({"step": float(report.update), **report.metrics})
        on_step(report)

    def evaluation(update: int, metrics: Mapping[str, float]) -> None:
        picture.add({"step": float(update), **metrics})
        on_evaluation(update, metrics)

    return {**callbacks, "on_step": step, "on_evaluation": evaluation}


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def _own_signals() -> Iterator[None]:
    """Give the signals back that the run handles."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _composed(content: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return the checked configuration, and its settings as words of a command line."""
    file = of_content(dict(content), CALL)
    notices: list[str] = []
    try:
        (config,) = composed([], file, notices)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    for notice in filter(None, notices):
        print(notice)
    return config, file.words


def _content(arguments: Mapping[str, Any], file: str | Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of a settings file for the arguments of `train`, and the objects that it names."""
    below: dict[str, Any] = {}
    if file is not None:
        if not str(file).endswith(SUFFIXES):
            raise ConfigError(f"found {str(file)!r}, expected the path of a settings file, which ends with .yaml")
        stored = settings_file([str(file)])
        assert stored is not None
        below = {"defaults": [dict([preset]) for preset in stored.presets.items()], **stored.values}
    conversion = Arguments()
    content = conversion.content(arguments, below)
    keep(conversion.objects)
    for spec in content.get("reward", {}).get("functions", ()):
        if spec.startswith(COPY):
            from lockstep.rewards.workers.copies import pickled

            pickled(spec)  # says at once what cannot cross
        if is_object(spec):
            refuse_no_reward(name_of(spec), object_named(spec), content["reward"].get("settings", {}))
    return content, conversion.objects
