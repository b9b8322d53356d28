"""Settings of a run: name, type, default, range, meaning, unit, and the condition under which each has an effect.

The YAML files under `configs/` choose values. Checks, docs/settings.md and the command line derive from these
declarations (`trainer/setting.py`); `trainer/checks/` finds conflicts between settings.

Imports nothing heavy, so that mistakes are found before torch is loaded. Strings with a fixed set of values declare
`choices`, because Hydra does not support `Literal` in structured configs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.rollout.environments import declared_parts
from lockstep.rollout.environments.declaration import Declaration
from lockstep.trainer.config.conditions import PROFILE, RESUMED, STEP_LIMIT
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.data_settings import DataConfig, DataSetConfig, DemonstrationsConfig
from lockstep.trainer.config.groups.evaluation_settings import EvalConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.groups.outputs_settings import (
    CheckpointConfig,
    GatewayConfig,
    HubConfig,
    LoggerConfig,
    ServerConfig,
)
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig, SyncConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig, RewardConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.plan import StepPlan
from lockstep.trainer.setting import setting

PACK_TOKENS = 16_384
"""`token_budget` where it is null and memory suffices."""


@dataclass
class Config:
    seed: int = setting(0, "seed of data order, sampling and initialization", low=0, high=2**32 - 1)
    updates: int = setting(80, "optimizer updates of the whole run", low=1)
    run_root: str = setting("runs", "directory that holds run directories")
    run_name: str | None = setting(
        None, "name of the run directory; null: that of settings file, experiment or environment, and time"
    )
    dry_run: bool = setting(
        False, "print a plan of the run (changed settings, counts, memory, two rows) and exit, without an engine"
    )
    resume: str = setting(
        "never",
        "never, auto (latest checkpoint of run_name), or the path of a checkpoint; with a new run_name it is a fork",
        is_path=True,
    )
    resume_with_changes: bool = setting(
        False, "resume although model, data, environment, reward, loss or advantage have changed", when=RESUMED
    )
    max_hours: float = setting(
        0.0, "wall-clock limit; checkpoint and exit after the current update; 0: none [h]", low=0
    )
    step_timeout_s: float = setting(
        1800.0, "time limit of a step, save or evaluation before stacks are written to logs/; 0: none [s]", low=0
    )
    on_step_timeout: str = setting(
        "report",
        "report: write the stacks and continue; end: write them and end the run",
        choices=("report", "end"),
        when=STEP_LIMIT,
    )
    profile: bool = setting(False, "trace steps on every rank with torch.profiler, into profile/ of the run directory")
    profile_steps: int = setting(1, "number of traced steps, after the first one", low=1, when=PROFILE)
    token_budget: int | None = setting(
        None,
        "maximum number of tokens per packed microbatch of a rank; null: 16384, or the largest smaller power of two "
        "that fits the memory plan",
        low=1,
    )
    share_prefixes: str = setting(
        "auto",
        "compute common prefixes of rows (prompts of groups, histories of branches) once per pack; auto: if attention "
        "is packed_rows; always: use packed_rows",
        choices=("auto", "always", "never"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def heldout_sets(self) -> dict[str, DataSetConfig]:
        """Return the held-out sets by name, with inherited settings; the name of data.heldout_path is empty.

        Tasks of lm-eval replace data.heldout_path, whose default is that of the demo.
        """
        split = self.data.heldout_split
        sets = {name: self.data.complete(data_set, split) for name, data_set in self.eval.sets.items()}
        if self.data.heldout_path is None or self.eval.lm_eval.tasks:
            return sets
        main = DataSetConfig(path=self.data.heldout_path, subset=self.data.subset)
        return {"": self.data.complete(main, split), **sets}

    def demonstration_sets(self) -> dict[str, DataSetConfig]:
        """Return the demonstrations that are trained, by name: the training data, or demonstrations.path."""
        settings = self.demonstrations
        if not self.has_rollouts:
            return self.data.training_sets()
        if settings.path is None:
            return {}
        return {
            "": DataSetConfig(
                path=settings.path, subset=settings.subset, split=settings.split, columns=settings.columns
            )
        }

    @property
    def evaluates(self) -> bool:
        """True if the run evaluates on held-out data."""
        return self.eval.every > 0 or self.eval.before_training

    @property
    def has_rollouts(self) -> bool:
        """True if rollouts are sampled and trained."""
        return self.algorithm.trains_on == "rollouts"

    @property
    def pack_tokens(self) -> int:
        """token_budget with null resolved, as long as no memory plan has chosen a smaller one."""
        return PACK_TOKENS if self.token_budget is None else self.token_budget

    @property
    def plan(self) -> StepPlan:
        """Plan of a step: what it scores and replays, and what its rows keep."""
        return StepPlan.of(self.algorithm, self.correction, self.demonstrations)

    @property
    def has_teacher(self) -> bool:
        """True if a teacher scores rollouts or demonstrations in the run."""
        return self.teacher.scores

    @property
    def engine_context(self) -> int:
        """Context of the engines that sample [tokens]; one more than a row has if they also score whole rows as the
        teacher, because vLLM samples a token after those that it scores."""
        return self.rollout.max_model_len + (self.teacher.source == "policy")

    @property
    def rotary_context(self) -> int | None:
        """engine_context where the trainer's rotary positions depend on it; None without rollouts."""
        return self.engine_context if self.has_rollouts else None

    @property
    def pause_mode(self) -> str:
        """sync.pause with auto resolved."""
        if self.sync.pause != "auto":
            return self.sync.pause
        return "keep" if self.rollout.max_staleness else "wait"

    @property
    def max_turns(self) -> int:
        """environment.max_turns with null resolved: the most that the environment or a part of a mixture declares."""
        parts = declared_parts(self.environment.name, self.environment.settings)
        turns = [part.max_turns for _, _, part in parts if not part.has_parts]
        return self.environment.max_turns or max(turns, default=Declaration().max_turns)

    @property
    def horizon(self) -> int:
        """Maximum completion length of a rollout over all of its turns [tokens]."""
        return self.algorithm.max_completion_tokens or (self.max_turns * self.rollout.max_tokens_per_turn)
