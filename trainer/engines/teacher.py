"""The teacher of a run: a frozen model in engines of its own, which scores the tokens that the student sampled.

    rows of a step ─► teacher's engine, all rows at once ─► logprobs, most probable tokens ─► StepBatch.teacher

Rank 0 talks to it, like to the engines of the student, and all ranks get its scores with the rows. It scores token ids,
so student and teacher must have one vocabulary. It computes the student's whole row, prompt included, at temperature 1,
as engines score prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.pool import EnginePool
from rollout.engine.protocol import Engine, PooledEngine
from rollout.engine.token_scores import TokenScores
from rollout.errors import ConfigError, EvidenceError
from rollout.records import TrainingRow
from rollout.server.server_engine import ServerEngine
from rollout.system.background_loop import BackgroundLoop
from trainer.batch.step_batch import StepBatch
from trainer.batch.teacher_scores import TeacherScores
from trainer.config.schema import CPU_CACHE_GIB, Config
from trainer.distributed.distributed import Distributed
from trainer.engines.start import engine_key


class Teacher:
    """Scorer of the rows of a step."""

    def __init__(
        self, engine: Engine | None, *, distributed: Distributed, loop: BackgroundLoop, top_k: int, vocab_size: int
    ) -> None:
        """engine: None on ranks other than 0. top_k: most probable tokens at each position. vocab_size: the student's
        number of ids."""
        self._engine = engine
        self._distributed = distributed
        self._loop = loop
        self._top_k = top_k
        self._vocab_size = vocab_size

    def scored(self, batch: StepBatch) -> StepBatch:
        """Return the batch of rank 0 with the teacher's scores; a collective. Raises on all ranks what a request
        raises, and `EvidenceError` for scores of other tokens."""
        return self._distributed.together(lambda: self._scored(batch))

    def close(self) -> None:
        """Release the engine."""
        if self._engine is not None:
            self._loop.run(self._engine.close())

    def _scored(self, batch: StepBatch) -> StepBatch:
        if self._engine is None:
            return batch
        scores = self._loop.run(self._score_all(self._engine, [row for row in batch.rows if row.num_trained]))
        outside = [one.top_ids.max() for one in scores if one.top_ids.size and one.top_ids.max() >= self._vocab_size]
        if outside:
            raise EvidenceError(
                f"teacher: its most probable token {outside[0]} is none of the {self._vocab_size} ids of the student"
            )
        return replace(batch, teacher=TeacherScores.of(batch.rows, scores, top_k=self._top_k))

    async def _score_all(self, engine: Engine, rows: Sequence[TrainingRow]) -> list[TokenScores]:
        # Tokens after the last trained one are not scored.
        ends = [int(np.flatnonzero(row.loss_mask)[-1]) + 1 for row in rows]
        requests = (engine.score_top(row.ids[:end].tolist(), self._top_k) for row, end in zip(rows, ends, strict=True))
        return await asyncio.gather(*requests)


def refuse_other_tokenizer(config: Config) -> None:
    """Raise `ConfigError` if the teacher gives ids another meaning than the student, before any engine starts."""
    if config.teacher.path is None:
        return
    trusts = config.model.trust_remote_code
    own, other = (
        AutoTokenizer.from_pretrained(path, trust_remote_code=trusts).get_vocab()
        for path in (config.model.path, config.teacher.path)
    )
    differing = [token for token, number in own.items() if other.get(token) != number]
    extra = other.keys() - own.keys()
    if differing or extra:
        example = differing[0] if differing else min(extra)
        raise ConfigError(
            f"teacher.path={config.teacher.path} has another tokenizer than model.path={config.model.path}: "
            f"{len(differing) + len(extra)} tokens differ, such as {example!r} with id {other.get(example)} and "
            f"{own.get(example)}; set teacher.path to a model with the policy's tokenizer"
        )


def start_teacher(config: Config, distributed: Distributed, *, loop: BackgroundLoop, logs: Path) -> Teacher | None:
    """Start the teacher's engine, or connect to its servers; a collective. Returns None without a teacher.

    Raises `EngineError` on all ranks if vLLM does not start or a server cannot be reached, `ConfigError` for a teacher
    whose context is too short.
    """
    if config.teacher.path is None:
        return None

    def start() -> EnginePool | None:
        return EnginePool(_members(config, loop=loop, logs=logs)) if distributed.is_main else None

    return Teacher(
        distributed.together(start),
        distributed=distributed,
        loop=loop,
        top_k=config.teacher_top_k,
        vocab_size=_vocab_size(config.model.path, config),
    )


def _members(config: Config, *, loop: BackgroundLoop, logs: Path) -> Sequence[PooledEngine]:
    settings, rollout = config.teacher, config.rollout
    assert settings.path is not None
    longest = rollout.max_model_len + 1  # vLLM samples one token after those that it scores
    model = AutoConfig.from_pretrained(settings.path, trust_remote_code=config.model.trust_remote_code)
    limit = getattr(model.get_text_config(), "max_position_embeddings", None)
    members: Sequence[PooledEngine]
    if settings.urls:
        members = [
            ServerEngine(
                url,
                loop=loop,
                vocab_size=_vocab_size(settings.path, config),
                api_key=engine_key(settings.api_key_env, setting="teacher.api_key_env"),
                request_timeout_s=rollout.request_timeout_s,
                start_timeout_s=rollout.start_timeout_s,
                silence_timeout_s=rollout.silence_timeout_s,
            )
            for url in settings.urls
        ]
        limit = min(member.max_model_len for member in members)
    if limit is not None and limit < longest:
        raise ConfigError(
            f"the teacher's context of {limit} tokens is too short to score rows of rollout.max_model_len="
            f"{rollout.max_model_len}, for which it needs one more; set rollout.max_model_len={limit - 1} or less"
        )
    if settings.urls:
        return members
    is_cpu = not torch.cuda.is_available()
    return [
        EmbeddedEngine(
            settings.path,
            loop=loop,
            log_path=logs / "teacher.log",
            name="the teacher's engine",
            dtype=settings.dtype,
            max_model_len=longest,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_gib=CPU_CACHE_GIB if is_cpu and settings.kv_cache_gib is None else settings.kv_cache_gib,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            seed=config.seed,
            request_timeout_s=rollout.request_timeout_s,
            start_timeout_s=rollout.start_timeout_s,
            trust_remote_code=config.model.trust_remote_code,
        )
    ]


def _vocab_size(path: str, config: Config) -> int:
    """Return the number of ids of the model at `path`."""
    model = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    size: int = model.get_text_config().vocab_size
    return size
