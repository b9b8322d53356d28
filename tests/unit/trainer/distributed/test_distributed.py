"""Ranks: collectives, errors that reach all, the optimizer step, saved state, and stale build locks.

Two real ranks over gloo, and ranks in threads (tests/fixtures/distributed.py). Reduction under ZeRO is tested in
tests/integration/test_gradients.py.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.rollout.errors import (
    CheckpointError,
    ConfigError,
    ConnectionLostError,
    EngineError,
    LockstepError,
)
from lockstep.trainer.distributed import distributed
from lockstep.trainer.distributed.distributed import Distributed, choose_interface, drop_stale_build_locks
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.ranks import TORCHRUN, reports

# Two real ranks: tests/integration/workers/collectives.py


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks from the same calls."""
    return reports(TORCHRUN, "tests.integration.workers.collectives", tmp_path_factory.mktemp("ranks"), timeout_s=280)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sum", [3, 20]),
        ("bytes", [0, 5]),
        ("gathered", [1.5, 1.5]),
        ("none gathered", []),
        ("broadcast", {"rank": 0}),
        ("no bytes", 0),
        ("statistics", True),
        ("failed spread", "EngineError: part 1 fails"),
        ("spread", [[index, index % 2, 1 / (index + 3)] for index in range(5)]),
        ("sizes gathered", [True] * 7),
        ("sizes broadcast", [True] * 7),
        ("same claim meets", True),
        ("another claim meets", False),
        ("failure", "EngineError: the engine is dead"),
        ("claims", ["none", "RanksDiffer"]),
        ("norm with a nan on one rank", "inf"),
        ("has gradient", False),
    ],
)
def test_all_ranks_get_the_same(ranks: list[dict[str, Any]], name: str, expected: Any) -> None:
    assert [found[name] for found in ranks] == [expected, expected]


@pytest.mark.distributed
def test_a_single_part_is_made_by_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert [found["one spread"] for found in ranks] == [[0], [1]]


@pytest.mark.distributed
def test_gradients_are_averaged_over_ranks_summed_over_microbatches_and_clipped(ranks: list[dict[str, Any]]) -> None:
    gradient = (1.0 + 2.0) / 2 + 3.0  # of each of the two weights
    for found in ranks:
        assert found["norm"] == pytest.approx(gradient * math.sqrt(2))
        assert found["weight"] == pytest.approx([-1 / math.sqrt(2)] * 2)  # a norm of 1


# One rank, without processes


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    """The only rank, with the real optimizer step of `Distributed`."""
    rank = FakeRank(nn.Linear(2, 1, bias=False))
    monkeypatch.setattr(FakeRank, "step", Distributed.step)
    monkeypatch.setattr(rank, "_max_grad_norm", 1.0)
    return rank


def test_collectives_of_one_rank_return_its_own_value() -> None:
    rank = FakeRank()
    tensor = torch.ones(2, 3)
    for found in (Distributed.sum(rank, tensor), Distributed.gather(rank, tensor)):
        assert found is tensor
    assert Distributed.gather_bytes(rank, b"x") == [b"x"]
    assert Distributed.broadcast(rank, {"a": math.inf}) == {"a": math.inf}


