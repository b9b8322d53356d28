"""The engine in this process: vLLM's AsyncLLM behind the `Engine` protocol, token ids in, ids and evidence out.

What can kill or leak a vLLM engine is refused or prevented here, each for a reason that was measured:

* ids outside the vocabulary and prompts that do not fit are refused before they reach the engine: it has no
  check of its own when it runs without a tokenizer, and dies;
* chunked prefill is off, because a partial prefill of a request with a seed kills the CPU worker;
* engine processes are spawned, never forked, and exit with this process (`rollout/engine/plugin.py`);
* every request has a deadline, since vLLM waits for a hung worker;
* sampling parameters are sent in full, since what is left out comes from the model's generation_config.json.

vLLM writes to a log file, not to the console; an error quotes the end of that file.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from rollout.engine.engine_answers import (
    UNUSABLE_PREFIX,
    answer_of,
    check_prompt,
    engine_call,
    sample_params,
    score_params,
    version_number,
)
from rollout.engine.plugin import CHILD_ENV, SCHEDULER
from rollout.errors import ConfigError, EngineError, EvidenceError, RequestError
from rollout.records import EngineCall
from rollout.system.addresses import LOOPBACK
from rollout.system.background_loop import BackgroundLoop
from rollout.system.captured_output import output_to
from rollout.system.gc_freeze import collect_all

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.protocol import Sampling

T = TypeVar("T")

WATCH_S = 0.5
"""How often a call that waits looks whether the engine still lives."""
SHUTDOWN_TIMEOUT_S = 5.0
REQUEST_ATTEMPTS = 3
"""Of a request that fails for a reason that may pass; one that hangs, is invalid or finds the engine dead has one."""
FIRST_PAUSE_S = 0.1
PAUSE_MODES = ("wait", "keep", "abort")
LOG_TAIL_LINES = 15


class EmbeddedEngine:
    """vLLM in this process and child processes of it. Make one with `start`; all coroutines run in its `loop`."""

    def __init__(
        self,
        launch: Callable[[], AsyncLLM],
        *,
        name: str,
        loop: BackgroundLoop,
        log_path: Path,
        request_timeout_s: float,
    ) -> None:
        """launch: starts vLLM, now and after a death. Raises `EngineError`."""
        self._launch = launch
        llm = launch()
        self._llm: AsyncLLM | None = llm
        self.name = name
        self.host = LOOPBACK
        self.log_path = log_path
        self._request_timeout_s = request_timeout_s
        self._request_ids = itertools.count()
        self.loop = loop
        self.max_model_len = llm.model_config.max_model_len
        self.vocab_size = llm.model_config.get_vocab_size()
        self.dtype = llm.model_config.dtype
        parallel = llm.vllm_config.parallel_config
        self.num_workers = parallel.world_size * parallel.data_parallel_size
        transfer = llm.vllm_config.weight_transfer_config
        assert transfer is not None
        self.weight_transfer_backend = transfer.backend
        atexit.register(self._shutdown)

    @classmethod
    def start(
        cls,
        model_path: str | Path,
        *,
        loop: BackgroundLoop,
        log_path: str | Path,
        name: str = "the embedded engine",
        dtype: str = "float32",
        max_model_len: int | None = None,
        kv_cache_gib: float | None = None,
        max_num_seqs: int = 256,
        seed: int = 0,
        weight_transfer_backend: str = "gloo",
        weight_version: int = 0,
        request_timeout_s: float = 600.0,
        start_timeout_s: float = 600.0,
        num_threads: int | None = None,
        compile_on_cpu: bool = False,
        gpu_memory_utilization: float = 0.5,
        tensor_parallel_size: int = 1,
        trust_remote_code: bool = False,
        local_place: tuple[int, int] | None = None,
    ) -> EmbeddedEngine:
        """Load the model and wait until it can sample.

        Args:
            model_path: directory of a checkpoint (or a hub name); its tokenizer is not needed.
            loop: the engine's coroutines must run in this loop and no other.
            log_path: file that vLLM and its processes append to.
            name: for messages.
            dtype: torch name of the weights and the computation.
            max_model_len: longest prompt plus completion, in tokens; None: what the model was made for.
            kv_cache_gib: memory for the KV cache; None on a GPU: what `gpu_memory_utilization` leaves.
            max_num_seqs: requests that are sampled at once.
            seed: of requests without a seed of their own.
            weight_transfer_backend: gloo, ipc or nccl.
            weight_version: the version of the weights that are loaded.
            request_timeout_s: a request that takes longer, waiting included, is given up as hung.
            start_timeout_s: the same for the start.
            num_threads: compute threads on CPU; None: the CPUs of this process less one, or its part of them.
            compile_on_cpu: compile the model, which takes up to a minute, and less when the files of the last time are
                still there. On a GPU vLLM always does.
            gpu_memory_utilization: share of the GPU's memory; ignored on CPU.
            tensor_parallel_size: workers that share one copy of the model.
            trust_remote_code: run model code that comes with the checkpoint.
            local_place: (index, number) among the processes of this machine that each start an engine: it gets the
                GPU of that index and can sleep, or on a CPU its part of the cores. None: it has the machine to itself.

        Raises:
            EngineError: vLLM could not load the model, or not in time.
        """
        log_path = Path(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        is_cpu = not torch.cuda.is_available()
        eager = is_cpu and not compile_on_cpu
        if is_cpu and compile_on_cpu:
            _check_compiler()
        if num_threads is None:
            cores = len(os.sched_getaffinity(0))
            num_threads = max(1, cores - 1 if local_place is None else cores // local_place[1])

        async def build() -> AsyncLLM:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            args = AsyncEngineArgs(
                model=str(model_path),
                dtype=dtype,  # type: ignore[arg-type]
                max_model_len=max_model_len,  # type: ignore[arg-type]  # None is its default
                kv_cache_memory_bytes=None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
                max_num_seqs=max_num_seqs,
                # A whole prompt must fit one step, because chunked prefill is off.
                max_num_batched_tokens=None if max_model_len is None else max(max_model_len, 8192),
                enable_chunked_prefill=False,
                seed=seed,
                enforce_eager=eager,
                gpu_memory_utilization=gpu_memory_utilization,
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend="uni" if tensor_parallel_size == 1 else "mp",
                logprobs_mode="processed_logprobs",
                weight_transfer_config={"backend": weight_transfer_backend},  # type: ignore[arg-type]
                skip_tokenizer_init=True,
                disable_log_stats=True,
                scheduler_cls=SCHEDULER,
                trust_remote_code=trust_remote_code,
                enable_sleep_mode=local_place is not None and not is_cpu,
            )
            llm = AsyncLLM.from_vllm_config(args.create_engine_config(), disable_log_stats=True)
            try:
                await llm.update_weight_version(str(weight_version))
                return llm
            finally:
                del llm  # errors that vLLM's imports keep hold this frame, which would hold the engine for ever

        def launch() -> AsyncLLM:
            with (
                output_to(log_path),
                _environment(
                    log_path,
                    is_cpu=is_cpu,
                    eager=eager,
                    num_threads=num_threads,
                    start_timeout_s=start_timeout_s,
                    local_place=local_place,
                ),
            ):
                try:
                    return loop.run(build())
                except Exception as error:  # vLLM raises whatever its parts raise, and a failed start has one meaning
                    raise EngineError(
                        f"the engine could not start with {model_path}: {error}\n{_log_tail(log_path)}"
                    ) from error

        return cls(launch, name=name, loop=loop, log_path=log_path, request_timeout_s=request_timeout_s)

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine, for the weight sync; everything else goes through the methods below."""
        if self._llm is None:
            raise EngineError("the engine was closed")
        return self._llm

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> EngineCall:
        """Sample one completion; `max_tokens` is cut to what the context leaves.

        Raises:
            EngineError: the prompt does not fit or holds ids outside the vocabulary, or the engine is dead,
                hung, or failed on the request.
            EvidenceError: the answer lacks ids, logprobs or version spans that agree with each other.
        """
        room = check_prompt(prompt_ids, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        output = await self._request(prompt_ids, sample_params(sampling, room=room))
        return engine_call(prompt_ids, answer_of(output.outputs[0]), with_support=sampling.truncates, source=self.name)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """log π(ids[i] | ids[:i]) at temperature 1 for i = 1 .. len(ids) - 1, computed anew (no cached prefix).

        One token of the context must be free: at most `max_model_len - 1` ids.
        """
        from vllm.logprobs import FlatLogprobs

        check_prompt(ids, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        output = await self._request(ids, score_params())
        flat = output.prompt_logprobs
        # Position 0 has no logprob, so the flat list starts with the token at position 1.
        if not isinstance(flat, FlatLogprobs) or list(flat.token_ids) != list(ids[1:]):
            raise EvidenceError(f"engine score: {len(ids)} ids were sent, but the logprobs are not of these ids")
        return list(flat.logprobs)

    def restart_if_dead(self) -> bool:
        if self._llm is None or not self._llm.errored:
            return False
        self.loop.run(self.close())
        self._llm = self._launch()
        atexit.register(self._shutdown)
        return True

    async def check_alive(self) -> None:
        if self.llm.errored:
            raise self._dead("sample")

    async def pause(self, mode: str) -> None:
        """Stop sampling. mode: wait (drain), keep (freeze in place), abort. Clears the KV cache."""
        if mode not in PAUSE_MODES:
            raise ConfigError(f"pause mode must be one of {', '.join(PAUSE_MODES)}, found {mode!r}")
        if mode == "abort":  # what requests have sampled is sent when they are frozen, not when they are given up
            await self.guard(self.llm.pause_generation(mode="keep", clear_cache=False), "pause")
        await self.guard(self.llm.pause_generation(mode=mode, clear_cache=True), "pause")  # type: ignore[arg-type]

    async def resume(self) -> None:
        await self.guard(self.llm.resume_generation(), "resume")

    async def weight_version(self) -> int:
        """The version that the next sampled token will carry."""
        label = await self.guard(self.llm.get_weight_version(), "read the weight version")
        return version_number(label, source=self.name)

    async def label_weights(self, label: str) -> None:
        """What tokens say of the weights that sample from now on: a version, or that they are half-loaded."""
        await self.guard(self.llm.update_weight_version(label), "label the weights")

    async def sleep(self, level: int) -> None:
        """See `SleepingEngine`. On a CPU, where vLLM frees nothing, only a pause."""
        if level == 2:
            await self.label_weights(f"{UNUSABLE_PREFIX}asleep")
        await self.guard(self.llm.sleep(level), "sleep")

    async def wake(self) -> None:
        await self.guard(self.llm.wake_up(), "wake up")

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes. Raises `EngineError` if blocks are in use (pause first)."""
        if not await self.guard(self.llm.reset_prefix_cache(), "reset the prefix cache"):
            raise EngineError("the engine did not reset its prefix cache because requests hold blocks; pause it first")

    async def weight_checksums(self) -> dict[str, str]:
        workers = await self.guard(self.llm.compute_weight_checksums(), "compute checksums of the weights")
        return {name: digest for worker in workers for name, digest in worker.items()}

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info)
        await self.guard(self.llm.init_weight_transfer_engine(request), "join the weight transfer")

    async def start_weight_update(self) -> None:
        await self.guard(self.llm.start_weight_update(), "start a weight update")

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.guard(self.llm.update_weights(WeightTransferUpdateRequest(update_info)), "update the weights")

    async def finish_weight_update(self, label: str) -> None:
        await self.guard(self.llm.finish_weight_update(label), "finish the weight update")

    async def close(self) -> None:
        """End the engine's processes. Requests in flight fail with `EngineError`. Closing twice is allowed."""
        if self._llm is not None and self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it reports the closing as a death
        await asyncio.to_thread(self._shutdown)

    def _shutdown(self) -> None:
        atexit.unregister(self._shutdown)
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
            del llm
            collect_all()  # vLLM's engine is part of a cycle, and complains if it is collected while Python exits

    async def _request(self, ids: Sequence[int], params: dict[str, Any]) -> RequestOutput:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)

        async def final_output() -> RequestOutput:
            stream = self.llm.generate({"prompt_token_ids": list(ids)}, settings, f"lockstep-{next(self._request_ids)}")
            outputs = [output async for output in stream]  # one, the final one
            if len(outputs) != 1:
                raise EvidenceError(f"engine: the request ended with {len(outputs)} outputs, expected 1")
            return outputs[0]

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RequestError),
            stop=stop_after_attempt(REQUEST_ATTEMPTS),
            wait=wait_exponential_jitter(multiplier=FIRST_PAUSE_S, jitter=FIRST_PAUSE_S),
            reraise=True,
        )

        async def attempt() -> RequestOutput:
            return await self.guard(final_output(), "sample", timeout_s=self._request_timeout_s)

        return await retrying(attempt)

    async def guard(self, call: Coroutine[Any, Any, T], what: str, *, timeout_s: float | None = None) -> T:
        """Await a vLLM call; whatever goes wrong with the engine becomes an `EngineError` that says what to do.

        The call is watched, not only awaited: vLLM leaves control calls unanswered when the engine dies under
        them, and waits for a hung worker.
        """
        from vllm.exceptions import VLLMClientError, VLLMError
        from vllm.v1.engine.exceptions import EngineGenerateError

        task = asyncio.ensure_future(call)
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=max(0.0, min(WATCH_S, give_up_at - time.monotonic())))
                if task.done():
                    break
                if self.llm.errored:
                    raise self._dead(what)
                if time.monotonic() >= give_up_at:
                    raise EngineError(
                        f"cannot {what}: no answer within {timeout_s:g} s, so the engine hangs or is overloaded; "
                        f"raise rollout.request_timeout_s if it is only slow\n{_log_tail(self.log_path)}"
                    )
            return task.result()
        except (VLLMError, EngineGenerateError) as error:
            if self.llm.errored:
                raise self._dead(what) from error
            kind = EngineError if isinstance(error, VLLMClientError) else RequestError
            raise kind(f"cannot {what}: {error}\n{_log_tail(self.log_path)}") from error
        finally:
            task.cancel()

    def _dead(self, what: str) -> EngineError:
        return EngineError(
            f"cannot {what}: the engine is dead; resume the run from its last checkpoint\n{_log_tail(self.log_path)}"
        )


