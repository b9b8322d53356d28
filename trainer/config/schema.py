"""Settings of a run: name, type, default, range, meaning, unit, and the condition under which each has an effect.

The YAML files under `configs/` choose values. Checks, docs/settings.md and the command line derive from these
declarations (`trainer/setting.py`); `trainer/checks/` finds conflicts between settings.

Imports nothing heavy, so that mistakes are found before torch is loaded. Strings with a fixed set of values declare
`choices`, because Hydra does not support `Literal` in structured configs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from rewards.functions.built_in import ISOLATED
from rollout.engine.protocol import ONLINE_SCHEMES
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.conditions import (
    AHEAD,
    AVERAGED,
    COLOCATED,
    CRITIC,
    CURRICULUM,
    DEMONSTRATED,
    EMBEDDED,
    EVALUATE_SCRIPT,
    HUB,
    LEARNABILITY,
    LORA,
    MEASURED,
    MIXED,
    MIXED_SCHEDULE,
    MOMENTUM,
    OWN_ENGINES,
    POOLS,
    PROFILE,
    PROJECTS,
    REFERENCE,
    ROLLOUTS,
    SAVED,
    SERVED_ADAPTERS,
    SERVERS,
    SPIKES,
    STEP_LIMIT,
    TAUGHT,
    TAUGHT_DEMONSTRATIONS,
    TEACHER,
    TEACHER_ENGINE,
    TEACHER_SERVERS,
    WANDB,
    WEIGHTS,
    WITH_CONTEXT,
    WORKERS,
)
from trainer.objective.correction.modes import CORRECTION_MODES
from trainer.objective.distillation.divergence import DIVERGENCES
from trainer.objective.own.lookup import advantage_named
from trainer.setting import declarations, setting, typed

OPTIMIZERS = ("adamw", "adamw_tf", "adamw_8bit", "muon", "sgd")
PACK_TOKENS = 16_384
"""`token_budget` where it is null and memory suffices."""
SMALL_MODEL_LR = 3e-4
"""`optimizer.lr` where it is null and the model is small."""
CPU_CACHE_GIB = 0.25
"""`rollout.kv_cache_gib` of engines on a CPU, unless set."""
SAVED_ROLLOUTS = "rollouts:"
"""Beginning of a path that names saved rollouts: a run, a directory of their files, or one file."""
ATTENTIONS = ("auto", "packed_rows", "flash_attention_2", "flash_attention_3", "sdpa", "eager")
MIN_NORMS = 8
"""Minimum number of gradient norms for the median that detects spikes."""


@dataclass
class LoraConfig:
    rank: int = setting(0, "rank of low-rank adapters, trained in place of the weights; 0: no adapters", low=0)
    alpha: float = setting(32.0, "adapters are scaled by alpha / rank", when=LORA)
    target_modules: list[str] | None = setting(None, "linear layers with adapters; null: all but the head", when=LORA)
    rslora: bool = setting(False, "scale adapters by alpha / sqrt(rank), rsLoRA (arXiv:2312.03732)", when=LORA)
    path: str | None = setting(
        None, "adapter to start from, as peft saves it, with the rank, alpha and layers set here", when=LORA
    )
    send: str = setting(
        "auto",
        "what engines get; adapter: A and B, applied to weights that stay; merged: whole weights; auto: adapter, if "
        "vLLM applies it to every layer of the model's family",
        choices=("auto", "adapter", "merged"),
        when=LORA,
    )


@dataclass
class ModelConfig:
    path: str = setting("models/calculator", "directory or hub id of the policy, for `from_pretrained`")
    dtype: str = setting(
        "float32",
        "dtype of computation and engine; bfloat16: master weights, gradients and optimizer stay float32",
        choices=("float32", "bfloat16"),
    )
    attn_implementation: str = setting(
        "auto",
        "attention in the trainer; auto: packed_rows, one FlashAttention kernel per layer in half precision on "
        "NVIDIA GPUs, SDPA row by row elsewhere",
        choices=ATTENTIONS,
    )
    critic: str = setting(
        "separate",
        "separate: a critic with its own decoder; shared: a value head on the policy's trunk",
        choices=("separate", "shared"),
        when=CRITIC,
    )
    critic_path: str | None = setting(
        None, "initial separate critic: a model, a reward model, or a run's critic/; null: model.path", when=CRITIC
    )
    reference_path: str | None = setting(None, "frozen reference for the KL term; null: model.path", when=REFERENCE)
    chat_template: str | None = setting(
        None, "chat template in place of the model's: hermes (ChatML with tools), or a Jinja file; null: the model's"
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    compile: bool = setting(False, "torch.compile the layers of the trained models; not under ZeRO-3")
    trust_remote_code: bool = setting(False, "run code that ships with the model, in trainer and engine")
    lora: LoraConfig = field(default_factory=LoraConfig)
    adapters: dict[str, str] = setting(
        {},
        "scripts/evaluate.py, serve.py and serve_engine.py: adapters by name, directories that peft wrote, beside the "
        "model in one engine",
        when=SERVED_ADAPTERS,
    )


@dataclass
class DataSetConfig:
    """Entry of data.sources or eval.sets. Hydra sees dicts, so that `data.sources.new.path=...` needs no `+`;
    `trainer/cli.py` converts their entries."""

    path: str = setting(
        "", "JSONL, JSON, CSV or parquet file, reasoning_gym:<task>, rollouts:<run>, or a hub data set id"
    )
    subset: str | None = setting(None, "configuration of a hub data set that has several")
    split: str | None = setting(None, "split of a hub data set; null: data.split, in eval.sets data.heldout_split")
    parameters: dict[str, Any] | None = setting(None, "see data.parameters; null: the same")
    columns: dict[str, str] | None = setting(None, "see data.columns; null: the same")
    system_prompt: str | None = setting(None, "see data.system_prompt; null: the same")
    environment: str | None = setting(None, "environment of all its rows, with environment.name=mixed")
    weight: float = setting(1.0, "data.sources: share of the prompts, relative to the other sources", above=0)

    @property
    def is_saved(self) -> bool:
        """True if the path names saved rollouts."""
        return self.path.startswith(SAVED_ROLLOUTS)


@dataclass
class CurriculumConfig:
    rest_epochs: int = setting(
        0, "epochs to leave a row out after its pass rate was too low or too high; 0: no rest", low=0
    )
    weighting: str = setting(
        "uniform",
        "how often a row comes, by its pass rate p; uniform: always; learnability: by p(1-p); pools: by whether it is "
        "too hard, solved or in between (docs/data.md)",
        choices=("uniform", "learnability", "pools"),
    )
    window: int = setting(1, "last visits of a row that count for its pass rate", low=1, when=CURRICULUM)
    min_weight: float = setting(
        0.1, "lowest weight of a row; 1: that of a row with p = 1/2", low=0.01, high=1, when=LEARNABILITY
    )
    hard_weight: float = setting(
        0.5, "weight of rows that are too hard; 1: that of rows in between", low=0.01, high=1, when=POOLS
    )
    solved_weight: float = setting(
        0.1, "weight of rows that are solved; 1: that of rows in between", low=0.01, high=1, when=POOLS
    )
    min_pass_rate: float = setting(0.0, "highest pass rate of rows that are too hard", low=0, high=1, when=CURRICULUM)
    max_pass_rate: float = setting(1.0, "lowest pass rate of rows that are solved", low=0, high=1, when=CURRICULUM)
    solved_reward: float = setting(1.0, "lowest reward of a rollout that passes", when=CURRICULUM)

    @property
    def is_on(self) -> bool:
        """True if rows rest or have weights."""
        return self.rest_epochs > 0 or self.weighting != "uniform"


@dataclass
class DataConfig:
    path: str = setting(
        "data/demo/calculator/train.jsonl",
        "JSONL, JSON, CSV or parquet file, reasoning_gym:<task>, or a hub data set id; with algorithm=sft also "
        "rollouts:<run, directory or file>",
    )
    subset: str | None = setting(None, "configuration of a hub data set that has several")
    split: str = setting("train", "split of a hub data set")
    heldout_path: str | None = setting(
        None,
        "file or hub id for evaluation; null: none. That of the demo or of `make real` is left out with other data",
    )
    heldout_split: str = setting("test", "split of a hub data set for evaluation")
    parameters: dict[str, Any] = setting(
        {},
        "of reasoning_gym:<task>: settings of the task; size (1000): questions, one in eight held out; seed (0)",
    )
    columns: dict[str, str] = setting(
        {}, "renamed columns, {prompt: question, answer: solution}; `a.b` is column b inside of column a"
    )
    system_prompt: str | None = setting(None, "system message for prompts without one; null: none")
    sources: dict[str, Any] = setting({}, "data sets by name, mixed by weight, in place of data.path (docs/data.md)")
    shuffle: bool = setting(True, "draw a new permutation per epoch from `seed`; false: file order")
    max_prompt_tokens: int | None = setting(
        None, "rows with longer prompts are left out, with a report [tokens]", low=1
    )
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    def training_sets(self) -> dict[str, DataSetConfig]:
        """Return the training sets by name, with inherited settings; the name of data.path is empty."""
        if not self.sources:
            return {"": self.complete(DataSetConfig(path=self.path, subset=self.subset), self.split)}
        return {name: self.complete(source, self.split) for name, source in self.sources.items()}

    def complete(self, data_set: DataSetConfig, split: str) -> DataSetConfig:
        """Return the data set with its inherited settings."""
        return replace(
            data_set,
            split=data_set.split or split,
            parameters=self.parameters if data_set.parameters is None else data_set.parameters,
            columns=self.columns if data_set.columns is None else data_set.columns,
            system_prompt=self.system_prompt if data_set.system_prompt is None else data_set.system_prompt,
        )


@dataclass
class DemonstrationsConfig:
    path: str | None = setting(
        None,
        "conversations whose assistant turns are trained beside the rollouts: JSONL, JSON or parquet file, a hub data "
        "set id, or rollouts:<run, directory or file> (docs/sft.md); null: none",
        when=ROLLOUTS,
    )
    subset: str | None = setting(None, "configuration of a hub data set that has several", when=MIXED)
    split: str = setting("train", "split of a hub data set", when=MIXED)
    columns: dict[str, str] = setting({}, "renamed columns, {messages: conversations}", when=MIXED)
    rows_per_update: int = setting(16, "conversations per optimizer update, over all ranks", low=1, when=DEMONSTRATED)
    max_tokens: int | None = setting(
        None, "conversations with a longer row are left out, with a report [tokens]", low=2, when=DEMONSTRATED
    )
    min_reward: float | None = setting(None, "lowest reward of saved rollouts that are trained; null: any", when=SAVED)
    teacher_divergence: str = setting(
        "off",
        "loss over the most probable tokens of teacher.path in place of the cross-entropy",
        choices=("off", *DIVERGENCES),
        when=DEMONSTRATED,
    )
    teacher_share: float = setting(
        1.0,
        "share of the divergence in their loss; the rest is the cross-entropy",
        above=0,
        high=1,
        when=TAUGHT_DEMONSTRATIONS,
    )
    weight: float = setting(0.1, "weight of their loss beside the policy loss", low=0, when=MIXED)
    weight_schedule: str = setting(
        "constant", "weight over the updates of the run", choices=("constant", "linear", "cosine"), when=MIXED
    )
    final_weight: float = setting(0.0, "weight at the end of linear and cosine", low=0, when=MIXED_SCHEDULE)


@dataclass
class EnvironmentConfig:
    name: str = setting("calculator", "key of rollout.environments.ENVIRONMENTS, or path/to/file.py:ClassName")
    settings: dict[str, Any] = setting({}, "keyword arguments of the environment")
    max_turns: int = setting(3, "maximum number of assistant turns per episode", low=1)
    history: str = setting(
        "keep",
        "keep: past turns stay as sampled; template: as the chat template renders them (branches where it drops "
        "reasoning)",
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
        "where functions of files run; process: a worker that can be killed; thread: the trainer",
        choices=("process", "thread"),
    )
    workers: int = setting(4, "maximum number of reward worker processes", low=1, when=WORKERS)
    memory_gib: float = setting(4.0, "private memory limit of a reward worker; 0: none [GiB]", low=0, when=WORKERS)
    on_error: dict[str, Any] = setting(
        {}, "by outcome (timeout, exception, ...): drop (the default), raise, or the reward to use instead"
    )
    max_error_rate: float = setting(0.5, "share of failed recent reward calls above which the run ends", low=0, high=1)
    error_window: int = setting(128, "recent reward calls for max_error_rate", low=1)

    @property
    def weight_by_name(self) -> dict[str, float]:
        """Weights of the reward functions by the names under which rollouts keep their rewards."""
        names = [spec.rpartition(":")[2] for spec in self.functions]
        return dict(zip(names, self.weights or [1.0] * len(names), strict=True))

    @property
    def uses_workers(self) -> bool:
        """True if a reward function runs in a worker process."""
        return any(spec in ISOLATED or (":" in spec and self.isolation == "process") for spec in self.functions)


@dataclass
class RolloutConfig:
    engine: str = setting(
        "embedded",
        "vLLM; embedded: in the process of rank 0; colocated: of each rank, on its GPU; server: at rollout.urls",
        choices=("embedded", "colocated", "server"),
    )
    urls: list[str] = setting([], "engine=server: addresses of the servers, http://<host>:<port>")
    api_key_env: str | None = setting(
        "LOCKSTEP_ENGINE_KEY", "environment variable with the key of the servers; null: no key, open to all clients"
    )
    silence_timeout_s: float = setting(
        60.0, "time without any answer to waiting requests before a server counts as dead [s]", above=0, when=SERVERS
    )
    prompts_per_step: int = setting(16, "prompts per rollout batch, over all ranks", low=1)
    samples_per_prompt: int = setting(8, "rollouts per prompt (the group size G)", low=1)
    temperature: float = setting(1.0, "sampling temperature; the trainer divides logits by it too", above=0)
    top_p: float = setting(1.0, "nucleus; below 1 changes the sampling distribution", low=0, high=1)
    top_k: int = setting(0, "0: off", low=0)
    min_p: float = setting(0.0, "0: off", low=0, high=1)
    replay_support: bool = setting(
        False, "truncated sampling: normalize the trainer's logprobs over the engine's support"
    )
    max_tokens_per_turn: int = setting(48, "maximum number of sampled tokens per assistant turn [tokens]", low=1)
    max_model_len: int = setting(512, "context of the engine: prompt and completion [tokens]", low=2)
    max_num_seqs: int = setting(256, "maximum number of requests in a batch of the engine", low=1)
    kv_cache_gib: float | None = setting(
        None,
        "KV cache of an engine; null: 0.25 on a CPU, the memory plan's on the trainer's GPU, vLLM's on a server [GiB]",
        above=0,
    )
    num_engines: int = setting(1, "number of engines on a CPU, which share the cores", low=1, when=EMBEDDED)
    compile_engine: bool = setting(
        False, "compile CPU engines at start: up to a minute, needs a C++ compiler (on GPUs vLLM always compiles)"
    )
    quantization: str | None = setting(
        None,
        "engine quantizes the weights that arrive, and the trainer does not (docs/engines.md); null: off. On a CPU "
        "fp8_per_channel only",
        choices=ONLINE_SCHEMES,
    )
    batch_invariant: bool = setting(
        False, "vLLM's batch-invariant kernels: a request has the same logprobs in any batch, at a cost; on GPUs"
    )
    sleep_level: int = setting(
        2,
        "while the trainer computes: 2 frees the engine's weights and cache, 1 moves the weights to main memory, "
        "0 keeps both (a CPU engine frees nothing); engines that get adapters use 1 for 2",
        choices=(0, 1, 2),
        when=COLOCATED,
    )
    request_timeout_s: float = setting(600.0, "time limit of a request before it is an engine failure [s]", above=0)
    start_timeout_s: float = setting(600.0, "time limit for the start of the engine [s]", above=0)
    engine_restarts: int = setting(
        2, "maximum restarts of a failed engine of the run, within the step; 0: the run ends", low=0, when=OWN_ENGINES
    )
    ignore_eos: bool = setting(
        False, "sample past the end of the turn, up to max_tokens_per_turn: responses of a fixed length"
    )
    max_staleness: int = setting(
        0,
        "0: rollouts are sampled by current weights; k: during training, by weights at most k updates old "
        "(docs/asynchrony.md)",
        low=0,
    )
    stragglers: str = setting(
        "wait",
        "groups that will be too old for the next step; wait: the step waits for them; drop: it drops them",
        choices=("wait", "drop"),
        when=AHEAD,
    )
    mask_truncated: bool = setting(False, "do not train rollouts that hit a length limit (they still count)")


@dataclass
class SyncConfig:
    pause: str = setting(
        "auto",
        "running requests during a sync finish first (wait), continue with the new weights (keep) or are aborted "
        "(abort); auto: keep with rollout.max_staleness, else wait",
        choices=("auto", "wait", "keep", "abort"),
    )
    bucket_mib: float = setting(512.0, "maximum size of parameters gathered and sent at once [MiB]", above=0)
    canary_threshold: float | None = setting(
        None, "largest |logp engine - logp trainer| of the canary [nats]; null: by the engine's dtype", above=0
    )
    canary_share: float | None = setting(
        None,
        "largest share of time for canaries (0: only one, after the first sync; 1: one after every sync); null: 1 on a "
        "CPU, 0.01 on GPUs, where ZeRO-3 gathers the whole model for one",
        low=0,
        high=1,
    )
    timeout_s: float = setting(300.0, "time limit of each phase of a sync, on all ranks [s]", above=0)
    address: str | None = setting(
        None, "address of this machine from which servers fetch the weights; null: the one that reaches them"
    )


@dataclass
class CorrectionConfig:
    mode: str = setting(
        "token_truncate",
        "importance weights between engine and trainer; off: metrics only",
        choices=tuple(CORRECTION_MODES),
    )
    high: float = setting(
        2.0, "upper bound of weights, truncated to it or masked above", above=0, may_be_infinite=True, when=WEIGHTS
    )
    low: float = setting(0.0, "lower bound of weights, raised to it or masked below", low=0, when=WEIGHTS)
    batch_normalize: bool = setting(False, "divide the weights by their mean over the step", when=WEIGHTS)
    rejection: dict[str, float] = setting(
        {},
        "criterion: threshold; tokens that fail one leave loss and denominator (trainer/objective/correction/modes.py)",
    )
    logp_old: str = setting(
        "recompute",
        "old logprobs; recompute: by the trainer; bypass: the engine's (one update per batch)",
        choices=("recompute", "bypass"),
    )
    routing_replay: str = setting(
        "off",
        "experts of a mixture of experts in the trainer's passes; engine: R3, those that the engine chose; old: R2, "
        "those of the pass for the old logprobs; off: the routers' own",
        choices=("off", "engine", "old"),
    )
    kl_penalty: float = setting(
        0.0, "advantage lost per nat of logp_samp - logp_old above its mean over the step", low=0
    )
    noise_floor_every: int = setting(
        10, "updates between measurements of the noise floor, starting with the first; 0: off", low=0, when=MEASURED
    )
    alarm_kl: float = setting(0.1, "alarm if |kl| is above [nats]", may_be_infinite=True, when=MEASURED)
    alarm_ess: float = setting(0.3, "alarm if the effective sample size is below", when=MEASURED)
    alarm_k3: float = setting(
        10.0, "alarm if k3_kl is above this multiple of the noise floor", above=0, may_be_infinite=True, when=MEASURED
    )


@dataclass
class TeacherConfig:
    source: str = setting(
        "model",
        "model: that at path; policy: the policy itself, with the current weights in its own engine and a context "
        "(self-distillation); average: a moving average of the policy, in an engine of its own; saved: scores that "
        "were saved with rollouts",
        choices=("model", "policy", "average", "saved"),
    )
    average_decay: float = setting(
        0.95, "share of the average that a step keeps; the rest is the policy", above=0, below=1, when=AVERAGED
    )
    path: str | None = setting(
        None,
        "directory or hub id of the model to distill, with the policy's tokenizer; null: no teacher of source=model",
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
    def named(self) -> str:
        """The settings that say whose scores its scores are: its source, and others that differ from their defaults."""
        names = ("average_decay", "path", "context", "solved_reward", "dtype")
        found = [(name, *declarations(self)[name]) for name in names]
        others = [f"teacher.{name}={typed(value)}" for name, declared, value in found if value != declared.default]
        return " ".join([f"teacher.source={self.source}", *others])


@dataclass
class OptimizerConfig:
    name: str = setting("adamw", "optimizer (trainer/update/optimizers/optimizer.py)", choices=OPTIMIZERS)
    lr: float | None = setting(
        None,
        "peak learning rate; null: 3e-4 for models of at most 50 M parameters, 1e-6 for larger ones, 1e-5 for their "
        "adapters",
        above=0,
    )
    critic_lr: float | None = setting(
        None,
        "peak learning rate of a critic, on the same schedule (adamw, adamw_tf, sgd); null: lr",
        above=0,
        when=CRITIC,
    )
    betas: list[float] = setting([0.9, 0.95], "Adam's moment decays", length=2, low=0, below=1)
    eps: float = setting(1e-8, "Adam's epsilon", above=0)
    momentum: float = setting(0.95, "momentum of muon and sgd", low=0, high=1, when=MOMENTUM)
    weight_decay: float = setting(0.0, "decoupled weight decay, on matrices only", low=0)
    max_grad_norm: float = setting(1.0, "global norm to which gradients are clipped; 0: no clipping", low=0)
    schedule: str = setting("constant", "learning rate after warm-up", choices=("constant", "linear", "cosine"))
    warmup_updates: int = setting(0, "updates over which the learning rate rises linearly", low=0)
    final_lr_fraction: float = setting(0.0, "end of linear and cosine, as a fraction of lr", low=0, high=1)
    max_skipped_updates: int = setting(
        5, "consecutive updates skipped for a spike or a non-finite loss or gradient before the run ends", low=1
    )
    spike: str = setting(
        "off",
        "update with a gradient norm far above earlier ones; skip: skip it, dump its batch; dump: only dump its batch",
        choices=("off", "skip", "dump"),
    )
    spike_factor: float = setting(
        10.0, "gradient norm of a spike, as a multiple of the median of earlier ones", low=1, when=SPIKES
    )
    spike_window: int = setting(64, "recent updates for the median of gradient norms", low=MIN_NORMS, when=SPIKES)

    @property
    def peak_lr(self) -> float:
        """lr with null resolved, as long as the model's size has not chosen a lower one."""
        return SMALL_MODEL_LR if self.lr is None else self.lr


