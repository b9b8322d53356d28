"""Settings of the rollout correction: `correction`."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.trainer.config.conditions import MEASURED, ROLLOUTS, WEIGHTS
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES
from lockstep.trainer.setting import setting


@dataclass
class CorrectionConfig:
    mode: str = setting(
        "token_truncate",
        "importance weights between engine and trainer; off: metrics only",
        choices=tuple(CORRECTION_MODES),
    )
    high: float = setting(
        2.0, "upper bound of weights, truncated to it or masked above", above=0, may_be_infinite=True, when=WEIGHTS
    )
    low: float = setting(0.0, "lower bound of weights, raised to it or masked below", low=0, when=WEIGHTS)
    batch_normalize: bool = setting(False, "divide the weights by their mean over the step", when=WEIGHTS)
    rejection: dict[str, float] = setting(
        {},
        "criterion: threshold; tokens that fail one leave loss and denominator (trainer/objective/correction/modes.py)",
        when=ROLLOUTS,
    )
    logp_old: str = setting(
        "recompute",
        "old logprobs; recompute: by the trainer; bypass: the engine's (one update per batch)",
        choices=("recompute", "bypass"),
    )
    routing_replay: str = setting(
        "off",
        "experts of a mixture of experts in the trainer's passes; engine: R3, those that the engine chose; old: R2, "
        "those of the pass for the old logprobs; off: the routers' own",
        choices=("off", "engine", "old"),
        when=ROLLOUTS,
    )
    kl_penalty: float = setting(
        0.0, "advantage lost per nat of logp_samp - logp_old above its mean over the step", low=0, when=ROLLOUTS
    )
    noise_floor_every: int = setting(
        10, "updates between measurements of the noise floor, starting with the first; 0: off", low=0, when=MEASURED
    )
    on_disagreement: str = setting(
        "end",
        "engine and trainer disagree by far more than rounding explains (|kl| above alarm_kl, or k3_kl above ten times "
        "its alarm, with the weights that sampled); end: the run ends, and its last update is saved; warn: it goes on",
        choices=("end", "warn"),
        when=MEASURED,
    )
    alarm_kl: float = setting(0.1, "alarm if |kl| is above [nats]", may_be_infinite=True, when=MEASURED)
    alarm_ess: float = setting(0.3, "alarm if the effective sample size is below", when=MEASURED)
    alarm_k3: float = setting(
        10.0, "alarm if k3_kl is above this multiple of the noise floor", above=0, may_be_infinite=True, when=MEASURED
    )
