"""The models that a configuration names, checked by their files before an engine starts: tensors, ids, contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from lockstep.rewards.resolve import MODEL
from lockstep.rollout.chat.chat import generation_stops, load_tokenizer, vocabulary_difference
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.stored_model import (
    REWARD_MODEL,
    Role,
    language_model,
    read_config,
    refuse_non_finite,
    stored_model,
)
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.decoder import packable_config
from lockstep.trainer.model.layers.rotary import DYNAMIC, original_lengths
from lockstep.trainer.model.quantized_base import loading_arguments, stored_method

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Names of the longest context in configs."""
SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary positions whose factor that context contains, as vLLM reads configs."""


def refuse_unfit_models(config: Config, say: Callable[[str], None], *, trains: bool = True) -> None:
    """Raise `ConfigError` for a model whose files do not hold it, or whose ids or context do not fit the run.

    say: prints what is left out of a model's files, or changed. trains: False for a process that only samples.
    """
    model, trust = config.model, {"trust_remote_code": config.model.trust_remote_code}
    own_role, seeing = language_model(sees_images=model.sees_images), {**trust, "sees_images": model.sees_images}
    if trains:
        policy = packable_config(model.path, setting="model.path", has_adapters=model.lora.rank > 0, **seeing)
    else:
        policy = read_config(model.path, setting="model.path", **trust)
    models: list[tuple[Role, str, str, PreTrainedConfig]] = []
    if trains or stored_method(policy) is None:  # an engine reads more methods than the trainer
        models.append((own_role, "model.path", model.path, policy))
    if trains and config.algorithm.kl_coef and model.reference_path is not None:
        reference = packable_config(model.reference_path, setting="model.reference_path", **seeing)
        models.append((own_role, "model.reference_path", model.reference_path, reference))
    if trains and config.plan.has_critic and model.critic == "separate" and model.critic_path is not None:
        from lockstep.trainer.model.critic import role_of

        critic = packable_config(model.critic_path, setting="model.critic_path", **seeing)
        models.append((role_of(critic), "model.critic_path", model.critic_path, critic))
    if trains and config.teacher.path is not None and model.sees_images:
        from lockstep.rollout.media.processing import refuse_other_images

        refuse_other_images(model.path, "teacher.path", config.teacher.path, **trust)
    if trains and config.teacher.path is not None and not config.teacher.urls:
        teacher = read_config(config.teacher.path, setting="teacher.path", **trust)
        if stored_method(teacher) is None:
            models.append((own_role, "teacher.path", config.teacher.path, teacher))
    for role, setting, path, own in models:
        content = stored_model(role, path, own, setting=setting, **trust, **loading_arguments(own))
        for note in content.notes:
            say(note)
        if not trains:  # the trainer checks what it loads
            refuse_non_finite(content.non_finite(), setting=setting, path=path)
        _refuse_other_ids(model, setting, path, own, policy)
        if config.has_rollouts and setting != "teacher.path":
            longest = config.rollout.max_model_len
            _refuse_short(longest, setting, path, own)
            if trains:
                _refuse_rotary(longest, config.engine_context, setting, path, own, say)
    if trains and MODEL in config.reward.functions:
        _refuse_unfit_reward_model(config.reward.settings[MODEL])
    if model.adapters or model.lora.path is not None:
        from lockstep.trainer.model.lora import refuse_unfit_adapters

        refuse_unfit_adapters(model, policy)


def vocabulary(path: str, *, setting: str, trust_remote_code: bool) -> Mapping[str, int] | None:
    """Return the ids of a model's tokens; None for a directory without a tokenizer, where transformers makes one."""
    directory = Path(path)
    if directory.is_dir() and not any(file for pattern in TOKENIZER_FILES for file in directory.glob(pattern)):
        return None
    return load_tokenizer(path, setting=setting, trust_remote_code=trust_remote_code, template=None).get_vocab()


def refuse_other_tokenizer(policy: ModelConfig, setting: str, path: str) -> None:
    """Raise `ConfigError` if the tokenizer of another model gives a token another id than the policy's."""
    trust = policy.trust_remote_code
    own = vocabulary(policy.path, setting="model.path", trust_remote_code=trust)
    other = vocabulary(path, setting=setting, trust_remote_code=trust)
    if (difference := vocabulary_difference(own or {}, other or {})) is not None:
        raise ConfigError(
            f"{setting}={path} has another tokenizer than model.path={policy.path}: {difference}; set {setting} "
            "to a model with the policy's tokenizer"
        )