@dataclass
class LoggerConfig:
    wandb: str = setting(
        "off",
        "Weights & Biases; auto: as the environment variable WANDB_MODE says, online without it",
        choices=("off", "auto", "online", "offline"),
    )
    tensorboard: bool = setting(False, "TensorBoard, with files in the run directory")
    mlflow: bool = setting(
        False, "MLflow, on the server MLFLOW_TRACKING_URI; without it in a database in the run directory"
    )
    trackio: bool = setting(
        False, "Trackio, in TRACKIO_DIR or its default, or on TRACKIO_SPACE_ID or TRACKIO_SERVER_URL"
    )
    swanlab: bool = setting(
        False, "SwanLab, as the environment variable SWANLAB_MODE says; without it offline, in the run directory"
    )
    project: str = setting("lockstep", "project of W&B, Trackio and SwanLab, experiment of MLflow", when=PROJECTS)
    entity: str | None = setting(None, "W&B entity", when=WANDB)
    wandb_id: str | None = setting(
        None, "W&B run to continue; null: that of a resumed run, a new one for a fork", when=WANDB
    )
    group: str | None = setting(None, "group of related runs; in MLflow the tag group", when=PROJECTS)
    wandb_media_every: int = setting(
        10,
        "updates between rollout tables, token views and histograms in trackers, starting with the first; 0: never",
        low=0,
    )
    wandb_rollouts: int = setting(64, "maximum number of rollouts per table in trackers", low=0)
    print_rollouts: int = setting(1, "sample rollouts printed per report", low=0)
    print_rollouts_every: int = setting(10, "updates between printed sample rollouts; 0: never", low=0)
    peak_tflops: float | None = setting(
        None,
        "peak of one device in model.dtype, for perf/mfu (bfloat16: H100 SXM 989, A100 312) [10¹² FLOP/s]; null: not "
        "reported, nor for mixtures of experts",
        above=0,
    )
    save_rollouts: bool = setting(True, "write all rollouts of each step as JSONL into the run directory")

    @property
    def trackers(self) -> list[str]:
        """Enabled trackers other than W&B. Each name is that of the setting, the Python package and the extra."""
        return [name for name in ("tensorboard", "mlflow", "trackio", "swanlab") if getattr(self, name)]

    @property
    def wandb_mode(self) -> str | None:
        """W&B's mode with auto resolved; None if W&B's own settings decide."""
        return os.environ.get("WANDB_MODE") if self.wandb == "auto" else self.wandb


