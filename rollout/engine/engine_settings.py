"""Settings of an engine, which an embedded engine, the command of a server and the checks before a start read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.rollout.engine.adapters import AdapterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The model of an engine, how it is computed, and what it may use of the machine."""

    model: str | Path
    """Checkpoint directory or hub name; no tokenizer is needed."""
    dtype: str = "float32"
    trust_remote_code: bool = False
    max_model_len: int | None = None
    """Longest prompt plus completion, in tokens; None: the model's own limit."""
    context: int | None = None
    """vLLM's context where it is longer, in tokens; `score` takes up to one id less. None: max_model_len."""
    quantization: str | None = None
    """Scheme of `ONLINE_SCHEMES`, by which weights are quantized whenever they arrive."""
    adapters: AdapterSettings | None = None
    """Keep the weights on disk, and sample with the adapter that weight updates bring; None: updates replace the
    weights."""
    return_routes: bool = False
    """Prepare for `Sampling.with_routes`; of a mixture of experts."""
    batch_invariant: bool = False
    """Compute each request as if it were alone in its batch; on GPUs, where vLLM can."""
    max_images: int = 0
    """Most images of a prompt; 0 leaves out the vision tower of a model that has one."""
    seed: int = 0
    """For requests without one."""
    max_num_seqs: int = 256
    kv_cache_gib: float | None = None
    """Memory of the KV cache; None on a GPU: what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU's memory; ignored on CPU."""
    num_threads: int | None = None
    """Compute threads on CPU; None: the CPUs of this process minus one, or this engine's share."""
    local_place: tuple[int, int] | None = None
    """(index, number) among the processes of this machine that each start an engine: selects the GPU of that index and
    enables sleep, or on CPU selects a share of the cores. None: the only engine."""
    compile_on_cpu: bool = False
    """Compile the model: up to a minute, less with cached files. On a GPU vLLM always compiles."""
    weight_transfer_backend: str = "gloo"
    """gloo, cuda_ipc or nccl."""
    request_timeout_s: float = 600.0
    """Limit of one request, including its wait in the queue."""
    start_timeout_s: float = 600.0

    @property
    def vllm_context(self) -> int | None:
        """vLLM's own context, in tokens; None: the model's."""
        return self.max_model_len if self.context is None else self.context
