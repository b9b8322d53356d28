"""Location of a mismatch: five kinds of passes of the trainer, errors at every landmark, shares, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.lab.locate.comparison import Errors, compare_all
from lockstep.lab.locate.engine_trace import EngineTrace
from lockstep.lab.locate.landmarks import LOGITS, LOGPROB, Landmark, LandmarkMap, Part, map_landmarks
from lockstep.lab.locate.probe import Pass, Probe, dense_routes
from lockstep.lab.locate.shares import divergence, log_probabilities, share
from lockstep.trainer.model.head.fused_head import FusedHead
from lockstep.trainer.model.head.logit_tiles import LogitTransform
from lockstep.trainer.model.policy import logit_settings

MIN_KL = 1e-9
"""Divergence [nats] below which nothing is named: operators at it differ by rounding that no token shows."""
PROOF_KL = 1e-10
PROOF_SHARE = 1e-3
"""With all errors injected, the trainer must be the engine: what may be left, in nats or as a share of the divergence."""


class Verdict(StrEnum):
    OK = "ok"
    """No operator leaves its floor, or the divergence is that of rounding."""
    NAMED = "named"
    UNPROVEN = "unproven"
    """The errors at the landmarks do not explain the divergence, so a name could be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One operator in all layers, and how much of the divergence its errors make."""

    operator: str
    landmarks: int
    share: float
    """Covariance share; the shares of all groups add up to 1."""
    removed: float
    """Share of the divergence that injecting these errors alone removes. Below 0 if it adds to it."""
    left: float
    """Share of the divergence that is left when all others are injected."""
    is_named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """What was found on one row."""

    verdict: Verdict
    kl: float
    """Mean KL(engine ‖ trainer) over the sampled positions, in nats, at temperature 1."""
    kl_injected: float
    """What is left of it with the errors of all operators injected."""
    errors: tuple[Errors, ...]
    """Of all landmarks, in the order of the computation."""
    groups: tuple[Group, ...]
    """By share, the largest first; empty if the divergence is that of rounding."""
    unmapped: tuple[str, ...]
    """Modules of the trainer without a landmark: an error there shows at the next landmark."""
    trace: EngineTrace

    @property
    def named(self) -> list[Errors]:
        """Operators that leave their floors, in the order of the computation: the first is where the sides part."""
        return [one for one in self.errors if one.is_named] if self.verdict is Verdict.NAMED else []


def locate(trainer: PreTrainedModel, reference: PreTrainedModel, trace: EngineTrace) -> Location:
    """Examine the trainer's model on the row of a trace.

    trainer: prepared for packs, in float32. reference: another object of the same model, which this changes: its
    parameters become float64, float32 and the engine's dtype in turn.

    Raises `ConfigError` for a model type without a map.
    """
    engine = map_landmarks(trainer, trace)
    trainer_dtype = next(trainer.parameters()).dtype
    probe = Probe(trainer, trace.ids, engine, trace.logits)
    free, forced = probe.run(), probe.run(forces=True)
    references = _reference_passes(reference, trace, engine, (torch.float64, trainer_dtype, trace.dtype))
    truth, trainer_floor, engine_floor = (_with_logprobs(reference, one, trace) for one in references)
    errors = compare_all(
        truth,
        engine=_engine_values(engine, trace, forced),
        trainer=_with_logprobs(trainer, forced, trace, is_fused=True),
        engine_floor=engine_floor,
        trainer_floor=trainer_floor,
        engine_dtype=trace.dtype,
        trainer_dtype=trainer_dtype,
    )
    target, start = log_probabilities(trace.logits), log_probabilities(free.logits)
    kl = divergence(target, start)
    if kl <= MIN_KL:
        groups, left = [], kl
    else:
        groups, left = _groups(probe, _injected(engine, trace, forced), errors, target=target, start=start)
    is_proven = left <= max(PROOF_KL, PROOF_SHARE * kl)
    has_names = kl > MIN_KL and any(one.is_named for one in errors)
    return Location(
        verdict=Verdict.OK if not has_names else Verdict.NAMED if is_proven else Verdict.UNPROVEN,
        kl=kl,
        kl_injected=left,
        errors=tuple(errors),
        groups=tuple(groups),
        unmapped=(*engine.unmapped, *sorted(f"{one.part} {one.module}" for one in probe.mismatched)),
        trace=trace,
    )


def _reference_passes(
    model: PreTrainedModel, trace: EngineTrace, engine: LandmarkMap, dtypes: Sequence[torch.dtype]
) -> list[Pass]:
    """Return forced passes in each dtype, the widest first. Buffers, such as rotary frequencies, stay wide."""
    passes: dict[torch.dtype, Pass] = {}
    for dtype in dict.fromkeys(dtypes):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(torch.promote_types(dtype, torch.float32))
        probe = Probe(model, trace.ids, engine, trace.logits, is_reference=True)
        passes[dtype] = probe.run(forces=True, is_wide=dtype is torch.float64)
    return [passes[dtype] for dtype in dtypes]


def _engine_values(engine: LandmarkMap, trace: EngineTrace, forced: Pass) -> dict[Landmark, Tensor]:
    values = dict(engine.values) | {LOGITS: trace.logits, LOGPROB: trace.sampled_logprobs[:, None]}
    for name, (weights, chosen) in engine.routes.items():
        landmark = Landmark(name, Part.ROUTES)
        if landmark in forced.values:
            values[landmark] = dense_routes(weights, chosen, forced.values[landmark].shape[1])
    return values


def _with_logprobs(
    model: PreTrainedModel, result: Pass, trace: EngineTrace, *, is_fused: bool = False
) -> dict[Landmark, Tensor]:
    """Return the values of a pass, and (n, 1) log-probabilities of the sampled tokens.

    is_fused: by the trainer's head, which never has all logits; otherwise by a plain log-softmax.
    """
    targets = torch.tensor(trace.ids[trace.num_prompt :])
    if is_fused:
        head = model.get_output_embeddings()
        assert isinstance(head, FusedHead)
        scale, softcap = logit_settings(model.config.get_text_config())
        transform = LogitTransform(temperature=trace.temperature, scale=scale, softcap=softcap)
        with torch.no_grad():
            logprobs = head(result.hidden, targets.to(result.hidden.device), transform=transform, with_entropy=False)[0]
    else:
        wide = torch.promote_types(result.logits.dtype, torch.float32)
        logits = result.logits.to(wide) / trace.temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, targets.to(logits.device)[:, None])[:, 0]
    return result.values | {LOGPROB: logprobs[:, None]}


def _injected(engine: LandmarkMap, trace: EngineTrace, forced: Pass) -> dict[Landmark, Tensor]:
    """Return e = engine − trainer of every landmark; of routes, where the engine's are put in whole."""
    values = _engine_values(engine, trace, forced)
    return {
        landmark: values[landmark].double() - own.double() for landmark, own in forced.values.items() if landmark in values
    }


def _groups(
    probe: Probe, injected: Mapping[Landmark, Tensor], errors: Iterable[Errors], *, target: Tensor, start: Tensor
) -> tuple[list[Group], float]:
    """Return operators by their shares, and the divergence that is left when all are injected."""
    named = {one.landmark.operator for one in errors if one.is_named}
    members: dict[str, list[Landmark]] = {}
    for landmark, error in injected.items():
        if error.any():
            members.setdefault(landmark.operator, []).append(landmark)

    def run(landmarks: Iterable[Landmark]) -> Tensor:
        return log_probabilities(probe.run(added={one: injected[one] for one in landmarks}).logits)

    kl = divergence(target, start)
    groups = []
    for operator, own in members.items():
        alone = run(own)
        others = run(one for name, rest in members.items() if name != operator for one in rest)
        groups.append(
            Group(
                operator=operator,
                landmarks=len(own),
                share=share(target, start, alone),
                removed=1 - divergence(target, alone) / kl,
                left=divergence(target, others) / kl,
                is_named=operator in named,
            )
        )
    everything = run(one for own in members.values() for one in own)
    return sorted(groups, key=lambda one: -abs(one.share)), divergence(target, everything)