@dataclass
class CheckpointConfig:
    every: int = setting(20, "updates between checkpoints; 0: only at the end and on interruption", low=0)
    keep: int = setting(2, "checkpoints kept; older ones are deleted after a new one is published", low=1)


@dataclass
class LmEvalConfig:
    tasks: list[str] = setting(
        [], "tasks of lm-eval to evaluate in place of data.heldout_path: names, patterns or files", when=EVALUATE_SCRIPT
    )
    include_path: str | None = setting(None, "directory of further task files; null: none", when=EVALUATE_SCRIPT)
    num_fewshot: int | None = setting(
        None, "examples in a prompt; null: the task's own number", low=0, when=EVALUATE_SCRIPT
    )
    apply_chat_template: bool = setting(False, "render prompts with the chat template", when=EVALUATE_SCRIPT)
    fewshot_as_multiturn: bool = setting(
        False, "with the chat template: write examples as turns of a conversation", when=EVALUATE_SCRIPT
    )
    system_instruction: str | None = setting(None, "system prompt; null: none", when=EVALUATE_SCRIPT)
    gen_kwargs: dict[str, Any] = setting(
        {}, "generation settings in place of the tasks' own, for example {max_gen_toks: 2048}", when=EVALUATE_SCRIPT
    )
    confirm_run_unsafe_code: bool = setting(
        False, "run programs of the model without isolation, for tasks that do", when=EVALUATE_SCRIPT
    )


