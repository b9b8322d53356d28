"""Worker of tests/integration/test_disagreement.py: a run whose trainer, unlike its engine, scales queries by 1.05.

The arguments are WHEN and the words of a command line. WHEN: `loaded`, as soon as the model is loaded, or `synced`,
after the first sync.
"""

from __future__ import annotations

import sys
from typing import Any

from lockstep.trainer.cli import launch
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.run import assembly, run
from lockstep.trainer.step import Trainer


def plant(policy: Policy) -> None:
    for layer in policy.causal_lm.model.layers:
        layer.self_attn.scaling *= 1.05


def main(config: Any) -> None:
    loaded: list[Policy] = []
    load, push = assembly.load_policy, Trainer.push_weights

    def load_policy(*arguments: Any) -> Policy:
        loaded.append(load(*arguments))
        if when == "loaded":
            plant(loaded[0])
        return loaded[0]

    def push_weights(trainer: Trainer) -> Any:
        report = push(trainer)
        if when == "synced" and trainer.version == 0:
            plant(loaded[0])
        return report

    assembly.load_policy, Trainer.push_weights = load_policy, push_weights  # type: ignore[method-assign]
    run.run(config)


if __name__ == "__main__":
    when = sys.argv.pop(1)
    launch(main)
