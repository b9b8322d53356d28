"""Directory of a run among the words of `lockstep evaluate`, and the command to type in its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.plain_files import behind_link
from lockstep.trainer.checks.names import run_problem
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.run.next_steps import changed_words, evaluate_command


def refuse_runs(words: Sequence[str]) -> None:
    """Raise `ConfigError` with the command that evaluates the model of a run, if a word is the run's directory.

    The user reads the command first, because it names code that the run used, which others may have written.
    """
    for word in words:
        run = behind_link(Path(word))
        if "=" in word or word.startswith("-") or not (run / "config.yaml").is_file():
            continue
        adapter = None if (run / "model/config.json").is_file() else run / "model/adapter"
        if adapter is not None and not adapter.is_dir():
            raise ConfigError(run_problem("model.path", word))
        saved = read_saved(run / "config.yaml")
        values: Any = OmegaConf.to_container(saved)
        base, by_turn = (OmegaConf.select(saved, name) for name in ("model.path", "algorithm.turn_rewards"))
        command = evaluate_command(
            changed_words(values), base=str(base or ""), model=run / "model", adapter=adapter, by_turn=by_turn is True
        )
        raise ConfigError(f"{word} is a run; to evaluate its model type: {command}")