@dataclass
class EvalConfig:
    every: int = setting(0, "updates between evaluations on held-out data, also after the last update; 0: never", low=0)
    before_training: bool = setting(False, "evaluate before the first update and after the last one")
    sets: dict[str, Any] = setting(
        {}, "further held-out data by name, with metrics eval/<name>/... (docs/evaluation.md)"
    )
    prompts: int | None = setting(128, "number of prompts from the start of each data set; null: all", low=1)
    samples_per_prompt: int = setting(1, "rollouts per held-out prompt, n of pass@k and mean@n", low=1)
    temperature: float = setting(0.0, "0: greedy", low=0)
    top_p: float = setting(1.0, "nucleus", low=0, high=1)
    top_k: int = setting(0, "0: off", low=0)
    min_p: float = setting(0.0, "0: off", low=0, high=1)
    max_tokens_per_turn: int | None = setting(
        None, "maximum number of sampled tokens per assistant turn [tokens]; null: rollout.max_tokens_per_turn", low=1
    )
    pass_threshold: float = setting(1.0, "lowest reward of a rollout that passes")
    pass_reward: str | None = setting(None, "reward function compared with pass_threshold; null: the weighted sum")
    by: str = setting("environment", "column whose values break the results down, in data that has it")
    compare_to: str | None = setting(
        None,
        "scripts/evaluate.py: model, or JSON file of its evaluation, to compare with on the same seeds",
        when=EVALUATE_SCRIPT,
    )
    output: str | None = setting(
        None, "scripts/evaluate.py: JSON file for results, with rollouts beside it as .jsonl", when=EVALUATE_SCRIPT
    )
    lm_eval: LmEvalConfig = field(default_factory=LmEvalConfig)


