"""Assembly of a run on one rank: engines, model, rewards, data, rollouts, weight sync, and the trainer over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import SyncedEngine
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.episode.prepared_calls import prepared
from lockstep.rollout.rollout_lines import calls_as_json
from lockstep.rollout.safe_text import print_error
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import CANARY_TOKENS, CanarySettings, LongRow
from lockstep.rollout.weights.control_plane import Roster
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.build import images_of_data, load_policy, make_chat, make_rewards, make_sampler, make_sampling
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.checks.scale import disk_notes, overlap_warnings, size_warnings
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.collect.source import Collector, RolloutSource
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import DataSet, Prompts, heldout_data, training_data
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.recovery import Recovery
from lockstep.trainer.engines.run_engines import Engines, start_engines
from lockstep.trainer.model.chosen import with_chosen, with_compilation
from lockstep.trainer.model.decoder import decoder_setup
from lockstep.trainer.model.families import unproven
from lockstep.trainer.model.layers.routing import refuse_dense
from lockstep.trainer.model.memory_plan import MemoryPlan, memory_plan
from lockstep.trainer.model.policy import Policy, policy_of
from lockstep.trainer.model.shape import ModelShape, planned_shape
from lockstep.trainer.model.start_checks.distances import Reach, reach
from lockstep.trainer.model.start_checks.rounding import marked_layers, rounding_of
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.run.library_logs import ThirdPartyLog
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.step import Trainer
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Updater

if TYPE_CHECKING:  # of runs that need them
    from lockstep.rollout.media.processing import ImageProcessing
    from lockstep.trainer.batch.packed_images import ImageSource
    from lockstep.trainer.engines.averaged_teacher import AveragedTeacher
    from lockstep.trainer.engines.teacher import Teacher
    from lockstep.trainer.evaluate.evaluation import Evaluation
    from lockstep.trainer.sft.demonstration_rows import Demonstrations
    from lockstep.trainer.sft.heldout_demonstrations import HeldoutDemonstrations


Evaluate = Callable[[RunConsole], "Evaluation | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run on this rank."""

    config: Config
    distributed: Distributed
    engines: Engines
    shape: ModelShape
    updater: Updater
    chat: Chat
    prompts: Prompts | None
    """None without rollouts."""
    demonstrations: Demonstrations | None
    trainer: Trainer
    evaluate: Evaluate | None
    """Evaluates on held-out data; a collective. Returns None on ranks other than 0. None: the run does not."""
    teacher: Teacher | None
    averaged: AveragedTeacher | None
    """Weights of the teacher; None if they are not an average of the policy's."""
    close_collection: Callable[[], None]
    """Ends rollouts in flight and reward workers; engines stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """Parts that sample and score rollouts."""

    episodes: Episodes
    rollouts: RolloutSource

    def close(self) -> None:
        """End rollouts in flight and reward workers."""
        self.rollouts.close()
        self.episodes.rewards.close()


class Assembly:
    """Builder of the parts of a run. Its methods are collectives.

    What only some runs need is imported where they need it.
    """

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        directory: RunDirectory,
        loop: BackgroundLoop,
        console: RunConsole,
        libraries: ThirdPartyLog,
    ) -> None:
        self._config = config
        self._distributed = distributed
        self._directory = directory
        self._loop = loop
        self._console = console
        self._libraries = libraries
        self._images: ImageProcessing | None = None
        self._image_source: ImageSource | None = None

    def parts(self) -> Parts:
        """Build all parts.

        Data come before engines: a row that cannot be used ends the run in seconds. Engines come before the model: they
        fork workers, which must not inherit threads of a model that computes.
        """
        config, distributed, console = self._config, self._distributed, self._console
        if config.has_rollouts:
            refuse_dense(config.model, config.correction.routing_replay)
        if config.has_teacher:
            from lockstep.trainer.engines.teacher_start import refuse_unfit_teacher

            distributed.together(lambda: refuse_unfit_teacher(config.teacher, config.model, config.rollout))
        chat = make_chat(config.model, history=config.environment.history, media=self._directory.media)
        self._images = chat.images
        demonstrations = self._demonstrations(chat)
        prompts = None
        if config.has_rollouts:
            prompts = make_prompts(config, distributed, self._loop, chat, say=console.say)
        heldout, heldout_demonstrations = self._heldout_prompts(chat), self._heldout_demonstrations(chat)
        engines, drivers = self._engines()
        teacher = self._teacher(engines, chat)
        module, shape, updater = self._trained(demonstrations, teacher)
        sync = average = recovery = rollout_parts = evaluate = None
        if heldout_demonstrations is not None:
            evaluate = self._demonstrations_evaluation(heldout_demonstrations, module)
        if prompts is not None:
            rollout_parts = self._rollout_parts(engines, drivers, chat, prompts)
            sleep_level = config.rollout.sleep_level if engines.is_colocated else 0
            sync = make_sync(
                config, distributed, updater, engines=engines.synced, sleep_level=sleep_level, images=self._images
            )
            average = self._average(updater, teacher)
            recovery = Recovery(
                engines=engines,
                distributed=distributed,
                rollouts=rollout_parts.rollouts,
                sync=sync,
                version=lambda: updater.num_updates,
                limit=config.rollout.engine_restarts,
                pool_timeout_s=config.rollout.pool_timeout_s,
                say=console.warn,
            )
            if config.evaluates:
                self._warn_of_overlap(prompts, heldout)
                evaluate = self._rollouts_evaluation(heldout, rollout_parts, recovery, chat)
        reference = None
        if config.has_rollouts and config.algorithm.kl_coef:
            from lockstep.trainer.score.reference import make_reference  # runs without a reference do not load it

            reference = make_reference(config, distributed, module, self._image_source)
        trainer = Trainer(
            config,
            distributed=distributed,
            updater=updater,
            rollouts=rollout_parts.rollouts if rollout_parts else None,
            reference=reference,
            teacher=teacher if config.plan.teaches_rollouts else None,
            averaged=average,
            sync=sync,
            recovery=recovery,
            is_quantized=sync is not None and sync.quantization is not None,
        )
        return Parts(
            config=config,
            distributed=distributed,
            engines=engines,
            shape=shape,
            updater=updater,
            chat=chat,
            prompts=prompts,
            demonstrations=demonstrations,
            trainer=trainer,
            evaluate=evaluate,
            teacher=teacher,
            averaged=average,
            close_collection=rollout_parts.close if rollout_parts else lambda: None,
        )

    # Data

    def _demonstrations(self, chat: Chat) -> Demonstrations | None:
        """Load the demonstrations that the run trains."""
        if not self._config.demonstration_sets():
            return None
        from lockstep.trainer.sft.demonstration_rows import Demonstrations

        return Demonstrations.load(self._config, self._distributed, chat, say=self._console.say)

    def _heldout_prompts(self, chat: Chat) -> Mapping[str, DataSet]:
        """Load the held-out data of a run with rollouts."""
        config, distributed = self._config, self._distributed
        if not (config.evaluates and config.has_rollouts):
            return {}
        sets, images = config.heldout_sets(), images_of_data(config.model, chat)
        load = partial(heldout_data, sets, config.environment, config.reward, **images, say=self._console.say)
        return distributed.together(load)

    def _heldout_demonstrations(self, chat: Chat) -> HeldoutDemonstrations | None:
        """Load the held-out data of a run without rollouts."""
        config = self._config
        if config.has_rollouts or not (config.evaluates and config.heldout_sets()):
            return None
        from lockstep.trainer.sft.demonstration_rows import tokenized
        from lockstep.trainer.sft.heldout_demonstrations import HeldoutDemonstrations

        names = config.heldout_sets()
        sets = tokenized(names, config.demonstrations, config.model, self._distributed, chat, say=self._console.say)
        return HeldoutDemonstrations(names, sets, self._distributed, limit=config.eval.prompts)

    def _warn_of_overlap(self, prompts: Prompts, heldout: Mapping[str, DataSet]) -> None:
        if not (heldout and self._distributed.is_main):
            return
        reader = PromptReader(column=self._config.environment.settings.get("prompt_column"))
        for sentence in overlap_warnings(prompts.sets, heldout, reader, evaluated=self._config.eval.prompts):
            self._console.warn(sentence)

    # Engines

    def _engines(self) -> tuple[Engines, Drivers]:
        """Start the engines of a run with rollouts, and choose the ranks that drive."""
        rollout = self._config.rollout
        if not self._config.has_rollouts:
            return Engines(loop=self._loop), Drivers(self._loop)
        ranks, drivers = (0,), Drivers(self._loop)
        if self._distributed.world_size > 1 or rollout.drivers is not None:
            from lockstep.trainer.collect.several_ranks import SeveralRanks, driver_ranks  # other runs do not load it

            ranks = driver_ranks(rollout, self._distributed, address=self._config.sync.address)
            drivers = SeveralRanks(self._loop, self._distributed, ranks)
        if rollout.urls:
            self._console.say(f"waiting for the engines at {', '.join(rollout.urls)} ...")
        else:
            engines = f"{rollout.num_engines} engines" if rollout.num_engines > 1 else "the engine"
            place = " of every rank" if rollout.engine == "colocated" else ""
            self._console.say(f"starting {engines}{place} ...")
        engines = start_engines(
            self._config,
            self._distributed,
            loop=self._loop,
            logs=self._directory.logs,
            drivers=ranks,
            images=self._images,
            warn=self._warn_of_engine,
        )
        if (pool := engines.pool) is not None:
            drivers.has_engine = lambda: bool(pool.members)
        return engines, drivers

    def _warn_of_engine(self, sentence: str) -> None:
        """Say on any rank that a server left or joined; only rank 0 has a console."""
        if self._distributed.is_main:
            self._console.warn(sentence)
        else:
            print_error(f"rank {self._distributed.rank}: {sentence}")

    def _teacher(self, engines: Engines, chat: Chat) -> Teacher | None:
        """Start the teacher."""
        if not self._config.has_teacher:
            return None
        from lockstep.trainer.engines.teacher_start import start_teacher

        return start_teacher(
            self._config,
            self._distributed,
            chat=chat,
            loop=self._loop,
            logs=self._directory.logs,
            policy=engines.pool if self._distributed.is_main else None,
            say=self._console.say,
        )

    def _average(self, updater: Updater, teacher: Teacher | None) -> AveragedTeacher | None:
        """Make the average of the policy that is the teacher, if it is one."""
        if teacher is None or self._config.teacher.source != "average":
            return None
        from lockstep.trainer.distributed.weight_average import WeightAverage
        from lockstep.trainer.engines.averaged_teacher import AveragedTeacher

        average = WeightAverage(self._distributed, decay=self._config.teacher.average_decay)
        sync = make_sync(self._config, self._distributed, updater, engines=teacher.synced, images=self._images)
        return AveragedTeacher(average, sync)

    # Rollouts

    def _rollout_parts(self, engines: Engines, drivers: Drivers, chat: Chat, prompts: Prompts) -> RolloutParts:
        """Load the rewards and make the source of rollouts."""
        config = self._config
        rewards = make_rewards(config)
        scores_groups = bool(config.rollout.max_staleness) or not rewards.compares_batches

        def load_reward_models() -> None:
            if drivers.is_main or (engines.pool is not None and scores_groups):
                with self._distributed.whole_models():  # on the ranks that score, also under ZeRO-3
                    rewards.load()

        self._distributed.together(load_reward_models)
        sampler, engine = None, engines.pool
        make_source: Callable[..., RolloutSource] = Collector
        if config.rollout.max_staleness:
            from lockstep.trainer.collect.async_source import made_ahead

            saves_rollouts, say = config.logger.save_rollouts, self._console.say
            engine, make_source = made_ahead(engines.pool, self._directory, say, saves_rollouts=saves_rollouts)
        if engine:
            gateway = config.gateway
            if gateway.port:  # drivers on one machine have a gateway each
                gateway = replace(gateway, port=gateway.port + int(os.environ.get("LOCAL_RANK", "0")))
            prepare = partial(prepared, to_json=calls_as_json if config.logger.save_rollouts else None)
            sampler = make_sampler(replace(config, gateway=gateway), engine=engine, chat=chat, prepare=prepare)
        episodes = Episodes(drivers=drivers, sampler=sampler, rewards=rewards)
        sampling = make_sampling(config.rollout, chat, with_routes=config.plan.replays_engine)
        rollouts = make_source(config, episodes=episodes, sampling=sampling, prompts=prompts)
        return RolloutParts(episodes=episodes, rollouts=rollouts)

    # Evaluations

    def _demonstrations_evaluation(self, heldout: HeldoutDemonstrations, module: nn.Module) -> Evaluate:
        config = self._config
        scorer = Scorer(
            module,
            self._distributed,
            temperature=1.0,
            token_budget=config.pack_tokens,
            share_prefixes=config.share_prefixes,
            images=self._image_source,
        )

        def evaluate(console: RunConsole) -> Evaluation | None:
            evaluation = heldout.evaluate(scorer)
            return evaluation if self._distributed.is_main else None

        return evaluate

    def _rollouts_evaluation(
        self, heldout: Mapping[str, DataSet], rollout_parts: RolloutParts, recovery: Recovery, chat: Chat
    ) -> Evaluate:
        """Return an evaluation by all drivers."""
        from lockstep.trainer.evaluate.evaluator import Evaluator

        config, distributed = self._config, self._distributed
        sampling = make_sampling(config.rollout, chat, with_routes=config.plan.replays_engine)
        evaluator = Evaluator(config.eval, heldout, episodes=rollout_parts.episodes, sampling=sampling)

        def evaluate(console: RunConsole) -> Evaluation | None:
            with console.progress("evaluation", evaluator.num_rollouts) as lines:
                evaluation = evaluator.evaluate(lines.rollout, lines.stage)
            return evaluation if distributed.is_main else None

        return lambda console: recovery.attempt(lambda: evaluate(console))

    # The model

    def _trained(
        self, demonstrations: Demonstrations | None, teacher: Teacher | None
    ) -> tuple[nn.Module, ModelShape, Updater]:
        """Load and prepare the model, with its components of the loss."""
        config, distributed, console = self._config, self._distributed, self._console
        has_critic, context = config.plan.has_critic, config.rotary_context
        policy = load_policy(config.model, decoder_setup(config.model, context))
        module: nn.Module = policy
        if has_critic:
            from lockstep.trainer.model.critic import with_critic

            module = with_critic(policy, config.model, has_critic=True, engine_context=context)
        optimizer = make_optimizer(module, config.optimizer, is_sharded=distributed.zero_stage > 0)
        with self._libraries.output_to_file():  # DeepSpeed prints, and compiles an offloaded optimizer
            prepared_module = distributed.prepare(module, optimizer)
        shape = ModelShape.of_trained(module, policy)
        plan = memory_plan(shape, config, distributed.sharding)
        show_memory_plan(plan, console, available=distributed.device_memory)
        show_scale(shape, config, console)
        if config.model.is_compiled:
            from lockstep.trainer.model.layers.compiled import described

            console.say(described(module))
        if demonstrations is not None:
            demonstrations.take_teacher(teacher)
        if self._images is not None:
            from lockstep.trainer.model.layers.vision import image_source

            self._image_source = image_source(policy.causal_lm.config, self._images.prepared)
        others = [demonstrations] if demonstrations else []
        updater = Updater(prepared_module, distributed, config, given=others, images=self._image_source)
        updater.scorer.budget.warn = console.warn
        dtype = getattr(torch, config.model.dtype)
        longest = config.rollout.max_model_len
        row = checked_row(policy, distributed.device, max_model_len=longest, pack_tokens=config.pack_tokens)
        if row.missed:
            names = ", ".join(f"{name}={length}" for name, length in row.missed.items())
            console.warn(
                f"the checks at the start and after syncs score rows of {row.tokens} tokens, and rows of this run "
                f"can pass {names} of the model's config: what it computes beyond is not checked"
            )
        passed_checks = ["the head", "rows of a pack apart from each other"]
        updater.scorer.refuse_leaks(policy, dtype=dtype, length=row.tokens, with_values=has_critic)
        if not marked_layers(policy):
            console.warn(
                f"transformers marks no layers of {type(policy.causal_lm).__name__}: none is compared with its "
                "computation in float32, and the canary of a weight sync has its short row alone"
            )
        elif not policy.is_quantized:
            updater.scorer.refuse_imprecise_layers(policy, dtype=dtype, length=longest)
            passed_checks.append("each layer against its computation in float32")
        if (sentence := unproven(policy.causal_lm.config, passed_checks, has_sync=config.has_rollouts)) is not None:
            console.warn(sentence)
        return prepared_module, shape, updater


CANARY_SHARE = {"cpu": 1.0, "cuda": 0.01}
"""`sync.canary_share` where it is null, by device."""


def checked_row(policy: Policy, device: torch.device, *, max_model_len: int, pack_tokens: int) -> Reach:
    """Return the row that the checks of a run score."""
    # Its last token leaves room for the one that vLLM samples.
    longest = max_model_len - 1
    return reach(policy.causal_lm.config, longest=longest, device_type=device.type, budget=pack_tokens)


def make_sync(
    config: Config,
    distributed: Distributed,
    updater: Updater,
    *,
    engines: Sequence[SyncedEngine] | Roster,
    sleep_level: int = 0,
    images: ImageProcessing | None = None,
) -> WeightSync:
    """Make a weight sync of the trained module to these engines of this rank; a collective. images: of the run."""
    settings = config.sync
    share = settings.canary_share
    policy = policy_of(distributed.unwrapped)
    longest = config.rollout.max_model_len
    row = checked_row(policy, distributed.device, max_model_len=longest, pack_tokens=config.pack_tokens)
    dtype = getattr(torch, config.model.dtype)
    rounding = rounding_of(dtype, distributed.device.type)
    score_disturbed = partial(updater.logprobs, error=rounding)
    long_row = LongRow(tokens=row.tokens, distances=row.passed, score_disturbed=score_disturbed)
    image = whole = None
    if images is not None:
        from lockstep.rollout.weights.canary_prompt import image_row  # runs without images do not load it

        image = image_row(images, updater.logprobs)
    if settings.distributions_every:
        from lockstep.rollout.weights.whole.distributions import WholeRow  # other runs do not load them
        from lockstep.trainer.model.head.whole_head import whole_scores

        score = partial(whole_scores, policy, updater.logprobs)
        whole = WholeRow(every=settings.distributions_every, score=score, rounding=rounding)
    return WeightSync(
        engines=engines,
        sleep_level=sleep_level,
        module=policy.model,
        score_canary=updater.logprobs,
        canary=CanarySettings(
            threshold=settings.canary_threshold,
            share=CANARY_SHARE.get(distributed.device.type, 1.0) if share is None else share,
            long=long_row if row.tokens > CANARY_TOKENS and marked_layers(policy) else None,
            image=image,
            whole=whole,
        ),
        pause_mode=config.pause_mode,
        bucket_bytes=int(settings.bucket_mib * 2**20),
        deadline_s=settings.timeout_s,
        silence_s=config.rollout.silence_timeout_s,
        address=settings.address,
    )


def choose(config: Config, distributed: Distributed, console: RunConsole) -> Config:
    """Choose learning rate, token budget, checkpointing and compilation where they are null, for model and device; a
    collective.

    Raises `ConfigError` on all ranks if nothing fits into the memory of one.
    """
    model = config.model
    if None not in (config.optimizer.lr, config.token_budget, model.gradient_checkpointing, model.compile):
        return config

    def choose_on_this_rank() -> Config:
        shape = planned_shape(
            model, config.algorithm, has_critic=config.plan.has_critic, engine_context=config.rotary_context
        )
        memory = distributed.device_memory
        decided = with_compilation(model, shape, device_type=distributed.device.type, say=console.say)
        with_model = replace(config, model=decided)
        return with_chosen(with_model, shape, distributed.sharding, available=memory, say=console.say)

    with distributed.whole_models():
        resolved_config = distributed.together(choose_on_this_rank)
    # Devices may differ; packs and the collectives of a repeated layer may not.
    resolved_config.token_budget = distributed.broadcast(resolved_config.token_budget)
    resolved_config.model.gradient_checkpointing = distributed.broadcast(resolved_config.model.gradient_checkpointing)
    resolved_config.model.compile = distributed.broadcast(resolved_config.model.compile)
    return resolved_config


def show_memory_plan(plan: MemoryPlan, console: RunConsole, *, available: int) -> str | None:
    """Print the memory plan, and the remedies if the device has less; return the sentence with the remedies."""
    console.say(plan.table())
    warning = plan.advice(available=available)
    if warning is not None:
        console.warn(warning)
    return warning


def show_scale(shape: ModelShape, config: Config, console: RunConsole) -> None:
    """Print the disk space that a large model needs, and settings that are unusual for one."""
    for sentence in disk_notes(shape, config.checkpoint, optimizer=config.optimizer.name, updates=config.updates):
        console.say(sentence)
    for sentence in size_warnings(shape, config.optimizer, has_adapters=config.model.lora.rank > 0):
        console.warn(sentence)


def make_prompts(
    config: Config, distributed: Distributed, loop: BackgroundLoop, chat: Chat, *, say: Callable[[str], None]
) -> Prompts:
    """Load and filter the prompts of a run; a collective. Raises `DataError` on all ranks."""
    settings = config.data
    images = images_of_data(config.model, chat)
    data = distributed.together(lambda: training_data(settings, config.environment, config.reward, **images, say=say))
    if settings.max_prompt_tokens is not None:
        from lockstep.trainer.data.prompt_filter import without_long  # other runs do not load it

        max_tokens = settings.max_prompt_tokens
        data = without_long(data, config.environment, distributed, loop, chat, max_tokens=max_tokens, say=say)
    return Prompts(
        data,
        seed=config.seed,
        shuffle=settings.shuffle,
        weights=[source.weight for source in settings.training_sets().values()],
        curriculum=settings.curriculum,
    )
