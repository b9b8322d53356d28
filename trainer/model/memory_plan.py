"""Plan of each rank's memory before a run starts, and the settings to change if it does not fit.

An estimate from shapes and settings. Counted: weights, float32 masters, gradients, optimizer state, activations of one
full pack, router logits and replayed routes of a mixture of experts, the tile of logits and the gradient of the head,
buffers of collectives and of the weight sync, the reference, an average of the policy, and on the engine's rank its
weights, KV cache and workspace; on a CPU, the weights that arrive, and the programs themselves. What DeepSpeed offloads
is not on the GPU.
Not counted: a teacher's engine, workspaces of the trainer's kernels, fragmentation, CUDA contexts (about 0.5 GiB per
process), rows and rollouts in main memory; on a GPU, Python. Accurate within a third.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from lockstep.rollout.engine.arguments import BATCH_TOKENS
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.rollout_settings import CPU_CACHE_GIB, RolloutConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.sharding import Sharding
from lockstep.trainer.model.head import logit_tiles
from lockstep.trainer.model.shape import ModelShape

GIB = 2**30
INT64, FLOAT32, BFLOAT16, INT16 = 8, 4, 2, 2
USABLE = 0.9
"""Share of a GPU that is planned; the rest is for two CUDA contexts, workspaces and fragmentation."""
MIN_CACHE_GIB = 0.25
CUDA_GRAPHS = GIB // 2
"""Memory of vLLM's CUDA graphs, which it keeps during sleep."""
SCORED_TOKENS = 1024
"""Tokens of a batch whose logits vLLM's V2 runner computes at a time if one of its requests is scored."""
PROGRAM = int(0.6 * GIB)
"""Main memory of a trainer or an engine without a model, measured on the demo, whose model is small."""
OPTIMIZER_BYTES = {"adamw": 8, "adamw_tf": 8, "adamw_8bit": 2, "muon": 4, "sgd": 4}
"""Optimizer state per trained parameter. Muon keeps one moment for its matrices; embeddings and head, under AdamW,
keep two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Bytes on a rank that holds an engine; other ranks lack the engine's weights and cache."""

    weights: int
    masters: int
    gradients: int
    optimizer: int
    reference: int
    average: int
    """The teacher's average of the policy, and the policy's weights while it is sent."""
    activations: int
    tower: int
    """Activations of the vision tower, of a pack of images."""
    routers: int
    """Probabilities and choices of the routers; with router losses, their logits."""
    routes: int
    """Replayed experts of a pack."""
    logits: int
    gathered: int
    """Buffers of the weight sync."""
    communication: int
    """Buffers of DeepSpeed's reductions."""
    live_weights: int
    """Weights that ZeRO-3 keeps gathered during a pass."""
    engine_weights: int
    kv_cache: int
    engine_workspace: int
    programs: int
    """Python and its libraries where weights are in main memory, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(_Parts):
    """Memory of a rank that holds an engine, and the settings that it depends on most."""

    model: ModelConfig
    rollout: RolloutConfig
    pack_tokens: int
    zero_stage: int

    @property
    def engine_sleeps(self) -> bool:
        """True if the engine frees its memory while the trainer computes."""
        return self.rollout.engine == "colocated" and self.rollout.sleep_level > 0

    @property
    def resident(self) -> int:
        """Bytes that the trainer holds while the engine samples and receives weights."""
        return sum(self.parts().values()) - self._computing - self._engine

    @property
    def total(self) -> int:
        """Peak bytes."""
        beside = max(self._computing, self._engine) if self.engine_sleeps else self._computing + self._engine
        return self.resident + beside

    @property
    def _computing(self) -> int:
        return self.activations + self.tower + self.routers + self.routes + self.logits + self.live_weights

    @property
    def _engine(self) -> int:
        return self.engine_weights + self.kv_cache + self.engine_workspace

    def parts(self) -> dict[str, int]:
        """Return the non-zero parts in bytes, by name."""
        sizes = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(_Parts)}
        return {name: size for name, size in sizes.items() if size}

    def table(self) -> str:
        cells = [f"{name} {size / GIB:.3g}" for name, size in self.parts().items()]
        turns = " (engine and update in turns)" if self.engine_sleeps else ""
        return f"memory         {self.total / GIB:.3g} GiB planned per rank{turns}: {', '.join(cells)}"

    def advice(self, *, available: int) -> str | None:
        """Return what to change if the plan exceeds `available` bytes, largest saving first; None if it fits."""
        if self.total <= available:
            return None
        states = self.masters + self.gradients + self.optimizer
        half_cache = self.kv_cache / 2 / GIB / self.rollout.num_engines
        fewer_tokens = max(self.pack_tokens // 2, self.rollout.max_model_len)
        possible = [
            (self.pack_tokens > self.rollout.max_model_len, self.activations // 2, f"token_budget={fewer_tokens}"),
            (not self.model.is_checkpointed, self.activations * 3 // 4, "model.gradient_checkpointing=true"),
            (not self.model.lora.rank, states, "model.lora.rank=16"),
            (self.zero_stage < 3, (self.weights + states) // 2, "configs/accelerate/zero3.yaml on more devices"),
            (self.masters > 0, states, "accelerate launch --offload_optimizer_device cpu"),
            (self.engine_weights > self.total // 4, self.engine_weights, "rollout=server on other devices"),
            (
                self.model.dtype == "float32",
                (self.activations + self.engine_weights) // 2,
                "model.dtype=bfloat16",
            ),
            (self.kv_cache > self.total // 4, self.kv_cache // 2, f"rollout.kv_cache_gib={half_cache:g}"),
        ]
        helpful = sorted(((saving, override) for helps, saving, override in possible if helps), reverse=True)
        overrides = "; ".join(f"{override} (about -{saving / GIB:.3g} GiB)" for saving, override in helpful[:3])
        return (
            f"{self.total / GIB:.3g} GiB are planned per rank and the device has {available / GIB:.3g}: "
            f"{overrides or 'more or larger devices are needed'}"
        )


def memory_plan(shape: ModelShape, config: Config, sharding: Sharding, *, on_gpu: bool | None = None) -> MemoryPlan:
    """Plan the memory of one rank. on_gpu: None for the device of this machine."""
    world_size, zero_stage = sharding.world_size, sharding.zero_stage
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    is_half = config.model.dtype == "bfloat16"
    compute = BFLOAT16 if is_half else FLOAT32

    def share(size: float, *, from_stage: int) -> int:
        return int(size / world_size if zero_stage >= from_stage else size)

    is_cast = is_half and not sharding.uses_deepspeed
    states_here = not (on_gpu and sharding.offloads_optimizer)
    weights_here = not (on_gpu and sharding.offloads_weights)
    if sharding.uses_deepspeed:
        weights = share(compute * shape.parameters, from_stage=3) * weights_here
        masters = share(FLOAT32 * shape.trained, from_stage=1) * states_here
        gradients = share(FLOAT32 * shape.trained, from_stage=2) * states_here
    else:
        # Autocast casts the weights of layers once per forward pass, and backward needs the copies.
        copies = BFLOAT16 * shape.of_layers if is_cast else 0
        if config.model.lora.rank and config.model.is_checkpointed:  # frozen weights are cast again in each layer
            copies //= shape.layers
        weights = FLOAT32 * shape.parameters + copies
        masters = 0
        gradients = FLOAT32 * shape.trained * (2 if world_size > 1 else 1)  # DDP has its own buckets
    needs_copy = bool(config.algorithm.kl_coef) and (
        not config.model.lora.rank or config.model.reference_path is not None
    )
    reference = compute if sharding.uses_deepspeed else FLOAT32  # as the policy (trainer/score/reference.py)
    bucket = max(compute * shape.largest, int(config.sync.bucket_mib * 2**20))
    # Fetched from shards; on a GPU also a buffer for the engine, and the engine's copy of it.
    buckets = (zero_stage == 3 and world_size > 1) + 2 * (on_gpu and config.rollout.engine != "server")
    # Parts of a bucket of several tensors arrive in messages, from which they are copied to their places.
    messages = int(config.sync.bucket_mib * 2**20) if zero_stage == 3 and world_size > 1 else 0
    buckets, messages = (buckets, messages) if config.has_rollouts else (0, 0)
    communication = FLOAT32 * sharding.reduce_bucket
    if zero_stage == 3:  # the reduction copies the bucket, or a larger tensor
        communication += FLOAT32 * max(min(sharding.reduce_bucket, shape.trained), shape.largest)
    live = max(min(sharding.live_parameters, shape.parameters), shape.largest) if zero_stage == 3 else 0
    if zero_stage == 3 and config.model.is_compiled:  # a layer is gathered, and its gradients reduced, as a whole
        layer = shape.of_layers // shape.layers
        live, communication = max(live, layer), communication + compute * layer
    engines = config.rollout.num_engines if config.has_rollouts and config.rollout.engine != "server" else 0
    return MemoryPlan(
        weights=weights,
        masters=masters,
        gradients=gradients,
        optimizer=share(OPTIMIZER_BYTES[config.optimizer.name] * shape.trained, from_stage=1) * states_here,
        reference=share(reference * shape.engine_parameters, from_stage=3) * weights_here if needs_copy else 0,
        average=share((FLOAT32 + (compute if sharding.uses_deepspeed else FLOAT32)) * shape.trained, from_stage=3)
        if config.teacher.source == "average"
        else 0,
        activations=activation_bytes(
            shape,
            config.pack_tokens,
            compute=compute,
            is_cast=is_cast,
            has_kernel=on_gpu and is_half,
            is_checkpointed=config.model.is_checkpointed,
        ),
        tower=0
        if shape.tower is None
        else shape.tower.activation_bytes(
            config.pack_tokens, compute=compute, is_checkpointed=config.model.is_checkpointed
        ),
        routers=router_bytes(
            shape,
            config.pack_tokens,
            compute=compute,
            is_checkpointed=config.model.is_checkpointed,
            has_losses=any(coef != 0 for coef in (config.algorithm.router_aux_coef, config.algorithm.router_z_coef)),
        ),
        routes=route_bytes(shape, config.pack_tokens) if config.correction.routing_replay != "off" else 0,
        logits=logits_bytes(shape, config.pack_tokens, compute=compute, on_gpu=on_gpu)
        + (FLOAT32 if is_cast else compute) * shape.vocabulary * shape.hidden * (not config.model.lora.rank),
        gathered=min(bucket, compute * shape.parameters) * buckets + min(messages, compute * shape.parameters),
        communication=communication,
        live_weights=compute * live,
        # On a CPU an engine keeps the memory in which whole weights arrive (`KEEP_FREED`).
        engine_weights=compute * shape.engine_parameters * engines * (1 if on_gpu or config.model.lora.rank else 2),
        kv_cache=int((cache_gib(config.rollout, on_gpu=on_gpu) or 0) * GIB) * engines,
        engine_workspace=engine_workspace_bytes(shape, requests=config.rollout.max_num_seqs, compute=compute) * engines
        if on_gpu
        else 0,
        programs=0 if on_gpu else PROGRAM * (1 + engines),
        model=config.model,
        rollout=config.rollout,
        pack_tokens=config.pack_tokens,
        zero_stage=zero_stage,
    )


def engine_workspace_bytes(shape: ModelShape, *, requests: int, compute: int) -> int:
    """Return the bytes that an engine takes on a GPU beside weights and cache, for a full batch of `requests`.

    Counted: hidden states and gated projections of one layer, logits in float32 with their softmax, logits of the
    prompts in a batch with a scored request, which each canary is, and CUDA graphs.
    """
    layer = compute * (4 * shape.hidden + 3 * (shape.intermediate + shape.chosen * shape.expert))
    return BATCH_TOKENS * layer + (2 * requests + SCORED_TOKENS) * shape.vocabulary * FLOAT32 + CUDA_GRAPHS


def cache_gib(rollout: RolloutConfig, *, on_gpu: bool | None = None) -> float | None:
    """Return the configured KV cache of an engine [GiB]; None: what its GPU has left. on_gpu: as in `memory_plan`."""
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    return CPU_CACHE_GIB if rollout.kv_cache_gib is None and not on_gpu else rollout.kv_cache_gib


def cache_gib_left(plan: MemoryPlan, *, available: int) -> float:
    """Return the memory that a plan leaves to the KV cache [GiB]. Raises `ConfigError` below `MIN_CACHE_GIB`."""
    beside = plan.engine_weights + plan.engine_workspace + (0 if plan.engine_sleeps else plan._computing)
    left = USABLE * available - plan.resident - beside
    if left < MIN_CACHE_GIB * GIB:
        raise ConfigError(
            f"rollout.kv_cache_gib=null leaves {left / GIB:.2g} of {available / GIB:.3g} GiB to the cache; "
            f"{plan.table()}. Use more ranks with configs/accelerate/zero3.yaml, or rollout=server"
        )
    return left / GIB


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    compute: int,
    is_checkpointed: bool,
    is_cast: bool = False,
    has_kernel: bool = False,
) -> int:
    """Return the bytes that forward keeps for backward, for `tokens` tokens.

    Counted in a Llama-like decoder layer: of each norm its input in float32, its normalized input, and its output; the
    queries, keys and values, and the attention output; the gate, its activation, the up-projection and their product.
    In a mixture of experts, for each expert of a token: its input and its output (hidden), gate and up-projection, the
    activation and the product (its width).

    compute: bytes of a number in products. is_cast: under autocast, which casts the output of a norm for each of the
    five projections that read it. has_kernel: one kernel computes attention; else its output is kept twice, by rows and
    as a pack.
    """
    outputs = 5 if is_cast else 2
    # Families with norms behind their sublayers, too (Gemma), multiply by the weight in float32.
    hidden = shape.norms * (FLOAT32 + (FLOAT32 if shape.norms > 2 else compute)) + outputs * compute
    of_head_norms = (FLOAT32 + compute) * shape.has_head_norms
    attention = (2 if has_kernel else 3) * compute + of_head_norms
    key_value = 2 * compute + of_head_norms
    experts = compute * shape.chosen * (2 * shape.hidden + 4 * shape.expert)
    layer = tokens * (
        hidden * shape.hidden
        + attention * shape.attention
        + key_value * shape.key_value
        + 4 * compute * shape.intermediate
        + experts
    )
    return tokens * compute * shape.hidden * shape.layers + layer if is_checkpointed else layer * shape.layers


def router_bytes(shape: ModelShape, tokens: int, *, compute: int, is_checkpointed: bool, has_losses: bool) -> int:
    """Return the bytes that the routers keep for backward, for `tokens` tokens.

    Counted in a layer: the probabilities of all experts in float32, and weights and int64 indices of the chosen ones,
    before and after they are sorted by expert. With router losses, which are computed after the last layer, also the
    logits and their softmax in float32, which gradient checkpointing does not drop.
    """
    layer = tokens * (FLOAT32 * shape.experts + (4 * INT64 + 2 * FLOAT32) * shape.chosen)
    losses = tokens * (compute + FLOAT32) * shape.experts * shape.layers if has_losses else 0
    return (layer if is_checkpointed else layer * shape.layers) + losses


def route_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of the replayed experts of a pack, and of one flag per token and layer for flipped ones."""
    return tokens * shape.layers * (INT16 * shape.chosen + 1)


def logits_bytes(shape: ModelShape, tokens: int, *, compute: int, on_gpu: bool) -> int:
    """Return the bytes of the fused head: tiles of logits, and gradients of hidden states and of a weight tile.

    On a GPU a gradient in half precision is beside the logits. On a CPU their softmax is, and that over a small
    vocabulary is kept.
    """
    width = min(logit_tiles.TILE_K, shape.vocabulary)
    if on_gpu:
        tiles = min(logit_tiles.LOGITS_BUDGET_GIB * GIB, (FLOAT32 + compute % FLOAT32) * tokens * width)
    else:
        tiles = min(logit_tiles.CPU_LOGITS_BUDGET_GIB * GIB, 2 * FLOAT32 * tokens * width)
        softmax = FLOAT32 * tokens * shape.vocabulary
        tiles += softmax * (width == shape.vocabulary and softmax <= logit_tiles.KEPT_GIB * GIB)
    return int(tiles) + FLOAT32 * (2 * tokens * shape.hidden + width * shape.hidden)
