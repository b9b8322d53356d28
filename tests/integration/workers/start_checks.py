"""Worker of tests/integration/test_start_checks.py: one long row in bfloat16 under a launcher, by family.

Writes to DIRECTORY/rank<N>.json the difference of each layer from its computation in float32, and the median difference
of the log-probabilities in each part of the row from transformers' own model: eager attention, whole logits, float32,
with the weights as the launcher holds them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks import layer_precision
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.update.updater import Updater

LENGTH = 1500
PARTS = 4


def plain_logprobs(path: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the log-probabilities of ids[1:]. dtype: to which the weights are rounded first."""
    with Distributed.whole_models():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    row = torch.tensor([ids])
    with torch.no_grad():
        logprobs = model(row).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, row[0, 1:, None])[:, 0]


def medians(scorer: Scorer, path: Path, vocab_size: int, dtype: torch.dtype) -> list[float]:
    """Return the median difference in nats of each part of a row."""
    ids = torch.randint(vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        logprobs, *_ = scorer.forward(collate([whole_row(ids)], [0], device="cpu"))
    differences = (logprobs.float() - plain_logprobs(path, ids, dtype)).abs()
    return [part.median().item() for part in differences.chunk(PARTS)]


def main(directory: Path) -> None:
    distributed = Distributed.start(dtype="bfloat16", max_grad_norm=1.0)
    report = {}
    for path in sorted((directory / "models").iterdir()):
        policy = Policy.from_pretrained(path, compute_dtype="bfloat16")
        module = distributed.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
        config = Config(token_budget=LENGTH)
        config.model.path, config.model.dtype = str(path), "bfloat16"
        scorer = Updater(module, distributed, config).scorer
        layers = layer_precision.differences(
            policy, scorer.forward, length=LENGTH, dtype=torch.bfloat16, gather=distributed.whole_parameters
        )
        held = next(policy.parameters()).dtype
        report[path.name] = {
            "layers": {layer.layer: layer.worst for layer in layers},
            "logprobs": medians(scorer, path, policy.vocab_size, held),
        }
    (directory / f"rank{distributed.rank}.json").write_text(json.dumps(report))
    distributed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
