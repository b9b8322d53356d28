"""Lookup of what is the user's own: in a file, `path/to/file.py:name,other`, or in this process.

    object:short    the function, class or rows that the program which called `lockstep.train` gave by this name
    copy:short      a copy of the function that reward workers call (`rewards/workers/copies.py`)

No other process knows these names: a run whose settings hold one is continued by a program that gives it again.

Loading runs the file with the rights of this process, without a sandbox; only files named in a setting are loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import symtable
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import error_text

MOVED = ("trainer", "rollout", "rewards", "demo")
"""Packages that were importable by these names before they moved into `lockstep`."""
ROOT = str(Path(__file__).resolve().parents[2])
"""Directory of Lockstep's own folders."""
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Directories of Python and of installed packages."""
OBJECT, COPY = "object:", "copy:"
_objects: dict[str, Any] = {}
_IN_WORD = re.compile(rf"[=\[\s:]'?({OBJECT}|{COPY})\w")
_HIDES_NAMES = re.compile(r"import\s*\*|^\s*global\s|\b(?:globals|vars|locals|exec|eval|setattr)\s*\(", re.MULTILINE)
"""Ways to define a name of a module that its symbol table does not show."""


def is_object(text: str) -> bool:
    """Return True for `object:name` and `copy:name`."""
    return text.startswith((OBJECT, COPY))


def holds_objects(words: Iterable[str]) -> bool:
    """Return True if a word of a command line sets a setting to an object, or to a list with one."""
    return any(_IN_WORD.search(word) for word in words)


def name_of(spec: str) -> str:
    """Return the name in `object:name` or `copy:name`."""
    return spec.partition(":")[2]


def keep(objects: Mapping[str, Any]) -> None:
    """Keep objects by name, each in place of an earlier one: a cell of a notebook that runs again has new functions."""
    _objects.update(objects)


def object_named(spec: str) -> Any:
    """Return the object of `object:name` or `copy:name`. Raises `ConfigError` where it was not kept."""
    if problem := object_problem(spec):
        raise ConfigError(problem)
    return _objects[name_of(spec)]


def object_problem(spec: str) -> str | None:
    """Return a sentence if no object of this name is kept in this process; None if one is."""
    if name_of(spec) in _objects:
        return None
    return (
        f"found {spec}, an object of the program that called lockstep.train, which no other process has; continue the "
        "run in that program: lockstep.train(<the same arguments>, resume='auto', run_name=<name of the run>)"
    )


def load_functions(spec: str) -> list[Callable[..., Any]]:
    """Return the functions named by `path.py:name` or `path.py:name,other`, in that order, or by `object:name`.

    Raises `ConfigError`: the spec is malformed, or the file is missing, fails to load or lacks a name.
    """
    if is_object(spec):
        return [object_named(spec)]
    path_text, colon, names_text = spec.rpartition(":")
    names = [name.strip() for name in names_text.split(",") if name.strip()]
    if not colon or not path_text.endswith(".py") or not names:
        raise ConfigError(
            f"found {spec!r}, expected path/to/file.py:name or path/to/file.py:name,other_name (in a list on the "
            "command line quote a spec with a comma: '[\"path/to/file.py:name,other_name\"]')"
        )
    module = _load_module(Path(path_text))
    return [_lookup(module, name, path_text) for name in names]


def load_function(spec: str) -> Callable[..., Any]:
    """Return the single function named by `path.py:name`. Raises `ConfigError` as `load_functions` does."""
    functions = load_functions(spec)
    if len(functions) != 1:
        raise ConfigError(f"found {spec!r}, which names {len(functions)} functions; expected one: path/to/file.py:name")
    return functions[0]


def names_function(text: str) -> bool:
    """Return True for `path/to/file.py:name`, or several names separated by commas, and for `object:name`."""
    return text.rpartition(":")[0].endswith(".py") or is_object(text)


def place_problem(spec: str) -> str | None:
    """Return a sentence if the file of `path.py:name`, or the object of `object:name`, is not there; None if it is."""
    if is_object(spec):
        return object_problem(spec)
    path = spec.rpartition(":")[0]
    return None if os.path.isfile(os.path.expanduser(path)) else f"no file {path} (looked in {Path.cwd()})"


def written_names(spec: str) -> Mapping[str, tuple[str, ...] | None]:
    """Return the names that the file of `path.py:name` defines, without running it; each with its parameters if it is
    written there as a function.

    Raises `ConfigError` for a file that is not Python, or that lacks the name. A file may define names in ways that
    cannot be read (`import *`, `setattr`); then it may lack the name without an error.
    """
    if is_object(spec):
        value = object_named(spec)
        is_function = inspect.isfunction(value) or inspect.ismethod(value)
        return {name_of(spec): tuple(inspect.signature(value).parameters) if is_function else None}
    path_text, _, name = spec.rpartition(":")
    path = Path(os.path.expanduser(path_text))
    names: dict[str, tuple[str, ...] | None] = {}
    for symbol in _table(path).get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            inner = [of for of in symbol.get_namespaces() if isinstance(of, symtable.Function)]
            names[symbol.get_name()] = inner[-1].get_parameters() if inner else None
    if name not in names and not _HIDES_NAMES.search(path.read_text(encoding="utf-8")):
        functions = [key for key, parameters in names.items() if parameters is not None]
        raise ConfigError(_missing_name(path_text, name, functions or names))
    return names


def _table(path: Path) -> symtable.SymbolTable:
    """Return the names in a file, without running it. Raises `ConfigError` for a file that is not Python."""
    try:
        return symtable.symtable(path.read_text(encoding="utf-8"), str(path.resolve()), "exec")
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be loaded: {fault(error, path)}") from error


def written_at(spec: str) -> str:
    """Return the line and file where the function or class of `path.py:name` is written; the file alone if its text
    does not show it. Raises `ConfigError` for a file that is not Python."""
    if is_object(spec):
        code = getattr(object_named(spec), "__code__", None)
        return "this process" if code is None else _place(code.co_filename, code.co_firstlineno)
    path_text, _, name = spec.rpartition(":")
    path = Path(os.path.expanduser(path_text))
    lines = [table.get_lineno() for table in _table(path).get_children() if table.get_name() == name]
    return _place(str(path.resolve()), lines[-1] if lines else None)


def _load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no file {path} (looked in {Path.cwd()}); give the path relative to the working directory")
    full_path = path.resolve()
    # Files of the same name in two directories are two modules; the same file is loaded once and shares its state.
    name = f"lockstep_user_{full_path.stem}_{hashlib.sha256(str(full_path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full_path)
    assert spec is not None  # a .py file always has the source loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up here while it loads
    try:
        _own_files.add(full_path.parent)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        old = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
        hint = f"; Lockstep's packages moved: write `lockstep.{old}` instead of `{old}`" if old in MOVED else ""
        raise ConfigError(f"{path} cannot be loaded: {fault(error, path)}{hint}") from error
    return module


class _OwnFiles(MetaPathFinder):
    """Finder of what files of the user import, also inside of functions: beside them, then in the working directory.

    For imports of libraries these directories are the last ones, so that they hide no package.
    """

    def __init__(self) -> None:
        self.directories: list[str] = []

    def add(self, directory: Path) -> None:
        """Add the directory of a user's file. Lockstep's own folders are not added as the working directory."""
        if self not in sys.meta_path:
            sys.meta_path.insert(sys.meta_path.index(PathFinder), self)  # type: ignore[arg-type]
        for path in (str(directory), *((os.getcwd(),) if os.getcwd() != ROOT else ())):
            if path not in self.directories:
                self.directories.append(path)
            if path not in sys.path:
                sys.path.append(path)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        frame = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(("importlib", "_frozen_importlib")):
            frame = frame.f_back
        if path is not None or frame is None or not _is_own(frame):
            return None
        file = Path(frame.f_code.co_filename)
        near = sorted((one for one in self.directories if file.is_relative_to(one)), key=len, reverse=True)
        working = [one for one in self.directories if near and one == os.getcwd()]
        spec = PathFinder.find_spec(fullname, [*near, *working])
        return spec if spec is not None and spec.loader is not None else None  # a folder of data is not one


_own_files = _OwnFiles()


def fault(error: BaseException, path: str | Path | None = None) -> str:
    """Return an exception on one line: type, the innermost line of the user's code that led to it, and message.

    path: the file, if the sentence around it names it; None: any file that is not installed, and its name is given.
    """
    file = None if path is None else str(Path(path).resolve())
    frames = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in frames if file is not None or _is_own(frame)]
    if isinstance(error, SyntaxError) and file is not None and error.filename == file:
        places.append((file, error.lineno or 1))
    places = [place for place in places if file in (None, place[0])]
    where = (f" in {_place(*places[-1])}" if file is None else f" in line {places[-1][1]}") if places else ""
    return f"{type(error).__name__}{where}: {' '.join(error_text(error).split())}"


def is_of_user(error: BaseException) -> bool:
    """Return True if code of a user raised an exception, or called what did."""
    return any(_is_own(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_own(frame: FrameType) -> bool:
    """Return True for code of a user: neither Lockstep's, nor installed, nor made from a text."""
    name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    return not name.startswith(f"{__name__.partition('.')[0]}.") and not file.startswith(("<", *INSTALLED))


def _place(file: str, line: int | None) -> str:
    if "ipykernel_" in file:
        return "a cell of the notebook" if line is None else f"line {line} of a cell of the notebook"
    shown_path = str(Path(file).relative_to(Path.cwd()) if Path(file).is_relative_to(Path.cwd()) else file)
    return shown_path if line is None else f"line {line} of {shown_path}"


def file_sha256(spec: str) -> str:
    """Return the SHA-256 of the file of `path.py:name`, or of the source of `object:name`, without imports."""
    if is_object(spec):
        value = object_named(spec)
        try:
            content = inspect.getsource(value).encode()
        except (OSError, TypeError):  # typed into an interpreter, or no function
            content = getattr(getattr(value, "__code__", None), "co_code", b"")
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha256(Path(spec.rpartition(":")[0]).read_bytes()).hexdigest()


def _lookup(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    value = vars(module).get(name)
    if not callable(value):
        raise ConfigError(_missing_name(path, name, [key for key, item in vars(module).items() if callable(item)]))
    return value


def _missing_name(path: str, name: str, names: Iterable[str]) -> str:
    public = sorted(key for key in names if not key.startswith("_"))
    return f"{path} has no function {name!r}; it has {', '.join(public) or 'none'}"
