"""Check that the trainer's update with a loss or an advantage is the same on one rank and on two, however it is packed.

    one process ──► gradients ─┐
    two processes over gloo ───┴─► each division against one microbatch on one rank

The processes run on the CPU of this machine and meet on its loopback address. They end with this one.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from lockstep.lab.finding import Finding, failure
from lockstep.lab.losses import toy_update
from lockstep.lab.losses.examined_loss import change
from lockstep.lab.losses.toy_update import ONE_MICROBATCH, KeptGradient, RankReport, divisions_of, report_of
from lockstep.rollout.errors import ConnectionLostError, LockstepError
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.captured_output import redirect_output
from lockstep.rollout.system.orphan_guard import exit_when_orphaned

TOLERANCE = 1e-5
"""Largest relative difference of float32 gradients that should be equal."""
NUM_RANKS = (1, 2)
TIMEOUT_S = 120.0
"""Bound of the processes, which take seconds; a function that waits for other ranks could wait forever."""
LOOPBACK = "127.0.0.1"


def examine_update(algorithm: Mapping[str, Any], cause: str | None = None, *, is_loss: bool) -> Iterator[Finding]:
    """Yield the finding of each division of the update.

    Args:
        algorithm: settings of `Config.algorithm`.
        cause: of a dependence on the other tokens of a microbatch, if it is known.
        is_loss: False for an advantage.
    """
    logging.getLogger(start_processes.__module__).setLevel(logging.ERROR)  # it reports every rank that it ends
    with tempfile.TemporaryDirectory(prefix="lockstep-update-") as directory:
        contexts = [_start(num_ranks, algorithm, Path(directory)) for num_ranks in NUM_RANKS]
        try:
            deadline = time.monotonic() + TIMEOUT_S
            reports = {
                num_ranks: _joined(context, num_ranks, Path(directory), deadline)
                for num_ranks, context in zip(NUM_RANKS, contexts, strict=True)
            }
        finally:
            for process in (process for context in contexts for process in context.processes):
                process.kill()
                process.join()
    baseline = reports[1]
    if isinstance(baseline, str):
        yield failure("update, 1 rank", f"The trainer's update fails with {baseline}.")
        return
    whole = baseline.gradients[ONE_MICROBATCH.name]
    for num_ranks, report in reports.items():
        if isinstance(report, str):
            yield failure(f"update, {num_ranks} ranks", f"The trainer's update fails with {report}.")
            continue
        for division in divisions_of(num_ranks):
            if division is ONE_MICROBATCH:
                continue
            gradients = report.gradients[division.name]
            changes = {name: change(gradient, whole[name]) for name, gradient in gradients.items()}
            worst = max(changes, key=lambda name: changes[name])
            check, measurement = f"update, {division.name}", f"{changes[worst]:.0e}"
            if changes[worst] <= TOLERANCE:
                yield Finding(check=check, measured=measurement)
                continue
            because = cause or f"{'the loss' if is_loss else 'the advantage'} depends on the division of the step"
            yield failure(
                check,
                f"With {division.name} and algorithm.normalizer={worst} the gradient of the trainer's update changes "
                f"by {changes[worst]:.0%} against one microbatch: {because}.",
                measurement,
            )
    if is_loss:
        yield _at_extremes(baseline)


def _at_extremes(report: RankReport) -> Finding:
    check, norm = "update, extreme log ratios", report.extreme_norm
    assert norm is not None
    if norm < float("inf"):
        return Finding(check=check)
    return failure(
        check,
        "At log ratios of up to 1000 the gradient of the trainer's update is not finite, so the guard skips it; bound "
        "the log ratio before exp, for example by `token_ratio` of trainer/objective/losses/inputs.py.",
    )


def _start(num_ranks: int, algorithm: Mapping[str, Any], directory: Path) -> ProcessContext:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    multiprocessing.set_forkserver_preload([toy_update.__name__])  # imported once for all ranks, in five seconds
    context = start_processes(
        _run,
        (num_ranks, port, algorithm, directory),
        nprocs=num_ranks,
        join=False,
        daemon=True,
        start_method="forkserver",
    )
    assert context is not None
    return context


def _joined(context: ProcessContext, num_ranks: int, directory: Path, deadline: float) -> RankReport | str:
    """Wait for the ranks; return the report of rank 0, or what was computed when a rank failed, and the error."""
    stages = [directory / f"stage-{num_ranks}-{rank}" for rank in range(num_ranks)]
    error = f"no result within {TIMEOUT_S:g} s"
    try:
        while time.monotonic() < deadline:
            if context.join(timeout=1.0):
                return RankReport(**torch.load(directory / f"report-{num_ranks}", weights_only=True))
    except ProcessException as lost:
        error = str(lost).strip().rpartition("\n")[2]
    error_files = [path.with_suffix(".error") for path in stages if path.with_suffix(".error").is_file()]
    stage = next((path.read_text() for path in stages if path.is_file()), "the start of its processes")
    return f"{stage}: {error_files[0].read_text() if error_files else error}"


def _run(rank: int, num_ranks: int, port: int, algorithm: Mapping[str, Any], directory: Path) -> None:
    """Compute the report of a rank in a process of its own."""
    exit_when_orphaned()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if num_ranks > 1:
        of_launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(value) for name, value in of_launcher.items()}
        os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    stage = directory / f"stage-{num_ranks}-{rank}"
    try:
        with redirect_output(Path(os.devnull)), KeptGradient.start(dtype="float32", max_grad_norm=0.0) as distributed:
            report = report_of(algorithm, distributed, stage.write_text, with_extremes=num_ranks == 1)
            if distributed.is_main:
                torch.save(asdict(report), directory / f"report-{num_ranks}")
    except ConnectionLostError:
        raise  # the other rank says why
    except LockstepError as error:
        stage.with_suffix(".error").write_text(error_text(error))
        raise
