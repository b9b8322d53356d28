"""Factories from the configuration, shared by training, evaluation, replays and servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from lockstep.rewards.composition import FaultTolerance, RewardSet, make_reward_set
from lockstep.rewards.length import LengthControl
from lockstep.rewards.outcomes import Outcome
from lockstep.rewards.shaping import Shaping
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.errors import ConfigError, TemplateError
from lockstep.rollout.records import Rollout
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.system.abandonable_thread import run_in_abandonable_thread
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.outputs_settings import GatewayConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.decoder import DecoderSetup
from lockstep.trainer.model.policy import Policy

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing

CHAT_LIMIT_S = 300.0
"""Time limit for loading a tokenizer, also from the hub, and rendering short conversations [s]."""


def vocab_size_of(path: str, *, trust_remote_code: bool) -> int:
    """Return the number of ids of the model at `path`."""
    model = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    size: int = model.get_text_config().vocab_size
    return size


def load_policy(model: ModelConfig, setup: DecoderSetup) -> Policy:
    return Policy.from_pretrained(
        model.path,
        dtype="float32",  # master weights; trainer/distributed/distributed.py chooses the mixed precision
        is_compiled=model.is_compiled,
        trust_remote_code=model.trust_remote_code,
        lora=model.lora,
        **setup,
    )


def _image_processing(model: ModelConfig, media: Path | None) -> ImageProcessing | None:
    """Load the image processor of a model that sees images; None for one that does not."""
    if not model.sees_images:
        return None
    from lockstep.rollout.media.processing import ImageProcessing  # runs without images do not load it
    from lockstep.rollout.media.run_images import run_store

    limits = {"trust_remote_code": model.trust_remote_code, "max_per_prompt": model.images.max_per_prompt}
    return ImageProcessing.from_pretrained(model.path, store=run_store(media), **limits)


def make_chat(model: ModelConfig, *, history: str, media: Path | None = None) -> Chat:
    """Load tokenizer and chat template, and the image processor of a model that sees images.

    history: `environment.history`. media: folder that keeps images, for other ranks and later readers; None: one
    that this process deletes when it ends.

    Raises `TemplateError` if the template fails on a short conversation or does not end: it is a program of the model's
    directory, and its sandbox limits neither time nor depth.
    """

    def make() -> Chat:
        return Chat.from_pretrained(
            model.path,
            history=history,
            trust_remote_code=model.trust_remote_code,
            template=model.chat_template,
            images=_image_processing(model, media),
        )

    try:
        # A template that never ends must not keep the process alive.
        return run_in_abandonable_thread(make).result(CHAT_LIMIT_S)
    except TimeoutError as error:
        raise TemplateError(
            f"{model.path}: tokenizer and chat template are not ready after {CHAT_LIMIT_S:g} s; expected a "
            "template that renders a short conversation at once"
        ) from error
    except (ArithmeticError, MemoryError, RecursionError, TypeError) as error:
        raise TemplateError(
            f"{model.path}: the chat template fails on a short conversation: {type(error).__name__}: {error}"
        ) from error


def images_of_data(model: ModelConfig, chat: Chat) -> dict[str, Any]:
    """Return the arguments of `training_data` and `heldout_data` for a run that sees images; none for another."""
    if chat.images is None:
        return {}
    return {"store": chat.images.store, "max_images": model.images.max_per_prompt}


def make_sampler(
    config: Config,
    *,
    engine: Engine,
    chat: Chat,
    prepare: Callable[[Rollout], Rollout] = lambda rollout: rollout,
) -> Sampler:
    """prepare: as for `Sampler`."""
    environment = config.environment
    return Sampler(
        engine=engine,
        chat=chat,
        make_environment=partial(make_environment, environment.name, **environment.settings),
        max_turns=config.max_turns,
        call_timeout_s=environment.call_timeout_s,
        seed=config.seed,
        gateway=make_gateway_settings(config.gateway, config.model),
        prepare=prepare,
    )


def make_gateway_settings(settings: GatewayConfig, model: ModelConfig) -> GatewaySettings:
    model_name = settings.model_name or Path(model.path).name
    if model_name in model.adapters:
        raise ConfigError(
            f"model.adapters: {model_name} is the name of the model without adapters; choose another, or set "
            "gateway.model_name"
        )
    return GatewaySettings(
        host=settings.host,
        port=settings.port,
        api_key=settings.api_key,
        model_name=model_name,
        max_request_mib=settings.max_request_mib,
        adapters=tuple(model.adapters),
        max_images=model.images.max_per_prompt,
    )


def make_sampling(settings: RolloutConfig, chat: Chat, *, with_routes: bool) -> Sampling:
    return Sampling(
        max_tokens=settings.max_tokens_per_turn,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop_token_ids=() if settings.ignore_eos else tuple(chat.stop_token_ids),
        ignore_eos=settings.ignore_eos,
        with_routes=with_routes,
    )


def make_rewards(config: Config) -> RewardSet:
    settings, algorithm = config.reward, config.algorithm
    rewards = make_reward_set(
        settings.functions,
        settings.weights,
        settings.settings,
        FaultTolerance(
            timeout_s=settings.timeout_s,
            on_error={Outcome(outcome): action for outcome, action in settings.on_error.items()},
            max_error_rate=settings.max_error_rate,
        ),
        Isolation(
            mode=settings.isolation,  # type: ignore[arg-type]  # Hydra refuses Literal; its choices are checked
            workers=settings.workers,
            memory_gib=settings.memory_gib,
        ),
        Shaping(
            turn_rewards=algorithm.turn_rewards,
            turn_states=config.plan.needs_states,
            horizon=config.horizon,
            overlong_buffer=algorithm.overlong_buffer,
            overlong_penalty=algorithm.overlong_penalty,
            length=LengthControl(
                rule=algorithm.length_control,
                weight=algorithm.length_weight,
                solved_reward=algorithm.solved_reward,
                horizon=config.horizon,
            ),
        ),
    )
    rewards.num_updates = config.updates
    return rewards
