"""Checks of the engine beside its trainer: evidence, weights, sleep, restart, scheduling."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import re
import time
from functools import partial
from typing import Any

import torch

from lockstep.rollout.errors import EngineError
from lockstep.rollout.records import EngineCall
from lockstep.rollout.weights.canary import CANARY_THRESHOLD, Canary, CanarySettings, LongRow
from lockstep.rollout.weights.checksums import describe_differences
from lockstep.rollout.weights.control_plane import ControlPlane
from lockstep.rollout.weights.source import ZeroSource
from lockstep.scripts.gpu_checks.measured import Measured, above, below, equal, unbounded
from lockstep.scripts.gpu_checks.subject import Served, Subject
from lockstep.trainer.model.start_checks.rounding import rounding_of

GIB = 2**30


def engine(subject: Subject) -> list[Measured]:
    seconds: list[float] = []
    measurements: list[Measured] = []
    for _ in range(2):
        start = time.perf_counter()
        with subject.engine() as one:
            seconds.append(time.perf_counter() - start)
            log = one.log_path.read_text(encoding="utf-8")
            measurements = [
                equal("V2 model runner", "Using V2 Model Runner" in log, True),
                equal("asynchronous scheduling", one.llm.vllm_config.scheduler_config.async_scheduling, True),
            ]
            pair = Served(subject=subject, engine=one, policy=subject.new_policy())
            pair.sample(subject.prompts(256, 32), 256)  # compiles what the first batch needs
            start = time.perf_counter()
            pair.sample(subject.prompts(256, 32), 256)
            rate = 256 * 256 / (time.perf_counter() - start)
    return [
        *measurements,
        below("first start, s", seconds[0], 150),
        below("second start, s", seconds[1], 60),
        above("tokens per second", rate, 10_000) if subject.is_fast_gpu else unbounded("tokens per second", rate),
    ]


def evidence(subject: Subject) -> list[Measured]:
    prompts, tokens = subject.prompts(subject.pick(64, 8), 24), subject.pick(256, 48)
    with subject.served() as pair:
        calls = pair.sample(prompts, tokens)
        from_scores = torch.cat([_score_differences(pair, call) for call in calls])
        head = str(pair.engine.llm.vllm_config.model_config.head_dtype).removeprefix("torch.")
        measurements = [
            *pair.agreement("sampled and scored", from_scores, calls),
            *pair.agreement("engine and trainer", pair.mismatch(calls), calls),
            equal("dtype of the engine's logits", head, "float32"),
        ]
    if subject.rehearses:
        return measurements
    with subject.served(arguments={"hf_overrides": {}}) as pair:
        rounded_mismatch = pair.mismatch(pair.sample(prompts, tokens)).mean().item()
    return [*measurements, unbounded("mean |Δ| with logits in bfloat16", rounded_mismatch)]


def _score_differences(served: Served, call: EngineCall) -> torch.Tensor:
    scores = served.engine.loop.run(served.engine.score(call.all_ids))[-len(call.sampled_ids) :]
    return (torch.tensor(scores) - torch.tensor(call.sampled_logprobs)).abs()


def transfer(subject: Subject) -> list[Measured]:
    reports, used_bytes = [], []
    with subject.served() as pair:
        for seed in range(5):
            pair.perturb(seed)
            reports.append(pair.push())
            used_bytes.append(_used_memory())
        calls = pair.sample(subject.prompts(8, 24), 24)
        agreement = pair.agreement("engine and trainer", pair.mismatch(calls), calls)
        dtype = getattr(torch, subject.dtype)
        source = ZeroSource(pair.policy.model, dtype=dtype, bucket_bytes=2**29, readers=[0])
        checksums = pair.engine.loop.run(pair.engine.weight_checksums())
        comparison = describe_differences(source, checksums)
        number = re.search(r"(\d+) of the engine's", comparison)
    rate = max(report.gb_per_s for report in reports)
    return [
        equal("versions of the tokens", str({call.oldest_version for call in calls}), "{5}"),
        below("largest canary", max(report.canary_abs_diff for report in reports), subject.pick(0.3, 1e-3)),
        *agreement,
        above("parameters compared by checksum", int(number.group(1)) if number else 0, 0),
        equal("checksums", "equal" if "equal the sent ones" in comparison else comparison, "equal"),
        above("GB/s, fastest", rate, 20) if subject.is_fast_gpu else unbounded("GB/s, fastest", rate),
        below("growth of used GPU memory after push 2, MiB", (max(used_bytes[2:]) - used_bytes[1]) / 2**20, 100),
    ]


def _used_memory() -> int:
    """Return the used bytes of the first GPU, over all processes; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def canary(subject: Subject) -> list[Measured]:
    threshold = CANARY_THRESHOLD[getattr(torch, subject.dtype)]
    ids = subject.prompts(1, 24)[0]
    with subject.served() as pair:
        before = pair.push().canary_abs_diff
        at_distance = _long_row(pair)
        with torch.no_grad():
            for parameter in pair.policy.causal_lm.get_decoder().get_submodule("layers.2").parameters():
                parameter.mul_(1.5)
        scores = torch.tensor(pair.engine.loop.run(pair.engine.score(ids)))
        difference = (scores - torch.tensor(pair.scores(ids))).abs().max().item()
        scaled_at_distance = _long_row(pair)
    return [
        below("canary with equal weights", before, threshold),
        above("canary after one layer was scaled", difference, threshold),
        below("long row with equal weights, share of what is accepted", at_distance, 0.5),
        above("long row after one layer was scaled, the same", scaled_at_distance, 1),
    ]


