"""Curated charts of a run, by section: the one list that the live page and the report show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Metrics that share an axis."""

    title: str
    curves: Mapping[str, str]
    """Regular expression of whole metric names by the name of the curve, in which `*` becomes the first group."""
    meaning: str
    """Advice for the reader, in sentences."""
    unit: str = ""
    limits: tuple[float | None, float | None] = (None, None)
    """Values that the axis must include."""
    is_log: bool = False
    is_split: bool = False
    """True if each metric has a chart of its own on the live page."""
    hides_zeros: bool = False
    """True if metrics that are always 0 are left out."""
    band: str = ""
    """Metric with the half width of a band around the first curve, on the report."""
    dashed: tuple[str, ...] = ()
    """Curves to compare the others with."""
    threshold: str = ""
    """Field of `AlarmThresholds` that is drawn as a line on the report."""

    def metrics(self, names: Iterable[str]) -> dict[str, str]:
        """Return the metric of each curve that is among the names, in the order of the curves."""
        metrics: dict[str, str] = {}
        ordered = sorted(names)
        for curve, pattern in self.curves.items():
            for name in ordered:
                if match := re.fullmatch(pattern, name):
                    star = match.group(1) or "" if match.re.groups else ""
                    metrics[curve.replace("*", star.replace("_", " ")).strip()] = name
        return metrics


SHARE = (0.0, 1.0)
POSITIVE = (0.0, None)

