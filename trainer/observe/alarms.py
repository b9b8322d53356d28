"""Alarms: messages about metrics beyond their thresholds. Notes: messages about what is well, but not useful."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.objective.correction.modes import PREFIX, QUANTIZATION_K3

K3_NEGLIGIBLE = {"float32": 1e-8, "bfloat16": 5e-3}
"""k3 below which two correct programs may differ, by `model.dtype`, with a margin of ten or more. Two float32 programs
differ by about 1e-6 per logprob, which is k3 = 1e-12; two bfloat16 programs by 2e-2, which is 4e-4 to 7e-4 (random
4-layer model). The noise of one program can be smaller or zero: another packing may round the same way."""

FAR = 10.0
"""k3_kl that ends a run, as a multiple of the one that raises an alarm."""
TF32_K3 = 5e-6
"""k3_kl of correct programs in float32 on a GPU, with a margin of ten: vLLM's Triton kernels compute attention in
TensorFloat-32, which can change logprobs by 1e-3."""

SETTINGS = {
    "kl": "correction.alarm_kl",
    "ess": "correction.alarm_ess",
    "k3_over_noise_floor": "correction.alarm_k3",
    "solved": "eval.pass_threshold",
}
"""Settings of thresholds, by field."""
DROPPED = "rollout/dropped_"
"""Prefix of the metrics that count the rollouts of a step that are not trained, by cause."""
CUT_OFF = {"truncated": "rollout.max_tokens_per_turn", "context_full": "rollout.max_model_len"}
"""Setting that cuts rollouts off, by their status."""
TOOL_CALLS, TOOL_ERRORS = "environment/tool_calls", "environment/tool_errors"
"""Metrics of tools: calls, and those that fail, per rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmThresholds:
    """Thresholds. Source of `kl`: the critical KL of "KL Divergence Analysis" (jphme, gist, 2026)."""

    kl: float = 0.1
    """Alarm if |kl| is above [nats per token]."""
    ess: float = 0.3
    """Alarm if the effective sample size is below [share of tokens]."""
    k3_over_noise_floor: float = 10.0
    """Alarm if k3_kl is above this multiple of the noise floor."""
    k3_negligible: float = 1e-8
    """No alarm if k3_kl is below, whatever the noise floor [nats per token]. See `K3_NEGLIGIBLE`."""
    token_match_rate: float = 1.0
    """Alarm if the share of trained positions with the engine's own id and logprob is below."""
    dropped: float = 0.05
    """Alarm if the share of a step's rollouts that fail is above."""
    tool_errors: float = 0.5
    """Alarm if the share of a step's tool calls that fail is above."""
    cut_off: float = 0.5
    """Share of a step's rollouts above which their limits are the likely cause of equal rewards."""
    solved: float = 1.0
    """Reward from which a rollout passes."""

    @classmethod
    def of(cls, setting: Callable[[str], Any]) -> AlarmThresholds:
        """Return the thresholds of a run; `setting` returns the value of `group.name`, or None for the default.

        Raises `ConfigError` for a threshold that is not a number, or an unknown dtype.
        """
        dtype = setting("model.dtype")
        if dtype is not None and dtype not in tuple(K3_NEGLIGIBLE):
            raise ConfigError(f"model.dtype is {dtype!r:.80}, expected one of {', '.join(K3_NEGLIGIBLE)}")
        thresholds = cls() if dtype is None else cls(k3_negligible=K3_NEGLIGIBLE[dtype])
        for field, name in SETTINGS.items():
            value = setting(name)
            if value is not None and type(value) not in (int, float):
                raise ConfigError(f"{name} is {value!r:.80}, expected a number")
            thresholds = thresholds if value is None else replace(thresholds, **{field: value})
        return thresholds


