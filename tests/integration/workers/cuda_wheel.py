"""Checks of the CUDA builds of vLLM and torch on a machine without a GPU.

Started by tests/integration/test_cuda_wheel.py with the Python of an environment that has them:

    python -m tests.integration.workers.cuda_wheel DIRECTORY

Each check is a function; DIRECTORY/found.json gets its error, or null. Not shown: computation, memory, NCCL, IPC
handles. Two things are made up. Kernels link to the driver, so without one they load beside a library whose functions
fail. NVML reports one GPU, and in checks of its settings so does torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any
from unittest import mock

CHECKS: dict[str, Callable[[Path], None]] = {}
"""All checks by name, in the order in which they run."""
METHODS = (FunctionType, MethodType)
UUID, NAME = "GPU-4c1d", "NVIDIA H100 80GB HBM3"


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def pretend_platform() -> None:
    """Report one GPU like an H100 through NVML and Triton, where vLLM looks for one when it is first imported."""
    import vllm.third_party.pynvml as nvml

    answers: dict[str, Any] = {
        "Init": None,
        "Shutdown": None,
        "DeviceGetCount": 1,
        "DeviceGetHandleByIndex": "handle",
        "DeviceGetName": NAME,
        "DeviceGetUUID": UUID,
        "DeviceGetCudaComputeCapability": (9, 0),
        "DeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30),
    }
    import triton.backends

    for name, answer in answers.items():
        setattr(nvml, f"nvml{name}", lambda *_, answer=answer: answer)
    triton.backends.backends["nvidia"].driver.is_active = staticmethod(lambda: True)  # else vLLM goes without Triton


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Report the same GPU through torch; any use of it would still fail."""
    import torch

    properties = SimpleNamespace(uuid=UUID, name=NAME, total_memory=80 * 2**30, multi_processor_count=132)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
        mock.patch.object(torch.accelerator, "device_count", return_value=1),
    ):
        yield


def load_driver(directory: Path) -> None:
    """Load the driver's library, or one whose functions return CUDA_ERROR_NO_DEVICE, so that kernels can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass
    package = importlib.metadata.distribution("vllm").locate_file("vllm")
    listed = [
        subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
        for path in Path(str(package)).rglob("*.so")
    ]
    names = sorted(set(re.findall(r" U (cu[A-Z]\w*)", "".join(listed))))
    source, library = directory / "driver.c", directory / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def tiny_model(directory: Path) -> Path:
    from tests.fixtures.models import save_tiny_model

    path = directory / "model"
    return path if path.exists() else save_tiny_model(path, tied=True)


def composed(settings: list[str], *, needs_data: bool) -> Any:
    """Return the checked configuration of a command line."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from lockstep.trainer.checks.validate import validate
    from lockstep.trainer.compose import CONFIG_DIR, schema, to_config

    ConfigStore.instance().store(name="schema", node=schema())
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = to_config(compose("train", overrides=settings))
    validate(config, needs_data=needs_data)
    return config


def gpu_config(directory: Path, **changes: Any) -> Any:
    settings = {"model.path": tiny_model(directory), "model.dtype": "bfloat16", "rollout.max_model_len": 256, **changes}
    return composed([f"{name}={value}" for name, value in settings.items()], needs_data=False)


def settings_of(config: Any) -> Any:
    from lockstep.trainer.engines.start import engine_settings

    context = config.engine_context
    return engine_settings(config.model, config.rollout, config.correction, seed=config.seed, context=context)


@check
def torch_is_a_cuda_build_of_the_version_that_vllm_needs(directory: Path) -> None:
    import torch

    assert (torch.version.cuda or "").split(".")[0] == "13", f"torch {torch.__version__} is for {torch.version.cuda}"
    needed = next(one for one in importlib.metadata.requires("vllm") or () if re.match(r"torch\s*==", one))
    assert needed.partition("==")[2].strip() == torch.__version__.partition("+")[0], (needed, torch.__version__)


@check
def nccl_is_new_enough_for_the_transfer_between_processes(directory: Path) -> None:
    from torch.cuda import nccl

    from lockstep.scripts.gpu_checks.environment import NCCL

    assert nccl.version() >= NCCL, nccl.version()


