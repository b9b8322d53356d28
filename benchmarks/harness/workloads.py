"""Workloads that Lockstep and TRL both train on, and their models.

    equal       the demo: turns of nearly the same length (multi-turn), or exactly (single-turn, no end token)
    lognormal   turns with a log-normal number of tokens (`long_winded.py`)
    real        SmolLM2-135M-Instruct on tasks of reasoning-gym, in one turn, or in several with a tool (real_tools)
    real_long   SmolLM2-135M-Instruct, one turn: answers of exactly 128 tokens to short prompts of which those of
                different groups differ from the first block of the KV cache on, so that they share nothing

In both trainers the model decides the lengths; only `fixed_tokens` forces them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.long_winded import make_long_winded_model

if TYPE_CHECKING:
    from lockstep.trainer.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
PEER_ENGINES = ("transformers", "paged", "vllm")
"""Engines of TRL's generation; paged: its continuous batching; vllm: in its process."""
SENTENCE = Path(__file__).parent / "sentence.py"
ODD_LENGTH = Path(__file__).parent / "random_reward.py"
TOOL_TOKENS = 24
"""Longest answer of the tools, with the tokens around it."""
SAME_UPDATE = ("optimizer.schedule=constant", "optimizer.warmup_updates=0", "algorithm.advantage_eps=1e-4")
"""Settings that TRL cannot express otherwise: a rate that falls to a share of itself, and another epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task of the demo, a model and a batch, shared by both sides."""

    name: str
    task: str
    """Data, environment and reward."""
    max_turns: int
    is_long_winded: bool = False
    micro_batch: int | None = None
    """Rollouts in one pass of TRL; None: the whole batch."""
    is_engine_compiled: bool = True
    fixed_tokens: int | None = None
    """Every turn has exactly this many tokens; None: the model ends its turns."""
    max_tokens_per_turn: int = 48
    prompts: int = 16
    samples_per_prompt: int = 8
    learning_rate: float = 3e-4
    """Almost 0 where lengths must not change: at the demo's rate they fall to a third in four updates."""

    @property
    def batch(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def model_path(self) -> Path:
        return ROOT / "models" / (f"{self.task}-long-winded" if self.is_long_winded else self.task)

    @property
    def data_path(self) -> Path:
        return ROOT / "data" / "demo" / self.task / "train.jsonl"

    @property
    def max_model_len(self) -> int:
        return 160 + self.max_turns * (self.max_tokens_per_turn + TOOL_TOKENS)

    def settings(self) -> list[str]:
        """Return the overrides of a run of Lockstep on this workload; `trl_side.py` translates them."""
        return [
            f"model={self.task}",
            f"data={self.task}",
            f"environment={self.task}",
            f"model.path={self.model_path}",
            f"data.path={self.data_path}",
            f"data.heldout_path={self.data_path.with_name('heldout.jsonl')}",
            f"environment.max_turns={self.max_turns}",
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.samples_per_prompt={self.samples_per_prompt}",
            f"rollout.max_tokens_per_turn={self.max_tokens_per_turn}",
            f"rollout.max_model_len={self.max_model_len}",
            f"rollout.ignore_eos={str(self.fixed_tokens is not None).lower()}",
            f"reward.functions=[{SENTENCE}:right_sentence]",
            "reward.isolation=thread",
            f"optimizer.lr={self.learning_rate}",
            *SAME_UPDATE,
        ]

    def prepare(self) -> None:
        """Make the model and its data if they are missing."""
        from rich.console import Console

        from lockstep.demo.make import make_demo

        console = Console(file=sys.stderr)
        make_demo(self.task, ROOT / "models" / self.task, self.data_path.parent, 0, console)
        if self.is_long_winded:
            make_long_winded_model(self.task, ROOT / "models" / self.task, self.model_path, console)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="single_equal", task="reverse", max_turns=1, fixed_tokens=64, max_tokens_per_turn=64),
        Workload(
            name="single_lognormal",
            task="reverse",
            max_turns=1,
            is_long_winded=True,
            max_tokens_per_turn=256,
            learning_rate=1e-8,
        ),
        Workload(name="multi_equal", task="calculator", max_turns=3),
        Workload(
            name="multi_lognormal",
            task="calculator",
            max_turns=3,
            is_long_winded=True,
            max_tokens_per_turn=256,
            learning_rate=1e-8,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealWorkload:
    """SmolLM2-135M-Instruct on a task of reasoning-gym, as an experiment of the repository trains it."""

    name: str
    experiment: str
    task: str
    """Name of the task in `demo/real/tasks.py`."""
    micro_batch: int = 4
    """Rollouts in one pass of TRL: with 8 an update takes 1.1 times as long, with 16 twice."""
    is_engine_compiled: bool = False
    """Compiling takes minutes, and large matrices gain little."""

    @property
    def model_path(self) -> Path:
        return ROOT / "models" / "smollm2-135m-instruct"

    def settings(self) -> list[str]:
        """Return the overrides of a run of Lockstep on this workload; `trl_side.py` translates them."""
        return [
            f"experiment={self.experiment}",
            f"model.path={self.model_path}",
            f"data.path={ROOT}/data/real/{self.task}/train.jsonl",
            f"data.heldout_path={ROOT}/data/real/{self.task}/heldout.jsonl",
            "rollout.prompts_per_step=8",  # with 16 x 8 rollouts TRL takes minutes per update
            "rollout.samples_per_prompt=4",
            "reward.isolation=thread",
            *SAME_UPDATE,
        ]

    def prepare(self) -> None:
        """Make the model and its data if they are missing."""
        command = [sys.executable, "scripts/make_real_model.py", "--task", self.task]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongAnswers:
    """SmolLM2-135M-Instruct with long answers to short prompts."""

    name: str
    tokens: int
    """Tokens of every answer."""
    micro_batch: int = 4
    is_engine_compiled: bool = False
    rows: int = 512

    @property
    def model_path(self) -> Path:
        return ROOT / "models" / "smollm2-135m-instruct"

    @property
    def data_path(self) -> Path:
        return ROOT / "data" / "real" / "long" / "train.jsonl"

    def settings(self) -> list[str]:
        """Return the overrides of a run of Lockstep on this workload; `trl_side.py` translates them."""
        return [
            "experiment=real",
            f"model.path={self.model_path}",
            f"data.path={self.data_path}",
            "data.heldout_path=null",
            "eval.before_training=false",
            "eval.every=0",
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            f"rollout.max_tokens_per_turn={self.tokens}",
            "rollout.ignore_eos=true",
            f"reward.functions=[{ODD_LENGTH}:odd_length]",
            "reward.isolation=thread",
            *SAME_UPDATE,
        ]

    def prepare(self) -> None:
        """Make the model and the rows if they are missing."""
        command = [sys.executable, "scripts/make_real_model.py", "--model-only"]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
        self.data_path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            [
                {"role": "system", "content": f"{number} is your number."},  # without it the template writes the same
                {"role": "user", "content": f"Tell a long story about {number} cats."},
            ]
            for number in range(self.rows)
        ]
        self.data_path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


AnyWorkload = Workload | RealWorkload | LongAnswers
COMPARED: dict[str, AnyWorkload] = {
    **WORKLOADS,
    "real": RealWorkload(name="real", experiment="real", task="names"),
    "real_tools": RealWorkload(name="real_tools", experiment="real_calculator", task="calculator"),
    "real_long": LongAnswers(name="real_long", tokens=128),
}
"""Workloads that `compare_trl.py` can run."""


def configuration(settings: Sequence[str]) -> Config:
    """Return the checked settings of a run with these overrides."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from lockstep.trainer.checks.validate import validate
    from lockstep.trainer.compose import CONFIG_DIR, schema, to_config

    ConfigStore.instance().store(name="schema", node=schema())
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = to_config(compose("train", overrides=list(settings)))
    validate(config)
    return config
