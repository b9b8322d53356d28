"""Collectives of two real ranks, which rank by rank give different values, and the optimizer step between them.

Started by tests/unit/trainer/distributed/test_distributed.py under torchrun. Writes DIRECTORY/rank<N>.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.rollout.errors import EngineError, LockstepError
from lockstep.trainer.distributed.distributed import Distributed, RanksDiffer
from lockstep.trainer.objective.correction import mismatch
from lockstep.trainer.objective.correction.mismatch import Spread


def error_of(distributed: Distributed, *, claim: bytes) -> str:
    try:
        distributed.gradient_norm(claim=claim)
    except RanksDiffer as error:
        return type(error).__name__
    return "none"


def backpropagate(distributed: Distributed, scale: float, *, is_last: bool = True) -> None:
    with distributed.accumulate(is_last=is_last) as backward:
        backward(scale * distributed.module(torch.ones(1, 2)).sum())


SIZES = [(0, 0), (0, 511), (512, 0), (513, 512), (512, 513), (3, 100_000), (70_000, 514)]
"""Bytes of each rank's payload, around those that travel with their length."""


def payload(rank: int, size: int) -> bytes:
    return bytes((7 * rank + place) % 251 for place in range(size))


def mismatch_in_parts(*spread: Spread) -> dict[str, float]:
    """Return the metrics of four rollouts, each a part of its own."""
    mismatch.PART_TOKENS = 5
    train_T = torch.linspace(-3, -0.1, 24)
    options = {"spread": spread[0]} if spread else {}
    return mismatch.mismatch_metrics(train_T, train_T.flip(0), torch.arange(24) // 6, 4, **options)


def spread_error(distributed: Distributed) -> str:
    def work(index: int) -> int:
        if index == 1:
            raise EngineError("part 1 fails")
        return index

    try:
        return str(distributed.spread(4, work))
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"


def main(directory: str) -> None:
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    rank = distributed.rank
    found: dict[str, Any] = {
        "sum": distributed.sum(torch.tensor([rank + 1, 10])).tolist(),
        "bytes": [len(part) for part in distributed.gather_bytes(b"x" * (5 * rank))],
        "sizes gathered": [
            distributed.gather_bytes(payload(rank, sizes[rank])) == [payload(one, sizes[one]) for one in (0, 1)]
            for sizes in SIZES
        ],
        "sizes broadcast": [
            distributed.broadcast_bytes(payload(rank, sizes[rank])) == payload(0, sizes[0]) for sizes in SIZES
        ],
        "spread": distributed.spread(5, lambda index: [index, rank, 1 / (index + 3)]),
        "statistics": mismatch_in_parts(distributed.spread) == mismatch_in_parts(),
        "failed spread": spread_error(distributed),
        "one spread": distributed.spread(1, lambda index: rank),
        "gathered": distributed.gather(torch.full((2 * rank,), 0.5 + rank, dtype=torch.float64)).tolist(),
        "none gathered": distributed.gather(torch.zeros(0)).tolist(),
        "broadcast": distributed.broadcast({"rank": rank}),
        "no bytes": len(distributed.broadcast_bytes(b"" if rank == 0 else b"mine")),
        "same claim meets": distributed.meets(b"same"),
        "another claim meets": distributed.meets(f"rank {rank}".encode()),
    }

    def fails() -> None:
        if rank == 1:
            raise EngineError("the engine is dead")

    try:
        distributed.together(fails)
    except LockstepError as error:
        found["failure"] = f"{type(error).__name__}: {error}"

    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1, bias=False)
    distributed.prepare(module, torch.optim.SGD(module.parameters()))
    with torch.no_grad():
        module.weight.zero_()
    backpropagate(distributed, 1.0 + rank, is_last=False)
    backpropagate(distributed, 3.0)
    found["claims"] = [error_of(distributed, claim=claim) for claim in (b"same", f"rank {rank}".encode())]
    norm = distributed.gradient_norm()
    found["norm"] = norm
    distributed.step(1.0, norm)
    found["weight"] = module.weight[0].tolist()

    backpropagate(distributed, 1.0)
    if rank == 1:
        assert module.weight.grad is not None
        module.weight.grad.fill_(torch.nan)
    found["norm with a nan on one rank"] = str(distributed.gradient_norm())
    distributed.discard_gradients()
    found["has gradient"] = module.weight.grad is not None
    (Path(directory) / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.close()


if __name__ == "__main__":
    main(sys.argv[1])