@contextmanager
def _environment(
    log_path: Path,
    *,
    is_cpu: bool,
    eager: bool,
    num_threads: int,
    start_timeout_s: float,
    local_place: tuple[int, int] | None,
) -> Iterator[None]:
    """What vLLM and its processes read from the environment, set while they start and put back afterwards."""
    handler = {"class": "logging.FileHandler", "filename": str(log_path), "formatter": "plain"}
    logging_config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    variables = {
        CHILD_ENV: "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(start_timeout_s)),
    }
    if is_cpu:
        variables |= {
            # Lets the CPU platform keep the in-process executor: one process and one import of vLLM less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(num_threads),
            # Eager mode still compiles single functions at the first request, for 4 to 18 s.
            "TORCHDYNAMO_DISABLE": str(int(eager)),
        }
    if local_place is not None:
        variables |= _own_devices(*local_place, is_cpu=is_cpu)
    with tempfile.TemporaryDirectory(prefix="lockstep-engine-") as directory:
        config_path = Path(directory) / "logging.json"
        config_path.write_text(json.dumps(logging_config), encoding="utf-8")
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(config_path)
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _check_compiler() -> None:
    """Raises `ConfigError` if there is no C++ compiler, without which vLLM's processes would end in a traceback."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"compiling an engine's model on a CPU needs a C++ compiler, and {' and '.join(names)} cannot be found; "
            "`apt-get install g++`, or set rollout.compile_engine=false"
        )


def _own_devices(index: int, number: int, *, is_cpu: bool) -> dict[str, str]:
    """What keeps the engines of one machine apart. vLLM's own choice is the first GPU, and the first core, for each."""
    if is_cpu:
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(cores[index::number] or cores[index % len(cores) :][:1])}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": devices[index]}


def _log_tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(its log {path} cannot be read: {error})"
    return "\n".join([f"the last lines of {path}:", *(f"  {line}" for line in lines[-LOG_TAIL_LINES:])])
