"""Every setting of a run: its name, type, default, range, meaning and unit, and the condition under which it counts.

The YAML files under `configs/` only choose values. Checks, docs/settings.md and the command line derive from these
declarations (`trainer/setting.py`); conflicts between settings are checked in `trainer/checks/`.

Nothing heavy is imported here, so that a mistake is found before anything heavy starts. Strings with a fixed set of
values carry it as `choices` (Hydra refuses `Literal` in structured configs).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rewards.functions.built_in import ISOLATED
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.conditions import (
    AHEAD,
    COLOCATED,
    CRITIC,
    CURRICULUM,
    EMBEDDED,
    EVALUATE_SCRIPT,
    HUB,
    LORA,
    MEASURED,
    MOMENTUM,
    OWN_ENGINES,
    PROFILE,
    REFERENCE,
    SERVERS,
    SPIKES,
    STEP_LIMIT,
    WANDB,
    WEIGHTS,
    WORKERS,
)
from trainer.objective.correction_modes import CORRECTION_MODES
from trainer.objective.declare import ADVANTAGES
from trainer.setting import setting

OPTIMIZERS = ("adamw", "adamw_tf", "adamw_8bit", "muon", "sgd")
CPU_CACHE_GIB = 0.25
"""`rollout.kv_cache_gib` of engines on a CPU, unless set."""
ATTENTIONS = ("auto", "packed_rows", "flash_attention_2", "flash_attention_3", "sdpa", "eager")
MIN_NORMS = 8
"""Fewest gradient norms that a median for spikes is taken of."""


@dataclass
class LoraConfig:
    rank: int = setting(
        0, "rank of the low-rank adapters that are trained in place of the weights; 0: no adapters", low=0
    )
    alpha: float = setting(32.0, "adapters are scaled by alpha / rank", when=LORA)
    target_modules: list[str] | None = setting(
        None, "names of the linear layers that get adapters; null: all but the head", when=LORA
    )


@dataclass
class ModelConfig:
    path: str = setting("models/calculator", "directory or hub id of the policy, for `from_pretrained`")
    dtype: str = setting(
        "float32",
        "dtype of the computation and of the engine; bfloat16: master weights, gradients and optimizer stay float32",
        choices=("float32", "bfloat16"),
    )
    attn_implementation: str = setting(
        "auto",
        "attention of the trainer; auto: packed_rows, one FlashAttention kernel per layer in half precision on "
        "NVIDIA GPUs, SDPA row by row elsewhere",
        choices=ATTENTIONS,
    )
    critic: str = setting(
        "separate",
        "algorithm.advantage=gae: a critic with a decoder of its own, or a value head on the policy's trunk",
        choices=("separate", "shared"),
        when=CRITIC,
    )
    critic_path: str | None = setting(
        None,
        "what a separate critic starts from: a model, a reward model, or a run's critic/; null: model.path",
        when=CRITIC,
    )
    reference_path: str | None = setting(
        None, "frozen reference of algorithm.kl_coef; null: model.path", when=REFERENCE
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    compile: bool = setting(False, "torch.compile the layers of the trained models; not under ZeRO-3")
    trust_remote_code: bool = setting(False, "run code that ships with the model, in trainer and engine alike")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class DataSetConfig:
    """One entry of data.sources or eval.sets. Those are dicts of anything to Hydra, so that `data.sources.new.path=...`
    needs no more words; `trainer/cli.py` reads their entries as this."""

    path: str = setting("", "JSONL, JSON, CSV or parquet file, or a hub data set id")
    subset: str | None = setting(None, "configuration of a hub data set that has several")
    split: str | None = setting(None, "split of a hub data set; null: data.split, in eval.sets data.heldout_split")
    columns: dict[str, str] | None = setting(None, "see data.columns; null: the same")
    system_prompt: str | None = setting(None, "see data.system_prompt; null: the same")
    environment: str | None = setting(None, "environment.name=mixed: the environment of all its rows")
    weight: float = setting(1.0, "data.sources: share of the prompts, relative to the other sources", above=0)


@dataclass
class CurriculumConfig:
    rest_epochs: int = setting(
        0,
        "epochs that a row is left out of after its group was outside of the pass rates below; 0: no curriculum",
        low=0,
    )
    min_pass_rate: float = setting(
        0.0, "at this pass rate or below a row is too hard for now", low=0, high=1, when=CURRICULUM
    )
    max_pass_rate: float = setting(
        1.0, "at this pass rate or above a row is solved for now", low=0, high=1, when=CURRICULUM
    )
    solved_reward: float = setting(1.0, "a rollout passes with at least this reward", when=CURRICULUM)


@dataclass
class DataConfig:
    path: str = setting("data/demo/calculator/train.jsonl", "JSONL, JSON, CSV or parquet file, or a hub data set id")
    subset: str | None = setting(None, "configuration of a hub data set that has several")
    split: str = setting("train", "split of a hub data set")
    heldout_path: str | None = setting(None, "file or hub id for evaluation; null: no evaluation data")
    heldout_split: str = setting("test", "split of a hub data set for evaluation")
    columns: dict[str, str] = setting(
        {}, "columns under other names, {prompt: question, answer: solution}; `a.b` is column b inside of column a"
    )
    system_prompt: str | None = setting(None, "system turn before the prompts of rows that bring none; null: none")
    sources: dict[str, Any] = setting(
        {}, "several data sets by name, mixed by weight, in place of data.path (docs/data.md)"
    )
    shuffle: bool = setting(True, "draw a new permutation per epoch from `seed`; false: file order")
    max_prompt_tokens: int | None = setting(None, "rows with longer prompts are left out, visibly [tokens]", low=1)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    def training_sets(self) -> dict[str, DataSetConfig]:
        """By name, with everything filled in that they inherit; data.path has an empty name."""
        if not self.sources:
            return {"": self.complete(DataSetConfig(path=self.path, subset=self.subset), self.split)}
        return {name: self.complete(source, self.split) for name, source in self.sources.items()}

    def complete(self, data_set: DataSetConfig, split: str) -> DataSetConfig:
        """With what it inherits."""
        return replace(
            data_set,
            split=data_set.split or split,
            columns=self.columns if data_set.columns is None else data_set.columns,
            system_prompt=self.system_prompt if data_set.system_prompt is None else data_set.system_prompt,
        )


@dataclass
class EnvironmentConfig:
    name: str = setting("calculator", "key of rollout.environments.ENVIRONMENTS, or path/to/file.py:ClassName")
    settings: dict[str, Any] = setting({}, "keyword arguments of the environment")
    max_turns: int = setting(3, "assistant turns per episode at most", low=1)
    history: str = setting(
        "keep",
        "keep: past turns stay as sampled; template: follow the chat template (branches where it drops reasoning)",
        choices=("keep", "template"),
    )


@dataclass
class RewardConfig:
    functions: list[str] = setting(["demo_answer"], "reward functions: a built-in name, or path/to/file.py:function")
    weights: list[float] | None = setting(None, "weight per reward function, in the same order; null: 1 each")
    settings: dict[str, Any] = setting({}, "keyword arguments per reward function name")
    timeout_s: float = setting(30.0, "wall-clock limit of one reward call [s]", above=0)
    isolation: str = setting(
        "process",
        "where functions of files run; process: a worker that can be killed; thread: the trainer itself",
        choices=("process", "thread"),
    )
    workers: int = setting(4, "worker processes for rewards, at most", low=1, when=WORKERS)
    memory_gib: float = setting(
        4.0, "private memory of one reward worker, at most; 0: no limit [GiB]", low=0, when=WORKERS
    )
    on_error: dict[str, Any] = setting(
        {}, "by outcome (timeout, exception, ...): drop (the default), raise, or the reward to count instead"
    )
    max_error_rate: float = setting(
        0.5, "the run ends when more than this share of recent reward calls failed", low=0, high=1
    )
    error_window: int = setting(128, "reward calls that max_error_rate looks back on", low=1)

    @property
    def uses_workers(self) -> bool:
        """True if a reward function runs in a worker process."""
        return any(spec in ISOLATED or (":" in spec and self.isolation == "process") for spec in self.functions)


@dataclass
class RolloutConfig:
    engine: str = setting(
        "embedded",
        "embedded: vLLM in the process of rank 0; colocated: in that of every rank, on its GPU; server: vLLM servers "
        "at rollout.urls",
        choices=("embedded", "colocated", "server"),
    )
    urls: list[str] = setting([], "engine=server: addresses of the servers, http://<host>:<port>")
    api_key_env: str | None = setting(
        "LOCKSTEP_ENGINE_KEY", "environment variable with the key of the servers; null: they are open to everybody"
    )
    silence_timeout_s: float = setting(
        60.0,
        "engine=server: a server that answers nothing for this long while requests wait is taken for dead [s]",
        above=0,
        when=SERVERS,
    )
    prompts_per_step: int = setting(16, "prompts per rollout batch, over all ranks", low=1)
    samples_per_prompt: int = setting(8, "rollouts per prompt (the group size G)", low=1)
    temperature: float = setting(1.0, "sampling temperature; the trainer divides logits by the same", above=0)
    top_p: float = setting(1.0, "nucleus; below 1 changes the sampling distribution", low=0, high=1)
    top_k: int = setting(0, "0: off", low=0)
    min_p: float = setting(0.0, "0: off", low=0, high=1)
    replay_support: bool = setting(
        False, "truncated sampling: normalise the trainer's logprobs over the tokens the engine sampled from, too"
    )
    max_tokens_per_turn: int = setting(48, "sampled tokens per assistant turn at most [tokens]", low=1)
    max_model_len: int = setting(512, "context of the engine: prompt and completion [tokens]", low=2)
    max_num_seqs: int = setting(256, "requests the engine batches at once", low=1)
    kv_cache_gib: float | None = setting(
        None,
        "KV cache of an engine; null: on a CPU 0.25, on the trainer's GPU what the memory plan leaves, on a GPU of a "
        "server what vLLM leaves [GiB]",
        above=0,
    )
    num_engines: int = setting(
        1, "engine=embedded on a CPU: engines, among which the cores are shared out", low=1, when=EMBEDDED
    )
    compile_engine: bool = setting(
        False,
        "engines on a CPU: compile the model when they start, with a C++ compiler, in up to a minute (on GPUs vLLM "
        "always does)",
    )
    sleep_level: int = setting(
        2,
        "engine=colocated, while the trainer computes: 2 frees the engine's weights and cache, 1 moves its weights to "
        "main memory, 0 keeps both (a CPU engine pauses, and frees nothing)",
        choices=(0, 1, 2),
        when=COLOCATED,
    )
    request_timeout_s: float = setting(
        600.0, "a request without an answer for this long is an engine failure [s]", above=0
    )
    start_timeout_s: float = setting(600.0, "limit for the engine to become ready [s]", above=0)
    engine_restarts: int = setting(
        2,
        "times that an engine of the run's own that died is started again, and the step goes on; 0: the run ends",
        low=0,
        when=OWN_ENGINES,
    )
    ignore_eos: bool = setting(
        False, "sample past the end of the turn, up to max_tokens_per_turn: responses of one fixed length"
    )
    max_staleness: int = setting(
        0,
        "0: rollouts are sampled by the weights they train; k: while the trainer works, by weights at most k updates "
        "old (docs/asynchrony.md)",
        low=0,
    )
    stragglers: str = setting(
        "wait",
        "max_staleness: a step waits for groups that the next one could not train any more, or goes on and drops them",
        choices=("wait", "drop"),
        when=AHEAD,
    )
    mask_truncated: bool = setting(False, "do not train rollouts that ended on a length limit (they still count)")


@dataclass
class SyncConfig:
    pause: str = setting(
        "auto",
        "running requests during a sync are drained (wait), continued by the new weights (keep) or given up (abort); "
        "auto: keep with rollout.max_staleness, else wait",
        choices=("auto", "wait", "keep", "abort"),
    )
    bucket_mib: float = setting(512.0, "parameters gathered and sent at once, at most [MiB]", above=0)
    canary_threshold: float | None = setting(
        None, "largest |logp engine - logp trainer| of the canary; null: by the engine's dtype [nats]", above=0
    )
    canary_share: float | None = setting(
        None,
        "most of the time that canaries may take (0.01: the next one when the cost of the last is a hundredth of the "
        "time since; 0: one after the first sync); null: one after every sync",
        low=0,
        high=1,
    )
    timeout_s: float = setting(300.0, "deadline of each phase of a sync, on all ranks [s]", above=0)
    address: str | None = setting(
        None,
        "engine=server: this machine's address, where servers fetch the weights; null: the one that reaches them",
    )


@dataclass
class CorrectionConfig:
    mode: str = setting(
        "token_truncate",
        "importance weights between engine and trainer; off: metrics only",
        choices=tuple(CORRECTION_MODES),
    )
    high: float = setting(
        2.0,
        "upper bound of the weight: truncated to it, or masked above it",
        above=0,
        may_be_infinite=True,
        when=WEIGHTS,
    )
    low: float = setting(0.0, "lower bound of the weight: raised to it, or masked below it", low=0, when=WEIGHTS)
    batch_normalize: bool = setting(False, "divide the weights by their mean over the step", when=WEIGHTS)
    rejection: dict[str, float] = setting(
        {},
        "criterion: threshold; tokens that fail one leave the loss and its denominator "
        "(trainer/objective/rejection.py)",
    )
    logp_old: str = setting(
        "recompute",
        "recompute: proximal logprobs by the trainer; bypass: the engine's own (one update per batch)",
        choices=("recompute", "bypass"),
    )
    kl_penalty: float = setting(
        0.0, "advantage lost per nat by which a token's logp_samp - logp_old is above its mean over the step", low=0
    )
    noise_floor_every: int = setting(
        10,
        "updates between measurements of the trainer against itself in another packing, the first one included; 0: off",
        low=0,
        when=MEASURED,
    )
    alarm_kl: float = setting(0.1, "alarm when |kl| is above [nats]", may_be_infinite=True, when=MEASURED)
    alarm_ess: float = setting(0.3, "alarm when the effective sample size is below", when=MEASURED)
    alarm_k3: float = setting(
        10.0, "alarm when k3_kl is above this many times the noise floor", above=0, may_be_infinite=True, when=MEASURED
    )


@dataclass
class OptimizerConfig:
    name: str = setting("adamw", "optimizer (trainer/update/optimizer.py)", choices=OPTIMIZERS)
    lr: float = setting(3e-4, "learning rate at its highest", above=0)
    critic_lr: float | None = setting(
        None,
        "learning rate of a critic at its highest, on the same schedule (adamw, adamw_tf, sgd); null: lr",
        above=0,
        when=CRITIC,
    )
    betas: list[float] = setting([0.9, 0.95], "Adam's moment decays", length=2, low=0, below=1)
    eps: float = setting(1e-8, "Adam's epsilon", above=0)
    momentum: float = setting(0.95, "of muon and sgd", low=0, high=1, when=MOMENTUM)
    weight_decay: float = setting(0.0, "decoupled weight decay, on matrices only", low=0)
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this global norm; 0: off", low=0)
    schedule: str = setting("constant", "learning rate after warm-up", choices=("constant", "linear", "cosine"))
    warmup_updates: int = setting(0, "updates over which the learning rate rises linearly", low=0)
    final_lr_fraction: float = setting(0.0, "where linear and cosine end, as a fraction of lr", low=0, high=1)
    max_skipped_updates: int = setting(
        5,
        "updates skipped in a row, for a loss or gradient that is not finite or a spike, after which the run ends",
        low=1,
    )
    spike: str = setting(
        "off",
        "update whose gradient norm is far above those before; skip: not made, its batch dumped; dump: made and dumped",
        choices=("off", "skip", "dump"),
    )
    spike_factor: float = setting(
        10.0, "spike: a norm above this many times the median of those before it", low=1, when=SPIKES
    )
    spike_window: int = setting(64, "spike: updates that the median looks back on", low=MIN_NORMS, when=SPIKES)


@dataclass
class LoggerConfig:
    wandb: str = setting("off", "Weights & Biases", choices=("off", "online", "offline"))
    project: str = setting("lockstep", "W&B project", when=WANDB)
    entity: str | None = setting(None, "W&B entity", when=WANDB)
    wandb_id: str | None = setting(
        None, "W&B run to go on with; null: that of the run which is resumed, a new one for a fork", when=WANDB
    )
    group: str | None = setting(None, "W&B group, for runs that belong together", when=WANDB)
    wandb_media_every: int = setting(
        10,
        "updates between tables of rollouts, token views and histograms in W&B, the first one included; 0: never",
        low=0,
    )
    wandb_rollouts: int = setting(64, "rollouts per table in W&B, at most", low=0)
    print_rollouts: int = setting(1, "sample rollouts printed per report", low=0)
    print_rollouts_every: int = setting(10, "updates between printed sample rollouts; 0: never", low=0)
    peak_tflops: float | None = setting(
        None,
        "what one device can compute in model.dtype, for perf/mfu (bfloat16: H100 SXM 989, A100 312) [10¹² FLOP/s]; "
        "null: not reported, nor for mixtures of experts",
        above=0,
    )
    save_rollouts: bool = setting(True, "write all rollouts of each step as JSONL into the run directory")


@dataclass
class CheckpointConfig:
    every: int = setting(20, "updates between checkpoints; 0: only at the end and when interrupted", low=0)
    keep: int = setting(2, "checkpoints kept; older ones go after a new one is published", low=1)


@dataclass
class EvalConfig:
    every: int = setting(
        0, "updates between evaluations on the held-out data; another one follows the last update; 0: never", low=0
    )
    before_training: bool = setting(False, "evaluate before the first update and after the last one")
    sets: dict[str, Any] = setting(
        {}, "further held-out data by name; its metrics are eval/<name>/... (docs/evaluation.md)"
    )
    prompts: int | None = setting(128, "the first so many prompts of each data set; null: all", low=1)
    samples_per_prompt: int = setting(1, "rollouts per held-out prompt, n of pass@k and mean@n", low=1)
    temperature: float = setting(0.0, "0: greedy", low=0)
    top_p: float = setting(1.0, "nucleus", low=0, high=1)
    top_k: int = setting(0, "0: off", low=0)
    min_p: float = setting(0.0, "0: off", low=0, high=1)
    max_tokens_per_turn: int | None = setting(
        None, "sampled tokens per assistant turn at most [tokens]; null: rollout.max_tokens_per_turn", low=1
    )
    pass_threshold: float = setting(1.0, "a rollout passes with at least this reward")
    pass_reward: str | None = setting(None, "reward function that decides whether it passes; null: the weighted sum")
    by: str = setting("environment", "column by whose values results are broken down, in data that has it")
    compare_to: str | None = setting(
        None,
        "scripts/evaluate.py: a model, or the JSON file of its evaluation, to compare with on the same seeds",
        when=EVALUATE_SCRIPT,
    )
    output: str | None = setting(
        None,
        "scripts/evaluate.py: JSON file for the results; the rollouts go beside it, as .jsonl",
        when=EVALUATE_SCRIPT,
    )


@dataclass
class HubConfig:
    repo: str | None = setting(None, "hub repository that the trained model is uploaded to at the end; null: none")
    private: bool = setting(True, "a repository that is made for it can be seen by its owner only", when=HUB)


@dataclass
class GatewayConfig:
    host: str = setting("127.0.0.1", "address the gateway listens on; others than loopback can be reached by others")
    port: int = setting(0, "port of the gateway; 0: any that is free", low=0, high=65535)
    api_key: str | None = setting(None, "key that clients send; null: a random one for each run")
    model_name: str | None = setting(None, "name of the model for clients; null: the last part of model.path")
    max_request_mib: float = setting(64.0, "larger requests are refused [MiB]", above=0)


@dataclass
class ServerConfig:
    host: str = setting("127.0.0.1", "address a server listens on; others than loopback can be reached by others")
    port: int = setting(8000, "port of the server", low=1, high=65535)
    vllm_args: list[str] = setting([], "further arguments of vLLM's server, for example [--tensor-parallel-size,2]")


@dataclass
class Config:
    seed: int = setting(0, "of data order, sampling and initialisation", low=0, high=2**32 - 1)
    updates: int = setting(80, "optimizer updates of the whole run", low=1)
    run_root: str = setting("runs", "directory that holds run directories")
    run_name: str | None = setting(None, "name of the run directory; null: experiment name and time")
    dry_run: bool = setting(False, "say what the run would do (settings, counts, memory, two rows) and end; no engine")
    resume: str = setting(
        "never",
        "never, auto (latest checkpoint of run_name), or the path of a checkpoint, with which a new run_name is a fork",
    )
    max_hours: float = setting(
        0.0, "the run saves and ends after the update during which so much time is over; 0: no limit [h]", low=0
    )
    step_timeout_s: float = setting(
        1800.0,
        "stacks of a rank are written to logs/ when one step, save or evaluation takes longer; 0: never [s]",
        low=0,
    )
    on_step_timeout: str = setting(
        "report",
        "report: write the stacks and wait on; end: write them and end the run",
        choices=("report", "end"),
        when=STEP_LIMIT,
    )
    profile: bool = setting(
        False, "trace steps with torch's profiler, on every rank, into profile/ of the run directory"
    )
    profile_steps: int = setting(1, "profile: steps that are traced, after the first one", low=1, when=PROFILE)
    token_budget: int = setting(16384, "tokens per packed microbatch on one rank, at most", low=1)
    share_prefixes: str = setting(
        "auto",
        "compute what rows begin with once per pack (prompts of groups, histories of branches); auto: where attention "
        "is packed_rows; always: have it so",
        choices=("auto", "always", "never"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def heldout_sets(self) -> dict[str, DataSetConfig]:
        """Held-out data sets by name, with everything filled in that they inherit; data.heldout_path has no name."""
        split = self.data.heldout_split
        sets = {name: self.data.complete(data_set, split) for name, data_set in self.eval.sets.items()}
        if self.data.heldout_path is None:
            return sets
        main = DataSetConfig(path=self.data.heldout_path, subset=self.data.subset)
        return {"": self.data.complete(main, split), **sets}

    @property
    def has_critic(self) -> bool:
        """True if advantages come from a learned value."""
        return ADVANTAGES[self.algorithm.advantage].needs_critic

    @property
    def needs_greedy(self) -> bool:
        """True if advantages need the greedy answer to each prompt."""
        return ADVANTAGES[self.algorithm.advantage].needs_greedy

    @property
    def attention(self) -> str:
        """What attention the trainer is to use: model.attn_implementation, unless that leaves it open."""
        is_open = self.model.attn_implementation == "auto" and self.share_prefixes == "always"
        return "packed_rows" if is_open else self.model.attn_implementation

    @property
    def pause_mode(self) -> str:
        """wait, keep or abort."""
        if self.sync.pause != "auto":
            return self.sync.pause
        return "keep" if self.rollout.max_staleness else "wait"

    @property
    def horizon(self) -> int:
        """Longest completion of a rollout, over all of its turns [tokens]."""
        return self.algorithm.max_completion_tokens or (self.environment.max_turns * self.rollout.max_tokens_per_turn)
