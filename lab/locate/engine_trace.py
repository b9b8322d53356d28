"""Trace of the engine: what every module of vLLM's model takes and gives while it samples one request.

vLLM runs in this process and without compilation, since hooks do not fire in compiled models or CUDA graphs. Norms and
rotary embeddings write into their inputs, so inputs are copied before the module runs, and outputs at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.rollout.engine.arguments import engine_arguments
from lockstep.rollout.engine.embedded import engine_environment
from lockstep.rollout.engine.engine_answers import sample_params
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError
from lockstep.rollout.system.captured_output import redirect_output
from lockstep.rollout.vllm_names import check_vllm

if TYPE_CHECKING:
    from vllm import LLM

HEAD = "logits_processor"
"""vLLM's module that computes logits, once per step of the engine, for the positions that are sampled from."""
ROUTES = "routes"
"""Key, under the name of the experts, of (T, k) weights and ids of the chosen experts, which no module returns."""
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads are in this process, too
    "TORCHDYNAMO_DISABLE": "1",
}

Step = tuple[list[Tensor], list[Tensor]]
"""Inputs and outputs of one call of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrace:
    """One request: a prompt and what was sampled after it. Shapes: T = len(ids) - 1 positions, n sampled tokens."""

    ids: tuple[int, ...]
    num_prompt: int
    dtype: torch.dtype
    temperature: float
    sampled_logprobs: Tensor
    """(n,) as the engine reports them, in nats, at the temperature."""
    logits: Tensor
    """(n, V) that the last n positions give."""
    inputs: Mapping[str, tuple[Tensor, ...]]
    """(T, C) inputs by the name of the module in vLLM."""
    outputs: Mapping[str, tuple[Tensor, ...]]
    routes: Mapping[str, tuple[Tensor, Tensor]]
    """(T, k) weights and ids of the chosen experts, by the name of the experts."""
    output_sizes: Mapping[str, tuple[int, ...]]
    """Widths of the projections that a packed one joins."""

    @property
    def num_positions(self) -> int:
        return len(self.ids) - 1


def trace_engine(
    settings: EngineSettings, prompt_ids: Sequence[int], *, sampled: int, temperature: float, log_path: Path
) -> EngineTrace:
    """Start vLLM in this process, sample one seeded request under hooks, and end vLLM.

    Raises `EngineError` if vLLM cannot load or run the model; its messages are in the log.
    """
    is_cpu = not torch.cuda.is_available()
    cache = settings.kv_cache_gib
    arguments = {
        "model": str(settings.model),
        "dtype": settings.dtype,
        "max_model_len": settings.vllm_context,
        "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        **engine_arguments(settings, is_cpu=is_cpu),
        "seed": settings.seed,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "trust_remote_code": settings.trust_remote_code,
    }
    sampling = Sampling(max_tokens=sampled, temperature=temperature, ignore_eos=True, seed=settings.seed)
    with redirect_output(log_path), engine_environment(VARIABLES, log_path):
        check_vllm("weights", "engine", "locate", *(["cpu"] if is_cpu else []))
        from vllm import LLM, SamplingParams
        from vllm.distributed import cleanup_dist_env_and_memory

        llm = None
        try:
            llm = LLM(**arguments)
            params = SamplingParams(**sample_params(sampling, room=sampled))
            return _trace(llm, list(prompt_ids), params, temperature=temperature)
        except EngineError:
            raise
        except Exception as error:  # vLLM raises many types
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            raise EngineError(f"the engine cannot trace {settings.model}: {error}\n{tail}") from error
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
                del llm
            cleanup_dist_env_and_memory()


def _trace(llm: LLM, prompt_ids: list[int], params: Any, *, temperature: float) -> EngineTrace:
    from vllm.logprobs import FlatLogprobs

    calls: dict[str, list[Step]] = {}
    handles, sizes = llm.apply_model(lambda model: _hook(model, calls))[0]
    answer = llm.generate([{"prompt_token_ids": prompt_ids}], [params], use_tqdm=False)[0].outputs[0]
    for handle in handles:
        handle.remove()
    steps = calls.pop(HEAD, [])
    if len(steps) != len(answer.token_ids):
        raise EngineError(f"found {len(steps)} calls of the engine's head for {len(answer.token_ids)} sampled tokens")
    assert isinstance(answer.logprobs, FlatLogprobs)
    ids = (*prompt_ids, *answer.token_ids)
    inputs, outputs, routes = {}, {}, {}
    for name, each in calls.items():
        joined = _joined(each, steps=len(steps), positions=len(ids) - 1)
        if joined is None:
            continue
        if name.endswith(f".{ROUTES}"):
            routes[name.removesuffix(f".{ROUTES}")] = (joined[1][0], joined[1][1])
        else:
            inputs[name], outputs[name] = joined
    return EngineTrace(
        ids=ids,
        num_prompt=len(prompt_ids),
        dtype=llm.llm_engine.model_config.dtype,
        temperature=temperature,
        sampled_logprobs=torch.tensor(list(answer.logprobs.logprobs)),
        logits=torch.cat([outputs[0] for _, outputs in steps]).cpu(),
        inputs=inputs,
        outputs=outputs,
        routes=routes,
        output_sizes=sizes,
    )


def _hook(model: nn.Module, calls: dict[str, list[Step]]) -> tuple[list[Any], dict[str, tuple[int, ...]]]:
    """Record the calls of all modules in `calls`. Return handles of the hooks, and sizes of packed projections."""
    handles: list[Any] = []
    sizes: dict[str, tuple[int, ...]] = {}
    arguments: dict[str, list[list[Tensor]]] = {}
    for name, module in model.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            arguments.setdefault(name, []).append([*_tensors(args), *_tensors(kwargs)])

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls.setdefault(name, []).append((arguments[name].pop(), list(_tensors(output))))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
        if (widths := getattr(module, "output_sizes", None)) is not None:
            sizes[name] = tuple(widths)
        router = getattr(module, "router", None)
        if router is not None and callable(getattr(router, "select_experts", None)):
            factor = getattr(module, "routed_scaling_factor", 1.0)
            handles.append(_Routed(router, calls.setdefault(f"{name}.{ROUTES}", []), factor))
    return handles, sizes


class _Routed:
    """Record of the experts that a router of vLLM selects, removed like a hook."""

    def __init__(self, router: Any, calls: list[Step], factor: float) -> None:
        """factor: by which vLLM scales the output of the experts, where transformers scales the weights."""
        self._router = router
        select = router.select_experts

        def selecting(*args: Any, **kwargs: Any) -> Any:
            selection = select(*args, **kwargs)
            weights, ids = _tensors(selection)
            calls.append(([], [weights * factor, ids]))
            return selection

        router.select_experts = selecting

    def remove(self) -> None:
        del self._router.select_experts


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _joined(calls: list[Step], *, steps: int, positions: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """Return (T, C) inputs and outputs of a module, joined over steps; None unless it ran once per step, per position.

    A module that is shared by layers (rotary embeddings) runs more often.
    """
    if len(calls) != steps:
        return None

    def side(index: int) -> tuple[Tensor, ...]:
        return tuple(_column(column, positions) for column in zip(*(call[index] for call in calls), strict=False))

    return side(0), side(1)


def _column(tensors: Sequence[Tensor], positions: int) -> Tensor:
    """Return the (T, C) tensor of all steps; an empty one for what has another shape, such as a cache."""
    rows = [one.reshape(len(one), -1) for one in tensors if one.dim()]
    if len({one.shape[1] for one in rows}) == 1:
        joined = torch.cat(rows).cpu()
        if len(joined) == positions:
            return joined
    return torch.empty(0)