@dataclass
class HubConfig:
    repo: str | None = setting(None, "hub repository to upload the trained model to; null: none")
    private: bool = setting(True, "make a new repository private", when=HUB)


@dataclass
class GatewayConfig:
    host: str = setting("127.0.0.1", "address of the gateway; other machines can reach it unless it is loopback")
    port: int = setting(0, "port of the gateway; 0: any free port", low=0, high=65535)
    api_key: str | None = setting(None, "key of clients; null: a random one for each run")
    model_name: str | None = setting(None, "model name for clients; null: the last part of model.path")
    max_request_mib: float = setting(64.0, "maximum size of a request [MiB]", above=0)


@dataclass
class ServerConfig:
    host: str = setting("127.0.0.1", "address of a server; other machines can reach it unless it is loopback")
    port: int = setting(8000, "port of the server", low=1, high=65535)
    vllm_args: list[str] = setting([], "further arguments for vLLM's server, for example [--tensor-parallel-size,2]")


@dataclass
class Config:
    seed: int = setting(0, "seed of data order, sampling and initialization", low=0, high=2**32 - 1)
    updates: int = setting(80, "optimizer updates of the whole run", low=1)
    run_root: str = setting("runs", "directory that holds run directories")
    run_name: str | None = setting(None, "name of the run directory; null: experiment name and time")
    dry_run: bool = setting(
        False, "print a plan of the run (changed settings, counts, memory, two rows) and exit, without an engine"
    )
    resume: str = setting(
        "never",
        "never, auto (latest checkpoint of run_name), or the path of a checkpoint; with a new run_name it is a fork",
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
        given = self.demonstrations
        if not self.has_rollouts:
            return self.data.training_sets()
        if given.path is None:
            return {}
        return {"": DataSetConfig(path=given.path, subset=given.subset, split=given.split, columns=given.columns)}

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
    def has_critic(self) -> bool:
        """True if the advantage estimator needs a critic."""
        return advantage_named(self.algorithm.advantage).needs_critic

    def trains_critic_alone(self, update: int) -> bool:
        """Return True for the optimizer step after this many updates if it leaves the policy as it is."""
        return self.has_critic and update < self.algorithm.critic_warmup

    def ends_warmup(self, update: int) -> bool:
        """Return True for the first optimizer step after those of the critic alone."""
        return self.has_critic and 0 < self.algorithm.critic_warmup == update

    @property
    def needs_states(self) -> bool:
        """True if the advantage estimator compares turns of equal state."""
        return advantage_named(self.algorithm.advantage).needs_states

    @property
    def needs_greedy(self) -> bool:
        """True if the advantage estimator needs the greedy answer to each prompt."""
        return advantage_named(self.algorithm.advantage).needs_greedy

    @property
    def has_teacher(self) -> bool:
        """True if a teacher scores rollouts or demonstrations in the run."""
        return self.teacher.source in ("policy", "average") or (
            self.teacher.source == "model" and self.teacher.path is not None
        )

    @property
    def engine_context(self) -> int:
        """Context of the engines that sample [tokens]; one more than a row has if they also score whole rows as the
        teacher, because vLLM samples a token after those that it scores."""
        return self.rollout.max_model_len + (self.teacher.source == "policy")

    @property
    def teaches_rollouts(self) -> bool:
        """True if the loss of the rollouts has a teacher."""
        return self.has_rollouts and (self.algorithm.teacher_coef > 0 or self.algorithm.teacher_divergence != "off")

    @property
    def divergences(self) -> set[str]:
        """Kinds of divergence from a teacher in the loss."""
        return {self.algorithm.teacher_divergence, self.demonstrations.teacher_divergence} - {"off"}

    @property
    def teacher_top_k(self) -> int:
        """Number of most probable tokens that the teacher names at each position."""
        return self.algorithm.teacher_divergence_top_k if self.divergences else 0

    @property
    def replays_engine(self) -> bool:
        """True if the trainer computes with the experts that the engine chose."""
        return self.correction.routing_replay == "engine"

    @property
    def attention(self) -> str:
        """model.attn_implementation with auto resolved."""
        return "packed_rows" if self.model.attn_implementation == "auto" else self.model.attn_implementation

    @property
    def pause_mode(self) -> str:
        """sync.pause with auto resolved."""
        if self.sync.pause != "auto":
            return self.sync.pause
        return "keep" if self.rollout.max_staleness else "wait"

    @property
    def horizon(self) -> int:
        """Maximum completion length of a rollout over all of its turns [tokens]."""
        return self.algorithm.max_completion_tokens or (self.environment.max_turns * self.rollout.max_tokens_per_turn)
