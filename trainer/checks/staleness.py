"""Conflicts of settings with stale rollouts (`rollout.max_staleness`)."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES


def asynchrony_problems(config: Config) -> Iterator[str]:
    """Yield one sentence per conflict."""
    rollout, correction = config.rollout, config.correction
    staleness = rollout.max_staleness
    if not staleness:
        return
    updates = config.algorithm.epochs * config.algorithm.minibatches
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
    if config.sync.pause == "abort":
        yield (
            f"sync.pause=abort aborts the requests in flight of rollout.max_staleness={staleness} at every update; set "
            "sync.pause=keep"
        )
    environment = config.environment
    agents = environment.name == "agent" or "agent" in environment.settings.get("environments", {})
    if agents and config.gateway.port and config.eval.every:
        yield (
            f"gateway.port={config.gateway.port} is in use by rollouts in flight when an evaluation begins; "
            "set gateway.port=0 for any free port, or eval.every=0"
        )
