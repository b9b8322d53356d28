"""Low-rank adapters (LoRA, Hu et al. 2021): small matrices are trained while the model's weights stay frozen.

    y = W x + (alpha / rank) · B A x        A: rank × in, random; B: out × rank, zeros, so training begins at W

The engine gets the adapters and applies them to weights that stay, or merged weights (`model.lora.send`). Merging
rounds the sum to the engine's dtype, in which a small update vanishes. A finished run leaves both: a merged model that
`from_pretrained` loads, and the adapter itself in `adapter/` beside its weights. The reference policy is the model with
adapters disabled.

Covered: linear layers of the decoder, not of a vision tower, in one process and under DDP, ZeRO-2 and ZeRO-3; rsLoRA;
an initial adapter from disk. Not covered: adapters on the head or on an embedding tied to it (the engine holds one
weight for both), on experts, DoRA, dropout (the sampler has none).
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4Router

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.protocol import BASE, POLICY, RANKS, buffer_rank
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.stored_model import language_model, read_adapter, reason, whole_models
from lockstep.trainer.checkpoint.run_dir import ADAPTER
from lockstep.trainer.config.groups.model_settings import LoraConfig, ModelConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.families import FAMILIES
from lockstep.trainer.model.quantized_base import method_at
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES
from lockstep.trainer.setting import typed

if TYPE_CHECKING:
    import peft
    from peft import PeftModel

ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
PEFT_REFUSES, PEFT_REFUSES_IN = frozenset({"out_proj", "conv1d"}), frozenset({"falcon_h1", "nemotron_h"})
"""Layers, and the model types in which peft refuses adapters on them."""
OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "shared_expert_gate"})
"""Names of the layers of an expert in checkpoints, and of a shared one's gate. peft 0.21 adapts stacked experts in
place of them."""


BEYOND_PLAIN = (
    *("use_dora", "modules_to_save", "lora_bias", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
)
"""Settings of peft 0.21 that make an adapter more than matrices A and B of linear layers."""
PLAIN_INITS = ("gaussian", "eva", "orthogonal")
"""Initial values that leave W as it is. With others, such as PiSSA's, peft changes W when it loads the adapter."""
PLAIN_ONLY = "where trainer and engine apply plain LoRA only; set it to another adapter, or merge this one into a model"


def add_adapters(model: PreTrainedModel, settings: LoraConfig) -> PeftModel:
    """Insert trainable adapters into the model and freeze everything else.

    Raises `ConfigError` if `target_modules` names something that is not a linear layer, or the head, or if the adapter
    at `path` is another than these settings describe.
    """
    import peft

    targets = settings.target_modules
    if targets is not None:
        _check_targets(model, targets)
    peft_model = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number works: peft only divides it by the rank
            lora_dropout=0.0,
            target_modules=default_targets(model) if targets is None else list(targets),
            exclude_modules=_tower_pattern(model),
            use_rslora=settings.rslora,
            task_type="CAUSAL_LM",
        ),
    )
    assert isinstance(peft_model, peft.PeftModel)
    lora_config = peft_model.peft_config["default"]
    assert isinstance(lora_config, peft.LoraConfig)
    if isinstance(lora_config.target_modules, set):
        lora_config.target_modules = sorted(lora_config.target_modules)  # in the saved file, where a set has no order
    if settings.path is not None:
        _load(peft_model, settings.path, settings)
    return peft_model


def _load(model: PeftModel, path: str, settings: LoraConfig) -> None:
    """Fill the adapters from a directory or hub id that peft wrote. Raises `ConfigError` if they differ."""
    import peft

    lora_config = _read_config(path, setting="model.lora.path")
    values = {"r": settings.rank, "lora_alpha": settings.alpha, "use_rslora": settings.rslora}
    overrides = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
    different = [
        f"model.lora.{overrides[name]}={typed(getattr(lora_config, name))}"
        for name, value in values.items()
        if getattr(lora_config, name) != value
    ]
    if different:
        raise ConfigError(f"model.lora.path={path} was made with other settings: set {' '.join(different)}")
    if lora_config.rank_pattern or lora_config.alpha_pattern:
        raise ConfigError(
            f"model.lora.path={path} has ranks or scales of single layers (rank_pattern, alpha_pattern), where a run "
            "trains one rank and one alpha; set it to another adapter, or merge this one into a model"
        )
    tensors = read_adapter(path, setting="model.lora.path", model=model)
    if model.device.type != "meta":
        peft.set_peft_model_state_dict(model, tensors)


