"""Processes, devices and the optimizer step, on Accelerate and DeepSpeed.

The rest of the trainer sees ranks, a few collectives over small CPU tensors, and `accumulate` / `step`. Guarantee:
gradients of `accumulate(loss)` are *averaged over ranks and summed over microbatches*, and divided by nothing else. A
loss of `local sum x world_size / global denominator` on every rank is therefore the global objective, with one
denominator per optimizer step ("Reinforcement Learning Loss Normalization", note).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.utils.cpp_extension import get_default_build_root

from lockstep.rollout.errors import (
    CheckpointError,
    ConfigError,
    ConnectionLostError,
    LockstepError,
    TrainingError,
    error_named,
)
from lockstep.rollout.models import stored_model
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.addresses import address_towards, interface_of, is_loopback
from lockstep.trainer.distributed.sharding import GATHERED_WHOLE, OPTIMIZER, PARAMETERS, Sharding, set_buffers

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

log = logging.getLogger(__name__)

STALE_LOCK_S = 900.0
LR_SCALE = "lr_scale"
"""Key of an optimizer's parameter group: factor of the learning rate in `Distributed.step`."""
IS_CRITIC = "is_critic"
"""Key of an optimizer's parameter group: True for parameters of a critic."""
IS_HELD = "is_held"
"""Key of an optimizer's parameter group: True in a step that leaves its parameters as they are."""
CONTROL_TIMEOUT = timedelta(hours=2)
"""Bound of the longest work of one rank alone, such as a teacher's scores, for which the others wait."""
NCCL_TIMEOUT = timedelta(minutes=20)
"""Bound of a collective of the model, after which the ranks of one that failed end too."""
MEETING_TIMEOUT = timedelta(seconds=20)
"""Time in which all ranks fail with an error that is common to them."""
COMMUNICATION = {"float32": "fp32", "bfloat16": "bf16"}
"""DeepSpeed's names of the dtypes in which ranks sum gradients."""
LOST = re.compile(r"gloo/transport/tcp\S+ (.*?\[(\S+)\]:\d+.*?)\. This is")
"""gloo's words on a connection that ended, with the address at its other end."""
ENDED = (
    "its process or its machine has ended. Its log says why; without a word there it was killed (out of memory, "
    "preempted)"
)
"""The end of a sentence about a lost rank."""
CLAIM_BYTES = 8
"""Length of the digest by which ranks compare claims."""


class RanksDiffer(Exception):
    """Ranks make different claims; raised on all of them, and handled by the caller that made the claim."""


