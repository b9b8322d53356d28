"""Demonstrations as components of the loss, on rows of their own: their cross-entropy, and a divergence from a teacher.

    loss = w · ((1 − α) · Σ_t −log π(token t) + α · Σ_t D(π, π_teacher)_t) / N
    N   trained tokens of the step's rows, on all ranks
    α   demonstrations.teacher_share; 0 without a divergence

The losses are in trainer/update/components/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import DataError
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.build import vocab_size_of
from lockstep.trainer.config.groups.data_settings import DataSetConfig, DemonstrationsConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.demonstrations import Demonstration, load_demonstrations
from lockstep.trainer.data.prompts import Prompts
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.teacher import Teacher
from lockstep.trainer.sft.saved_teacher import SavedTeacher
from lockstep.trainer.update.components.component import TokenSet
from lockstep.trainer.update.components.demonstrations_component import demonstrations_component
from lockstep.trainer.update.components.router_component import router_term
from lockstep.trainer.update.components.teacher_component import divergence_term
from lockstep.trainer.update.routers import Routers
from lockstep.trainer.update.schedule import component_weight

NAME = "demonstrations"
EPOCH = "data/demonstrations_epoch"
"""Metric: passes over the demonstrations."""


class Demonstrations:
    """The demonstrations of a run, mixed into the updates of rollouts, or trained alone."""

    name = NAME

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        sets: Sequence[Sequence[Demonstration]] | None,
        *,
        teacher: Teacher | SavedTeacher | None = None,
    ) -> None:
        """
        Args:
            sets: one per set of `Config.demonstration_sets`; None on ranks other than 0, which get each step's rows.
            teacher: scores the rows; None: they get no scores.
        """
        self._config = config
        self._distributed = distributed
        self._teacher = teacher
        self._order = None
        if sets is not None:
            weights = [settings.weight for settings in config.demonstration_sets().values()]
            self._order = Prompts(sets, seed=config.seed, shuffle=config.data.shuffle, weights=weights)
        self.cursor = 0

    @classmethod
    def load(
        cls,
        config: Config,
        distributed: Distributed,
        chat: Chat,
        *,
        say: Callable[[str], None],
    ) -> Demonstrations | None:
        """Load and tokenize the configured demonstrations; a collective. None if there are none.

        Raises `DataError` on all ranks for rows that cannot be trained, or are too long for a teacher.
        """
        data_sets = config.demonstration_sets()
        if not data_sets:
            return None
        sets = tokenized(data_sets, config.demonstrations, config.model, distributed, chat, say=say)
        limit = config.rollout.max_model_len if config.has_teacher else None
        distributed.together(lambda: refuse_long(sets or (), config.demonstrations, limit))
        if config.demonstrations.teacher_divergence == "off" or config.teacher.source != "saved":
            return cls(config, distributed, sets)
        top_k = config.plan.teacher_top_k
        saved_teacher = distributed.together(
            lambda: SavedTeacher.open(data_sets.values(), config.model, distributed, sets, top_k=top_k, say=say)
        )
        return cls(config, distributed, sets, teacher=saved_teacher)

    def take_teacher(self, teacher: Teacher | None) -> None:
        """Let the run's teacher score the rows, if a divergence from it is trained."""
        if self._config.demonstrations.teacher_divergence != "off" and self._teacher is None:
            self._teacher = teacher

    @property
    def count(self) -> int:
        """Number of demonstrations in the data; 0 on ranks other than 0."""
        return 0 if self._order is None else len(self._order)

    def draw(self, stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()) -> StepBatch:
        """Return the rows of the next optimizer step, with a teacher's scores: one batch for all ranks; a collective.

        stage: times what is named, the rows as `data` and their scores as `teacher`.
        """
        rows: list[Any] = []
        with stage("data"):
            if self._order is not None:
                self._order.cursor = self.cursor
                rows = self._order.take(self._config.demonstrations.rows_per_update)
            self.cursor += self._config.demonstrations.rows_per_update
            batch = batch_of(rows)
        if self._teacher is not None:
            with stage("teacher"):
                batch = self._teacher.scored(batch, ())
        with stage("data"):
            return dealt(batch, self._distributed)

    def token_set(self, batch: StepBatch, *, update: int, routers: Routers | None) -> TokenSet:
        """Return rows from `draw` with their terms."""
        settings, algorithm = self._config.demonstrations, self._config.algorithm
        rows, num_tokens = range(len(batch.rows)), batch.layout.num_tokens
        weight = self._weight(update)
        share = 0.0 if settings.teacher_divergence == "off" else settings.teacher_share
        terms = [demonstrations_component(NAME, weight=weight * (1 - share), num_tokens=num_tokens)]
        if share:
            kind, beta = settings.teacher_divergence, algorithm.teacher_divergence_beta
            more = {"kind": kind, "beta": beta, "weight": weight * share, "num_tokens": num_tokens}
            terms.append(divergence_term("demonstrations_teacher", batch, **more))
        if routers is not None:
            every_N = torch.ones(num_tokens, dtype=torch.bool)
            terms.append(router_term(routers, batch, rows, every_N, num_tokens))
        return TokenSet(batch=batch, rows=rows, terms=terms)

    def metrics(self) -> dict[str, float]:
        """Return `data/demonstrations_epoch`, passes over the demonstrations, and the mismatch of their teacher.

        Nothing on ranks other than 0.
        """
        if self._order is None:
            return {}
        of_teacher = self._teacher.measured if self._teacher else {}
        return {EPOCH: self.cursor / len(self._order), **of_teacher}

    def _weight(self, update: int) -> float:
        settings = self._config.demonstrations
        if not self._config.has_rollouts:
            return 1.0
        return component_weight(
            update,
            first=settings.weight,
            last=settings.final_weight,
            schedule=settings.weight_schedule,
            total_updates=self._config.updates,
        )