def refuse_unfit_adapters(settings: ModelConfig, shapes: PreTrainedConfig) -> None:
    """Raise `ConfigError` for adapters of `model.lora.path` or `model.adapters` that the policy has no layers for.

    shapes: config of the policy.
    """
    import peft

    trust = settings.trust_remote_code
    adapters = {f"model.adapters.{name}": path for name, path in settings.adapters.items()}
    auto = language_model(sees_images=settings.sees_images).auto
    with whole_models(), torch.device("meta"):
        if settings.lora.path is not None and settings.lora.rank:
            add_adapters(auto.from_config(deepcopy(shapes), trust_remote_code=trust), settings.lora)
        for setting, path in adapters.items():
            lora_config = _read_config(path, setting=setting)
            model = auto.from_config(deepcopy(shapes), trust_remote_code=trust)
            try:
                peft_model = peft.get_peft_model(model, lora_config)
            except ValueError as error:
                raise ConfigError(
                    f"{setting}={path} does not fit model.path={settings.path} ({error}); set it to an adapter of this "
                    "model"
                ) from error
            assert isinstance(peft_model, peft.PeftModel)
            read_adapter(path, setting=setting, model=peft_model)


def _read_config(path: str, *, setting: str) -> peft.LoraConfig:
    """Read the settings of an adapter. Raises `ConfigError` if it is not plain LoRA, or peft cannot read it."""
    import peft

    try:
        peft_config = peft.PeftConfig.from_pretrained(path)
        numbers = (peft_config.r, peft_config.lora_alpha) if isinstance(peft_config, peft.LoraConfig) else ()
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError("r={!r} and lora_alpha={!r} are not numbers".format(*numbers))
    except Exception as error:  # of many kinds, for values that peft does not expect
        raise ConfigError(
            f"{setting}={path} has no adapter that peft reads ({reason(error)}); set it to a directory with "
            "adapter_config.json and adapter_model.safetensors, such as <run>/model/adapter"
        ) from error
    if not isinstance(peft_config, peft.LoraConfig):
        raise ConfigError(f"{setting}={path} is of kind {peft_config.peft_type}, {PLAIN_ONLY}")
    settings = peft_config.to_dict()
    beyond = [name for name in BEYOND_PLAIN if settings[name]]
    beyond += ["bias"] if peft_config.bias != "none" else []
    if isinstance(peft_config.init_lora_weights, str) and peft_config.init_lora_weights not in PLAIN_INITS:
        beyond.append("init_lora_weights")
    if beyond:
        summary = ", ".join(f"{name}={typed(settings[name])}" for name in beyond)
        raise ConfigError(f"{setting}={path} has {summary}, {PLAIN_ONLY}")
    return peft_config


def adapter_settings(model: ModelConfig, rollout: RolloutConfig, *, correction_mode: str) -> AdapterSettings | None:
    """Return the adapters that engines must hold, the run's and `model.adapters`; None if they get whole weights.

    Raises `ConfigError` for adapters of a kind or rank that vLLM does not have, and for quantized weights that would
    have to be replaced or quantized again.
    """
    lora, others = model.lora, model.adapters
    is_compiled = rollout.compile_engine and not torch.cuda.is_available()
    if is_compiled and (others or (lora.rank and lora.send == "adapter")):
        raise ConfigError(
            "rollout.compile_engine=true: on a CPU vLLM has no adapters in compiled models; set "
            "rollout.compile_engine=false, or model.lora.send=merged without model.adapters"
        )
    is_sent = lora.rank > 0 and (
        lora.send == "adapter" or (lora.send == "auto" and not is_compiled and _can_send(model))
    )
    if lora.rank or rollout.quantization is not None:
        _refuse_what_quantized_weights_exclude(model, rollout.quantization, correction_mode, is_sent=is_sent)
    if not is_sent and not others:
        return None
    ranks = {"model.lora.rank": lora.rank} if is_sent else {}
    for name, path in others.items():
        if name in (BASE, POLICY):
            raise ConfigError(f"model.adapters: {name} is the name of another model; choose one beside base and policy")
        if ADAPTER_NAME.fullmatch(name) is None:
            raise ConfigError(
                f"model.adapters: {name!r} becomes part of file names and arguments; choose one of letters, digits, "
                "'.', '_' and '-', as in 'model.adapters={last: runs/first/model/adapter}'"
            )
        lora_config = _read_config(path, setting=f"model.adapters.{name}")
        ranks[f"model.adapters.{name}={path}: rank"] = max([lora_config.r, *(lora_config.rank_pattern or {}).values()])
    for name, rank in ranks.items():
        try:
            buffer_rank(rank)
        except ValueError as error:
            raise ConfigError(
                f"{name}={rank}: {error}; set model.lora.send=merged, or merge it into a model"
            ) from error
    return AdapterSettings(max_rank=max(ranks.values()), others=tuple(others.items()))


