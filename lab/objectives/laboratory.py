"""A saved step under several objectives, from the weights before it.

    rollouts of a step ─► Trainer's stages, per objective ─► token sets ─► gradients of groups ─► numbers
    held-out rollouts  ─► gradient of the mean reward ─────────────────► first-order change of it by each update

Rollouts, rewards, weights, moments and the division of the step are the run's; advantages, correction, loss and
denominators are computed by the code of training under each configuration (`choice.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from lockstep.lab.diagnosis.token_classes import classify
from lockstep.lab.objectives.choice import Objective, objectives_of, refuse_unsaved
from lockstep.lab.objectives.gradients import Measured, SharedForward, TrialSteps, backward, dot, measure, norm, trained
from lockstep.lab.objectives.objective_numbers import Comparison, compared
from lockstep.lab.replay import Replay, SavedStep, SavedTeacher, checkpoints_up_to, saved_step, settings_of
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.saved_rollouts import check_ids, read_rollouts
from lockstep.rollout.system.plain_files import behind_link
from lockstep.trainer.batch.saved_scores import SavedScores
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.build import make_chat
from lockstep.trainer.checkpoint import stored
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.collect.groups import Collected, is_kept
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.task_settings import RewardConfig
from lockstep.trainer.config.redaction import redact_text
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.observe.token_texts import TokenTexts
from lockstep.trainer.run.library_logs import quiet_third_parties
from lockstep.trainer.run.state import save_policy
from lockstep.trainer.score.reference import Reference, make_reference
from lockstep.trainer.step import Trainer
from lockstep.trainer.stopwatch import Stopwatch
from lockstep.trainer.update.optimizer_step import OptimizerStep
from lockstep.trainer.update.routers import Routers
from lockstep.trainer.update.schedule import learning_rate
from lockstep.trainer.update.updater import Minibatch, Updater


class Request(NamedTuple):
    """A comparison to make."""

    run: Path
    step: int
    """Update after the step."""
    names: Sequence[str]
    corrections: Sequence[str]
    after: int
    """Optimizer steps of the batch that the run's own objective makes before the comparison."""
    heldout: Path | None
    """Saved rollouts whose mean reward is predicted."""
    overrides: Sequence[str]
    trusts_run: bool
    models: Path | None = None
    """Directory for the model after the update of each objective, new or empty."""


def compare_objectives(request: Request) -> Comparison:
    """Compare the objectives on a saved step.

    Raises `ConfigError`, `DataError` or `CheckpointError` before anything heavy if an input is missing or damaged, or
    an objective needs what the run has not saved.
    """
    quiet_third_parties()
    run = behind_link(request.run)
    config = settings_of(run, request.overrides, sample=False, trusts_run=request.trusts_run)
    config.model.compile = False  # a compiled backward pass runs once
    if not config.has_rollouts:
        raise ConfigError("this run trains on demonstrations alone; compare objectives on a run with rollouts")

    def check(name: str, algorithm: AlgorithmConfig, correction: CorrectionConfig) -> None:
        # Nothing is scored or sampled, so stale rollouts may be seen without weights, too.
        unsampled = replace(config, reward=RewardConfig(), rollout=replace(config.rollout, max_staleness=0))
        changed = replace(unsampled, algorithm=algorithm, correction=correction)
        refuse_unsaved(name, changed.plan, config.plan, algorithm)
        try:
            validate(changed, needs_data=False)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    if request.models is not None and request.models.exists() and any(request.models.iterdir()):
        raise ConfigError(f"--models {request.models} is not empty; name a new directory")
    objectives = objectives_of(
        config.algorithm, config.correction, names=request.names, corrections=request.corrections, check=check
    )
    step = saved_step(run, request.step)
    _refuse_other_weights(run, step, request)
    num_steps = config.algorithm.epochs * config.algorithm.minibatches
    if not 0 <= request.after < num_steps:
        raise ConfigError(
            f"--after {request.after}: a batch of this run is {num_steps} optimizer steps, so expected 0 to "
            f"{num_steps - 1}; add algorithm.minibatches=4 to divide it into more"
        )
    if config.plan.trains_critic_alone(step.weights_update + request.after):
        raise ConfigError(f"--step {request.step} trains the critic alone; name a step after algorithm.critic_warmup")
    distributed = TrialSteps.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    with distributed:
        if distributed.world_size > 1:
            raise ConfigError("objectives are compared in one process; start it with `lockstep compare-objectives`")
        return _Laboratory(run, config, distributed).compare(step, objectives, request)


