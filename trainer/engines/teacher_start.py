"""Start of a run's teacher: its tokenizer, its engine or servers, and their check against the model at its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Engine, PooledEngine, SyncedEngine
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.mixed import environment_of
from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.stored_model import read_config
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.build import vocab_size_of
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.rollout_settings import CPU_CACHE_GIB, RolloutConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.named_models import longest_context, refuse_other_tokenizer
from lockstep.trainer.engines.start import engine_settings
from lockstep.trainer.engines.teacher import Teacher
from lockstep.trainer.engines.teacher_check import canary_diff, is_checked
from lockstep.trainer.engines.teacher_prompts import TeacherPrompts

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing

NAME, LOG = "the teacher's engine", "teacher.log"


def refuse_unfit_teacher(settings: TeacherConfig, model: ModelConfig, rollout: RolloutConfig) -> None:
    """Raise `ConfigError` if the teacher gives ids another meaning than the student, or its context is too short.

    Before any engine starts, without the contexts of servers.
    """
    if settings.path is not None:
        refuse_other_tokenizer(model, "teacher.path", settings.path)
    if settings.scores and not (settings.urls or (settings.source == "policy" and rollout.urls)):
        path, setting = (settings.path, "teacher.path") if settings.path else (model.path, "model.path")
        model_config = read_config(path, setting=setting, trust_remote_code=model.trust_remote_code)
        refuse_short(rollout.max_model_len, longest_context(model_config))


def start_teacher(
    config: Config,
    distributed: Distributed,
    *,
    chat: Chat,
    loop: BackgroundLoop,
    logs: Path,
    policy: Engine | None,
    say: Callable[[str], None],
) -> Teacher | None:
    """Start the teacher's engine, or connect to its servers; a collective. Returns None without a teacher.

    chat: of the student. policy: its engines, the teacher if `teacher.source=policy`; None on ranks other than 0.

    Raises `EngineError` on all ranks if vLLM does not start or a server cannot be reached, `ConfigError` for a teacher
    whose context is too short, and `EvidenceError` for an engine that computes another model than that at its path.
    """
    if not config.has_teacher:
        return None
    settings, rollout, trust = config.teacher, config.rollout, config.model.trust_remote_code
    engine_start = _EngineStart(
        settings=settings,
        rollout=rollout,
        model=config.model,
        seed=config.seed,
        loop=loop,
        log_path=logs / LOG,
        images=chat.images,
    )
    metrics: dict[str, float] = {}
    engines: list[SyncedEngine] = []

    def start() -> EnginePool | None:
        if not distributed.is_main:
            return None
        if settings.source == "average":
            context = rollout.max_model_len + 1
            own = engine_settings(config.model, rollout, config.correction, seed=config.seed, context=context)
            engines.append(engine_start.averaged(own))
            return EnginePool(engines)
        members = engine_start.members()
        if is_checked(settings, trust_remote_code=trust, sees_images=config.model.sees_images):
            metrics["teacher/canary_abs_diff"] = canary_diff(
                settings, members, loop, trust_remote_code=trust, images=chat.images
            )
            say(
                f"teacher        its log π of a canary differ by at most {metrics['teacher/canary_abs_diff']:.2g} "
                "from those of transformers"
            )
        return EnginePool(members, patience_s=rollout.pool_timeout_s)

    def prompts() -> TeacherPrompts | None:
        if settings.context is None:
            return None
        return _prompts(chat, settings, config.environment, max_tokens=rollout.max_model_len)

    with distributed.whole_models():
        engine = policy if settings.source == "policy" else distributed.together(start)
    return Teacher(
        engine,
        distributed=distributed,
        loop=loop,
        top_k=config.plan.teacher_top_k,
        vocab_size=vocab_size_of(config.model.path, trust_remote_code=trust),
        prompts=distributed.together(prompts),
        is_policy=settings.source == "policy",
        synced=engines,
        measured=metrics,
    )


def refuse_short(max_model_len: int, limit: int | None, *, serves: bool = False) -> None:
    """Raise `ConfigError` if a teacher's context of `limit` tokens cannot score rows of up to `max_model_len` tokens.
    serves: True if it is that of servers."""
    longest = max_model_len + 1  # vLLM samples one token after those that it scores
    if limit is not None and limit < longest:
        raise ConfigError(
            f"the teacher's context of {limit} tokens is too short to score rows of rollout.max_model_len="
            f"{max_model_len}, for which it needs one more; set rollout.max_model_len={limit - 1} or "
            f"less{f', or start its servers with rollout.max_model_len={longest}' if serves else ''}"
        )


def _prompts(chat: Chat, settings: TeacherConfig, environment: EnvironmentConfig, *, max_tokens: int) -> TeacherPrompts:
    """Return the prompts of a teacher with a context."""
    assert settings.context is not None

    def tools_of(row: Mapping[str, Any]) -> Tools:
        part = environment_of(make_environment(environment.name, **environment.settings), row)
        return () if isinstance(part, RunsItself) else part.tools

    return TeacherPrompts(
        chat,
        template=settings.context,
        solved_reward=settings.solved_reward,
        max_tokens=max_tokens,
        tools_of=tools_of,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineStart:
    """Start of the engine of a teacher, or the connection to its servers."""

    settings: TeacherConfig
    rollout: RolloutConfig
    model: ModelConfig
    """The student's."""
    seed: int
    loop: BackgroundLoop
    log_path: Path
    images: ImageProcessing | None
    """Those of the student, which are the teacher's, too (`refuse_other_images`)."""

    def averaged(self, own: EngineSettings) -> SyncedEngine:
        """Start an engine like the policy's, which gets weights as that does. own: of the policy, with its context."""
        return self._engine(replace(own, return_routes=False, quantization=None, **self._memory()))

    def members(self) -> Sequence[PooledEngine]:
        """Start the engine of the model at `teacher.path`, or connect to its servers."""
        settings, rollout, trust = self.settings, self.rollout, self.model.trust_remote_code
        max_images = self.model.images.max_per_prompt
        assert settings.path is not None
        if settings.urls:
            from lockstep.rollout.server.server_engine import ServerEngine  # other runs do not load its client
            from lockstep.trainer.engines.servers import check_images, engine_key

            servers = [
                ServerEngine(
                    url,
                    loop=self.loop,
                    vocab_size=vocab_size_of(settings.path, trust_remote_code=trust),
                    api_key=engine_key(settings.api_key_env, setting="teacher.api_key_env"),
                    request_timeout_s=rollout.request_timeout_s,
                    start_timeout_s=rollout.start_timeout_s,
                    silence_timeout_s=rollout.silence_timeout_s,
                    images=self.images,
                )
                for url in settings.urls
            ]
            for server in servers:
                check_images(server, max_images)
            refuse_short(rollout.max_model_len, min(server.max_model_len for server in servers), serves=True)
            return servers
        engine = EngineSettings(
            model=settings.path,
            dtype=settings.dtype,
            trust_remote_code=trust,
            max_model_len=rollout.max_model_len + 1,
            seed=self.seed,
            max_images=max_images,
            max_num_seqs=rollout.max_num_seqs,
            request_timeout_s=rollout.request_timeout_s,
            start_timeout_s=rollout.start_timeout_s,
            **self._memory(),
        )
        return [self._engine(engine)]

    def _engine(self, settings: EngineSettings) -> EmbeddedEngine:
        return EmbeddedEngine(settings, loop=self.loop, log_path=self.log_path, name=NAME, images=self.images)

    def _memory(self) -> dict[str, Any]:
        settings, is_cpu = self.settings, not torch.cuda.is_available()
        return {
            "kv_cache_gib": CPU_CACHE_GIB if is_cpu and settings.kv_cache_gib is None else settings.kv_cache_gib,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
        }
