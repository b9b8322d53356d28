"""Plan of a recipe: its configuration, its memory, estimated hours and cost, and the machine that it needs.

The hours are an estimate. Nothing was measured on GPUs: sampling runs at the assumed tokens per second of the recipe
(`Assumed`), the update at `MFU` of `PEAK_TFLOPS`, and each rollout batch takes `FIXED_S` more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from lockstep.rollout.errors import ConfigError
from lockstep.scripts.recipes.declared import Recipe
from lockstep.trainer.checks.names import model_problems
from lockstep.trainer.compose import CONFIG_DIR, schema, to_config
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.sharding import Sharding, set_buffers
from lockstep.trainer.model.memory_plan import GIB, USABLE, MemoryPlan, cache_gib_left, memory_plan
from lockstep.trainer.model.shape import ModelShape, planned_shape, update_flops

GPU = "H100 SXM"
PEAK_TFLOPS = 989.0
"""Peak of one such GPU in bfloat16 (NVIDIA's data sheet) [10¹² FLOP/s]."""
MFU = 0.25
"""Assumed share of the peak that forward and backward passes reach."""
FIXED_S = 20.0
"""Assumed seconds of a rollout batch beside sampling and passes: weight sync, sleep and wake of engines, rewards."""
USD_PER_GPU_HOUR = 2.5
"""Assumed price."""
SERVER_TIMEOUT_S = 10.0

QWEN = {"vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
QWEN2_5 = {**QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = {**QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "num_hidden_layers": 28, "num_attention_heads": 16}


def _sizes(layers: int, hidden: int, intermediate: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2_5 | _sizes(24, 896, 4864, 14),
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN2_5 | _sizes(28, 1536, 8960, 12),
    "Qwen/Qwen2.5-3B-Instruct": QWEN2_5 | _sizes(36, 2048, 11008, 16),
    "Qwen/Qwen3-1.7B-Base": QWEN3 | _sizes(28, 2048, 6144, 16),
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_5
    | _sizes(28, 3584, 18944, 28)
    | {"vocab_size": 152064, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "Qwen/Qwen3-4B": QWEN3 | _sizes(36, 2560, 9728, 32),
    "Qwen/Qwen3-14B": QWEN3 | _sizes(40, 5120, 17408, 40) | {"tie_word_embeddings": False},
    "Qwen/Qwen3-32B": QWEN3 | _sizes(64, 5120, 25600, 64) | {"tie_word_embeddings": False},
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": QWEN3 | _sizes(28, 1024, 3072, 16),
}
"""Sizes in the config.json of models, so that a plan needs no network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """Estimated hours of a whole run, on all GPUs together, by what takes them."""

    sampling: float
    training: float
    evaluation: float
    fixed: float

    @property
    def total(self) -> float:
        return self.sampling + self.training + self.evaluation + self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    recipe: Recipe
    config: Config
    processes: int
    memory: MemoryPlan
    shape: ModelShape

    @property
    def hours(self) -> Hours | None:
        """Hours that the recipe's assumed rates give; None without them."""
        assumptions = self.recipe.assumed
        if assumptions is None:
            return None
        config, algorithm, processes = self.config, self.config.algorithm, self.processes
        rollouts = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        batches = config.updates / (algorithm.epochs * algorithm.minibatches)
        rate = assumptions.tokens_per_s * processes
        length = assumptions.sampled_tokens + assumptions.read_tokens
        flops = update_flops(self.shape, [length]) * rollouts
        # A forward pass is a third of an update: recomputed layers, old logprobs, logprobs of the reference.
        passes = algorithm.epochs * (1 + config.model.is_checkpointed / 3) + (1 + bool(algorithm.kl_coef)) / 3
        every = config.eval.every
        evaluations = (config.updates // every if every else 0) + config.eval.before_training
        return Hours(
            sampling=batches * rollouts * assumptions.sampled_tokens / rate / 3600,
            training=batches * flops * passes / (PEAK_TFLOPS * 1e12 * MFU * processes) / 3600,
            evaluation=evaluations * assumptions.heldout_rollouts * assumptions.sampled_tokens / rate / 3600,
            fixed=batches * FIXED_S / 3600,
        )

    @property
    def gpu_hours(self) -> float | None:
        hours = self.hours
        return None if hours is None else hours.total * max(1, self.recipe.gpus and self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs that a run may use."""

    gpus: int
    name: str = ""
    gpu_gib: float = 0.0
    """Memory of the smallest of them [GiB]."""


def overrides_of(recipe: Recipe, extra: tuple[str, ...] = ()) -> list[str]:
    """Return the command line of scripts/train.py, the user's own words last."""
    return [
        f"experiment={recipe.experiment}",
        *recipe.overrides,
        f"run_name=recipe-{recipe.name}",
        "resume=auto",
        *extra,
    ]


def compose_config(overrides: list[str]) -> Config:
    """Compose a configuration as scripts/train.py does. Raises Hydra's errors for a misspelled override."""
    ConfigStore.instance().store(name="schema", node=schema(Config))
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return to_config(compose("train", overrides=overrides), Config)


def shape_of(config: Config) -> ModelShape:
    """Measure the trained modules. Raises `ConfigError` without a model."""
    measure = partial(
        planned_shape,
        algorithm=config.algorithm,
        has_critic=config.plan.has_critic,
        engine_context=config.rotary_context,
    )
    sizes = MODELS.get(config.model.path)
    if sizes is None:
        for problem in model_problems(config.model, config.teacher):
            raise ConfigError(problem)
        return measure(config.model)
    with tempfile.TemporaryDirectory(prefix="lockstep-recipe-") as directory:
        Path(directory, "config.json").write_text(json.dumps(sizes))
        return measure(replace(config.model, path=directory))


def sharding_of(launch: str, processes: int) -> Sharding:
    """Return the division that a launch file of configs/accelerate/ makes."""
    stage = {"zero2": 2, "zero3": 3}.get(launch, 0)
    if not stage:
        return Sharding.of(world_size=processes, zero_stage=0, deepspeed_config=None)
    settings: dict = {}
    set_buffers(settings)
    return Sharding.of(world_size=processes, zero_stage=stage, deepspeed_config=settings)


def make_plan(recipe: Recipe, *, processes: int | None = None, extra: tuple[str, ...] = ()) -> Plan:
    """Plan a recipe. processes: None for one per GPU of the recipe."""
    config = compose_config(overrides_of(recipe, extra))
    ranks = processes or max(1, recipe.gpus)
    shape, sharding = shape_of(config), sharding_of(recipe.launch, ranks)
    return Plan(
        recipe=recipe,
        config=config,
        processes=ranks,
        memory=memory_plan(shape, config, sharding, on_gpu=bool(recipe.gpus)),
        shape=shape,
    )


def this_machine() -> Machine:
    """Return the NVIDIA GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return Machine(gpus=0)
    rows = [line.rpartition(",") for line in listing.splitlines() if "," in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(rows) if visible is None else min(len(rows), len([word for word in visible.split(",") if word.strip()]))
    if not count:
        return Machine(gpus=0)
    return Machine(gpus=count, name=rows[0][0].strip(), gpu_gib=min(float(row[2]) for row in rows) / 1024)


def refusals(plan: Plan, machine: Machine) -> Iterator[str]:
    """Yield one sentence per reason why the recipe cannot run on this machine: found, expected, what to type."""
    recipe, config = plan.recipe, plan.config
    if recipe.gpus and machine.gpus < plan.processes:
        fewer = f"--processes {machine.gpus}" if machine.gpus else "RECIPE=demo_calculator, which needs none"
        yield (
            f"found {machine.gpus} GPUs, expected {plan.processes} of {recipe.gpu_gib} GB or more; run it on such a "
            f"machine, or type make reproduce {'ARGS=' + repr(fewer) if machine.gpus else fewer}"
        )
    elif recipe.gpus:
        available = int(machine.gpu_gib * GIB)
        problem = plan.memory.advice(available=int(available * USABLE))
        if problem is not None:
            yield f"{machine.name}: {problem}. Type one of these behind ARGS="
        elif config.rollout.kv_cache_gib is None:
            try:
                cache_gib_left(plan.memory, available=available)
            except ConfigError as error:
                yield f"{machine.name}: {error}"
    missing = [name for name in recipe.packages if importlib.util.find_spec(name) is None]
    if missing:
        yield f"found no package {', '.join(missing)}, expected it for the rewards; type {recipe.install}"
    url = config.environment.settings.get("url")
    if url is not None and (problem := server_problem(str(url))):
        yield problem


def server_problem(url: str) -> str | None:
    """Return why a search server cannot be used; None if it answers a query."""
    body = json.dumps({"queries": ["capital of France"], "topk": 1, "return_scores": True}).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as response:
            json.loads(response.read())["result"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return (
            f"search server {url}: found {type(error).__name__}: {error}, expected an answer to one query; start it as "
            "docs/recipes.md says, or type ARGS='environment.settings.url=http://host:8000/retrieve'"
        )
    return None