def _refuse_other_weights(run: Path, step: SavedStep, request: Request) -> None:
    """Raise `ConfigError` unless the weights before the step are a checkpoint, or those that the run started from."""
    whole = {update for update, path in checkpoints_up_to(run, 10**17) if stored.check(path) is None} | {0}
    if step.weights_update in whole:
        return
    updates = [int(path.stem.partition("-")[2]) for path in sorted((run / "rollouts").glob("step-??????.jsonl"))]
    usable = [update for update in updates if saved_step(run, update).weights_update in whole]
    raise ConfigError(
        f"--step {request.step} was computed with the weights of update {step.weights_update}, of which {run} has no "
        f"whole checkpoint; name --step {' or '.join(map(str, usable)) or '<none can be compared>'}, or train with "
        "checkpoint.every=1 and a large checkpoint.keep"
    )


class _Recorder(Trainer):
    """The stages of a step before the update."""

    def targets_of(self, collection: Collected) -> tuple[StepBatch, Targets]:
        batch = self._share(collection, Stopwatch())
        logprobs, batch = self._score(batch)
        correction = StepCorrection.of(batch, logprobs.old, self._config.correction)
        return batch, self._assign_credit(batch, logprobs, correction)[0]


class _Recorded(NamedTuple):
    """Rows and targets of a step, and what computes its losses."""

    updater: Updater
    batch: StepBatch
    targets: Targets
    losses: OptimizerStep

    def minibatch(self, number: int) -> Minibatch:
        seen_N = torch.full((self.batch.layout.num_tokens,), torch.nan)
        minibatch = next(islice(self.updater.parts(self.batch, self.targets, seen_N), number, None))
        assert minibatch is not None, "a run with rollouts"
        return minibatch


