"""The declaration of what is used of vLLM, against the sources of the library and against the installed vLLM.

The CUDA builds of all supported versions: tests/integration/test_cuda_wheel.py.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from lockstep.rollout import vllm_names
from lockstep.rollout.engine import plugin
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_answers import sample_params, score_params
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.server.server_engine import read_facts
from lockstep.rollout.vllm_names import WINDOW, check_vllm, declared, differences, is_supported, missing_routes
from lockstep.rollout.vllm_names import sections as sections_of_file
from tests.fixtures.paths import ROOT

FOLDERS = ("rollout", "trainer", "lab", "integrations", "rewards", "demo", "scripts")
SECTIONS = [name for name in sections_of_file() if name != "routes"]
ROUTES = set(sections_of_file()["routes"].split())
TREES = [ast.parse(file.read_text()) for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
KERNELS = re.compile(r"vllm\.(_C\w*|cumem_allocator)")
"""Compiled modules, which `lockstep gpu-check` loads and reports."""


def module_names() -> dict[str, set[str]]:
    """Return the declared names by module, each with its parts: `A.b` is also `A`."""
    names: dict[str, set[str]] = {}
    for section in SECTIONS:
        for module, entries in declared(section):
            parts = [form for name, _, _ in entries for form in name.split("|")]
            names.setdefault(module, set()).update(*([part, part.partition(".")[0]] for part in parts))
    return names


def parameters(name: str) -> set[str]:
    found = [taken for s in SECTIONS for _, entries in declared(s) for one, _, taken in entries if one == name]
    return set().union(*filter(None, found))


def nodes_at_runtime(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that are for types alone."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from nodes_at_runtime(node)


def imported(*, at_runtime: bool) -> set[tuple[str, str]]:
    """Return module and name of each import from vLLM; an empty name for a module that a string names."""
    found = set()
    for tree in TREES:
        for node in nodes_at_runtime(tree) if at_runtime else ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
                found.add((str(node.value), ""))
    return {pair for pair in found if pair[0].split(".")[0] == "vllm" and not KERNELS.fullmatch(pair[0])}


def words() -> set[str]:
    """Return all identifiers and short strings of the sources."""
    found: set[str] = set()
    for node in (node for tree in TREES for node in ast.walk(tree)):
        match node:
            case ast.Attribute(attr=word) | ast.Name(id=word) | ast.arg(arg=word) | ast.alias(name=word):
                found.add(word)
            case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.ClassDef(name=word):
                found.add(word)
            case ast.keyword(arg=str(word)) | ast.Constant(value=str(word)):
                found.add(word)
    return found


def test_every_import_from_vllm_is_declared() -> None:
    names = module_names()
    known = {(module, name) for module, own in names.items() for name in [*own, ""]}
    known |= {tuple(module.rpartition(".")[::2]) for module in names}  # a module imported from its package
    assert imported(at_runtime=True) - known == set()


def test_nothing_is_declared_that_the_library_does_not_use() -> None:
    imports, known = imported(at_runtime=False), words()
    unused = set()
    for section in set(SECTIONS) - {"server"}:
        for module, entries in declared(section):
            as_module = {(module, ""), tuple(module.rpartition(".")[::2])} & imports
            for name, _, _ in entries:
                first, *parts = re.split(r"[.|]", name)
                is_imported = (module, first) in imports or (as_module and first in known) or module == "vllm.envs"
                if not is_imported or not known.issuperset(parts[-1:]):
                    unused.add(f"{module}.{name}")
    assert unused == set()


def start() -> None:
    """Create an engine up to the start of vLLM."""
    EmbeddedEngine(EngineSettings(model=Path("none")), loop=mock.Mock(), log_path="none")


def argument_names(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the keys of what a function returns and collects in `arguments`, also for other devices and models."""
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=ast.Name(id="arguments"), slice=ast.Constant(value=str(name))):
                yield name
            case (
                ast.Assign(targets=[ast.Name(id="arguments")], value=value)
                | ast.AugAssign(target=ast.Name(id="arguments"), value=value)
                | ast.Return(value=ast.expr() as value)
            ):
                outer = value.body if isinstance(value, ast.IfExp) else value
                keys = outer.keys if isinstance(outer, ast.Dict) else []
                yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))


def test_every_argument_and_variable_of_an_engine_is_declared() -> None:
    given: set[str] = set()
    with (
        mock.patch.object(
            EmbeddedEngine, "_launch", autospec=True, side_effect=lambda engine: given.update(engine._args)
        ),
        pytest.raises(EngineError),
    ):
        start()  # it has no `llm`
    for file in ("rollout/engine/arguments.py", "rollout/engine/adapters.py"):
        functions = [
            node for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        ]
        for function in functions:
            if function.name in ("engine_arguments", "arguments"):
                given.update(argument_names(function))
    assert given == parameters("AsyncEngineArgs")
    sampled, scored = sample_params(Sampling(max_tokens=1, drawn=1), room=1), score_params()
    assert {*sampled, *scored, "output_kind", "skip_clone"} == parameters("SamplingParams")
    assert {word for word in words() if re.fullmatch(r"VLLM_[A-Z0-9_]+", word)} == parameters("environment_variables")


