"""Settings of the rollout correction that contradict each other, or that nothing would act on."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.hints import closest
from trainer.config.schema import REJECTIONS, Config


def correction_problems(config: Config) -> Iterator[str]:
    """One sentence per contradiction."""
    correction = config.correction
    has_weights = correction.mode not in ("off", "none")
    if correction.logp_old == "bypass":
        yield from _bypass(config, has_weights=has_weights)
    if correction.batch_normalize and not has_weights:
        yield (
            f"correction.batch_normalize=true has no weights to divide under correction.mode={correction.mode}; "
            "set correction.mode=token_truncate or correction.batch_normalize=false"
        )
    for name, threshold in correction.rejection.items():
        if name not in REJECTIONS:
            yield (
                f"correction.rejection: {name} is not one of {', '.join(REJECTIONS)}{closest(name, REJECTIONS)}; "
                "set 'correction.rejection={seq_mean_k3: 0.01}'"
            )
        elif name.endswith("_k1") and not threshold > 1:
            yield (
                f"correction.rejection.{name}={threshold} bounds a ratio from above, and from below by its inverse: it "
                f"must be greater than 1; set correction.rejection.{name}=2.0"
            )
        elif not threshold > 0:
            setting = f"correction.rejection.{name}"
            yield f"{setting}={threshold} must be greater than 0; set {setting}=0.01"


def _bypass(config: Config, *, has_weights: bool) -> Iterator[str]:
    """What needs the trainer's own logprobs from before the update."""
    correction, algorithm = config.correction, config.algorithm
    updates = algorithm.epochs * algorithm.minibatches
    if updates > 1:
        yield (
            "correction.logp_old=bypass needs one update per rollout batch, but algorithm.epochs x "
            f"algorithm.minibatches = {updates}; set correction.logp_old=recompute"
        )
    if has_weights:
        yield (
            f"correction.mode={correction.mode} would weigh nothing, because with correction.logp_old=bypass the ratio "
            "of the loss carries the mismatch; set correction=bypass, or correction.logp_old=recompute"
        )
    if algorithm.loss == "reinforce":
        yield (
            "correction.logp_old=bypass lets the ratio of the loss carry the mismatch, but algorithm.loss=reinforce "
            "has none: nothing would be corrected; set correction.logp_old=recompute, or algorithm.loss=ppo_clip"
        )
    if algorithm.kl_coef and algorithm.kl_place == "reward":
        yield (
            "algorithm.kl_place=reward compares the trainer's logprobs with the reference's, which "
            "correction.logp_old=bypass does not compute before the update; set algorithm.kl_place=loss, or "
            "correction.logp_old=recompute"
        )
    compared = {"kl_penalty": (bool(correction.kl_penalty), "0"), "rejection": (bool(correction.rejection), "{}")}
    for name, (is_set, off) in compared.items():
        if is_set:
            yield (
                f"correction.{name} compares the engine's logprobs with the trainer's, which "
                "correction.logp_old=bypass does not compute before the update; set correction.logp_old=recompute, or "
                f"'correction.{name}={off}'"
            )
