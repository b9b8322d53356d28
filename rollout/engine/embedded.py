"""vLLM's AsyncLLM in this process, behind the `SyncedEngine` protocol.

Faults that kill or leak a vLLM engine, all reproduced, are prevented here:

* ids outside the vocabulary and prompts that do not fit are refused first: without a tokenizer vLLM does not check them
  and dies;
* chunked prefill is off: a partial prefill of a request with a seed kills the CPU worker;
* engine processes are spawned, never forked, and exit with this process (`rollout/engine/plugin.py`);
* every request has a deadline: vLLM waits forever for a hung worker;
* sampling parameters are sent in full: vLLM takes missing ones from the model's generation_config.json.

vLLM writes to a log file, not to the console; errors quote its last lines.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import random
import shutil
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lockstep.rollout.engine.adapters import AdapterSettings, refuse_adapter
from lockstep.rollout.engine.arguments import engine_arguments, engine_variables
from lockstep.rollout.engine.engine_answers import (
    UNUSABLE_PREFIX,
    answer_of,
    check_prompt,
    engine_call,
    refuse_images,
    sample_params,
    score_params,
    single_version,
    version_number,
)
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.plugin import CHILD_ENV, SCHEDULER
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import ConfigError, EngineError, EvidenceError, RequestError
from lockstep.rollout.records import EngineCall, ImageSpan
from lockstep.rollout.system.addresses import LOOPBACK
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.captured_output import redirect_output
from lockstep.rollout.system.device_memory import release_cached_memory
from lockstep.rollout.system.gc_freeze import gc_collect_all
from lockstep.rollout.vllm_names import check_vllm

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

    from lockstep.rollout.engine.token_scores import TokenScores
    from lockstep.rollout.media.image_prompts import ImagePrompts
    from lockstep.rollout.media.processing import ImageProcessing

T = TypeVar("T")

WATCH_S = 0.5
"""Interval of the check that the engine is alive while calls wait for it."""
ENDED = 0.0
"""Time [s] of the loop, long past, that is set as the limit of a call to end it."""
SHUTDOWN_TIMEOUT_S = 5.0
REQUEST_ATTEMPTS = 3
"""Attempts of a request with a passing failure. A request that hangs, is invalid or finds the engine dead has one."""
FIRST_PAUSE_S = 0.1
"""Pause before the second attempt; it doubles with each further one. Up to as much again is added at random."""
LOG_TAIL_LINES = 15

SCORE = Sampling(max_tokens=1)
"""Sampling of requests that score a prompt; their parameters are `score_params`."""
PAUSE_MODES = ("wait", "keep", "abort")
"""Treatments of requests in flight that vLLM knows."""


class EmbeddedEngine:
    """vLLM in this process and its child processes, started on creation; all coroutines run in its `loop`."""

    host = LOOPBACK
    num_workers = 1
    _adapters: AdapterSettings | None = None
    _quantization: str | None = None
    _images: ImageProcessing | None = None
    _image_prompts: ImagePrompts | None = None

    def __init__(
        self,
        settings: EngineSettings,
        *,
        loop: BackgroundLoop,
        log_path: str | Path,
        name: str = "the embedded engine",
        images: ImageProcessing | None = None,
    ) -> None:
        """Load the model, as version 0, and wait until the engine can sample.

        log_path: file to which vLLM and its processes append. images: those of the model, for `max_images` above 0.
        Raises `EngineError`: vLLM could not load the model, or not in time.
        """
        self.name, self.loop, self.log_path = name, loop, Path(log_path)
        self.weight_transfer_backend = settings.weight_transfer_backend
        self._request_timeout_s = settings.request_timeout_s
        self._request_ids = itertools.count()
        self._calls: set[asyncio.Timeout] = set()
        """Limits of the calls in flight, by which they are ended."""
        self._watcher: asyncio.Task[None] | None = None
        self._admits = asyncio.Event()
        """Unset from a pause that drains or aborts until the engine resumes: vLLM 0.33 refuses requests meanwhile."""
        self._admits.set()
        if settings.max_images and images is None:
            raise ConfigError("an engine with max_images above 0 needs the image processing of its model")
        is_cpu = not torch.cuda.is_available()
        check_vllm("weights", "engine", *(["cpu"] if is_cpu else []), *(["adapters"] if settings.adapters else []))
        eager = is_cpu and not settings.compile_on_cpu
        if is_cpu and settings.compile_on_cpu:
            _check_compiler()
        self._variables = _environment_variables(settings, is_cpu=is_cpu) | engine_variables(settings, is_cpu=is_cpu)
        cache_gib = settings.kv_cache_gib
        self._args: dict[str, Any] = {
            "model": str(settings.model),
            "dtype": settings.dtype,
            "max_model_len": settings.vllm_context,
            "kv_cache_memory_bytes": None if cache_gib is None else int(cache_gib * 2**30),
            "max_num_seqs": settings.max_num_seqs,
            **engine_arguments(settings, is_cpu=is_cpu),
            "seed": settings.seed,
            "enforce_eager": eager,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "distributed_executor_backend": "uni",
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": settings.weight_transfer_backend},
            "skip_tokenizer_init": not settings.max_images,  # vLLM's own processor of images is made with a tokenizer
            "disable_log_stats": True,
            "scheduler_cls": SCHEDULER,
            "trust_remote_code": settings.trust_remote_code,
            "enable_return_routed_experts": settings.return_routes,
            "enable_sleep_mode": settings.local_place is not None and not is_cpu,
        }
        self._adapters = settings.adapters
        self._quantization = settings.quantization
        self._llm: AsyncLLM | None = None
        self._launch()
        self._context = self.llm.model_config.max_model_len
        self.max_model_len = self._context if settings.max_model_len is None else settings.max_model_len
        self.vocab_size = self.llm.model_config.get_vocab_size()
        self.dtype = self.llm.model_config.dtype
        if settings.max_images and images is not None:
            from lockstep.rollout.media.image_prompts import ImagePrompts  # engines of text do not load it

            self._images = images
            processor = self.llm.renderer.get_mm_processor()
            most = settings.max_images
            self._image_prompts = ImagePrompts(images, max_images=most, dtype=self.dtype, processor=processor)

    def _launch(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with redirect_output(self.log_path), engine_environment(self._variables, self.log_path), _without_main():
            try:
                self._llm = self.loop.run(self._build())
                self.loop.run(self._load_adapters())
            except Exception as error:  # vLLM raises many types; all mean a failed start
                self.loop.run(self.close())
                raise EngineError(
                    f"the engine could not start with {self._args['model']}: {error}\n{_log_tail(self.log_path)}"
                ) from error
        atexit.register(self._shutdown)

    async def _build(self) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # Not a local: errors stored by vLLM's imports hold this frame, which would keep a closed engine alive.
        return AsyncLLM.from_vllm_config(AsyncEngineArgs(**self._args).create_engine_config(), disable_log_stats=True)

    async def _load_adapters(self) -> None:
        """Load the adapters on disk. One that vLLM cannot load would kill the engine at the first request for it."""
        if self._adapters is not None:
            for name, _ in self._adapters.others:
                request = self._adapters.request(name)
                assert request is not None
                await self._call(self.llm.add_lora(request), f"load the adapter {name}")

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine. Raises `EngineError` once closed."""
        if self._llm is None:
            raise EngineError("the engine was closed")
        return self._llm

    @property
    def quantization(self) -> str | None:
        """See `SyncedEngine.quantization`."""
        return self._quantization or self.llm.model_config.quantization

    @property
    def takes_adapters(self) -> bool:
        """See `SyncedEngine`."""
        return self._adapters is not None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        """See `Engine.generate`."""
        room = check_prompt(prompt_ids, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        params = sample_params(sampling, room=room)
        output = await self._request(prompt_ids, params, sampling, images)
        answer = answer_of(output.outputs[0])
        if self._images is not None:
            self._images.refuse_sampled(answer.sampled_ids, self.name)
        return engine_call(
            prompt_ids,
            answer,
            images=images,
            with_support=sampling.truncates,
            with_routes=sampling.needs_routes,
            max_tokens=params["max_tokens"],
            vocab_size=self.vocab_size,
            source=self.name,
        )

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """See `Engine.score`."""
        return (await self.score_ranked(ids, images))[0]

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        """See `Engine.score_ranked`."""
        from vllm.logprobs import FlatLogprobs

        check_prompt(ids, max_model_len=self._context, vocab_size=self.vocab_size)
        output = await self._request(ids, score_params(), images=images)
        flat = output.prompt_logprobs
        # Position 0 has no logprob, so the flat list starts with the token at position 1.
        if not isinstance(flat, FlatLogprobs) or list(flat.token_ids) != list(ids[1:]):
            raise EvidenceError(f"engine score: the logprobs do not belong to the {len(ids)} ids that were sent")
        return list(flat.logprobs), [int(rank or 0) for rank in flat.ranks]

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        """See `Engine.score_top`."""
        from vllm.logprobs import FlatLogprobs

        check_prompt(ids, max_model_len=self._context, vocab_size=self.vocab_size)
        output = await self._request(ids, score_params(top_k), images=images)
        flat = output.prompt_logprobs
        if not isinstance(flat, FlatLogprobs):
            raise EvidenceError(f"engine score: no logprobs for the {len(ids)} ids that were sent")
        from lockstep.rollout.engine.token_scores import token_scores  # runs without a teacher do not load it

        return token_scores(
            ids,
            flat.token_ids,
            flat.logprobs,
            top_k=top_k,
            version=single_version([span.version for span in output.outputs[0].weight_versions or ()], self.name),
            vocab_size=self.vocab_size,
            source=self.name,
        )

    def restart_if_dead(self) -> bool:
        if self._llm is None or not self._llm.errored:
            return False
        self.loop.run(self.close())
        release_cached_memory()
        self._launch()
        return True

    async def check_alive(self) -> None:
        if self.llm.errored:
            raise self._dead("sample")

    async def pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise ConfigError(f"pause mode must be one of {', '.join(PAUSE_MODES)}, found {mode!r}")
        if mode != "keep":
            self._admits.clear()
        if self._images is None and not self.llm.output_processor.has_unfinished_requests():
            # `pause_generation` would clear images, and sleep for 20 ms, for the last outputs of requests in flight.
            core: AsyncMPClient = self.llm.engine_core
            await self._call(core.pause_scheduler_async(mode=mode, clear_cache=True), "pause")  # type: ignore[arg-type]
            return
        if mode == "abort":  # buffered tokens are sent when requests freeze, not when they are aborted
            await self._call(self.llm.pause_generation(mode="keep", clear_cache=False), "pause")
        await self._call(self.llm.pause_generation(mode=mode, clear_cache=True), "pause")  # type: ignore[arg-type]

    async def resume(self) -> None:
        await self._call(self.llm.resume_generation(), "resume")
        self._admits.set()

    async def weight_version(self) -> int:
        label = await self._call(self.llm.get_weight_version(), "read the weight version")
        return version_number(label, source=self.name)

    async def label_weights(self, label: str) -> None:
        await self._call(self.llm.update_weight_version(label), "label the weights")

    async def sleep(self, level: int) -> None:
        """See `SleepingEngine.sleep`. On a CPU vLLM only pauses and frees nothing."""
        if self.takes_adapters:
            level = 1  # no update brings discarded weights back
        if level == 2:
            await self.label_weights(f"{UNUSABLE_PREFIX}asleep")
        await self._call(self.llm.sleep(level), "sleep")

    async def wake(self, part: str) -> None:
        await self._call(self.llm.wake_up([part]), f"wake its {part}")

    async def reset_prefix_cache(self) -> None:
        if not await self._call(self.llm.reset_prefix_cache(), "reset the prefix cache"):
            raise EngineError(f"{self.name} did not reset its prefix cache: requests hold blocks; pause it first")
        if self._images is not None:  # vLLM keeps what the vision tower computed apart from the KV cache
            await self._call(self.llm.reset_encoder_cache(), "reset the cache of images")

    async def weight_checksums(self) -> dict[str, str]:
        workers = await self._call(self.llm.compute_weight_checksums(), "compute checksums of the weights")
        return {name: digest for worker in workers for name, digest in worker.items()}

    async def ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        return await self._call(self.llm.collective_rpc(method, args=arguments), f"call {method} of its workers")

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info)
        await self._call(self.llm.init_weight_transfer_engine(request), "join the weight transfer")

    async def start_weight_update(self) -> None:
        await self._call(self.llm.start_weight_update(), "start a weight update")

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call(self.llm.update_weights(WeightTransferUpdateRequest(update_info)), "update the weights")

    async def finish_weight_update(self, label: str) -> None:
        await self._call(self.llm.finish_weight_update(label), "finish the weight update")

    async def close(self) -> None:
        """End the engine's processes; requests in flight fail with `EngineError`. Closing twice is allowed."""
        if self._llm is not None and self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # otherwise it reports the shutdown as a death
        await asyncio.to_thread(self._shutdown)
        self._end_calls()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self._admits.set()

    def _shutdown(self) -> None:
        atexit.unregister(self._shutdown)
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
            del llm
            gc_collect_all()  # vLLM's engine is in a reference cycle and complains if collected at interpreter exit

    async def _request(
        self, ids: Sequence[int], params: dict[str, Any], sampling: Sampling = SCORE, images: Sequence[ImageSpan] = ()
    ) -> RequestOutput:
        for attempt in range(REQUEST_ATTEMPTS - 1):
            with suppress(RequestError):
                return await self._attempt(ids, params, sampling, images)
            await asyncio.sleep(FIRST_PAUSE_S * (2**attempt + random.random()))
        return await self._attempt(ids, params, sampling, images)

    async def _attempt(
        self, ids: Sequence[int], params: dict[str, Any], sampling: Sampling, images: Sequence[ImageSpan]
    ) -> RequestOutput:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # vLLM copies parameters deeply unless they are those of one request.
        settings = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)
        if self._image_prompts is None:
            refuse_images(images, source=self.name)
            prompt = tokens_input(list(ids))  # vLLM would render raw ids in a thread
        else:
            prompt = self._image_prompts.input(ids, images)
        answer = self._final_output(prompt, settings, sampling)
        return await self._call(answer, "sample", timeout_s=self._request_timeout_s)

    async def _final_output(self, prompt: Any, settings: SamplingParams, sampling: Sampling) -> RequestOutput:
        await self._admits.wait()
        adapter: dict[str, Any] = {}
        if self._adapters is None:
            refuse_adapter(sampling.model, source=self.name)
        else:
            adapter["lora_request"] = self._adapters.request(sampling.model)
        name = sampling.name or f"lockstep-{next(self._request_ids)}"
        stream = self.llm.generate(prompt, settings, name, **adapter)
        outputs = [output async for output in stream]
        if len(outputs) != 1:
            raise EvidenceError(f"engine: the request ended with {len(outputs)} outputs, expected 1")
        return outputs[0]

    async def _call(self, call: Awaitable[T], action: str, *, timeout_s: float | None = None) -> T:
        """Await a vLLM call and turn its failures into `EngineError`. action: for messages."""
        limit = asyncio.timeout(timeout_s)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            async with limit:
                self._calls.add(limit)
                try:
                    return await call
                finally:
                    self._calls.remove(limit)
        except Exception as error:
            from vllm.exceptions import VLLMClientError, VLLMError
            from vllm.v1.engine.exceptions import EngineGenerateError

            if limit.expired():
                if self.llm.errored:
                    raise self._dead(action) from None
                if limit.when() == ENDED:
                    raise EngineError("the engine was closed") from None
                raise EngineError(
                    f"cannot {action}: no answer within {timeout_s:g} s, so the engine hangs or is overloaded; "
                    f"raise rollout.request_timeout_s if it is only slow\n{_log_tail(self.log_path)}"
                ) from None
            if not isinstance(error, (VLLMError, EngineGenerateError)):
                raise
            if self.llm.errored:
                raise self._dead(action) from error
            kind = EngineError if isinstance(error, VLLMClientError) else RequestError
            raise kind(f"cannot {action}: {error}\n{_log_tail(self.log_path)}") from error

    async def _watch(self) -> None:
        """End the calls in flight when the engine is dead: vLLM leaves control calls unanswered when it dies."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._llm is None or self._llm.errored:
                self._end_calls()
            if not self._calls:
                return

    def _end_calls(self) -> None:
        for limit in self._calls:
            if not limit.expired():
                limit.reschedule(ENDED)

    def _dead(self, action: str) -> EngineError:
        return EngineError(
            f"cannot {action}: the engine is dead ({self.name}); resume the run from its last checkpoint\n"
            f"{_log_tail(self.log_path)}"
        )


def _environment_variables(settings: EngineSettings, *, is_cpu: bool) -> dict[str, str]:
    """Return the environment variables of vLLM and its processes."""
    variables = {
        CHILD_ENV: "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.start_timeout_s)),
    }
    place, num_threads = settings.local_place, settings.num_threads
    if num_threads is None:
        cores = len(os.sched_getaffinity(0))
        num_threads = max(1, cores - 1 if place is None else cores // place[1])
    if is_cpu:
        variables |= {
            # Keeps the in-process executor on CPU, which saves a process and an import of vLLM.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(num_threads),
            # Eager mode still compiles single functions at the first request, which takes 4 to 18 s.
            "TORCHDYNAMO_DISABLE": str(int(not settings.compile_on_cpu)),
        }
    if place is None:
        return variables
    # Its own GPU or cores for each local engine; vLLM would give all of them the first.
    index, number = place
    if is_cpu:
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
        own = ",".join(cores[index::number] or cores[index % len(cores) :][:1])
        return variables | {"VLLM_CPU_OMP_THREADS_BIND": own}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(device) for device in range(torch.cuda.device_count())]
    return variables | {"CUDA_VISIBLE_DEVICES": devices[index]}


@contextmanager
def _without_main() -> Iterator[None]:
    """Let children that are spawned in the block start without the main module of this program, which they do not need.

    A program that trains outside of `if __name__ == "__main__"` would train again in each of them.
    """
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main_from_")}

    spawn.get_preparation_data = prepared
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare


@contextmanager
def engine_environment(variables: dict[str, str], log_path: Path) -> Iterator[None]:
    """Set environment variables, and vLLM's logging to a file, for the duration of the block."""
    logging_config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(log_path), "formatter": "plain"}},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    config_path = log_path.with_suffix(".logging.json")
    config_path.write_text(json.dumps(logging_config), encoding="utf-8")
    variables = variables | {"VLLM_LOGGING_CONFIG_PATH": str(config_path)}
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
    config_path.unlink(missing_ok=True)  # not after an interrupt: the thread that starts vLLM may still read it


def _check_compiler() -> None:
    """Raise `ConfigError` without a C++ compiler: vLLM's processes would end in a traceback."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"compiling an engine's model on a CPU needs a C++ compiler, and {' and '.join(names)} cannot be found; "
            "`apt-get install g++`, or set rollout.compile_engine=false"
        )


def _log_tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(its log {path} cannot be read: {error})"
    return "\n".join([f"the last lines of {path}:", *(f"  {line}" for line in lines[-LOG_TAIL_LINES:])])
