"""Settings of a teacher: `teacher`."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.trainer.config.conditions import (
    AVERAGED,
    LEARNS_FROM_TEACHER,
    TAUGHT,
    TEACHER,
    TEACHER_ENGINE,
    TEACHER_SERVERS,
    WITH_CONTEXT,
)
from lockstep.trainer.setting import declarations, setting, typed


@dataclass
class TeacherConfig:
    source: str = setting(
        "model",
        "model: that at path; policy: the policy itself, with the current weights in its own engine and a context "
        "(self-distillation); average: a moving average of the policy, in an engine of its own; saved: scores that "
        "were saved with rollouts",
        choices=("model", "policy", "average", "saved"),
        when=LEARNS_FROM_TEACHER,
    )
    average_decay: float = setting(
        0.95, "share of the average that a step keeps; the rest is the policy", above=0, below=1, when=AVERAGED
    )
    path: str | None = setting(
        None,
        "directory or hub id of the model to distill, with the policy's tokenizer; null: no teacher of source=model",
        is_path=True,
        when=LEARNS_FROM_TEACHER,
    )
    context: str | None = setting(
        None,
        "text that the teacher reads at the end of the first prompt, with {column} of the data row, {solution} of "
        "another rollout of the group, and {texts} that the environment reports; null: it reads what the student read",
        when=TAUGHT,
    )
    solved_reward: float = setting(1.0, "lowest reward of a rollout whose answer is a {solution}", when=WITH_CONTEXT)
    urls: list[str] = setting(
        [], "servers that serve it, http://<host>:<port>; none: an engine beside that of rank 0", when=TEACHER
    )
    api_key_env: str | None = setting(
        "LOCKSTEP_ENGINE_KEY", "environment variable with the key of its servers; null: no key", when=TEACHER_SERVERS
    )
    dtype: str = setting("float32", "dtype of its computation", choices=("float32", "bfloat16"), when=TEACHER)
    check: bool | None = setting(
        None,
        "compare its engines at the start with its model in transformers, on the CPU; null: if its float32 weights "
        "take at most a quarter of the machine's memory",
        when=TEACHER,
    )
    kv_cache_gib: float | None = setting(
        None,
        "KV cache of its engine; null: 0.25 on a CPU, what gpu_memory_utilization leaves on a GPU [GiB]",
        above=0,
        when=TEACHER_ENGINE,
    )
    gpu_memory_utilization: float = setting(
        0.3, "share of the GPU's memory for its engine", above=0, below=1, when=TEACHER_ENGINE
    )

    @property
    def scores(self) -> bool:
        """True if it scores rollouts or demonstrations in the run."""
        return self.source in ("policy", "average") or (self.source == "model" and self.path is not None)

    @property
    def identity(self) -> str:
        """The settings that say whose scores its scores are: its source, and others that differ from their defaults."""
        names = ("average_decay", "path", "context", "solved_reward", "dtype")
        settings = [(name, *declarations(self)[name]) for name in names]
        others = [f"teacher.{name}={typed(value)}" for name, entry, value in settings if value != entry.default]
        return " ".join([f"teacher.source={self.source}", *others])