def alarms(metrics: Mapping[str, float], thresholds: AlarmThresholds) -> list[str]:
    """Return one message per alarm, in a fixed order. Absent metrics raise none."""
    names = (PREFIX + "kl", PREFIX + "ess", PREFIX + "k3_kl", "rollout/token_match_rate")
    not_finite = [name for name in names if not math.isfinite(metrics.get(name, 0.0))]
    messages = [f"{name} is {metrics[name]}: its logprobs are not finite." for name in not_finite]
    kl, ess, k3_kl, match_rate = (metrics.get(name, math.nan) for name in names)
    floor = _k3_floor(metrics)
    floor_name, of_floor = "the trainer's own noise", "the difference is more than rounding. Run lockstep diagnose."
    if QUANTIZATION_K3 in metrics:
        floor_name = "the cost of quantization in the first update"
        of_floor = (
            "it can grow as the policy moves. If sync/canary_abs_diff grew too, run lockstep diagnose; else set "
            "correction.alarm_k3=100."
        )
    lag = metrics.get(PREFIX + "version_lag_max", 0.0)
    # Comparisons with NaN are false, so absent or already reported metrics raise nothing below.
    if abs(kl) > thresholds.kl:
        cause = "sampler and trainer disagree about the sampled tokens. Run lockstep diagnose."
        if lag > 0:
            cause = f"the policy moves far in the {lag:.0f} updates between sampling and training. "
            cause += "Lower rollout.max_staleness or optimizer.lr."
        messages.append(f"|{PREFIX}kl| is {abs(kl):.4g}, above {thresholds.kl:g}: {cause}")
    if ess < thresholds.ess:
        messages.append(
            f"{PREFIX}ess is {ess:.3f}, below {thresholds.ess:g}: few tokens carry most of the correction weight. "
            "Correct per token with tighter bounds: correction=token_truncate correction.high=2."
        )
    # With version lag a difference beyond rounding is expected.
    if not lag > 0 and k3_kl > _k3_limit(metrics, thresholds):
        messages.append(
            f"{PREFIX}k3_kl is {k3_kl:.3g}, more than {thresholds.k3_over_noise_floor:g} times {floor_name} of "
            f"{floor:.3g}: {of_floor}"
        )
    if match_rate < thresholds.token_match_rate:
        messages.append(
            f"rollout/token_match_rate is {match_rate:.6g}, below {thresholds.token_match_rate:g}: tokens are trained "
            "that the engine did not sample. Run lockstep diagnose."
        )
    tools = _failed_tools(metrics, thresholds)
    if tools:
        messages.append(
            f"{TOOL_ERRORS} is {metrics[TOOL_ERRORS]:.3g} of {metrics[TOOL_CALLS]:.3g} calls per rollout: most tool "
            f"calls fail ({tools}). Read their answers with lockstep inspect-run."
        )
    limits = _limits(metrics, thresholds)
    is_fine = "teacher/kl" in metrics or _is_solved(metrics, thresholds)  # a signal without rewards, or all is learned
    if metrics.get("reward/zero_std_fraction") == 1.0 and metrics.get("reward/std") != 0.0 and not is_fine:
        entropy = metrics.get("policy/entropy", math.nan)
        repeats = (
            f"With policy/entropy {entropy:.3g} the policy may repeat itself: read some rollouts with lockstep "
            "inspect-run, and lower optimizer.lr or set algorithm=adaptive_entropy."
        )
        messages.append(
            "reward/zero_std_fraction is 1: the rollouts of each prompt have equal rewards, so none is better than "
            f"another. {limits or repeats}"
        )
    if metrics.get("reward/std") == 0.0 and not _is_solved(metrics, thresholds):
        cause = "The task is too hard for the model, or the reward does not recognize right answers."
        cause = "Mend the tools first: most of their calls fail." if tools else cause
        messages.append(
            f"reward/std is 0: every rollout of this step has the reward {metrics.get('reward/mean', math.nan):g}, so "
            f"none is better than another. {limits or cause} Read some with lockstep inspect-run."
        )
    share = metrics.get(f"{DROPPED}fraction", math.nan)
    if share > thresholds.dropped:
        messages.append(
            f"{DROPPED}fraction is {share:.3g}, above {thresholds.dropped:g}: rollouts of this step fail "
            f"({dropped(metrics)}) and are not trained. Read why with lockstep inspect-run --failed."
        )
    return messages