def longest_context(config: PreTrainedConfig) -> int | None:
    """Return the longest context of a model, as vLLM derives it; None if its config does not say."""
    text = config.get_text_config()
    values = text.to_dict() | {name: getattr(text, name) for name in text.attribute_map}
    limits = [values[name] for name in CONTEXTS if values.get(name)]
    if not limits:
        return None
    rope = values.get("rope_parameters") or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict) and "rope_type" in one]
    factors = [one.get("factor") or 1.0 for one in kinds if one["rope_type"] not in SCALED]
    factor = factors[-1] if factors and "gemma3" not in config.model_type else 1.0
    return int(values.get("model_max_length") or min(limits) * factor)


def _refuse_short(needed: int, setting: str, path: str, own: PreTrainedConfig) -> None:
    limit = longest_context(own)
    if limit is not None and limit < needed:
        raise ConfigError(
            f"rollout.max_model_len={needed} is more than {setting}={path} has positions for, {limit} in its "
            f"config.json; set rollout.max_model_len={limit} or less"
        )


def _refuse_rotary(
    longest: int, context: int, setting: str, path: str, own: PreTrainedConfig, say: Callable[[str], None]
) -> None:
    """Raise `ConfigError` for frequencies by the length of a row that engine and trainer cannot share; say which they
    take. longest: row [tokens]. context: of the engine."""
    for kind, original in original_lengths(own).items():
        if context <= original:
            continue
        shorter = f"rollout.max_model_len={longest - context + original}"
        if kind == DYNAMIC or own.model_type == "phimoe":
            other = "none by length" if kind == DYNAMIC else "other factors than transformers"
            raise ConfigError(
                f"{setting}={path} has {kind} rotary positions, whose frequencies change for rows of more than "
                f"{original} tokens; the engine has {other}, so it would sample from another model than is trained. "
                f"Set {shorter} or less"
            )
        say(
            f"{setting}={path}: engine and trainer use the long factors of its longrope positions for every row, "
            f"because the context of {context} tokens exceeds original_max_position_embeddings={original}; serve the "
            f"trained model with a context as long. With {shorter} they use the short ones"
        )


def _refuse_other_ids(
    model: ModelConfig, setting: str, path: str, own: PreTrainedConfig, policy: PreTrainedConfig
) -> None:
    """Raise `ConfigError` if ids of the policy are none, or other tokens, in a model that reads its rows."""
    size, num_ids = own.get_text_config().vocab_size, policy.get_text_config().vocab_size
    ids = vocabulary(path, setting=setting, trust_remote_code=model.trust_remote_code)
    refuse_outside(setting, path, size, ids)
    if setting == "model.path":
        if ids is None:
            raise ConfigError(f"model.path={path} has no tokenizer; save that of the model there (`save_pretrained`)")
        if outside := [stop for stop in generation_stops(path) if stop >= size]:
            raise ConfigError(
                f"model.path={path}: generation_config.json has eos_token_id {outside[0]}, and the model has {size} "
                "ids; correct the file"
            )
        return
    # Larger models of a family pad the vocabulary further. A reference must have the same, for a KL over the same ids.
    is_padded = ids is not None and setting != "model.reference_path" and size > max(ids.values())
    if size != num_ids and not (is_padded and (size > num_ids or setting == "teacher.path")):
        raise ConfigError(
            f"{setting}={path} has {size} ids, model.path={model.path} {num_ids}; set {setting} to a model with "
            "the policy's tokenizer and vocab_size"
        )
    if ids is not None:
        refuse_other_tokenizer(model, setting, path)


def refuse_outside(setting: str, path: str, size: int, ids: Mapping[str, int] | None) -> None:
    """Raise `ConfigError` if a tokenizer has ids for which the model has no embedding. size: their number there."""
    if ids is None or max(ids.values()) < size:
        return
    beyond = sorted(token for token, number in ids.items() if number >= size)
    raise ConfigError(
        f"{setting}={path}: the tokenizer has {len(beyond)} ids beyond the {size} of the model, such as {beyond[0]!r} "
        f"with id {ids[beyond[0]]}; set {setting} to a model with its own tokenizer, or give the model more ids "
        f"(`model.resize_token_embeddings({max(ids.values()) + 1})`)"
    )


def _refuse_unfit_reward_model(settings: Mapping[str, Any]) -> None:
    from lockstep.rewards.model.classifier import refuse_labels, remaining_bias  # of no use to other rewards
    from lockstep.rewards.model.reward import ModelReward

    path = str(settings["path"])
    source = {"setting": "reward.settings.model.path", "trust_remote_code": bool(settings.get("trust_remote_code"))}
    own = read_config(path, **source)
    refuse_labels(own, f"reward.settings.model.path={path}")
    remaining_bias(path)
    ModelReward(**settings).check()
    stored_model(REWARD_MODEL, path, own, **source)
    refuse_outside("reward.settings.model.path", path, own.get_text_config().vocab_size, vocabulary(path, **source))
