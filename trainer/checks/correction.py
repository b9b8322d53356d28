"""Conflicts between settings of the rollout correction, and with stale rollouts (`rollout.max_staleness`)."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.rollout.environments import declared_parts
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.outputs_settings import GatewayConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig
from lockstep.trainer.config.hints import closest
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES, REJECTION_CRITERIA
from lockstep.trainer.objective.own.lookup import policy_loss_named
from lockstep.trainer.setting import typed


def correction_problems(correction: CorrectionConfig, algorithm: AlgorithmConfig, model: ModelConfig) -> Iterator[str]:
    """Yield one sentence per conflict."""
    if not correction.low < correction.high:
        yield (
            f"correction.low={correction.low} and correction.high={correction.high} must satisfy low < high; set "
            "correction.low=0.5 correction.high=2.0"
        )
    elif correction.mode.endswith("_mask") and not correction.low <= 1 <= correction.high:
        yield (
            f"correction.low={correction.low} and correction.high={correction.high} exclude 1, the weight of a token "
            f"that engine and trainer agree on, so correction.mode={correction.mode} would train on disagreements "
            "only; set correction.low=0.5 correction.high=2.0"
        )
    has_weights = CORRECTION_MODES[correction.mode].control is not None
    if correction.logp_old == "bypass":
        yield from _bypass(correction, algorithm, has_weights=has_weights)
    if has_weights and policy_loss_named(algorithm.loss).weighs_by_sampling:
        yield from _unweighted(correction, algorithm.loss)
    if correction.routing_replay != "off":
        yield from _replay(correction, algorithm, model)
    for name, threshold in correction.rejection.items():
        if name not in REJECTION_CRITERIA:
            yield (
                f"correction.rejection: {name} is not one of {', '.join(REJECTION_CRITERIA)}"
                f"{closest(name, list(REJECTION_CRITERIA))}; set 'correction.rejection={{seq_mean_k3: 0.01}}'"
            )
        elif name.endswith("_k1") and not threshold > 1:
            yield (
                f"correction.rejection.{name}={threshold} is an upper bound of a ratio, its inverse the lower one: it "
                f"must be greater than 1; set correction.rejection.{name}=2.0"
            )
        elif not threshold > 0:
            setting = f"correction.rejection.{name}"
            yield f"{setting}={threshold} must be greater than 0; set {setting}=0.01"


def _unweighted(correction: CorrectionConfig, loss: str) -> Iterator[str]:
    """Yield settings of weights, if the ratio of the loss takes their place."""
    default = CorrectionConfig()
    for name in ("mode", "high", "low", "batch_normalize"):
        if (value := getattr(correction, name)) != getattr(default, name):
            yield (
                f"correction.{name}={typed(value)} has no effect with algorithm.loss={loss}, whose ratio is to the "
                f"engine's policy and carries the mismatch; set correction.{name}={typed(getattr(default, name))}, or "
                "algorithm.loss=ppo_clip"
            )


def _replay(correction: CorrectionConfig, algorithm: AlgorithmConfig, model: ModelConfig) -> Iterator[str]:
    """Yield settings with which routes cannot be replayed, or not to any effect."""
    replay = f"correction.routing_replay={correction.routing_replay}"
    if model.attention != "packed_rows":
        yield (
            f"{replay} needs the attention packed_rows, which hands each layer its pack, found "
            f"model.attn_implementation={model.attention}; set model.attn_implementation=auto"
        )
    if correction.routing_replay == "engine":
        return
    if correction.logp_old == "bypass":
        yield (
            f"{replay} replays the pass for the old logprobs, which correction.logp_old=bypass leaves out; set "
            "correction.logp_old=recompute, or correction.routing_replay=engine"
        )
    elif algorithm.epochs * algorithm.minibatches == 1:
        yield (
            f"{replay} has no effect with one update per rollout batch, whose own pass computes the old logprobs; set "
            "algorithm.minibatches=2, or correction.routing_replay=engine"
        )


def _bypass(correction: CorrectionConfig, algorithm: AlgorithmConfig, *, has_weights: bool) -> Iterator[str]:
    """Yield settings that need the trainer's logprobs before the update."""
    updates = algorithm.epochs * algorithm.minibatches
    if updates > 1:
        yield (
            "correction.logp_old=bypass needs one update per rollout batch, but algorithm.epochs x "
            f"algorithm.minibatches = {updates}; set correction.logp_old=recompute"
        )
    if has_weights:
        yield (
            f"correction.mode={correction.mode} has no effect with correction.logp_old=bypass, where the ratio of the "
            "loss carries the mismatch; set correction=bypass, or correction.logp_old=recompute"
        )
    if not policy_loss_named(algorithm.loss).has_ratio:
        yield (
            "correction.logp_old=bypass corrects the mismatch by the ratio of the loss, but algorithm.loss="
            f"{algorithm.loss} has no ratio; set correction.logp_old=recompute, or algorithm.loss=ppo_clip"
        )
    if algorithm.kl_coef and algorithm.kl_place == "reward":
        yield (
            "algorithm.kl_place=reward compares the trainer's logprobs with the reference's, which "
            "correction.logp_old=bypass does not compute before the update; set algorithm.kl_place=loss, or "
            "correction.logp_old=recompute"
        )
    settings = {"kl_penalty": (bool(correction.kl_penalty), "0"), "rejection": (bool(correction.rejection), "{}")}
    for name, (is_set, off) in settings.items():
        if is_set:
            yield (
                f"correction.{name} compares the engine's logprobs with the trainer's, which "
                "correction.logp_old=bypass does not compute before the update; set correction.logp_old=recompute, or "
                f"'correction.{name}={off}'"
            )


def asynchrony_problems(
    staleness: int, correction: CorrectionConfig, algorithm: AlgorithmConfig, *, pause: str
) -> Iterator[str]:
    """Yield one sentence per conflict with rollouts of this staleness, which is not 0. pause: `sync.pause`."""
    updates = algorithm.epochs * algorithm.minibatches
    if staleness < updates:
        yield (
            f"rollout.max_staleness={staleness} is less than the algorithm.epochs x algorithm.minibatches = {updates} "
            "updates of one step, so rollouts sampled ahead would be too old; "
            f"set rollout.max_staleness={updates}, or rollout.max_staleness=0"
        )
    if correction.logp_old == "bypass":
        yield (
            f"rollout.max_staleness={staleness} needs old logprobs by the trainer beside those of the sampling "
            "weights, found correction.logp_old=bypass; set correction.logp_old=recompute"
        )
    if CORRECTION_MODES[correction.mode].control is None:
        yield (
            f"rollout.max_staleness={staleness} trains on tokens of older policies, which correction.mode="
            f"{correction.mode} does not weight; set correction.mode=token_truncate, or rollout.max_staleness=0"
        )
    if pause == "abort":
        yield (
            f"sync.pause=abort aborts the requests in flight of rollout.max_staleness={staleness} at every update; set "
            "sync.pause=keep"
        )


def gateway_problems(gateway: GatewayConfig, environment: EnvironmentConfig, *, every: int) -> Iterator[str]:
    """Yield one sentence if rollouts in flight keep the gateway's port from an evaluation. every: `eval.every`."""
    parts = declared_parts(environment.name, environment.settings)
    if gateway.port and every and any(part.uses_gateway for _, _, part in parts):
        yield (
            f"gateway.port={gateway.port} is in use by rollouts in flight when an evaluation begins; "
            "set gateway.port=0 for any free port, or eval.every=0"
        )