class _Laboratory(Replay):
    """A step of a run with the weights, moments and counters before it."""

    _reference: Reference | None = None
    """Shared by the objectives with a KL."""

    def compare(self, step: SavedStep, objectives: Sequence[Objective], request: Request) -> Comparison:
        config, update, distributed = self._config, step.weights_update, self._distributed
        assert isinstance(distributed, TrialSteps)
        self._restore(update)
        check_ids(step.rollouts, vocab_size=self._vocab_size)
        size = sum(parameter.numel() for parameter in trained(self._module))
        self.say(
            f"memory         ({len(objectives)} objectives + 1) x {size:,} parameters x 20 bytes: "
            f"{(len(objectives) + 1) * size * 20 / 2**30:.2f} GiB beside the model"
        )
        shared = SharedForward(self._module)
        trained_rollouts = tuple(one for group in step.groups if is_kept(group, config.algorithm) for one in group)
        collection = Collected(rollouts=step.rollouts, trained=trained_rollouts)
        recorded = [
            self._recorded(collection, step, shared, algorithm=one.algorithm, correction=one.correction)
            for one in objectives
        ]
        lr = learning_rate(update, config.optimizer, total_updates=config.updates)
        for number in range(request.after):
            self._updater.optimizer_step(recorded[0].minibatch(number), {}, lr=lr)
        parts = [one.minibatch(request.after) for one in recorded]
        token_sets = [one.updater.on_rollouts(part) for one, part in zip(recorded, parts, strict=True)]
        first, rollouts = recorded[0], parts[0].rollouts
        half_of = _halves(first.batch.group_S, seed=config.seed)
        groups = [(rows, half_of[group]) for group, rows in _rows_by_group(first.batch, rollouts)]
        measured = measure(first.losses, self._module, first.updater.scorer, token_sets, groups)
        heldout = self._heldout(request, update, collection)

        def changes(one: Measured) -> tuple[Tensor, Tensor]:
            """Return the update that is judged on each half: by the other half, or by the whole step."""
            if not heldout.is_halves:
                change_P = distributed.trial(one.gradient_P, lr=lr)
                return change_P, change_P
            shares = np.bincount([half_of[group] for group in first.batch.group_S[rollouts]], minlength=2) / len(
                rollouts
            )
            by = [distributed.trial(half / max(x, 1e-9), lr=lr) for half, x in zip(one.halves_2P, shares, strict=True)]
            return by[1], by[0]

        updates = [changes(one) for one in measured]
        chat = make_chat(config.model, history=config.environment.history)
        if request.models is not None:
            for number, (objective, one) in enumerate(zip(objectives, measured, strict=True)):
                directory = request.models / f"{number}-{re.sub(r'[^A-Za-z0-9_]+', '-', objective.name)}"
                distributed.trial(one.gradient_P, lr=lr, after=lambda path=directory: self._save(path, chat))
        reward = self._recorded(heldout.collection, step, shared, **self._reward_sections(heldout))
        moments = "fresh moments" if self._state is None else "the moments of the checkpoint"
        texts = TokenTexts(chat.tokenizer)
        return compared(
            objectives,
            measured,
            [part.targets for part in parts],
            first.batch,
            rollouts,
            torch.from_numpy(np.concatenate([classify(row, texts) for row in first.batch.rows])),
            slopes_GO=self._slopes(reward, updates, half_of if heldout.is_halves else {}),
            steps=[norm(change[0]) for change in updates],
            run=str(self._run),
            step=request.step,
            weights=update,
            optimizer_step=f"{request.after + 1} of {config.algorithm.epochs * config.algorithm.minibatches}",
            optimizer=f"{config.optimizer.name} at learning rate {lr:.3g}, with {moments} and the clipping of the run",
            heldout=heldout.words,
            effective=_effective(reward),
            notes=self._notes(objectives, measured[0].norm, step, request),
        )

    def _save(self, directory: Path, chat: Chat) -> None:
        """Write the model of the weights now, as a run does at its end."""
        save_policy(self._distributed, directory, has_critic=self._config.plan.has_critic)
        chat.save_pretrained(directory)
        self.say(f"model          {redact_text(str(directory))}")

    def _recorded(self, collection: Collected, step: SavedStep, shared: SharedForward, **sections: Any) -> _Recorded:
        """Run the stages before the update. sections: of the settings, in place of those of the run."""
        config = replace(self._config, **sections)
        updater = Updater(self._module, self._distributed, config, images=self._images)
        updater.num_updates = self._updater.num_updates
        if config.algorithm.entropy_target is not None:
            updater.entropy = self._updater.entropy
        teaches = config.plan.teaches_rollouts
        if config.algorithm.kl_coef and self._reference is None:
            self._reference = make_reference(config, self._distributed, self._module, self._images)
        recorder = _Recorder(
            config,
            distributed=self._distributed,
            updater=updater,
            rollouts=None,
            reference=self._reference if config.algorithm.kl_coef else None,
            teacher=SavedTeacher(SavedScores.open(step.teacher_path)) if teaches else None,  # type: ignore[arg-type]
        )
        if self._state is not None and self._state.kl_coef is not None:
            recorder.kl_coef = self._state.kl_coef
        batch, targets = recorder.targets_of(collection)
        losses = OptimizerStep(
            shared,
            self._distributed,
            updater.scorer,
            routers=Routers(self._module, updater.scorer, config.algorithm, replays=config.plan.replays),
            guard=updater.guard,
            has_critic=self._config.plan.has_critic,
        )
        return _Recorded(updater, batch, targets, losses)

    def _heldout(self, request: Request, update: int, own: Collected) -> _Heldout:
        """Choose the rollouts whose mean reward is predicted: named ones, an evaluation of these weights, or halves."""
        evaluated = self._run / "evaluations" / f"update-{update:06d}.jsonl"
        settings = read_saved(self._run / "config.yaml")
        temperature = float(OmegaConf.select(settings, "eval.temperature", default=0.0))
        several = int(OmegaConf.select(settings, "eval.samples_per_prompt", default=1)) > 1
        path = request.heldout or (evaluated if evaluated.is_file() and temperature and several else None)
        if path is None:
            words = "two halves of the groups of this step: each update by one half is judged on the other"
            return _Heldout(own, self._config.rollout.temperature, words, is_halves=True)
        rollouts = tuple(read_rollouts(path))
        check_ids(rollouts, vocab_size=self._vocab_size)
        is_evaluation = path.resolve().parent.name == "evaluations"
        return _Heldout(
            Collected(rollouts=rollouts, trained=rollouts),
            temperature if is_evaluation and temperature else self._config.rollout.temperature,
            f"{len(rollouts)} rollouts of {path}",
        )

    def _reward_sections(self, heldout: _Heldout) -> dict[str, Any]:
        """Return the settings whose gradient is minus that of the mean reward: REINFORCE with a leave-one-out
        baseline, each rollout weighted by its whole ratio of probabilities."""
        return {
            "algorithm": AlgorithmConfig(advantage="rloo", loss="reinforce", normalizer="sequence_sum"),
            "correction": CorrectionConfig(
                mode="sequence_product_truncate",
                high=math.inf,
                routing_replay=self._config.correction.routing_replay,
            ),
            "rollout": replace(self._config.rollout, temperature=heldout.temperature, mask_truncated=False),
        }

    def _slopes(
        self, reward: _Recorded, updates: Sequence[tuple[Tensor, Tensor]], half_of: Mapping[int, int]
    ) -> np.ndarray:
        """Return the (G, O) change of the mean reward of each held-out group of several rollouts, to first order."""
        batch, part, slopes = reward.batch, reward.minibatch(0), []
        tokens = reward.updater.on_rollouts(part)
        sizes = dict(zip(*(values.tolist() for values in np.unique(batch.group_S, return_counts=True)), strict=True))
        can_judge = len(set(half_of.values())) != 1  # a single group cannot be divided into halves
        for group, rows in _rows_by_group(batch, part.rollouts):
            if sizes[group] < 2 or not can_judge:  # without a baseline
                continue
            parts_of_group = backward(reward.losses, self._module, reward.updater.scorer, [tokens], rows)
            gradient_P = -torch.stack([gradient_P for *_, gradient_P, _ in parts_of_group]).sum(0)
            share = batch.num_rollouts / sizes[group]  # the loss divides by all rollouts
            slopes.append([share * dot(gradient_P, change[half_of.get(group, 0)]) for change in updates])
        return np.array(slopes).reshape(-1, len(updates))

    def _notes(self, objectives: Sequence[Objective], found: float, step: SavedStep, request: Request) -> list[str]:
        """Say what was left out, and whether the run's own gradient is found again."""
        config, logged = self._config, step.logged.get("optim/grad_norm")
        notes = [
            f"{one.name}: left as in the run, because the rollouts have it: {', '.join(one.kept)}"
            for one in objectives
            if one.kept
        ]
        if config.demonstration_sets():
            notes.append("the demonstrations that the run trains beside its rollouts are in no gradient here")
        elif logged and config.algorithm.epochs == config.algorithm.minibatches == 1 and not request.overrides:
            notes.append(f"the run logged the gradient norm {logged:.6g}, found here {found:.6g}")
        if config.plan.has_critic:
            notes.append("gradients include the critic's parameters, and the value loss where an objective has it")
        return notes