def _long_row(served: Served) -> float:
    """Return the largest median of a stretch of the canary's long row, as a share of the accepted one."""
    subject, engine = served.subject, served.engine
    dtype = getattr(torch, subject.dtype)
    error = rounding_of(dtype, subject.device)
    row = LongRow(tokens=subject.max_model_len - 1, score_disturbed=partial(served.scores, error=error))
    canary = Canary(served.scores, dtype=dtype, vocab_size=engine.vocab_size, settings=CanarySettings(long=row))
    engines = ControlPlane([engine], 120, is_staged=True)
    medians = canary.compare(engines, canary.expected(is_long=True))[engine.name].long
    assert medians is not None
    return medians.differences[medians.worst] / medians.limits[medians.worst]


def graphs(subject: Subject) -> list[Measured]:
    prompts = subject.prompts(64, 24)
    with subject.served() as pair:
        for seed in range(3):
            pair.perturb(seed)
            pair.push()
        calls = pair.sample(prompts, 128)
        path = subject.directory / "pushed"
        pair.policy.model.save_pretrained(path)
    with subject.engine({"enforce_eager": True}, path=path) as eager:
        other = Served(subject=subject, engine=eager, policy=pair.policy)
        differences = torch.cat([_score_differences(other, call) for call in calls])
    return other.agreement("sampled with graphs and scored eagerly", differences, calls)


