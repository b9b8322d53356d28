"""Settings of the engines: `rollout`, and `sync`, which sends them weights."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.rollout.engine.protocol import ONLINE_SCHEMES
from lockstep.trainer.config.conditions import AHEAD, COLOCATED, EMBEDDED, OWN_ENGINES, ROLLOUTS, SERVERS
from lockstep.trainer.setting import setting

CPU_CACHE_GIB = 0.25
"""`rollout.kv_cache_gib` of engines on a CPU, unless set."""


@dataclass
class RolloutConfig:
    engine: str = setting(
        "embedded",
        "vLLM; embedded: in the process of rank 0; colocated: of each rank, on its GPU; server: at rollout.urls",
        choices=("embedded", "colocated", "server"),
    )
    urls: list[str] = setting(
        [],
        "engine=server: servers, each as http://<host>:<port>, as a file with an address per line, or as "
        "dns://<host>:<port> for all addresses of a name; files and names are read again during the run",
    )
    drivers: int | None = setting(
        None,
        "ranks that run episodes, each on its share of the servers (docs/engines.md); null: one per machine, at most "
        "one per server",
        low=1,
        when=SERVERS,
    )
    api_key_env: str | None = setting(
        "LOCKSTEP_ENGINE_KEY", "environment variable with the key of the servers; null: no key, open to all clients"
    )
    silence_timeout_s: float = setting(
        60.0, "time without any answer to waiting requests before a server counts as lost [s]", above=0, when=SERVERS
    )
    pool_timeout_s: float = setting(
        600.0, "time without any server after which the run ends; 0: at once [s]", low=0, when=SERVERS
    )
    prompts_per_step: int = setting(16, "prompts per rollout batch, over all ranks", low=1)
    samples_per_prompt: int = setting(8, "rollouts per prompt (the group size G)", low=1)
    temperature: float = setting(
        1.0, "sampling temperature; the trainer divides logits by it too", above=0, when=ROLLOUTS
    )
    top_p: float = setting(1.0, "nucleus; below 1 changes the sampling distribution", low=0, high=1)
    top_k: int = setting(0, "0: off", low=0)
    min_p: float = setting(0.0, "0: off", low=0, high=1)
    replay_support: bool = setting(
        False, "truncated sampling: normalize the trainer's logprobs over the engine's support"
    )
    max_tokens_per_turn: int = setting(48, "maximum number of sampled tokens per assistant turn [tokens]", low=1)
    max_model_len: int = setting(512, "context of the engine: prompt and completion [tokens]", low=32)
    max_num_seqs: int = setting(256, "maximum number of requests in a batch of the engine", low=1)
    kv_cache_gib: float | None = setting(
        None,
        "KV cache of an engine; null: 0.25 on a CPU, the memory plan's on the trainer's GPU, vLLM's on a server [GiB]",
        above=0,
    )
    num_engines: int = setting(1, "number of engines on a CPU, which share the cores", low=1, when=EMBEDDED)
    num_threads: int | None = setting(None, "threads of an engine on a CPU; null: cores - 1", low=1, when=EMBEDDED)
    compile_engine: bool = setting(
        False, "compile CPU engines at start: up to a minute, needs a C++ compiler (on GPUs vLLM always compiles)"
    )
    quantization: str | None = setting(
        None,
        "engine quantizes the weights that arrive, and the trainer does not (docs/engines.md); null: off. On a CPU "
        "fp8_per_channel only",
        choices=ONLINE_SCHEMES,
        when=ROLLOUTS,
        experimental="not run on a GPU yet",
    )
    batch_invariant: bool = setting(
        False,
        "vLLM's batch-invariant kernels: a request has the same logprobs in any batch, at a cost; on GPUs",
        experimental="not run on a GPU yet",
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
        when=ROLLOUTS,
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
    distributions_every: int = setting(
        0,
        "syncs per comparison of whole distributions (2 s, 19 MB at 151,936 entries; docs/diagnosis.md); 0: none",
        low=0,
    )
    timeout_s: float = setting(300.0, "time limit of each phase of a sync, on all ranks [s]", above=0)
    address: str | None = setting(
        None, "address of this machine from which servers fetch the weights; null: the one that reaches them"
    )