def _refuse_what_quantized_weights_exclude(
    model: ModelConfig, quantization: str | None, correction_mode: str, *, is_sent: bool
) -> None:
    method = method_at(model.path, trust_remote_code=model.trust_remote_code)
    if method is None:
        return
    if quantization is not None:
        raise ConfigError(
            f"rollout.quantization={quantization}: the weights of model.path={model.path} are "
            f"quantized already ({method}); set rollout.quantization=null"
        )
    if not is_sent:
        raise ConfigError(
            f"model.lora.send={model.lora.send}: the engine holds the quantized weights ({method}) of "
            f"model.path={model.path}, which whole weights cannot replace; set model.lora.send=adapter "
            "rollout.compile_engine=false"
        )
    if not CORRECTION_MODES[correction_mode].corrects_tokens:
        raise ConfigError(
            f"model.path={model.path}: the engine rounds activations for its quantized weights ({method}), "
            f"which correction.mode={correction_mode} does not correct per token; set correction=token_truncate"
        )


def _can_send(settings: ModelConfig) -> bool:
    model = AutoConfig.from_pretrained(settings.path, trust_remote_code=settings.trust_remote_code)
    kind = model.get_text_config().model_type
    return settings.lora.rank <= RANKS[-1] and any(
        kind in one.model_types for one in FAMILIES if not one.merges_adapters
    )


def default_targets(model: PreTrainedModel) -> str | list[str]:
    """Return the linear layers that get adapters unless `model.lora.target_modules` names others.

    All but the head; without those that peft 0.21 refuses in Mamba-2 layers, and without the names of experts' layers
    in a mixture of experts, which peft would take for stacked experts, of which the engine is sent parts.
    """
    left_out = PEFT_REFUSES if model.config.get_text_config().model_type in PEFT_REFUSES_IN else frozenset()
    if any(".experts." in name for name, _ in model.named_parameters()):
        left_out |= OF_EXPERTS
    if not left_out:
        return "all-linear"  # excludes the head
    return sorted(_linear_names(model) - left_out)


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return all linear layers by name, but those of a vision tower. For peft, routers that give several tensors
    (Llama 4) are none."""
    pattern = _tower_pattern(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, Llama4Router)
        and not (pattern and re.fullmatch(pattern, name))
    }


def _tower_pattern(model: PreTrainedModel) -> str | None:
    """Return a pattern of the names of the modules of a vision tower, which gets no adapters; None without one."""
    if not hasattr(model.config, "vision_config"):
        return None
    from lockstep.trainer.model.layers.vision import tower_parts

    names = "|".join(map(re.escape, tower_parts(model)))
    return rf"{re.escape(model.base_model_prefix)}\.({names})\..*" if names else None


def _linear_names(model: PreTrainedModel) -> set[str]:
    """Return the last parts of the names of all linear layers but the head."""
    head = model.get_output_embeddings()
    return {name.rpartition(".")[2] for name, module in _linear_layers(model).items() if module is not head}


def _check_targets(model: PreTrainedModel, wanted: list[str]) -> None:
    head = model.get_output_embeddings()
    linear = _linear_layers(model)
    for target in wanted:
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if OF_EXPERTS & {target} and any(".experts." in name for name, _ in model.named_parameters()):
            raise ConfigError(
                f"model.lora.target_modules={wanted}: {target} names layers of experts, which {type(model).__name__} "
                "stacks in one tensor, and adapters on them cannot be sent to the engine; leave it out"
            )
        if not matching:
            raise ConfigError(
                f"model.lora.target_modules={wanted}: {type(model).__name__} has no linear layer named {target}; "
                f"it has {', '.join(sorted(_linear_names(model)))}"
            )
        if any(linear[name] is head for name in matching):
            raise ConfigError(
                f"model.lora.target_modules={wanted} names the head, which the fused log-probabilities need unadapted; "
                f"leave {target} out"
            )


def save_adapted(model: PeftModel, directory: Path, distributed: Distributed, *, merges: bool = True) -> None:
    """Write the model with merged adapters, if `merges`, and the adapter beside it; a collective."""
    if merges:
        from lockstep.rollout.weights.source import ZeroSource  # here: it imports vLLM, which takes seconds

        weights = {name: tensor.cpu() for name, tensor in ZeroSource(model, readers=[0])}
        if distributed.is_main:
            model.get_base_model().save_pretrained(directory, state_dict=weights)  # type: ignore[operator]
    save_adapter(model, directory / ADAPTER, distributed)


def save_adapter(model: PeftModel, directory: Path, distributed: Distributed) -> None:
    """Write the adapter as peft does, for `model.lora.path` and `model.adapters`; a collective."""
    adapters = nn.ParameterList(parameter for parameter in model.parameters() if parameter.requires_grad)
    with distributed.whole_parameters(adapters):
        if distributed.is_main:
            model.save_pretrained(str(directory), save_embedding_layers=False)