@check
def the_kernels_load(directory: Path) -> None:
    from lockstep.scripts.gpu_checks.environment import _imported, _kernels

    for module in (_kernels("cuda"), "vllm.cumem_allocator"):  # the second frees memory for a sleeping engine
        assert _imported(module) == "loaded", _imported(module)


@check
def vllm_resolves_the_cuda_platform(directory: Path) -> None:
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "NvmlCudaPlatform"
    assert current_platform.is_cuda()
    assert current_platform.get_device_capability().to_int() == 90


@check
def vllm_has_every_declared_name(directory: Path) -> None:
    from lockstep.rollout.vllm_names import differences, sections

    found = [text for name in sections() if name != "routes" for text in differences(name)]
    assert not found, found


@check
def the_entry_point_registers_the_transports(directory: Path) -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightTransferEngine
    from vllm.plugins import load_general_plugins

    assert "cuda_ipc" not in WeightTransferEngineFactory._registry
    load_general_plugins()
    for name in ("gloo", "cuda_ipc"):
        assert issubclass(WeightTransferEngineFactory._registry[name](), WeightTransferEngine)
    assert issubclass(WeightTransferTrainerFactory._registry["cuda_ipc"](), TrainerWeightTransferEngine)


@check
def overrides_accept_what_callers_of_the_base_classes_pass(directory: Path) -> None:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

    from lockstep.rollout.engine.scheduler import BufferedAsyncScheduler, BufferedOutputs, BufferedScheduler
    from lockstep.rollout.weights.control_plane import ControlPlane
    from lockstep.rollout.weights.cuda_ipc import CudaIpcTrainerWeightTransferEngine, CudaIpcWeightTransferEngine
    from lockstep.rollout.weights.gloo.worker import GlooWeightTransferEngine
    from lockstep.rollout.weights.source import ZeroSource

    subclasses: list[type] = [
        *(CudaIpcTrainerWeightTransferEngine, CudaIpcWeightTransferEngine),
        *(GlooWeightTransferEngine, ZeroSource, BufferedScheduler, BufferedAsyncScheduler),
    ]
    compared = []
    for subclass in subclasses:
        assert not inspect.isabstract(subclass), (subclass, sorted(subclass.__abstractmethods__))
        own = vars(subclass) | (vars(BufferedOutputs) if issubclass(subclass, BufferedOutputs) else {})
        base = next(one for one in subclass.__mro__[1:] if one.__module__.startswith("vllm."))
        for name in own:
            override, overridden = getattr(subclass, name), getattr(base, name, None)
            if isinstance(override, METHODS) and isinstance(overridden, METHODS) and not name.startswith("__"):
                _assert_accepts(override, overridden, f"{subclass.__name__}.{name}")
                compared.append(name)
    for name in ("send_weights", "receive_weights", "update_from_output", "finish_requests"):
        assert name in compared, compared
    for name, overridden in vars(VLLMWeightSyncClient).items():
        if not name.startswith("_") and callable(overridden):
            _assert_accepts(getattr(ControlPlane, name), overridden, f"ControlPlane.{name}")