class Distributed:
    """One process of the training job, with its device, wrapped module and collectives."""

    def __init__(self, accelerator: Accelerator, *, max_grad_norm: float, reduce_dtype: str = "float32") -> None:
        self._accelerator = accelerator
        self._reduce_dtype = reduce_dtype
        self._max_grad_norm = max_grad_norm
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.device: torch.device = accelerator.device
        # Rows, metrics and errors travel as CPU tensors over gloo, whatever backend carries the gradients.
        groups: list[Any] = [
            torch_dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None
            for timeout in (CONTROL_TIMEOUT, MEETING_TIMEOUT)
        ]
        self._control, self._after_failure = groups
        self.is_stepping = False
        """True within an optimizer step, and if one failed: then some parameters may be updated and others not."""
        self.module: nn.Module  # set by prepare
        self._optimizer: torch.optim.Optimizer
        self._trained: list[str]
        """Names of the trained parameters, in the optimizer's order."""

    @classmethod
    def start(cls, *, dtype: str, max_grad_norm: float, reduce_dtype: str = "float32") -> Self:
        """Join the other ranks if `accelerate launch` started this process; else be the only rank.

        dtype: of the computation. reduce_dtype: float32 or bfloat16, in which ranks sum gradients.
        """
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is first imported
        drop_stale_build_locks()
        choose_interface(os.environ)
        if os.environ.get("LOCAL_RANK") == "0" and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            from lockstep.trainer.distributed.machines import refuse_unreachable  # other runs do not load it

            refuse_unreachable(os.environ)
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        # `cpu=True` disables DeepSpeed, but without it Accelerate does not wrap DDP on CPU: ranks would train apart.
        with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        backend = {"backend": "gloo"} if with_deepspeed and not on_gpu else {}
        if with_deepspeed and not on_gpu:
            skip_deepspeed_builds()
        try:
            accelerator = Accelerator(
                cpu=not on_gpu and not with_deepspeed,
                kwargs_handlers=[
                    InitProcessGroupKwargs(timeout=NCCL_TIMEOUT if on_gpu else CONTROL_TIMEOUT, **backend)
                ],
                mixed_precision="bf16" if dtype == "bfloat16" else "no",
            )
        except (RuntimeError, OSError) as error:  # torch's errors of stores and backends are RuntimeErrors
            if "MASTER_ADDR" not in os.environ:
                raise
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise TrainingError(
                f"the ranks did not meet at {place} ({str(error).partition(chr(10))[0]}). Another run, or ranks that "
                "one left behind, may use the port: look with `pgrep -af train.py`, end them, or choose another port "
                "with `accelerate launch --main_process_port`"
            ) from error
        plugin = accelerator.state.deepspeed_plugin
        if plugin is not None:
            plugin.deepspeed_config.update(
                train_micro_batch_size_per_gpu=1,  # microbatches are packed by the trainer; no dataloader is prepared
                gradient_accumulation_steps=1,  # boundaries are set by hand; losses are never divided by this
                gradient_clipping=max_grad_norm,
                # Sums over many small gradients (microbatches, ranks) lose precision in bfloat16.
                communication_data_type=COMMUNICATION[reduce_dtype],
                data_types={"grad_accum_dtype": "fp32"},
            )
            set_buffers(plugin.deepspeed_config)
        return cls(accelerator, max_grad_norm=max_grad_norm, reduce_dtype=reduce_dtype)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def uses_deepspeed(self) -> bool:
        return self._accelerator.state.deepspeed_plugin is not None

    @property
    def zero_stage(self) -> int:
        plugin = self._accelerator.state.deepspeed_plugin
        return 0 if plugin is None else int(plugin.zero_stage)

    @property
    def sharding(self) -> Sharding:
        plugin = self._accelerator.state.deepspeed_plugin
        return Sharding.of(
            world_size=self.world_size,
            zero_stage=self.zero_stage,
            deepspeed_config=None if plugin is None else plugin.deepspeed_config,
        )

    @property
    def device_memory(self) -> int:
        """Bytes available to this rank: of its GPU, or its share of the machine's memory."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here

    # The model and its optimizer

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Wrap the module for DDP, DeepSpeed or one process. Use the result for every forward pass."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._trained = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        self._keep_hooks_outside(module)
        self.module, self._optimizer = self._accelerator.prepare(module, optimizer)
        if self._reduce_dtype == "bfloat16" and isinstance(self.module, nn.parallel.DistributedDataParallel):
            self.module.register_comm_hook(None, _mean_in_bfloat16)
        return self.module

    def prepare_frozen(self, module: nn.Module) -> nn.Module:
        """Prepare a module for evaluation only: on the device, in the trained module's precision, sharded under ZeRO-3,
        where every forward pass is a collective."""
        module.requires_grad_(False).eval()
        if self.zero_stage == 3:
            import deepspeed

            self._keep_hooks_outside(module)
            plugin = self._accelerator.state.deepspeed_plugin
            assert plugin is not None
            inherited_keys = ("train_micro_batch_size_per_gpu", "bf16", "fp16")
            zero = dict(plugin.deepspeed_config["zero_optimization"])
            zero.pop("offload_optimizer", None)  # requires an optimizer
            settings = {key: plugin.deepspeed_config[key] for key in inherited_keys if key in plugin.deepspeed_config}
            engine, *_ = deepspeed.initialize(model=module, config={**settings, "zero_optimization": zero})
            engine.eval()
            return engine
        if self.uses_deepspeed:
            return module.to(self.device)
        return self._accelerator.prepare_model(module, evaluation_mode=True)

    def _keep_hooks_outside(self, module: nn.Module) -> None:
        """Make ZeRO-3 gather the layers that are `GATHERED_WHOLE` as a whole."""
        if self.zero_stage != 3:
            return
        from deepspeed.utils import set_z3_leaf_module

        for part in module.modules():
            if GATHERED_WHOLE in vars(part):
                set_z3_leaf_module(part, True)
                if any(parameter.requires_grad for parameter in part.parameters()):
                    part.register_forward_pre_hook(_with_gradient)

    @contextlib.contextmanager
    def whole_parameters(self, module: nn.Module) -> Iterator[None]:
        """Gather a module's full tensors under ZeRO-3 for the duration of the block; keeps rank 0's changes."""
        if self.zero_stage != 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
            yield

    whole_models = staticmethod(stored_model.whole_models)

    @property
    def unwrapped(self) -> nn.Module:
        return self._accelerator.unwrap_model(self.module)  # type: ignore[return-value]

    @contextlib.contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[Callable[[torch.Tensor], None]]:
        """Enclose one microbatch, with equally many on all ranks, of which the last reduces gradients over ranks.

        Yields the function that backpropagates the loss.
        """
        if self.uses_deepspeed:
            self.module.set_gradient_accumulation_boundary(is_last)  # type: ignore[operator]
            yield lambda loss: self.module.backward(loss, scale_wrt_gas=False)  # type: ignore[operator]
        elif is_last:
            yield lambda loss: loss.backward()
        else:
            with self._accelerator.no_sync(self.module):
                yield lambda loss: loss.backward()

    def gradient_norm(self, *, claim: bytes = b"") -> float:
        """Return the global gradient norm before clipping; infinite if any rank's is not finite; a collective.

        claim: must be the same on all ranks, which is seen in the same exchange. Raises `RanksDiffer` on all ranks.
        """
        if self.zero_stage:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            optimizer: Any = self.module.optimizer
            # DeepSpeed computes this norm at the start of its step, but exposes it only afterwards.
            norms = optimizer._get_norm_groups() if self.zero_stage == 3 else [optimizer.scaled_global_norm()]
            norm = float(combine_grad_norm_groups(norms))
        else:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
        # Agree on it: a rank with a different verdict would step alone.
        digest = hashlib.blake2b(claim, digest_size=CLAIM_BYTES).digest()
        bits = [float(byte >> bit & 1) for byte in digest for bit in range(8)]
        num_finite, *ones = self.sum(torch.tensor([float(math.isfinite(norm)), *bits])).tolist()
        if any(0 < count < self.world_size for count in ones):
            raise RanksDiffer
        return norm if num_finite == self.world_size else math.inf

    def step(self, lr: float, grad_norm: float, *, critic_only: bool = False) -> None:
        """Clip, update the parameters, clear the gradients.

        grad_norm: finite result of `gradient_norm`. critic_only: other parameters keep their bits (learning rate 0),
        and their gradients must be 0.
        """
        for group in self._optimizer.param_groups:
            group[IS_HELD] = critic_only and not group.get(IS_CRITIC, False)
            group["lr"] = 0.0 if group[IS_HELD] else lr * group.get(LR_SCALE, 1.0)
        self.is_stepping = True
        if self.uses_deepspeed:
            self.module.step()  # type: ignore[operator]
        else:
            if self._max_grad_norm:
                parameters = list(self.module.parameters())
                torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, torch.tensor(grad_norm))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self.is_stepping = False

    def discard_gradients(self) -> None:
        """Drop the accumulated gradients instead of stepping; a collective."""
        if not self.zero_stage:
            self._optimizer.zero_grad(set_to_none=True)
            return
        # DeepSpeed has no call for this, but it skips a step with a non-finite norm and then clears its state.
        optimizer: Any = self.module.optimizer
        is_offloaded = optimizer.offload_optimizer if self.zero_stage == 3 else optimizer.cpu_offload
        if is_offloaded:  # then it reads norms recorded during backward
            for parameter_id in optimizer.norm_for_param_grads:
                optimizer.norm_for_param_grads[parameter_id] = torch.tensor(math.inf)
        for gradients in () if is_offloaded else optimizer.averaged_gradients.values():
            for gradient in gradients or ():
                gradient.fill_(math.nan)
        self.module.step()  # type: ignore[operator]
        assert not self.module.was_step_applied(), "DeepSpeed stepped with a non-finite gradient"  # type: ignore[operator]

    # Collectives over the control group

    def barrier(self) -> None:
        if self._control is not None:
            torch_dist.barrier(group=self._control)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over ranks, on every rank, on the tensor's device."""
        if self._control is None:
            return tensor
        total = tensor.detach().cpu().clone()
        torch_dist.all_reduce(total, group=self._control)
        return total.to(tensor.device)

    def meets(self, claim: bytes) -> bool:
        """Return True if every rank calls this after a failure, in `MEETING_TIMEOUT`, with the same claim.

        A rank that failed alone must begin no collective: the others wait in another one.
        """
        try:
            return len(set(self.gather_bytes(claim, group=self._after_failure))) == 1
        except RuntimeError:  # of torch: a rank is late or gone
            return False

    def gather_bytes(self, payload: bytes, group: Any = None) -> list[bytes]:
        """Return every rank's payload on every rank, in rank order. group: None for the control group."""
        group = group or self._control
        if group is None:
            return [payload]
        from lockstep.rollout.system.rank_messages import gathered  # runs on one rank do not load it

        return gathered(payload, group)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a CPU tensor to another rank, which receives it; not a collective."""
        torch_dist.send(tensor, dst=rank, group=self._control)

    def receive(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        """Begin to fill a CPU tensor with the one that another rank sends; return a function that waits for it."""
        return torch_dist.irecv(tensor, src=rank, group=self._control).wait  # type: ignore[union-attr]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenated flat tensors of all ranks, in rank order, on the tensor's device."""
        if self._control is None:
            return tensor
        payloads = self.gather_bytes(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        parts = [torch.frombuffer(bytearray(payload), dtype=tensor.dtype) for payload in payloads if payload]
        return torch.cat(parts or [tensor.new_zeros(0).cpu()]).to(tensor.device)

    def broadcast_bytes(self, payload: bytes) -> bytes:
        """Return rank 0's payload on every rank."""
        if self._control is None:
            return payload
        from lockstep.rollout.system.rank_messages import broadcast_from_first  # runs on one rank do not load it

        return broadcast_from_first(payload, self._control)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank."""
        if self._control is None:
            return value
        return json.loads(self.broadcast_bytes(json.dumps(value).encode() if self.is_main else b""))

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise the same error on all, so that none waits forever."""
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except (Exception, SystemExit) as error:  # of any kind: raised again below, after the other ranks are told
            failure = error
        report = b"" if failure is None else f"{type(failure).__name__}: {error_text(failure)}".encode()
        for rank, message in enumerate(self.gather_bytes(report)):
            if message:
                raise failure if failure and rank == self.rank else _same_error(message.decode(), rank)
        return result  # type: ignore[return-value]

    def spread(self, count: int, work: Callable[[int], Any]) -> list[Any]:
        """Return the JSON values of work(0), ..., work(count − 1) on all ranks, each made by one of them; a collective.

        A single one is made by every rank, which is faster than to send it.
        """
        if count < 2 or self.world_size == 1:
            return [work(index) for index in range(count)]
        own = self.together(lambda: [work(index) for index in range(self.rank, count, self.world_size)])
        by_rank = [json.loads(payload) for payload in self.gather_bytes(json.dumps(own).encode())]
        return [by_rank[index % self.world_size][index // self.world_size] for index in range(count)]

    # State on disk

    def save_state(self, directory: Path) -> None:
        """Write parameters and optimizer state; a collective. DeepSpeed writes shards; else one file each."""
        if self.uses_deepspeed:
            self.module.save_checkpoint(str(directory), tag="state")  # type: ignore[operator]
            return
        if self.is_main:
            from safetensors.torch import save_file

            tensors = dict(self.unwrapped.named_parameters())
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, directory / PARAMETERS)
            torch.save(self._optimizer.state_dict(), directory / OPTIMIZER)

    def adopt_state(self, directory: Path, *, zero_stage: int) -> None:
        """Read state that `save_state` wrote on other ranks; a collective, before the first step.

        zero_stage: stage of those ranks. Raises `CheckpointError` if the checkpoint has other parameters.
        """
        from lockstep.trainer.distributed.reshard import fill_shards, fill_whole  # other runs do not load it
        from lockstep.trainer.distributed.unsharded_state import open_state

        read = open_state(directory, trained=self._trained, zero_stage=zero_stage)
        if self.zero_stage:
            fill_shards(self.module, self.zero_stage, read)
        else:
            fill_whole(self.unwrapped, self._optimizer, self._trained, read)

    def load_state(self, directory: Path) -> None:
        """Read state that `save_state` wrote on the same number of ranks; a collective.

        Keeps the user's current optimizer settings (decay, betas, ...); the saved state contains the old ones. Raises
        `CheckpointError` if the checkpoint is of another launch config or has other parameters.
        """
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        self._read_state(directory)
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)

    def _read_state(self, directory: Path) -> None:
        from lockstep.trainer.distributed.unsharded_state import refuse_other_model, weights_only_loading

        if self.uses_deepspeed:
            with weights_only_loading():
                path, _ = self.module.load_checkpoint(str(directory), tag="state")  # type: ignore[operator]
            if path is None:
                raise CheckpointError(f"{directory} holds no DeepSpeed state; resume with the config it was saved with")
            return
        from safetensors.torch import load_file

        file = directory / PARAMETERS
        if not file.is_file():
            raise CheckpointError(f"{directory} holds no {PARAMETERS}; resume with the config it was saved with")
        tensors = load_file(file)
        own = dict(self.unwrapped.named_parameters())
        refuse_other_model(file, tensors.keys() ^ own.keys())
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        state = torch.load(directory / OPTIMIZER, map_location="cpu", weights_only=True)
        self._optimizer.load_state_dict(state)

    def save_pretrained(
        self,
        directory: Path,
        *,
        prefix: str = "model.",
        edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    ) -> None:
        """Write a transformers model inside the trained module, for `from_pretrained`; a collective.

        prefix: name of the model inside the module, with a trailing dot. edit: maps its whole state dict on rank 0 to
        the one that is written.
        """
        # Under ZeRO-3 rank 0 gathers the parameters; the others get None.
        state: dict[str, torch.Tensor] | None = self._accelerator.get_state_dict(self.module)  # type: ignore[assignment]
        if self.is_main:
            model = self.unwrapped.get_submodule(prefix.removesuffix("."))
            assert state is not None
            own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
            # Copies, as ZeRO-2 gives, no longer show which parameters are one.
            every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            for alias in every - {name for name, _ in model.named_parameters()}:
                own.pop(alias, None)
            model.save_pretrained(directory, state_dict=edit(own), safe_serialization=True)  # type: ignore[operator]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Leave the process groups, but not after a failure: other ranks may wait in a collective, and closing would
        wait for them. The end of the process closes them. Raises `ConnectionLostError` for one that gloo lost."""
        if error is None or self.world_size == 1:
            self.close()
        elif type(error) is RuntimeError and (sentence := lost_connection(self.rank, error)):
            lost = ConnectionLostError(sentence)
            lost.__dict__.update(vars(error))  # notes
            raise lost from error

    def close(self) -> None:
        self._accelerator.end_training()
        if torch_dist.is_initialized():
            torch_dist.destroy_process_group()


def _mean_in_bfloat16(_, bucket):  # without annotations: torch compares them, and here they are strings
    """Average a bucket of gradients over ranks; return a future. torch's own hook is for GPUs only."""
    mean = (bucket.buffer() / torch_dist.get_world_size()).bfloat16()
    arrived = torch_dist.all_reduce(mean, async_op=True).get_future()  # pyright: ignore[reportOptionalMemberAccess]
    return arrived.then(lambda _: bucket.buffer().copy_(mean))


def _with_gradient(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Let the states before a layer that is gathered whole have a gradient, also behind frozen weights.

    DeepSpeed reduces the gradients of such a layer when that of its first argument is known. Without one, torch calls
    that hook before the layer's backward pass, and DeepSpeed would take zeros.
    """
    if not args:
        raise ConfigError("this model calls its layers without positional arguments; set model.compile=false")
    states, *others = args
    if torch.is_grad_enabled() and not states.requires_grad:
        states = states.detach().requires_grad_()
    return states, *others


def _same_error(report: str, rank: int) -> LockstepError:
    """Rebuild another rank's error; errors that are not Lockstep's keep their name and rank in the message."""
    name, _, text = report.partition(": ")
    return error_named(name, text) or LockstepError(f"rank {rank} failed: {report}")


def lost_connection(rank: int, error: RuntimeError) -> str | None:
    """Return a sentence about a connection that gloo has lost; None for other errors. rank: number of this rank."""
    match = LOST.search(str(error))
    return match and f"rank {rank}: the connection to a rank at {match[2]} is lost ({match[1]}): {ENDED}"


def skip_deepspeed_builds() -> None:
    """Stop DeepSpeed on a CPU from building, for a minute, an all-reduce that only inference uses."""
    import deepspeed.ops

    deepspeed.ops.__dict__["__compatible_ops__"] = {}


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Set gloo's interface to the one that reaches rank 0's machine, unless the user has set one.

    Gloo's default is the interface of the host name, else loopback, on which ranks of several machines wait for each
    other until a timeout. Raises `ConfigError` if rank 0's address resolves to loopback on several machines.
    """
    master = environment.get("MASTER_ADDR", "")
    if not master or is_loopback(master) or environment.get("GLOO_SOCKET_IFNAME"):
        return  # an explicit loopback address: all ranks are on this machine
    address = address_towards(master)
    is_alone = environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE")
    if is_loopback(address) and not is_alone:
        raise ConfigError(
            f"--main_process_ip {master} is loopback on this machine ({address}), which other machines cannot "
            "reach; give its network address (`ip -4 addr` lists them)"
        )
    interface = interface_of(address)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface


def drop_stale_build_locks() -> None:
    """Remove locks that a killed process left on torch's compiled extensions.

    DeepSpeed compiles its operators at first use, and torch waits for such a lock silently and forever. A compilation
    takes well under a minute, so a much older lock has no owner.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for lock in Path(root).glob("**/lock"):
        with contextlib.suppress(OSError):  # another rank may have removed it
            if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
                lock.unlink()
                log.warning("removed the stale build lock %s of a killed process", lock)