def tokenized(
    sets: Mapping[str, DataSetConfig],
    settings: DemonstrationsConfig,
    model: ModelConfig,
    distributed: Distributed,
    chat: Chat,
    *,
    say: Callable[[str], None],
) -> list[list[Demonstration]] | None:
    """Load and tokenize data sets on rank 0; a collective. Other ranks get None."""
    return distributed.together(
        lambda: (
            [
                load_demonstrations(
                    one,
                    chat,
                    max_tokens=settings.max_tokens,
                    min_reward=settings.min_reward,
                    max_images=model.images.max_per_prompt,
                    vocab_size=vocab_size_of(model.path, trust_remote_code=model.trust_remote_code),
                    say=say,
                )
                for one in sets.values()
            ]
            if distributed.is_main
            else None
        )
    )


def refuse_long(sets: Sequence[Sequence[Demonstration]], settings: DemonstrationsConfig, limit: int | None) -> None:
    """Raise `DataError` for a row that is longer than the context of the teacher that would score it.

    limit: that context [tokens]; None without a teacher.
    """
    longest = max((len(row) for demonstrations in sets for rows in demonstrations for row in rows), default=0)
    if limit is not None and settings.teacher_divergence != "off" and longest > limit:
        raise DataError(
            f"the longest demonstration has {longest} tokens, the teacher scores {limit}; set rollout.max_model_len="
            f"{longest}, or demonstrations.max_tokens={limit} to leave out longer ones"
        )


def batch_of(demonstrations: Sequence[Demonstration]) -> StepBatch:
    """Return the rows of demonstrations as a batch, in which each counts as a rollout without a reward."""
    rows = tuple(one.row(number) for number, rows in enumerate(demonstrations) for one in rows)
    count = len(demonstrations)
    turns = np.array([1 + max(int(one.turns.max()) for one in rows) for rows in demonstrations], dtype=np.int64)
    return StepBatch(
        rows=rows,
        rollout_ids=np.arange(count, dtype=np.int64),
        group_S=np.arange(count, dtype=np.int64),
        rewards_S=np.zeros(count),
        is_kept_S=np.ones(count, dtype=np.bool_),
        greedy_rewards_S=np.full(count, np.nan),
        num_turns_S=turns,
        turn_rewards_K=np.zeros(int(turns.sum())),
        terms_SF=np.zeros((count, 0)),
        term_weights_F=np.zeros(0),
        states_K=np.full(int(turns.sum()), -1, dtype=np.int64),
    )
