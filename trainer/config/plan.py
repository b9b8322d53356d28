"""Plan of a step: what its passes score and replay, and what its rows keep, as the settings imply it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.data_settings import DemonstrationsConfig
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES, Granularity
from lockstep.trainer.objective.own.lookup import advantage_named


class OldLogprobs(StrEnum):
    """Source of log π_old (trainer/credit/old_policy.py)."""

    TRAINER = "trainer"
    ENGINE = "engine"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    old: OldLogprobs
    has_critic: bool
    """True if values are scored, because the advantage needs a critic."""
    critic_warmup: int
    """First optimizer steps, which train the critic alone; 0 without one."""
    teaches_rollouts: bool
    """True if a teacher scores the rollouts for their loss."""
    divergences: frozenset[str]
    """Kinds of divergence from a teacher in the loss."""
    teacher_top_k: int
    """Number of most probable tokens that the teacher names at each position."""
    replays_engine: bool
    """True if the trainer computes with the experts that the engine chose."""
    replays_old: bool
    """True if it computes with the experts of its pass before the update."""
    turn_rewards: bool
    """True if rows keep the rewards of turns."""
    needs_states: bool
    """True if rows keep the states before turns, because the advantage compares turns of equal state."""
    needs_greedy: bool
    """True if a greedy answer to each prompt is sampled, because the advantage needs its reward."""

    @classmethod
    def of(
        cls, algorithm: AlgorithmConfig, correction: CorrectionConfig, demonstrations: DemonstrationsConfig
    ) -> StepPlan:
        advantage = advantage_named(algorithm.advantage)
        divergences = frozenset({algorithm.teacher_divergence, demonstrations.teacher_divergence} - {"off"})
        learns = algorithm.teacher_coef > 0 or algorithm.teacher_divergence != "off"
        return cls(
            old=old_logprobs(algorithm, correction, has_critic=advantage.needs_critic),
            has_critic=advantage.needs_critic,
            critic_warmup=algorithm.critic_warmup if advantage.needs_critic else 0,
            teaches_rollouts=algorithm.trains_on == "rollouts" and learns,
            divergences=divergences,
            teacher_top_k=algorithm.teacher_divergence_top_k if divergences else 0,
            replays_engine=correction.routing_replay == "engine",
            replays_old=correction.routing_replay == "old",
            turn_rewards=algorithm.turn_rewards,
            needs_states=advantage.needs_states,
            needs_greedy=advantage.needs_greedy,
        )

    @property
    def replays(self) -> bool:
        """True if the trainer computes with given experts."""
        return self.replays_engine or self.replays_old

    @property
    def scores_policy(self) -> bool:
        """True if the policy scores the rows before the update: for log π_old, or for values beside it."""
        return self.has_critic or self.old is OldLogprobs.TRAINER

    def trains_critic_alone(self, update: int) -> bool:
        """Return True for the optimizer step after this many updates if it leaves the policy as it is."""
        return update < self.critic_warmup

    def ends_warmup(self, update: int) -> bool:
        """Return True for the first optimizer step after those of the critic alone."""
        return 0 < self.critic_warmup == update


def old_logprobs(algorithm: AlgorithmConfig, correction: CorrectionConfig, *, has_critic: bool) -> OldLogprobs:
    """Return the source of log π_old.

    The update's own pass saves one. It is exact if a rollout batch gets one update and nothing before the loss needs
    the logprobs of all tokens: sequence weights, their mean, rejection (it changes the denominators), advantages with a
    KL penalty or from a teacher, a critic.
    """
    if correction.logp_old == "bypass":
        return OldLogprobs.ENGINE
    is_known_in_time = (
        algorithm.epochs == algorithm.minibatches == 1
        and CORRECTION_MODES[correction.mode].granularity is Granularity.TOKEN
        and not (correction.batch_normalize or correction.rejection or correction.kl_penalty)
        and not (algorithm.kl_coef and algorithm.kl_place == "reward")
        and not algorithm.teacher_coef
        and not has_critic
    )
    return OldLogprobs.UPDATE if is_known_in_time else OldLogprobs.TRAINER