class _Heldout(NamedTuple):
    """Rollouts whose mean reward is predicted."""

    collection: Collected
    temperature: float
    words: str
    is_halves: bool = False


def _halves(group_S: np.ndarray, *, seed: int) -> dict[int, int]:
    """Return the half, 0 or 1, of each group."""
    order = np.random.default_rng(seed).permutation(np.unique(group_S)).tolist()
    return {group: int(place >= len(order) // 2) for place, group in enumerate(order)}


def _rows_by_group(batch: StepBatch, rollouts: np.ndarray) -> list[tuple[int, list[int]]]:
    """Return each group with the rows (indices) of these of its rollouts."""
    row_indices = np.flatnonzero(np.isin(batch.layout.rollout_index, rollouts)).tolist()
    group_of = batch.group_S[batch.layout.rollout_index]
    return [
        (group, [row for row in row_indices if group_of[row] == group])
        for group in dict.fromkeys(group_of[row_indices].tolist())
    ]


def _effective(reward: _Recorded) -> float:
    """Return the effective share of the held-out rollouts under their weights: (Σ w)² / (S Σ w²)."""
    weights_S = torch.zeros(reward.batch.num_rollouts, dtype=torch.float64)
    weights_N = reward.targets.correction.weights_N
    assert weights_N is not None, "weights of whole rollouts are known before the update"
    weights_S[reward.batch.rollout_N] = weights_N.double()
    return float(weights_S.sum() ** 2 / (len(weights_S) * weights_S.square().sum()).clamp(min=1e-300))