def _failed_tools(metrics: Mapping[str, float], thresholds: AlarmThresholds) -> str:
    """Return the faults of most tool calls with their shares, the most frequent first; "" if most calls succeed."""
    calls, errors = metrics.get(TOOL_CALLS, math.nan), metrics.get(TOOL_ERRORS, 0.0)
    if not errors > thresholds.tool_errors * calls:
        return ""
    prefix = f"{TOOL_ERRORS}_"
    faults = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    ranked = sorted((fault for fault in faults if faults[fault] > 0), key=lambda fault: -faults[fault])
    return ", ".join(f"{fault.replace('_', ' ')} {faults[fault] / errors:.0%}" for fault in ranked) or "no cause given"


def _limits(metrics: Mapping[str, float], thresholds: AlarmThresholds) -> str:
    """Return a sentence on the limits that cut most rollouts off; "" if most come to their own end."""
    shares = {status: metrics.get(f"rollout/{status}_fraction", 0.0) for status in CUT_OFF}
    if not sum(shares.values()) > thresholds.cut_off:
        return ""
    settings = [CUT_OFF[status] for status in sorted(CUT_OFF, key=lambda status: -shares[status]) if shares[status] > 0]
    return f"{sum(shares.values()):.0%} of the rollouts are cut off before their end: raise {' and '.join(settings)}."


def disagreement(metrics: Mapping[str, float], thresholds: AlarmThresholds, *, device_type: str = "cpu") -> str | None:
    """Return a sentence if engine and trainer disagree about the sampled tokens by far more than rounding, or None.

    Its metrics are the same on all ranks.
    """
    if metrics.get(PREFIX + "version_lag_max", 0.0) > 0:
        return None
    kl, k3_kl = (metrics.get(PREFIX + name, math.nan) for name in ("kl", "k3_kl"))
    k3_limit = FAR * max(_k3_limit(metrics, thresholds), TF32_K3 if device_type == "cuda" else 0.0)
    for name, value, limit in (("|kl|", abs(kl), thresholds.kl), ("k3_kl", k3_kl, k3_limit)):
        if value > limit:
            return (
                f"{name} between engine and trainer is {value:.3g} nats per token with the weights that sampled, above "
                f"{limit:.3g}: the engine computes another model, and training on would collapse the policy. Run "
                "lockstep diagnose on this run; correction.on_disagreement=warn trains on"
            )
    return None


def _k3_floor(metrics: Mapping[str, float]) -> float:
    floor = metrics.get(PREFIX + "noise_floor_k3", math.nan)
    return max(metrics[QUANTIZATION_K3], floor) if QUANTIZATION_K3 in metrics else floor


def _k3_limit(metrics: Mapping[str, float], thresholds: AlarmThresholds) -> float:
    """Return the k3_kl above which there is an alarm."""
    if math.isinf(thresholds.k3_over_noise_floor):
        return math.inf  # turned off, also over a floor of 0
    # In this order: without a measured floor, NaN, the constant holds.
    return max(thresholds.k3_negligible, thresholds.k3_over_noise_floor * _k3_floor(metrics))


def notes(metrics: Mapping[str, float], thresholds: AlarmThresholds) -> list[str]:
    """Return one message per metric that is as good as it can be."""
    if not _is_solved(metrics, thresholds):
        return []
    return [
        f"reward/mean is {metrics['reward/mean']:g}, and all rollouts of this step are solved, so none is better than "
        "another of its prompt. Harder data trains further; algorithm.dynamic_sampling=true leaves solved prompts out."
    ]


def dropped(metrics: Mapping[str, float]) -> str:
    """Return the rollouts of a step that are not trained, by cause, in words; "" for none."""
    return ", ".join(f"{cause} {count}" for cause, count in dropped_counts(metrics).items())


def dropped_counts(metrics: Mapping[str, float | None]) -> dict[str, int]:
    """Return the number of rollouts of a step that are not trained, by cause."""
    counts = {
        name.removeprefix(DROPPED): int(value or 0) for name, value in metrics.items() if name.startswith(DROPPED)
    }
    return {cause: count for cause, count in counts.items() if count and cause != "fraction"}


def _is_solved(metrics: Mapping[str, float], thresholds: AlarmThresholds) -> bool:
    is_equal = metrics.get("reward/std") == 0.0 and metrics.get("reward/mean", -math.inf) >= thresholds.solved
    return is_equal or metrics.get("reward/flat_solved_fraction") == 1.0