SECTIONS: Mapping[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel(
            title="Reward",
            curves={"mean": "reward/mean"},
            meaning="Mean over the rollouts of the step. It should rise.",
            limits=POSITIVE,
            band="reward/std",
        ),
        Panel(
            title="Held-out reward",
            curves={"held out *": "eval/(?:(.+)/)?reward_mean"},
            meaning="If it falls while the reward rises, the model learns the reward and not the task.",
            limits=POSITIVE,
            is_split=True,
        ),
        Panel(
            title="Reward functions",
            curves={"*": "reward/(?!errors/)(.+)/mean"},
            meaning="Mean of each function before its weight. One that rises while others fall may be gamed.",
            is_split=True,
        ),
        Panel(
            title="Prompts without signal",
            curves={"solved by all": "reward/flat_solved_fraction", "failed by all": "reward/flat_failed_fraction"},
            meaning="Equal rewards teach nothing. Solved by all: take harder data. Failed by all: easier data.",
            unit="share of prompts",
            limits=SHARE,
        ),
        Panel(
            title="Difficulty of the data",
            curves={
                "unseen": "data/unseen_share",
                "too hard": "data/too_hard_share",
                "in between": "data/between_share",
                "solved": "data/solved_share",
            },
            meaning="By the pass rate of each row in the window of the curriculum.",
            unit="share of rows",
            limits=SHARE,
        ),
    ),
    "Rollouts": (
        Panel(
            title="Length",
            curves={"mean": "rollout/sampled_tokens_mean", "longest": "rollout/sampled_tokens_max"},
            meaning="Sampled tokens of a rollout. Growth without reward is padding.",
            unit="tokens",
            limits=POSITIVE,
        ),
        Panel(
            title="How episodes end",
            curves={
                "truncated": "rollout/truncated_fraction",
                "completed": "rollout/completed_fraction",
                "max turns": "rollout/max_turns_fraction",
                "context full": "rollout/context_full_fraction",
                "failed": "rollout/failed_fraction",
            },
            meaning="More truncated rollouts: raise the token limit, or penalize length.",
            unit="share of rollouts",
            limits=POSITIVE,
            hides_zeros=True,
        ),
        Panel(
            title="Rollouts that are not trained",
            curves={"*": "rollout/dropped_(?!fraction$)(.+)"},
            meaning="By cause. More than 5 % failures of a step are an alarm.",
            unit="rollouts",
            limits=POSITIVE,
            hides_zeros=True,
        ),
        Panel(
            title="Turns",
            curves={"per rollout": "rollout/turns"},
            meaning="Calls of the model in a rollout.",
            limits=POSITIVE,
        ),
        Panel(
            title="Tools",
            curves={"calls": "environment/tool_calls", "errors": "environment/tool_errors"},
            meaning="Errors that do not fall: the model has not learned the form of a call.",
            unit="per rollout",
            limits=POSITIVE,
        ),
    ),
    "Optimization": (
        Panel(
            title="Entropy",
            curves={"policy": "policy/entropy"},
            meaning="Half of its first value in a few steps: the policy may collapse.",
            unit="nats",
            limits=POSITIVE,
        ),
        Panel(
            title="KL from the reference",
            curves={"kl": "objective/kl"},
            meaning="A steep rise without reward: lower the learning rate or raise the penalty.",
            unit="nats per rollout",
            limits=POSITIVE,
        ),
        Panel(
            title="KL of the update",
            curves={"kl": "policy/approx_kl"},
            meaning="From the policy before the step's updates, over the trained tokens.",
            unit="nats per token",
            limits=POSITIVE,
        ),
        Panel(
            title="KL from the teacher",
            curves={"kl": "teacher/kl"},
            meaning="It should fall towards its noise floor.",
            unit="nats per token",
        ),
        Panel(
            title="Clipped ratios",
            curves={
                "all": "policy/clip_frac",
                "low": "policy/clip_low_frac",
                "high": "policy/clip_high_frac",
                "dual": "policy/dual_clip_frac",
            },
            meaning="Large shares: the policy moves far within a step.",
            unit="share of tokens",
            limits=POSITIVE,
        ),
        Panel(
            title="Gradient norm",
            curves={"before clipping": "optim/grad_norm"},
            meaning="Peaks far above the median come from rare batches; look at the rollouts of that step.",
            limits=POSITIVE,
        ),
        Panel(
            title="Learning rate",
            curves={"learning rate": "optim/lr"},
            meaning="As scheduled.",
            limits=POSITIVE,
        ),
        Panel(
            title="Loss",
            curves={"*": "loss/(?!.*_(?:weight|tokens|entropy|rest)$)(.+)"},
            meaning="By component, before its weight. That of a policy says little about learning.",
        ),
        Panel(
            title="Skipped updates",
            curves={"so far": "health/skipped_updates"},
            meaning="Updates that were refused because loss or gradient were not finite or too large.",
            limits=POSITIVE,
            hides_zeros=True,
        ),
        Panel(
            title="Value function",
            curves={"explained variance": "value/explained_variance"},
            meaning="1: the critic knows the returns; below 0: worse than their mean.",
            limits=(None, 1.0),
        ),
        Panel(
            title="Load-balancing loss",
            curves={"before its weight": "router/aux_loss"},
            meaning="Of the routers of experts.",
            limits=POSITIVE,
        ),
        Panel(
            title="Unused experts",
            curves={"over all layers": "router/unused_experts"},
            meaning="Experts that no trained token of the step was routed to.",
            limits=POSITIVE,
        ),
        Panel(
            title="Load of experts",
            curves={"busiest expert": "router/load_max", "standard deviation": "router/load_cv"},
            meaning="Trained tokens per expert, in the worst layer.",
            unit="mean loads",
            limits=POSITIVE,
        ),
    ),
    "Engine against trainer": (
        Panel(
            title="|kl|",
            curves={
                "engine against trainer": "rollout_correction/kl",
                "noise floor": "rollout_correction/noise_floor_kl",
            },
            meaning="Mean difference of the logprobs of the same sampled tokens.",
            unit="nats per token",
            is_log=True,
            dashed=("noise floor",),
            threshold="kl",
        ),
        Panel(
            title="k3",
            curves={
                "engine against trainer": "rollout_correction/k3_kl",
                "noise floor": "rollout_correction/noise_floor_k3",
            },
            meaning="Noise floor: the trainer against itself in another packing; zero is drawn at the bottom.",
            unit="nats per token",
            is_log=True,
            dashed=("noise floor",),
        ),
        Panel(
            title="|Δ log π|",
            curves={
                "largest": "rollout_correction/logp_diff_abs_max",
                "mean": "rollout_correction/logp_diff_abs_mean",
            },
            meaning="Differences of single tokens.",
            unit="nats",
            is_log=True,
        ),
        Panel(
            title="Effective sample size",
            curves={"after correction": "rollout_correction/ess", "raw": "rollout_correction/raw_ess"},
            meaning="Share of tokens that effectively train under the correction weights.",
            unit="share of tokens",
            limits=SHARE,
            dashed=("raw",),
        ),
        Panel(
            title="Clipped weights",
            curves={"clipped": "rollout_correction/clipped_frac"},
            meaning="Correction weights at their bound.",
            unit="share of tokens",
            limits=POSITIVE,
        ),
        Panel(
            title="Staleness",
            curves={"largest": "rollout_correction/version_lag_max", "mean": "rollout_correction/version_lag_mean"},
            meaning="Age of the weights that sampled the trained tokens.",
            unit="updates",
            limits=POSITIVE,
        ),
        Panel(
            title="Flipped routes",
            curves={"flipped": "router/flipped_frac"},
            meaning="Sets of experts that the trainer's routers would not have chosen.",
            unit="share of (layer, token)",
            limits=POSITIVE,
        ),
        Panel(
            title="Canary after each sync",
            curves={"largest |Δ log π|": "sync/canary_abs_diff"},
            meaning="Scores of one sequence by engine and trainer after the new weights arrived.",
            unit="nats",
            is_log=True,
        ),
    ),
    "Speed": (
        Panel(
            title="Tokens per second",
            curves={
                "step": "perf/tokens_per_s",
                "rollouts": "perf/generated_tokens_per_s",
                "training": "perf/trained_tokens_per_s",
            },
            meaning="Sampled tokens over the time of the step and of its rollouts; trained ones over that of training.",
            unit="tokens/s",
            limits=POSITIVE,
        ),
        Panel(
            title="Seconds per step",
            curves={
                "rollout": "time/rollout",
                "reward": "time/reward",
                "teacher": "time/teacher",
                "data": "time/data",
                "wait": "time/wait",
                "score": "time/score",
                "update": "time/update",
                "sync": "time/sync",
                "step": "time/step",
            },
            meaning="Time by stage.",
            unit="s",
            limits=POSITIVE,
            dashed=("step",),
            hides_zeros=True,
        ),
        Panel(
            title="Idle trainer",
            curves={"idle": "perf/idle_frac"},
            meaning="Share of the step in which the trainer waits.",
            unit="share of time",
            limits=SHARE,
        ),
        Panel(
            title="Memory",
            curves={"device": "perf/device_gib", "process": "perf/process_gib"},
            meaning="Of rank 0: the most that the step allocated on its GPU, and the process after the step.",
            unit="GiB",
            limits=POSITIVE,
        ),
        Panel(
            title="Rollouts made ahead",
            curves={"in flight": "rollout/inflight", "waiting": "rollout/queue"},
            meaning="With rollout.max_staleness: rollouts that the engine samples, and complete ones.",
            unit="rollouts",
            limits=POSITIVE,
        ),
    ),
}
