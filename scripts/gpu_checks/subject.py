"""Subject of the checks: a model made from a config, its trainer, and an engine with the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import SyncReport, WeightSync
from lockstep.scripts.gpu_checks.measured import Measured, within_floor
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.lora import add_adapters
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.rounding import rounding_errors
from lockstep.trainer.update.updater import whole_row

ENGINE_SHARE = 0.3
"""Share of the GPU's memory that an engine may use, so that two fit beside a trainer."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Sizes and places of a check: a GPU and a model of 0.2 B parameters, or in a rehearsal a CPU and a tiny one."""

    directory: Path
    """Folder of the check's files."""
    rehearses: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearses else "cuda"

    @property
    def dtype(self) -> str:
        return "float32" if self.rehearses else "bfloat16"

    @property
    def max_model_len(self) -> int:
        return 320 if self.rehearses else 4096

    @property
    def is_fast_gpu(self) -> bool:
        """True for Hopper and later, for which speeds have expectations."""
        return not self.rehearses and torch.cuda.get_device_capability() >= (9, 0)

    def pick(self, real: Any, rehearsal: Any) -> Any:
        """Return the value for a GPU, or the one for a rehearsal."""
        return rehearsal if self.rehearses else real

    def config(self, **changes: Any) -> Qwen3Config:
        """Return a Qwen3 with half as many heads for keys. Its logits have a standard deviation of about 1."""
        hidden = self.pick(1024, 64)
        return Qwen3Config(
            **{
                "vocab_size": self.pick(151_936, 512),
                "hidden_size": hidden,
                "intermediate_size": 3 * hidden,
                "num_hidden_layers": 4,
                "num_attention_heads": self.pick(16, 4),
                "num_key_value_heads": self.pick(8, 2),
                "head_dim": self.pick(128, 32),
                "max_position_embeddings": self.max_model_len,
                "tie_word_embeddings": True,
                "initializer_range": hidden**-0.5,
                "bos_token_id": None,
                "eos_token_id": 0,
                "pad_token_id": 0,
                "dtype": "float32",
                **changes,
            }
        )

    def new_policy(self, lora: LoraConfig | None = None, **changes: Any) -> Policy:
        """Make a policy with random weights on the device, or with adapters on such weights."""
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config(**changes)).to(self.device)
        return Policy(model if lora is None else add_adapters(model, lora), compute_dtype=self.dtype)

    def autocast(self) -> torch.autocast:
        """Return the context of mixed precision, as Accelerate sets it for the trainer."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def prompts(self, number: int, length: int) -> list[tuple[int, ...]]:
        ids = np.random.default_rng(0).integers(1, self.pick(151_936, 512), (number, length))
        return [tuple(row) for row in ids.tolist()]

    @cached_property
    def saved(self) -> Path:
        """Directory of the checkpoint from which engines start."""
        path = self.directory / "model"
        self.new_policy().model.save_pretrained(str(path))
        return path

    @contextmanager
    def engine(self, arguments: dict[str, Any] | None = None, **settings: Any) -> Iterator[EmbeddedEngine]:
        """Start an engine and close it afterwards.

        arguments: vLLM's engine arguments to replace; settings: `EngineSettings`.
        """
        with BackgroundLoop() as loop:
            engine = _ChangedEngine(
                EngineSettings(
                    model=settings.pop("path", self.saved),
                    dtype=self.dtype,
                    max_model_len=self.max_model_len,
                    kv_cache_gib=self.pick(4.0, 0.0625),
                    gpu_memory_utilization=ENGINE_SHARE,
                    num_threads=1,
                    weight_transfer_backend=self.pick("cuda_ipc", "gloo"),
                    **settings,
                ),
                changes=arguments or {},
                loop=loop,
                log_path=self.directory / "engine.log",
            )
            (self.directory / "engine_settings.txt").write_text(str(engine.llm.vllm_config), encoding="utf-8")
            try:
                yield engine
            finally:
                loop.run(engine.close())

    @contextmanager
    def served(
        self, *, sleep_level: int = 0, lora: LoraConfig | None = None, policy: Policy | None = None, **settings: Any
    ) -> Iterator[Served]:
        """Start an engine, with a policy that has its weights and can push others. policy: None for a new one."""
        with self.engine(**settings) as engine:
            policy = policy or self.new_policy(lora)
            pair = Served(subject=self, engine=engine, policy=policy)
            pair.sync = WeightSync(
                module=policy.model,
                engines=[engine],
                score_canary=pair.scores,
                deadline_s=120,
                sleep_level=sleep_level,
            )
            try:
                yield pair
            finally:
                pair.sync.close()


@dataclass(kw_only=True)
class Served:
    """An engine and the policy whose weights it gets."""

    subject: Subject
    engine: Any
    policy: Policy
    version: int = 0
    sync: WeightSync = field(init=False)

    def push(self) -> SyncReport:
        self.version += 1
        return self.sync.push(self.version)

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        """Change all trained weights by noise of 0.4 of the initial standard deviation of the model's."""
        torch.manual_seed(seed)
        scale = 0.4 * self.policy.causal_lm.config.initializer_range
        for parameter in self.policy.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))

    def sample(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, **sampling: Any) -> list[EngineCall]:
        return self.engine.loop.run(self.sampled(prompts, max_tokens, **sampling))

    async def sampled(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, **sampling: Any) -> list[EngineCall]:
        """Sample all prompts at once, past the end of sequence; request i has seed i."""
        settings = [
            Sampling(max_tokens=max_tokens, ignore_eos=True, seed=seed, **sampling) for seed in range(len(prompts))
        ]
        return await asyncio.gather(*map(self.engine.generate, prompts, settings))

    @torch.no_grad()
    def scores(self, ids: Sequence[int], error: float = 0.0) -> list[float]:
        """Return the trainer's log π(ids[i] | ids[:i]) for i >= 1. error: as in `Updater.logprobs`."""
        pack = collate([whole_row(ids)], [0], device=self.subject.device)
        with self.subject.autocast(), rounding_errors(self.policy, error):
            return self.policy(pack, with_entropy=False)[0].float().tolist()

    def trained_logprobs(self, calls: Sequence[EngineCall]) -> torch.Tensor:
        """Return the trainer's log π of every sampled token, call by call."""
        return _logprobs(self.policy, calls, self.subject.autocast(), self.subject.device)

    def mismatch(self, calls: Sequence[EngineCall]) -> torch.Tensor:
        """Return |Δ log π| between engine and trainer of every sampled token."""
        engine_logprobs = torch.tensor([logprob for call in calls for logprob in call.sampled_logprobs])
        return (self.trained_logprobs(calls) - engine_logprobs).abs()

    def agreement(self, name: str, differences: torch.Tensor, calls: Sequence[EngineCall]) -> list[Measured]:
        """Expect |Δ log π| of these calls to be no more than what rounding explains.

        The floor is measured on the same tokens without the engine: the trainer's mixed precision (float32 weights and
        norms) against its weights and norms rounded to the engine's dtype. Two computations that round
        independently of each other and of the truth differ by no more than twice the one, on average.
        """
        floor = (self.trained_logprobs(calls) - self.rounded_logprobs(calls)).abs()
        return within_floor(name, differences, floor, least=self.subject.pick(1e-4, 1e-5))

    def rounded_logprobs(self, calls: Sequence[EngineCall]) -> torch.Tensor:
        """Return log π of every sampled token with all weights in the engine's dtype, as the engine holds them."""
        dtype = getattr(torch, self.subject.dtype)
        rounded_policy = Policy(copy.deepcopy(self.policy.model).to(dtype), compute_dtype=self.subject.dtype)
        return _logprobs(rounded_policy, calls, contextlib.nullcontext(), self.subject.device)


@torch.no_grad()
def _logprobs(
    policy: Policy, calls: Sequence[EngineCall], context: AbstractContextManager[Any], device: str
) -> torch.Tensor:
    with context:
        packs = [collate(rows_from_calls([call]), [0], device=device) for call in calls]
        return torch.cat([policy(pack, with_entropy=False)[0].float().cpu() for pack in packs])


class _ChangedEngine(EmbeddedEngine):
    """An engine with other arguments than the library gives vLLM, for comparison."""

    def __init__(self, *args: Any, changes: dict[str, Any], **settings: Any) -> None:
        self._changes = changes
        super().__init__(*args, **settings)

    async def _build(self) -> Any:
        self._args |= self._changes
        return await super()._build()