def sleep(subject: Subject) -> list[Measured]:
    wakes: list[float] = []
    asleep: list[float] = []
    agreement: list[Measured] = []
    for level, rounds in ((2, 10), (1, 2)):
        with subject.served(sleep_level=level, local_place=(0, 1)) as pair:
            pair.push()
            _time_wakes(pair.engine, wakes)
            for seed in range(rounds):
                pair.sync.sleep()
                asleep.append((_used_memory() - torch.cuda.memory_reserved()) / GIB)
                filler = torch.empty(int(0.6 * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
                del filler  # stays in torch's cache, which the wake must release
                pair.perturb(seed)
                wakes.append(0.0)
                pair.push()
                calls = pair.sample(subject.prompts(8, 24), 32)
                agreement += pair.agreement(f"level {level}, wake {seed + 1}", pair.mismatch(calls), calls)
    return [
        below("slowest wake of weights and cache, s", max(wakes), 1),
        below("memory of the sleeping engine and two contexts, most, GiB", max(asleep), 3),
        *agreement,
    ]


def _time_wakes(engine: Any, seconds: list[float]) -> None:
    """Add the time of each wake of the engine to the last of `seconds`."""
    original = engine.wake

    async def wake(part: str) -> None:
        start = time.perf_counter()
        await original(part)
        seconds[-1] += time.perf_counter() - start

    engine.wake = wake


def restart(subject: Subject) -> list[Measured]:
    measurements = []
    topologies = {"embedded": {}, "colocated": {"local_place": (0, 1), "sleep_level": 2}}
    for name in subject.pick(["embedded", "colocated"], ["embedded"]):
        with subject.served(**topologies[name]) as pair:
            pair.push()
            resident = None
            if not subject.rehearses:
                resident = torch.empty(int(0.55 * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
            for process in multiprocessing.active_children():
                process.kill()
            measurements += [
                equal(f"{name}: request to the killed engine", _outcome(pair, subject), "error"),
                equal(f"{name}: started again", pair.engine.restart_if_dead(), True),
            ]
            pair.perturb(1)
            pair.sync.reconnect()
            pair.push()
            calls = pair.sample(subject.prompts(8, 24), 24)
            measurements += pair.agreement(f"{name}, afterwards", pair.mismatch(calls), calls)
            del resident
            gc.collect()
    return measurements


def _outcome(served: Served, subject: Subject) -> str:
    try:
        served.sample(subject.prompts(1, 24), 8)
    except EngineError:
        return "error"
    return "answer"


def scheduler(subject: Subject) -> list[Measured]:
    number, tokens = subject.pick((200, 1024), (24, 250))
    prompts = subject.prompts(number, 24)
    with subject.served() as pair:
        pair.push()
        calls: list[EngineCall] = []
        for head_start_s in (0.3, 0.1, 1.0, 3.0):  # on a busy machine requests may not have begun, or may have ended
            calls = pair.engine.loop.run(_frozen_under_load(pair, prompts, tokens, head_start_s))
            spans = [span for call in calls for span in call.version_spans]
            if len(spans) > len(calls):
                break
        measurements = [
            equal("tokens lost", sum(tokens - len(call.sampled_ids) for call in calls), 0),
            equal("tokens without a version", sum(map(len, (c.sampled_ids for c in calls))) - _labeled(calls), 0),
            above("requests sampled under two versions", len(spans) - len(calls), 0),
            equal("requests with a support of 20", sum(call.support is not None for call in calls), number // 2),
            *pair.agreement("engine and trainer", pair.mismatch(calls), calls),
        ]
        if not subject.rehearses:
            rates = [_decoding_rate(pair, subject, length) for length in (32, int(0.95 * subject.max_model_len))]
            measurements.append(
                above("decoding speed beside long prompts over that beside short ones", rates[1] / rates[0], 0.7)
            )
    return measurements


async def _frozen_under_load(
    served: Served, prompts: list[tuple[int, ...]], tokens: int, head_start_s: float
) -> list[EngineCall]:
    """Freeze half plain and half truncated requests, label the weights with the next version, and let them end."""
    half = len(prompts) // 2
    running = [
        asyncio.ensure_future(served.sampled(prompts[:half], tokens)),
        asyncio.ensure_future(served.sampled(prompts[half:], tokens, top_k=20)),
    ]
    await asyncio.sleep(head_start_s)
    await served.engine.pause("keep")
    served.version += 1
    await served.engine.label_weights(str(served.version))
    await served.engine.resume()
    return [call for calls in await asyncio.gather(*running) for call in calls]


def _labeled(calls: list[EngineCall]) -> int:
    return sum(span.end - span.start for call in calls for span in call.version_spans if span.version >= 1)


def _decoding_rate(served: Served, subject: Subject, length: int) -> float:
    """Return tokens per second of 200 requests beside 64 prompts of this length."""

    async def seconds() -> float:
        beside = asyncio.ensure_future(served.sampled(subject.prompts(64, length), 32))
        start = time.perf_counter()
        await served.sampled(subject.prompts(200, 24), 512)
        duration = time.perf_counter() - start
        await beside
        return duration

    return 200 * 512 / served.engine.loop.run(seconds())
