"""Location of a mismatch: five kinds of passes of the trainer, errors at every landmark, shares, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
"""Divergence [nats] that an operator's error must make to be named: below it, no token shows it."""
PROOF_KL = 1e-10
PROOF_SHARE = 1e-3
"""Divergence that may be left with all errors injected, which make the trainer the engine: in nats, or as a share."""
SUM_TOLERANCE = 0.5
"""Distance of the sum of all shares from 1 in a model without experts, beyond which the map is wrong."""
MAX_CANDIDATES = 64
"""Operators outside of their floors whose effect is measured, each by a forward pass, in the order of the computation.
"""


class Verdict(StrEnum):
    OK = "ok"
    """No operator both leaves its floor and moves the probabilities."""
    NAMED = "named"
    UNPROVEN = "unproven"
    """The errors at the landmarks do not explain the divergence, or they cancel where there is none, as those of two
    operators do that the map confuses: a name could be wrong."""


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
    """Result of one row."""

    verdict: Verdict
    kl: float
    """Mean KL(engine ‖ trainer) over the sampled positions, in nats, at temperature 1."""
    kl_injected: float
    """Divergence that is left with the errors of all operators injected."""
    errors: tuple[Errors, ...]
    """All landmarks, in the order of the computation."""
    named: tuple[Errors, ...]
    """Landmarks that leave their floors with an effect, in the order of the computation: at the first the sides part.
    """
    groups: tuple[Group, ...]
    """By share, the largest first; empty if the divergence is that of rounding."""
    unmapped: tuple[str, ...]
    """Modules of the trainer without a landmark: an error there shows at the next landmark."""
    trace: EngineTrace


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
    injection = _Injection(probe, engine, trace, free=free, forced=forced)
    parting = _with_effect(errors, injection)
    has_effect = injection.kl > MIN_KL
    left = injection.left(injection.errors)
    groups = _groups(injection, {one.landmark.operator for one in parting}) if has_effect else []
    is_proven = left <= max(PROOF_KL, PROOF_SHARE * injection.kl) if has_effect else not _move(parting)
    if groups and not engine.routes:  # experts that flip make the divergence anything but quadratic
        is_proven = is_proven and abs(sum(group.share for group in groups) - 1) < SUM_TOLERANCE
    return Location(
        verdict=Verdict.UNPROVEN if not is_proven else Verdict.NAMED if parting else Verdict.OK,
        kl=injection.kl,
        kl_injected=left,
        errors=tuple(errors),
        named=tuple(parting) if is_proven else (),
        groups=tuple(groups),
        unmapped=(*engine.unmapped, *sorted(f"{one.part} {one.module}" for one in probe.mismatched)),
        trace=trace,
    )


def _move(errors: Iterable[Errors]) -> bool:
    """Return True if errors move the distributions. All of them come before the log-softmax."""
    return any(one.landmark != LOGPROB for one in errors)


class _Injection:
    """The trainer's own pass with errors e = engine − trainer added, which are local: on the engine's inputs."""

    def __init__(self, probe: Probe, engine: LandmarkMap, trace: EngineTrace, *, free: Pass, forced: Pass) -> None:
        self._probe = probe
        values = _engine_values(engine, trace, forced)
        errors = {one: values[one].double() - own.double() for one, own in forced.values.items() if one in values}
        self.errors = {landmark: error for landmark, error in errors.items() if error.any()}
        self.target, self.start = log_probabilities(trace.logits), log_probabilities(free.logits)
        self.kl = divergence(self.target, self.start)

    def run(self, landmarks: Iterable[Landmark]) -> Tensor:
        """Return (n, V) log-probabilities with the errors of these landmarks."""
        return log_probabilities(self._probe.run(added={one: self.errors[one] for one in landmarks}).logits)

    def left(self, landmarks: Iterable[Landmark]) -> float:
        """Return the divergence from the engine that is left with the errors of these landmarks."""
        return divergence(self.target, self.run(landmarks))

    def effect(self, landmarks: Iterable[Landmark]) -> float:
        """Return the divergence that the errors of these landmarks alone make."""
        return divergence(self.start, self.run(landmarks))


def _with_effect(errors: Sequence[Errors], injection: _Injection) -> list[Errors]:
    """Return the landmarks outside of their floors whose operator, in its layer, makes a divergence by itself.

    The log-softmax comes after the distributions that are compared, so it needs no effect on them.
    """
    places: dict[tuple[str, int | None], list[Errors]] = {}
    for one in errors:
        if one.leaves_floor:
            places.setdefault((one.landmark.operator, one.landmark.layer), []).append(one)
    parting: list[Errors] = []
    for (operator, layer), members in list(places.items())[:MAX_CANDIDATES]:
        own = [one for one in injection.errors if (one.operator, one.layer) == (operator, layer)]
        if operator == LOGPROB.operator or injection.effect(own) > MIN_KL:
            parting += members
    return sorted(parting, key=errors.index)


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
    for name, (weights, experts) in engine.routes.items():
        landmark = Landmark(name, Part.ROUTES)
        if landmark in forced.values:
            values[landmark] = dense_routes(weights, experts, forced.values[landmark].shape[1])
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


def _groups(injection: _Injection, named: set[str]) -> list[Group]:
    """Return operators by their shares of the divergence."""
    members: dict[str, list[Landmark]] = {}
    for landmark in injection.errors:
        members.setdefault(landmark.operator, []).append(landmark)
    groups = []
    for operator, own in members.items():
        alone = injection.run(own)
        others = [one for one in injection.errors if one.operator != operator]
        groups.append(
            Group(
                operator=operator,
                landmarks=len(own),
                share=share(injection.target, injection.start, alone),
                removed=1 - divergence(injection.target, alone) / injection.kl,
                left=injection.left(others) / injection.kl,
                is_named=operator in named,
            )
        )
    return sorted(groups, key=lambda one: -abs(one.share))