def _assert_accepts(override: Any, overridden: Any, shown: str) -> None:
    """Assert that an override can be called in every way that the signature of the overridden method allows."""
    parameters = inspect.signature(overridden).parameters.values()
    accepted = inspect.signature(override)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [one for one in parameters if one.kind not in kinds]
    positional = [one.name for one in named if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = [one.name for one in named if one.kind is inspect.Parameter.KEYWORD_ONLY]
    by_name = [name for name in positional if name != "self"]
    calls = [
        (positional, keywords),
        (positional[: len(positional) - len(by_name)], [*by_name, *keywords]),
    ]
    for args, kwargs in calls:
        try:
            accepted.bind(*args, **dict.fromkeys(kwargs))
        except TypeError as error:
            raise AssertionError(f"{shown}{accepted} is called as {inspect.signature(overridden)}: {error}") from error


@check
def engine_arguments_become_a_configuration_with_our_scheduler_and_transport(directory: Path) -> None:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor import Executor
    from vllm.v1.worker.gpu_worker import Worker

    from lockstep.rollout.engine.embedded import EmbeddedEngine
    from lockstep.rollout.engine.scheduler import BufferedAsyncScheduler, buffered_scheduler

    class Unstarted(EmbeddedEngine):
        def _launch(self) -> None:
            settings = SimpleNamespace(max_model_len=256, dtype=torch.bfloat16, get_vocab_size=lambda: 512)
            self._llm = SimpleNamespace(model_config=settings)  # type: ignore[assignment]

    with (
        pretended_gpu(),
        mock.patch.dict(os.environ),
    ):
        settings = settings_of(gpu_config(directory))
        settings = replace(settings, local_place=(0, 1), gpu_memory_utilization=0.3)
        engine: Any = Unstarted(settings, loop=mock.Mock(), log_path=directory / "log")
        assert engine._variables["CUDA_VISIBLE_DEVICES"] == "0"
        config = AsyncEngineArgs(**engine._args).create_engine_config()
        assert config.weight_transfer_config.backend == "cuda_ipc"
        assert config.model_config.enable_sleep_mode
        assert config.model_config.head_dtype == torch.float32
        assert config.model_config.logprobs_mode == "processed_logprobs"
        assert config.scheduler_config.enable_chunked_prefill
        assert config.scheduler_config.async_scheduling
        assert config.use_v2_model_runner
        assert Executor.get_class(config).__name__ == "UniProcExecutor"
        assert config.scheduler_config.get_scheduler_cls() is buffered_scheduler
        with mock.patch.object(BufferedAsyncScheduler, "__init__", return_value=None):
            assert type(buffered_scheduler(vllm_config=config)) is BufferedAsyncScheduler
        assert config.parallel_config.worker_cls in ("auto", f"{Worker.__module__}.{Worker.__name__}")


@check
def vllm_knows_the_environment_variables_that_engines_get(directory: Path) -> None:
    from vllm import envs

    from lockstep.rollout.engine.embedded import _environment_variables
    from lockstep.rollout.engine.engine_settings import EngineSettings
    from lockstep.trainer.tools import serve_engine

    with pretended_gpu():
        variables = {
            **_environment_variables(EngineSettings(model=directory, local_place=(0, 1)), is_cpu=False),
            **serve_engine.environment(settings_of(gpu_config(directory))),
            "VLLM_LOGGING_CONFIG_PATH": "",
        }
    unknown = {name for name in variables if name.startswith("VLLM_")} - set(envs.environment_variables)
    assert not unknown, unknown
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in variables
    assert not envs.VLLM_ALLOW_INSECURE_SERIALIZATION


@check
def the_embedded_engine_calls_methods_that_exist_with_arguments_that_they_take(directory: Path) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from lockstep.rollout.engine.embedded import PAUSE_MODES, EmbeddedEngine

    llm = mock.create_autospec(AsyncLLM, instance=True)
    llm.errored = False
    llm.compute_weight_checksums.return_value = [{"a": "1"}]
    llm.get_weight_version.return_value = "3"
    engine = EmbeddedEngine.__new__(EmbeddedEngine)
    engine.name, engine._llm, engine.log_path, engine._admits = "engine", llm, directory / "log", asyncio.Event()
    engine._watcher, engine._calls = None, set()

    async def call_all() -> None:
        for mode in PAUSE_MODES:
            await engine.pause(mode)
        await engine.resume()
        assert await engine.weight_version() == 3
        await engine.sleep(2)
        await engine.wake("weights")
        await engine.wake("kv_cache")
        await engine.reset_prefix_cache()
        assert await engine.weight_checksums() == {"a": "1"}
        await engine.init_weight_transfer({"packed": True})
        await engine.start_weight_update()
        await engine.update_weights({"names": []})
        await engine.finish_weight_update("4")
        await engine.check_alive()

    asyncio.run(call_all())
    inspect.signature(AsyncLLM.generate).bind(None, {"prompt_token_ids": [1]}, SamplingParams(), "lockstep-0")
    inspect.signature(AsyncLLM.from_vllm_config).bind(None, disable_log_stats=True)
    inspect.signature(AsyncLLM.shutdown).bind(None, timeout=5.0)
    assert isinstance(inspect.getattr_static(AsyncLLM, "errored"), property)
    # A request that is refused during a pause is an error that the engine's `_call` turns into a `RequestError`.
    from vllm.exceptions import RetryableRequestError, VLLMClientError, VLLMError

    assert issubclass(RetryableRequestError, VLLMError)
    assert not issubclass(RetryableRequestError, VLLMClientError)


@check
def vllm_parses_the_command_line_of_a_server_and_has_its_routes(directory: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.app import build_app

    from lockstep.rollout.server.guard import KEY_ENV
    from lockstep.rollout.vllm_names import missing_routes
    from lockstep.trainer.tools import serve_engine

    with pretended_gpu(), mock.patch.dict(os.environ, {"VLLM_SERVER_DEV_MODE": "1", KEY_ENV: "key"}):
        config = gpu_config(directory, **{"rollout.kv_cache_gib": 4})
        args = _parsed(serve_engine.command(settings_of(config), config.server, has_key=True))
        built = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        assert built.weight_transfer_config.backend == "nccl"
        assert built.model_config.logprobs_mode == "processed_logprobs"
        assert str(built.model_config.head_dtype) == "torch.float32"
        assert built.scheduler_config.async_scheduling
        assert args.middleware == [serve_engine.ROUTES, serve_engine.GUARD]
        app = build_app(args, supported_tasks=("generate",), model_config=built.model_config)
    assert missing_routes(_paths(app)) is None


def _paths(app: Any) -> set[str]:
    """Return the paths of an application's routes; newer FastAPI keeps included routers whole."""
    return set(app.openapi()["paths"]) | {route.path for route in app.routes if hasattr(route, "path")}


def _parsed(command: list[str]) -> Namespace:
    """Return vLLM's reading of a server's command line: PYTHON -m MODULE OPTION..."""
    entry = importlib.import_module(command[2])
    parsed: list[Namespace] = []
    with (
        mock.patch.object(sys, "argv", command[2:]),
        mock.patch.object(entry, "run_server", lambda args: args),
        mock.patch("uvloop.run", parsed.append),
    ):
        entry.main()
    return parsed[0]


@check
def an_ipc_update_reaches_the_engine_without_the_insecure_flag_where_vllms_own_is_refused(directory: Path) -> None:
    import pytest
    import torch
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    from lockstep.rollout.weights.cuda_ipc import CudaIpcTrainerInitInfo, CudaIpcTrainerWeightTransferEngine
    from lockstep.rollout.weights.source import ZeroSource

    handle = (
        *(torch.Tensor, torch.Size([4096]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0, b"\x00mem\xff"),
        *(2097152, 512, False, b"counter\x80", 7, b"event\x00", True),
    )  # as `reduce_tensor` returns it, read by `rebuild_cuda_tensor`
    assert len(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == len(handle)
    source = ZeroSource(torch.nn.Linear(3, 5))
    empty = torch.empty
    with (
        pretended_gpu(),
        mock.patch.object(packed_tensor, "reduce_tensor", return_value=(None, handle)),
        mock.patch.object(packed_tensor.torch, "empty", lambda *size, device, **more: empty(*size, **more)),
        mock.patch.object(torch.cuda, "current_stream", mock.Mock()),
        mock.patch.object(torch.accelerator, "current_stream", mock.Mock()),
        mock.patch.object(torch.accelerator, "synchronize", mock.Mock()),
        mock.patch.object(torch.cuda, "ipc_collect", mock.Mock()),
    ):
        client = _Encoding()
        theirs = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=4096)
        sender = IPCTrainerWeightTransferEngine.trainer_init(theirs, client=client, source=source)
        with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
            sender.send_weights()  # should this pass one day, cuda_ipc is no longer needed

        ours = CudaIpcTrainerInitInfo(rank=0, packed_buffer_size_bytes=4096)
        CudaIpcTrainerWeightTransferEngine.trainer_init(ours, client=client, source=source).send_weights()
    assert client.loaded == [("weight", handle[7]), ("bias", handle[7])]


class _Encoding:
    """Client that passes calls to an engine as vLLM's core client does: encoded, to the process of the engine."""

    def __init__(self) -> None:
        import torch

        from lockstep.rollout.weights.cuda_ipc import CudaIpcWeightTransferEngine

        config: Any = SimpleNamespace(parallel_config=None, model_config=None)
        model = torch.nn.Module()
        self.worker = CudaIpcWeightTransferEngine(None, config, torch.device("cuda", 0), model)  # type: ignore[arg-type]
        self.loaded: list[tuple[str, bytes]] = []

    def _sent(self, method: str, argument: dict[str, Any]) -> dict[str, Any]:
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        message = (0, 1, "collective_rpc", (method, None, (), argument))
        return MsgpackDecoder().decode(MsgpackEncoder().encode(message))[3][3]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        sent = self._sent("init_weight_transfer_engine", {"init_info": init_info})["init_info"]
        self.worker.init_transfer_engine(self.worker.parse_init_info(sent))
        assert self.worker.packed

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        sent = self._sent("update_weights", {"update_info": update_info})["update_info"]
        with mock.patch("vllm.distributed.weight_transfer.ipc_engine.packed_ipc_consumer") as consumer:
            consumer.return_value = []
            self.worker.model.load_weights = lambda weights: None  # type: ignore[assignment]
            self.worker.receive_weights(self.worker.parse_update_info(sent))
        arguments = consumer.call_args.kwargs
        self.loaded += [(name, arguments["ipc_handle"][UUID][7]) for name in arguments["names"]]

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


@check
def a_source_fulfills_vllms_transports_on_senders_and_other_ranks(directory: Path) -> None:
    import torch
    from vllm.distributed.weight_transfer import nccl_engine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from lockstep.rollout.engine.plugin import register
    from lockstep.rollout.weights.source import ZeroSource
    from lockstep.rollout.weights.vllm_transport import connect

    register()
    source = ZeroSource(torch.nn.Linear(3, 5), dtype=torch.bfloat16)
    sent: list[str] = []

    def broadcast(*, iterator: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        sent.extend(name for name, _ in iterator)

    for hosts in (["127.0.0.1"], []):
        client = mock.Mock(hosts=hosts, num_workers=2)
        with (
            mock.patch.object(nccl_engine, "open_trainer_endpoint", return_value="group"),
            mock.patch.object(nccl_engine, "packed_nccl_broadcast_producer", broadcast),
        ):
            sender: Any = connect("nccl", client, source, address_for=lambda hosts: "127.0.0.1", buffer_bytes=4096)
            sender.send_weights()
        assert sender.packed_buffer_size_bytes == 4096
        if hosts:
            ((update,), _) = client.update_weights.call_args
            ((init,), _) = client.init_weight_transfer_engine.call_args
            parsed = NCCLWeightTransferEngine.update_info_cls(**update)
            assert (parsed.names, parsed.dtype_names) == (["weight", "bias"], ["bfloat16", "bfloat16"])
            assert (parsed.shapes, NCCLWeightTransferEngine.init_info_cls(**init).world_size) == ([[5, 3], [5]], 3)
        else:
            assert not client.method_calls
    assert sent == ["weight", "bias"]


@check
def names_that_the_gpu_checks_read_exist(directory: Path) -> None:
    import torch
    from vllm.v1.worker import gpu_worker

    from lockstep.scripts.gpu_checks import CHECKS as ON_GPUS
    from lockstep.scripts.gpu_checks.runs import _settings
    from lockstep.scripts.gpu_checks.subject import Subject

    for one in ON_GPUS:
        assert callable(getattr(importlib.import_module(one.module), one.name))
    assert '"Using V2 Model Runner"' in inspect.getsource(gpu_worker)
    for name in ("_sleep", "mem_get_info", "memory_reserved", "max_memory_reserved", "empty_cache",
                 "memory_allocated", "set_per_process_memory_fraction", "get_device_name"):  # fmt: skip
        assert callable(getattr(torch.cuda, name)), name
    (directory / "loop").mkdir()
    subject = Subject(directory=directory / "loop", rehearses=False)
    subject.__dict__["saved"] = tiny_model(directory)  # instead of 0.2 B parameters on a GPU
    with pretended_gpu():
        composed([f"{name}={value}" for name, value in _settings(subject, "loop", 5).items()], needs_data=True)


def main(directory: Path) -> None:
    found = {}
    load_driver(directory)
    pretend_platform()
    for name, function in CHECKS.items():
        try:
            function(directory)
            found[name] = None
        except (Exception, SystemExit):  # a check may fail in any way, also as a parser does; the others still run
            found[name] = traceback.format_exc()
    (directory / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
