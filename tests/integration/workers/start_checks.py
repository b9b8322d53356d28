"""Worker of tests/integration/test_start_checks.py: the precision of each layer on a rank in bfloat16, by family."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks import layer_precision
from lockstep.trainer.update.updater import Updater

LENGTH = 1500


def main(directory: Path) -> None:
    distributed = Distributed.start(dtype="bfloat16", max_grad_norm=1.0)
    found = {}
    for path in sorted((directory / "models").iterdir()):
        policy = Policy.from_pretrained(path, compute_dtype="bfloat16")
        module = distributed.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
        config = Config(token_budget=LENGTH)
        config.model.path, config.model.dtype = str(path), "bfloat16"
        scorer = Updater(module, distributed, config).scorer
        worst = layer_precision.differences(
            policy, scorer.forward, length=LENGTH, dtype=torch.bfloat16, gather=distributed.whole_parameters
        )
        found[path.name] = {one.layer: one.worst for one in worst}
    (directory / f"rank{distributed.rank}.json").write_text(json.dumps(found))
    distributed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
