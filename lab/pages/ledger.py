"""Ledger of evidence of a run: what is exact, what is corrected, and what is only measured.

Each entry is one way in which sampling and training may part. It follows from the settings of the run, and has the
worst numbers that the run has logged about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import lockstep.trainer.objective.losses  # noqa: F401  # declares the losses
from lockstep.lab.pages.chart import number
from lockstep.lab.pages.saved_run import nested
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.objective.correction.modes import PREFIX, QUANTIZATION_K3
from lockstep.trainer.objective.declare import POLICY_LOSSES
from lockstep.trainer.observe.metrics_log import metrics_lines

SUMMARY = "evidence/"
"""Prefix of the entries in W&B's summary."""


class Treatment(StrEnum):
    EXACT = "exact"
    """The trainer takes over what the engine did, or the engine what the trainer sent."""
    CORRECTED = "corrected"
    """Weights or bounds of the loss account for it."""
    MEASURED = "only measured"
    UNACCOUNTED = "not accounted for"


BADGES = {
    Treatment.EXACT: "ok",
    Treatment.CORRECTED: "ok",
    Treatment.MEASURED: "warning",
    Treatment.UNACCOUNTED: "critical",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Worst value of a metric over the run."""

    metric: str
    worst: Callable[[Sequence[float]], float] = max
    exact: float | None = None
    """Value that it must have in every step."""

    def text(self, values: Sequence[float | None]) -> str:
        """Return metric, worst value and number of steps. values: of the steps that logged it; None: not finite."""
        finite = [value for value in values if value is not None]
        if not values:
            return f"{self.metric}: no value"
        lost = f", {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
        steps = f"{len(values)} step{'s' if len(values) > 1 else ''}{lost}"
        if not finite:
            return f"{self.metric}: {steps}"
        return f"{self.metric}: {number(self.worst(finite))} at worst in {steps}"

    def holds(self, values: Sequence[float | None]) -> bool:
        """Return False if a step contradicts the treatment; one without a trained token has no finite value."""
        return self.exact is None or all(value in (self.exact, None) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    subject: str
    treatment: Treatment
    how: str
    measures: tuple[Measure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An entry with its numbers."""

    entry: Entry
    evidence: str
    holds: bool

    @property
    def badge(self) -> str:
        """Style of its badge on a page."""
        return BADGES[self.entry.treatment] if self.holds else "critical"

    @property
    def text(self) -> str:
        """The line for W&B's summary."""
        entry = self.entry
        refuted = "" if self.holds else "CONTRADICTED; "
        return f"{refuted}{entry.treatment}: {entry.how}" + (f" ({self.evidence})" if self.evidence else "")


def largest_size(values: Sequence[float]) -> float:
    return max(values, key=abs)


def ledger(setting: Callable[[str], Any], values: Callable[[str], Sequence[float | None]]) -> list[Line]:
    """Return the ledger of a run.

    setting: returns the value of `group.name`, None if the run's version had none. values: returns those of a metric,
    one per step that logged it; None: not finite.
    """
    return [
        Line(
            entry=entry,
            evidence="; ".join(measure.text(values(measure.metric)) for measure in entry.measures),
            holds=all(measure.holds(values(measure.metric)) for measure in entry.measures),
        )
        for entry in entries(setting, is_logged=lambda metric: bool(values(metric)))
    ]


def wandb_summary(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the ledger by subject for W&B's summary (entry point `lockstep.summary`).

    directory: of the run. config: its settings, nested.
    """
    path = RunDirectory(directory).metrics
    lines = list(metrics_lines(path)) if path.is_file() else []
    texts = ledger(lambda name: nested(config, name), lambda metric: [one[metric] for one in lines if metric in one])
    return {SUMMARY + line.entry.subject: line.text for line in texts}


def entries(setting: Callable[[str], Any], is_logged: Callable[[str], bool]) -> Iterator[Entry]:
    """Yield the entries of a run; none for one that trains on demonstrations alone.

    is_logged: returns True for a metric that some step has.
    """
    if setting("algorithm.trains_on") != "rollouts":
        return
    yield Entry(
        subject="token ids and logprobs",
        treatment=Treatment.EXACT,
        how="trained tokens and their sampling logprobs are those of the engine's record",
        measures=(Measure(metric="rollout/token_match_rate", worst=min, exact=1.0),),
    )
    yield from _support(setting)
    yield from _experts(setting, is_logged)
    if _number(setting("model.images.max_per_prompt")) > 0:
        yield Entry(
            subject="images",
            treatment=Treatment.EXACT,
            how="the trainer reads the pixels that the engine read, found by their hash",
            measures=(Measure(metric="sync/canary_image_diff"),),
        )
    yield from _weights(setting, is_logged)
    yield from _versions(setting)
    yield _difference(setting)
    yield from _updates(setting)
    yield Entry(
        subject="rollouts left out",
        treatment=Treatment.MEASURED,
        how="rollouts that failed are not trained, and no weight accounts for them",
        measures=(Measure(metric="rollout/dropped_fraction"), Measure(metric="rollout/trained_fraction", worst=min)),
    )


def _support(setting: Callable[[str], Any]) -> Iterator[Entry]:
    cuts = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    values = {name: setting(f"rollout.{name}") for name in cuts}
    cut = ", ".join(f"{name}={value}" for name, value in values.items() if value not in (None, cuts[name]))
    if cut:
        is_replayed = bool(setting("rollout.replay_support"))
        yield Entry(
            subject="sampling support",
            treatment=Treatment.EXACT if is_replayed else Treatment.UNACCOUNTED,
            how=f"the trainer's logprobs are over the tokens that sampling kept ({cut})"
            if is_replayed
            else f"sampling kept a part of the vocabulary ({cut}), and the trainer's logprobs are over all of it",
        )


def _experts(setting: Callable[[str], Any], is_logged: Callable[[str], bool]) -> Iterator[Entry]:
    replay = setting("correction.routing_replay")
    flipped = (Measure(metric="router/flipped_frac"),)
    if replay == "engine":
        how = "the trainer computes with the experts that the engine chose"
        yield Entry(subject="experts", treatment=Treatment.EXACT, how=how, measures=flipped)
    elif replay == "old" or is_logged("router/load_max"):
        how = "engine and trainer each choose their own experts; what that changes is in rollout_correction/kl"
        measures = flipped if replay == "old" else ()
        yield Entry(subject="experts", treatment=_difference(setting).treatment, how=how, measures=measures)


def _weights(setting: Callable[[str], Any], is_logged: Callable[[str], bool]) -> Iterator[Entry]:
    metrics = ("sync/canary_abs_diff", *filter(is_logged, ("sync/canary_long_diff", "sync/distribution_kl")))
    canary = tuple(Measure(metric=metric) for metric in metrics)
    scheme, rank = setting("rollout.quantization"), _number(setting("model.lora.rank"))
    if scheme:
        yield Entry(
            subject="weights",
            treatment=_difference(setting).treatment,
            how=f"the engine rounds the weights that arrive to {scheme}, the trainer does not",
            measures=(*canary, Measure(metric=QUANTIZATION_K3)),
        )
        return
    what = f"adapters of rank {rank} (model.lora.send={setting('model.lora.send')})" if rank else "all weights"
    dtype = setting("model.dtype")
    rounded = "" if dtype == "float32" else f", rounded to {dtype}"
    yield Entry(
        subject="weights",
        treatment=Treatment.EXACT,
        how=f"each sync sends {what}{rounded}; checked by version, and by a canary where one was scored",
        measures=canary,
    )


def _versions(setting: Callable[[str], Any]) -> Iterator[Entry]:
    staleness = _number(setting("rollout.max_staleness"))
    yield Entry(
        subject="weight versions",
        treatment=_difference(setting).treatment if staleness else Treatment.EXACT,
        how=f"tokens are sampled by weights up to {staleness} updates old"
        if staleness
        else "tokens are sampled by the weights that the step begins with",
        measures=(Measure(metric=PREFIX + "version_lag_max", exact=None if staleness else 0.0),),
    )


def _difference(setting: Callable[[str], Any]) -> Entry:
    mode, floor = setting("correction.mode"), Measure(metric=PREFIX + "noise_floor_k3")
    measures = (Measure(metric=PREFIX + "kl", worst=largest_size), Measure(metric=PREFIX + "k3_kl"))
    subject = "engine against trainer"
    if setting("correction.logp_old") == "bypass":
        how = "the ratio of the loss is to the engine's logprobs (correction.logp_old=bypass)"
        return Entry(subject=subject, treatment=Treatment.CORRECTED, how=how, measures=measures)
    policy_loss = POLICY_LOSSES.get(str(setting("algorithm.loss")))
    if policy_loss is not None and policy_loss.weighs_by_sampling:
        how = f"the ratio of the loss {setting('algorithm.loss')} is to the policy that sampled"
        return Entry(subject=subject, treatment=Treatment.CORRECTED, how=how, measures=measures)
    if mode == "none":
        return Entry(subject=subject, treatment=Treatment.UNACCOUNTED, how="correction.mode=none")
    if mode == "off":
        return Entry(
            subject=subject, treatment=Treatment.MEASURED, how="correction.mode=off", measures=(*measures, floor)
        )
    ess = Measure(metric=PREFIX + "ess", worst=min)
    rejection = setting("correction.rejection")
    limits = rejection.items() if isinstance(rejection, Mapping) else ()
    rejected = "".join(f"; rejection {name}={limit}" for name, limit in limits)
    how = f"importance weights {mode}, bounds {setting('correction.low')} and {setting('correction.high')}{rejected}"
    return Entry(subject=subject, treatment=Treatment.CORRECTED, how=how, measures=(*measures, floor, ess))


def _number(value: Any) -> float:
    """Return a setting that is a number; 0 for what else a damaged config.yaml holds."""
    return value if type(value) in (int, float) else 0


def _updates(setting: Callable[[str], Any]) -> Iterator[Entry]:
    updates = _number(setting("algorithm.epochs")) * _number(setting("algorithm.minibatches"))
    if updates < 2:
        return
    loss = str(setting("algorithm.loss"))
    policy_loss = POLICY_LOSSES.get(loss)
    has_ratio = policy_loss is not None and policy_loss.has_ratio
    if has_ratio:
        how = f"the loss {loss} has the ratio to the policy before the batch"
    elif policy_loss is None:
        how = f"whether the loss {loss} has the ratio to the policy before the batch, only its file says"
    else:
        how = f"the loss {loss} has no ratio to the policy before the batch"
    yield Entry(
        subject="later updates of a batch",
        treatment=Treatment.CORRECTED if has_ratio else Treatment.UNACCOUNTED,
        how=f"{updates} updates of each batch; {how}",
        measures=(Measure(metric="policy/clip_frac"),) if has_ratio else (),
    )