def test_every_method_of_the_engine_is_declared() -> None:
    text = "".join((ROOT / f"rollout/engine/{name}.py").read_text() for name in ("embedded", "partial_answers"))
    used = set(re.findall(r"(?:self\.|\b)_?llm\.(\w+)", text))
    known = module_names()["vllm.v1.engine.async_llm"]
    assert {f"AsyncLLM.{name}" for name in used} | {"AsyncLLM", "AsyncLLM.from_vllm_config"} == known


def test_every_route_is_declared() -> None:
    text = (ROOT / "rollout/server/server_engine.py").read_text()
    paths = set(re.findall(r'"(/[a-z_/0-9]+)["?]', text)) | {
        f"/{name}" for name in re.findall(r'_update\("(\w+)"', text)
    }
    assert paths - {"/server_info"} == ROUTES - {"/server_info"}
    assert "/server_info" in ROUTES


def test_the_window_is_that_of_pyproject_and_of_the_locks() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"vllm{WINDOW}" in extras["cuda"]
    locks = [file.read_text() for file in (ROOT / "requirements").glob("c*.txt")]
    versions = {version for text in locks for version in re.findall(r"^vllm(?:-cpu)?==(\S+)", text, re.MULTILINE)}
    assert versions == {"0.32.0", "0.33.0"}
    assert all(map(is_supported, versions))
    assert [is_supported(one) for one in ("0.31.9", "0.33.1+cpu", "0.34.0.dev3+g12", "1.0.0")] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_installed_vllm_has_every_name(section: str) -> None:
    assert list(differences(section)) == []


# A vLLM that lacks something


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    vllm_names._check.cache_clear()
    yield
    vllm_names._check.cache_clear()


def test_an_engine_does_not_start_without_a_method_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AsyncLLM, "from_vllm_config")
    with pytest.raises(ConfigError) as caught:
        start()
    package, version = vllm_names._installed()
    assert str(caught.value) == (
        f"vLLM {version} is installed, whose vllm.v1.engine.async_llm has no AsyncLLM.from_vllm_config; install a "
        f"supported version: pip install '{package}{WINDOW}'"
    )


def test_a_server_does_not_start_with_another_signature_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(self: Any, prompt: Any, sampling_params: Any, request_id: str) -> None: ...

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    with pytest.raises(ConfigError, match=r"AsyncLLM\.generate does not take lora_request; install"):
        plugin.register()


def test_a_replaced_function_with_one_more_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def has_requests(self: Any, more: Any) -> bool: ...

    monkeypatch.setattr(Scheduler, "has_requests", has_requests)
    with pytest.raises(
        ConfigError, match=r"Scheduler\.has_requests, which Lockstep replaces, also takes more; install"
    ):
        check_vllm("engine")


def test_a_missing_argument_a_missing_module_and_the_number_of_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "vllm.v1.worker.cpu_worker":
            raise ModuleNotFoundError(name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=r"which has no module vllm\.v1\.worker\.cpu_worker; install"):
        check_vllm("cpu")
    monkeypatch.setattr(AsyncEngineArgs, "__init__", lambda self, model: None)
    monkeypatch.delattr(AsyncLLM, "from_vllm_config")
    with pytest.raises(ConfigError, match=r"AsyncEngineArgs does not take .*seed.* \(and 1 more\); install"):
        check_vllm("engine")


def test_a_package_that_vllm_needs_is_not_taken_for_a_name_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=ModuleNotFoundError(name="msgspec")))
    with pytest.raises(ModuleNotFoundError):
        check_vllm("nccl")


def test_a_version_outside_the_window_with_every_name_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_names, "_installed", lambda: ("vllm", "0.35.1"))
    with caplog.at_level(logging.WARNING):
        check_vllm("engine", "engine")
    assert caplog.messages == [
        f"vLLM 0.35.1 is installed, and Lockstep was tested with vllm{WINDOW}; if the run fails, install a supported "
        f"version: pip install 'vllm{WINDOW}'"
    ]


def test_no_vllm_is_an_error() -> None:
    missing = importlib.metadata.PackageNotFoundError
    with (
        mock.patch("importlib.metadata.version", side_effect=missing),
        pytest.raises(ConfigError, match=r"^vLLM is not installed, .* pip install 'vllm>=0\.32,<0\.34'$"),
    ):
        start()


def test_a_server_without_a_route_says_which() -> None:
    assert missing_routes(ROUTES | {"/metrics"}) is None
    sentence = missing_routes(ROUTES - {"/is_paused"})
    assert sentence is not None
    assert "no route /is_paused; start it with `lockstep serve-engine`" in sentence


def test_a_server_that_describes_itself_in_another_way_is_refused_with_its_version() -> None:
    with pytest.raises(ConfigError, match=rf"a server of vLLM {WINDOW}, but of vLLM 0\.40\.0; start it with"):
        read_facts("http://a", {"vllm_config": {}, "system_env": {"vllm_version": "0.40.0"}})
    with pytest.raises(ConfigError, match=rf"a server of vLLM {WINDOW}; start it with"):
        read_facts("http://a", [])