def test_an_update_of_the_critic_alone_keeps_the_bits_of_the_policy(alone: Distributed) -> None:
    module = nn.ModuleDict({"policy": nn.Linear(1, 1), "critic": nn.Linear(1, 1)})
    groups = [
        {"params": list(module["policy"].parameters())},
        {"params": list(module["critic"].parameters()), distributed.IS_CRITIC: True, distributed.LR_SCALE: 10.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.1)
    alone.prepare(module, optimizer)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for parameter in module["policy"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    for parameter in module["critic"].parameters():
        parameter.grad = torch.ones_like(parameter)
    alone.step(0.01, alone.gradient_norm(), critic_only=True)
    assert {name: torch.equal(value, before[name]) for name, value in module.named_parameters()} == {
        name: name.startswith("policy") for name in before
    }
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert not alone.is_stepping


def test_a_step_that_fails_stays_marked(alone: Distributed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(alone._optimizer, "step", fail)
    with pytest.raises(RuntimeError):
        alone.step(0.01, alone.gradient_norm())
    assert alone.is_stepping, "some parameters may be updated and others not"


# Errors of one rank reach all


def raised_by_ranks(failure: BaseException) -> list[BaseException]:
    """The error that each of two ranks raises when work fails on rank 0."""

    def run(rank: FakeRank) -> BaseException:
        def work() -> None:
            if rank.is_main:
                raise failure

        with pytest.raises(type(failure) if rank.is_main else LockstepError) as raised:
            rank.together(work)
        return raised.value

    return on_ranks(2, run)


@pytest.mark.parametrize("kind", [EngineError, ConfigError])
def test_an_error_of_another_rank_has_its_type_and_its_message(kind: type[LockstepError]) -> None:
    _, found = raised_by_ranks(kind("the engine: is dead\nlog"))
    assert type(found) is kind
    assert str(found) == "the engine: is dead\nlog"


def test_an_error_of_another_type_names_the_rank_that_failed() -> None:
    _, found = raised_by_ranks(ZeroDivisionError("division by zero"))
    assert type(found) is LockstepError
    assert str(found) == "rank 0 failed: ZeroDivisionError: division by zero"


def test_the_rank_that_failed_raises_its_own_error() -> None:
    own = ValueError("mine")
    assert raised_by_ranks(own)[0] is own


def test_every_rank_gets_its_own_result() -> None:
    assert on_ranks(2, lambda rank: rank.together(lambda: rank.rank)) == [0, 1]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ValueError("a model wrote \ud800"), "rank 0 failed: ValueError: a model wrote \\ud800"),
        (EngineError("answered \x1b[2J\udfff"), "answered \\x1b[2J\\udfff"),
        (Unprintable(), "rank 0 failed: Unprintable: (its message cannot be printed)"),
        (ValueError(), "rank 0 failed: ValueError: "),
        (SystemExit(3), "rank 0 failed: SystemExit: 3"),
    ],
    ids=["surrogate", "engine", "unprintable", "empty", "exit"],
)
def test_no_failure_is_lost_whatever_its_text(failure: BaseException, expected: str) -> None:
    own, found = raised_by_ranks(failure)
    assert own is failure
    assert str(found) == expected


def test_a_rank_does_not_wait_for_one_whose_error_is_very_long() -> None:
    _, found = raised_by_ranks(ValueError("begin" + "x" * 10_000_000 + "end"))
    assert len(str(found)) < 30_000
    assert str(found).endswith("end")


def test_a_failed_rank_leaves_process_groups_open_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(FakeRank, "close", lambda self: closed.append(self.world_size))
    for world_size in (1, 2):
        with FakeRank(world_size=world_size):
            pass
        with pytest.raises(EngineError), FakeRank(world_size=world_size):
            raise EngineError("dead")
    assert closed == [1, 1, 2], "closing waits for ranks that are in a collective"


# Saved state


class Wrapper(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_a_tied_head_are_written_once(tmp_path: Path, tied: bool) -> None:
    """ZeRO-2 gives copies of the parameters, in which tied ones no longer share their memory."""
    module = Wrapper(tiny_qwen3(tied=tied))
    rank = FakeRank(module)
    copies = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rank._accelerator.get_state_dict = lambda _: copies  # type: ignore[method-assign]
    rank.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in written) is not tied
    ids = torch.tensor([[5, 6, 7]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, module.model(ids).logits)


def test_optimizer_state_is_read_on_a_cpu_with_an_index(tmp_path: Path) -> None:
    """Accelerate names the CPU of a DDP rank cpu:0, which torch.load does not know."""
    saved = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    FakeRank(saved, optimizer).save_state(tmp_path)

    module = nn.Linear(2, 2)
    rank = FakeRank(module, torch.optim.AdamW(module.parameters()))
    rank.device = torch.device("cpu", 0)
    rank.load_state(tmp_path)
    restored = rank._optimizer.state_dict()["state"]
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(restored[index][name], value) for name, value in state.items())


