"""Compiled layers on two ranks of ZeRO-3 give the gradient of one process that compiles nothing, and packs of other
lengths compile nothing after the first.

The file is its own worker, as test_policy_zero3.py, whose model, loss and launch files it takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.ranks import run_ranks
from tests.integration.test_policy_zero3 import DEEPSPEED, TEMPERATURE, ZERO3, loss_of, row_of, save_model

UPDATES, RANKS = 4, 2
RELATIVE_TOLERANCE = 1e-5
MOST_GRAPHS = 10


def rows_of(update: int) -> list[Any]:
    """Return four rows, two for each rank, of lengths that no other update has."""
    rng = np.random.default_rng(update)
    rows = []
    for index in range(2 * RANKS):
        length = 9 + 7 * update + 5 * index
        mask = np.arange(length) > 3
        rows.append(row_of(rng.integers(0, 512, length), mask, index))
    return rows


def worker(directory: Path, lora_rank: str) -> None:
    import torch
    from deepspeed.utils import safe_get_full_grad

    from lockstep.trainer.batch.packing import StepLayout, collate
    from lockstep.trainer.config.groups.model_settings import LoraConfig
    from lockstep.trainer.distributed.distributed import Distributed
    from lockstep.trainer.model.layers.compiled import num_graphs
    from lockstep.trainer.model.policy import Policy

    lora = LoraConfig(rank=int(lora_rank), alpha=8)

    def load(*, is_compiled: bool) -> Policy:
        torch.manual_seed(0)  # for the adapters
        # With checkpointing transformers gives the output of a frozen embedding a gradient.
        checkpoints = lora.rank == 0
        policy = Policy.from_pretrained(
            directory / "model", lora=lora, is_compiled=is_compiled, gradient_checkpointing=checkpoints
        )
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:  # zero at first, and then A has no gradient
                torch.nn.init.constant_(parameter, 0.1)
        return policy

    reference = load(is_compiled=False)
    expected = []
    for update in range(UPDATES):
        rows = rows_of(update)
        layout = StepLayout.of(rows)
        reference.zero_grad()
        loss_of(reference, collate(rows, range(len(rows))), layout.num_tokens, 1.0).backward()
        expected.append({n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None})

    distributed = Distributed.start(dtype="float32", max_grad_norm=0.0)
    policy = load(is_compiled=True)
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    module = distributed.prepare(policy, torch.optim.SGD(trained.values(), lr=0.0))
    errors, graphs = [], []
    for update in range(UPDATES):
        rows = rows_of(update)
        layout = StepLayout.of(rows)
        packed = collate(rows, [2 * distributed.rank, 2 * distributed.rank + 1], layout)
        with torch.no_grad():
            module(packed, temperature=TEMPERATURE)
        with distributed.accumulate(is_last=True) as backward:
            backward(loss_of(module, packed, layout.num_tokens, RANKS))
        assert trained.keys() == expected[update].keys(), "frozen weights have a gradient, or others have none"
        found = {name: safe_get_full_grad(parameter) for name, parameter in trained.items()}
        errors.append(
            max(float((found[name] - own).norm() / own.norm()) for name, own in expected[update].items())  # type: ignore[operator]
        )
        distributed.step(0.0, distributed.gradient_norm())
        graphs.append(num_graphs())
    if distributed.is_main:
        (directory / "report.json").write_text(json.dumps({"errors": errors, "graphs": graphs}))
    distributed.close()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora_rank", [0, 4], ids=["weights", "adapters"])
def test_compiled_layers_under_zero3_give_the_gradient_of_one_process(
    lora_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    save_model(tmp_path, tied=True)
    (tmp_path / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    # Partitioned when loaded, and when prepared.
    init = "false" if lora_rank else "true"
    (tmp_path / "accelerate.yaml").write_text(ZERO3.format(deepspeed=tmp_path / "deepspeed.json", init=init))
    launcher = ("accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml"))
    result = run_ranks((*launcher, "--main_process_port", "0"), __file__, tmp_path, str(lora_rank), timeout_s=800)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert max(report["errors"]) <= RELATIVE_TOLERANCE, report
    assert 0 < report["graphs"][0] <= MOST_GRAPHS, report
    assert report["graphs"] == [report["graphs"][0]] * UPDATES, "packs of other lengths were compiled"


if __name__ == "__main__":
    worker(Path(sys.argv[1]), sys.argv[2])