def test_state_of_another_model_or_another_launch_is_refused(tmp_path: Path) -> None:
    rank = FakeRank(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"holds no .*resume with the config it was saved with"):
        rank.load_state(tmp_path)
    rank.save_state(tmp_path)
    with pytest.raises(CheckpointError, match="bias"):
        FakeRank(nn.Linear(2, 2, bias=False)).load_state(tmp_path)


def test_the_settings_of_an_optimizer_are_those_of_the_run_that_resumes(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    FakeRank(module, torch.optim.AdamW(module.parameters(), weight_decay=0.5)).save_state(tmp_path)
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.1)
    FakeRank(module, optimizer).load_state(tmp_path)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


# Start


@pytest.mark.parametrize(
    ("environment", "address", "expected"),
    [
        ({}, "10.0.0.1", None),
        ({"MASTER_ADDR": "127.0.0.1"}, "10.0.0.1", None),
        ({"MASTER_ADDR": "node-a"}, "10.0.0.1", "eth7"),
        ({"MASTER_ADDR": "node-a", "GLOO_SOCKET_IFNAME": "mine"}, "10.0.0.1", "mine"),
        ({"MASTER_ADDR": "node-a", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "127.0.1.1", "eth7"),
    ],
    ids=["alone", "one machine", "network", "chosen by the user", "own name"],
)
def test_gloo_uses_the_interface_towards_rank_0(
    environment: dict[str, str], address: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "address_towards", lambda master: address)
    monkeypatch.setattr(distributed, "interface_of", lambda address: "eth7")
    choose_interface(environment)
    assert environment.get("GLOO_SOCKET_IFNAME") == expected


def test_an_address_that_other_machines_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "address_towards", lambda master: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"--main_process_ip node-a is loopback on this machine \(127\.0\.1\.1\)"):
        choose_interface({"MASTER_ADDR": "node-a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})


def test_only_locks_too_old_to_have_an_owner_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    stale, fresh = tmp_path / "shm_comm" / "lock", tmp_path / "adam" / "lock"
    for lock in (stale, fresh):
        lock.parent.mkdir()
        lock.touch()
    os.utime(stale, (time.time() - 3600,) * 2)
    drop_stale_build_locks()
    assert not stale.exists()
    assert fresh.exists()


# Lost connections

GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
GUESS = ". This is typically caused by a remote worker crashing. Check the logs"


@pytest.mark.parametrize(
    ("text", "address", "what"),
    [
        ("Connection closed by peer [10.0.0.2]:54692", "10.0.0.2", "Connection closed by peer"),
        ("Read error [10.0.0.2]:14563: Connection reset by peer", "10.0.0.2", "Connection reset by peer"),
        ("Connection closed by peer [fd00::2]:54692", "fd00::2", "Connection closed by peer"),
    ],
)
def test_a_lost_connection_is_a_sentence_with_the_notes_of_its_error(text: str, address: str, what: str) -> None:
    error = RuntimeError(f"{GLOO}{text}{GUESS}")
    error.add_note("no update is saved")
    with pytest.raises(ConnectionLostError) as caught:
        Distributed.__exit__(cast("Distributed", SimpleNamespace(rank=3, world_size=4)), None, error, None)
    lost = caught.value
    assert str(lost).startswith(f"rank 3: the connection to a rank at {address} is lost ({text}): its process or its")
    assert what in str(lost)
    assert vars(lost)["__notes__"] == ["no update is saved"]


@pytest.mark.parametrize("text", ["a tensor has the wrong size", f"{GLOO}Timed out waiting 1000ms for send operation"])
def test_other_errors_stay_as_they_are(text: str) -> None:
    Distributed.__exit__(cast("Distributed", SimpleNamespace(rank=3, world_size=4)), None, RuntimeError(text), None)
