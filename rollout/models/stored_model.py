"""The files of a model, judged before the values of its tensors are read.

    config.json ─► class of the model ────┐
    headers of the files with weights ────┴─► transformers' own loading, without values ─► missing, unexpected, ...

One judgment for all launchers: under ZeRO-3 transformers 5.19 itself reports no unexpected and no misshapen tensors.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import is_offline_mode
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations import deepspeed
from transformers.modeling_utils import _get_resolved_checkpoint_files, load_state_dict
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.generation import mend_generation
from lockstep.rollout.safe_text import error_text

if TYPE_CHECKING:
    from peft import PeftModel


NAMED = 4
"""Most tensors of one kind that a sentence names."""
MAX_REASON = 300
"""Most characters of another library's error that a sentence quotes."""
SCORE = "score."
"""Beginning of the names of a reward model's head."""
OF_TRANSFORMERS = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values(),
    *MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(),
}
"""Classes of transformers that a config.json may name. Others are aliases of vLLM, towers, and remote code."""
GROUPS = ("n_group", "topk_group")
"""Groups of experts, which dots1 publishes as null for none; transformers divides by them. One group is the same."""
HEADS = ("lm_head.", "embed_out.", SCORE, "classifier.")


@dataclass(frozen=True, slots=True)
class Role:
    """Purpose for which a model is loaded: its class, and the tensors that its files may lack or have beside it."""

    auto: Any
    """Auto class of transformers."""
    new: tuple[str, ...] = ()
    """Beginnings of names of tensors that the files may lack: a head that starts from new values."""
    unused: tuple[str, ...] = ()
    """Beginnings of names of tensors that only the files have: another head."""


LANGUAGE_MODEL = Role(AutoModelForCausalLM)
VISION_LANGUAGE_MODEL = Role(AutoModelForImageTextToText)
TRUNK = Role(AutoModel, unused=HEADS)
VALUE_MODEL = Role(AutoModelForTokenClassification)
REWARD_MODEL = Role(AutoModelForSequenceClassification)
NEW_REWARD_MODEL = Role(AutoModelForSequenceClassification, new=(SCORE,), unused=HEADS)


def language_model(*, sees_images: bool) -> Role:
    """Return the role of a policy, with its vision tower if it sees images."""
    return VISION_LANGUAGE_MODEL if sees_images else LANGUAGE_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model whose files hold every tensor of its class."""

    files: Mapping[str, str]
    """File of each tensor, by its name there."""
    names: Mapping[str, str]
    """Names in the files, by names in the model. Experts that transformers joins have the name of one of them."""
    notes: tuple[str, ...]
    """Sentences about what is left out or changed."""

    def read(self, name: str) -> torch.Tensor | None:
        """Read a tensor of the model as it is stored; None if it is not."""
        if (stored_name := self.names.get(name)) is None:
            return None
        file = self.files[stored_name]
        if not file.endswith(".safetensors"):
            return load_state_dict(file)[stored_name]
        with safe_open(file, framework="pt") as reader:
            return reader.get_tensor(stored_name)

    def non_finite(self) -> list[str]:
        """Read all values, one tensor at a time. Returns the names of tensors with NaN or infinite ones."""
        bad: list[str] = []
        for file in sorted(set(self.files.values())):
            if file.endswith(".safetensors"):
                with safe_open(file, framework="pt") as reader:
                    bad += [name for name in reader.keys() if not is_finite(reader.get_tensor(name))]  # noqa: SIM118
            else:
                bad += [name for name, tensor in load_state_dict(file).items() if not is_finite(tensor)]
        return bad


@contextmanager
def whole_models() -> Iterator[None]:
    """Let transformers make whole models on this rank inside the block, also under ZeRO-3."""
    config_ref = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config_ref


def read_config(path: str | Path, *, setting: str, trust_remote_code: bool, **changes: Any) -> PreTrainedConfig:
    """Read a model's config.json. setting: name of the path's setting. changes: replace values of the file.

    Raises `ConfigError` if it cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **changes)
        text = config.get_text_config()
        for name in GROUPS:
            if name in vars(text) and vars(text)[name] is None:
                setattr(text, name, 1)
        if not isinstance(config.architectures, list | None):
            raise TypeError(f"architectures: expected a list of names, found {config.architectures!r}")
    except Exception as error:  # of many kinds, for values that transformers does not expect
        raise ConfigError(
            f"{setting}={path}: no loadable model config ({reason(error)}); set {setting}=<directory with config.json "
            "and weights, or hub id>"
        ) from error
    return config


def stored_model(
    role: Role, path: str | Path, config: PreTrainedConfig, *, setting: str, trust_remote_code: bool, **loading: Any
) -> StoredModel:
    """Judge the files of a model without reading values. loading: further arguments of `from_pretrained`.

    Raises `ConfigError` for files that cannot be read or saved again, and with the names of tensors that are missing,
    unexpected, or of another shape or kind than the model's.
    """
    place = f"{setting}={path}"
    remedy = f"set {setting} to a directory that `save_pretrained` wrote, or a hub id"
    try:
        files, tensors = _headers(path, config)
        with whole_models():
            with torch.device("meta"):
                blank = role.auto.from_config(deepcopy(config), trust_remote_code=trust_remote_code)
            kind = type(blank)
            model, info = kind.from_pretrained(
                None,
                config=blank.config,  # the text's, of a checkpoint with a vision tower
                state_dict=dict(tensors),
                device_map={"": "meta"},
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **loading,
            )
        notes = _try_saving(model, path)
    except Exception as error:  # of many kinds, for values that transformers does not expect
        raise ConfigError(f"{place}: no loadable model ({reason(error)}); correct it, or {remedy}") from error
    own = model.state_dict()
    targets = _targets(model, tensors, own)
    missing = {name for name in info["missing_keys"] if not name.startswith(role.new)}
    unexpected = {name for name in info["unexpected_keys"] if not _is_ignorable(name, role, model)}
    unfit = {f"{name} {tuple(actual)}, expected {tuple(shape)}" for name, actual, shape in info["mismatched_keys"]}
    if not loading:  # else of quantized weights
        unfit |= {
            f"{name} of {tensor.dtype}, expected floating point"
            for name, tensor in tensors.items()
            if (place_of := own.get(targets[name])) is not None
            and place_of.is_floating_point()
            and not (tensor.is_floating_point() and tensor.itemsize > 1)
        }
    if missing or unexpected or unfit:
        lists = {"missing": missing, "unexpected": unexpected, "unfit": unfit}
        summary = "; ".join(f"{len(names)} {kind} ({first_names(names)})" for kind, names in lists.items() if names)
        hint = _hint(role, missing, unexpected, config)
        raise ConfigError(f"{place} does not hold the tensors of a {kind.__name__}: {summary}. {hint}{remedy}")
    if role is LANGUAGE_MODEL and (other := OF_TRANSFORMERS & {*(config.architectures or ())} - {kind.__name__}):
        raise ConfigError(
            f"{place}: config.json has architectures {first_names(other)}, which the engine would load, and the "
            f"model_type {config.model_type} of a {kind.__name__}; correct config.json, or {remedy}"
        )
    if left_out := targets.values() - own.keys():
        notes.append(
            f"{len(left_out)} tensor(s) left out, for which a {kind.__name__} has no place: {first_names(left_out)}"
        )
    names = {target: name for name, target in targets.items()}
    stored_weights = StoredModel(files=files, names=names, notes=tuple(f"{place}: {note}" for note in notes))
    for tied_name, source in model.all_tied_weights_keys.items():
        first, second = stored_weights.read(tied_name), stored_weights.read(source)
        if first is not None and second is not None and not torch.equal(first, second):
            raise ConfigError(
                f"{place}: config.json ties {tied_name} to {source}, and the files hold two that differ; set "
                "tie_word_embeddings=false in config.json, or leave the former out of the files"
            )
    return stored_weights


def reason(error: BaseException) -> str:
    """Return message and kind of an exception in one line; without the kind if the message was written for users."""
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return kind + " ".join(error_text(error).split())[:MAX_REASON]


def first_names(names: Collection[str]) -> str:
    """Return the first names in a line, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(sorted(names)[:NAMED]) + more


def refuse_non_finite(bad: Collection[str], *, setting: str, path: str | Path) -> None:
    """Raise `ConfigError` if there are names of tensors with values that are not finite."""
    if bad:
        raise ConfigError(
            f"{setting}={path}: {len(bad)} tensor(s) have NaN or infinite values ({first_names(bad)}); restore its "
            f"files, or set {setting} to another model"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all values are. A sum shows that at once, unless finite values overflow it."""
    return (
        tensor.is_meta
        or bool(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).isfinite())
        or bool(tensor.isfinite().all())
    )


def _headers(path: str | Path, config: PreTrainedConfig) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the file of each stored tensor, and the tensors on the meta device."""
    if (Path(path) / "adapter_config.json").is_file():
        raise ValueError("it has an adapter, adapter_config.json, which the trainer would add and the engine would not")
    weight_files, _ = _get_resolved_checkpoint_files(
        path,
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=True,  # no conversion to safetensors by the hub
        transformers_explicit_filename=config.to_dict().get("transformers_weights"),
        download_kwargs={"local_files_only": is_offline_mode()},
    )
    files: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files or ():
        try:
            file_tensors = load_state_dict(file, map_location="meta")
        except Exception as error:  # of many kinds; for pickles torch advises to run them
            problem = reason(error) if file.endswith(".safetensors") else "no torch file of tensors alone"
            raise ValueError(f"{Path(file).name}: {problem}") from error
        tensors |= file_tensors
        files |= dict.fromkeys(file_tensors, file)
    layers = config.get_text_config().to_dict().get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise ValueError(f"config.json has num_hidden_layers={layers}, and the files have {len(tensors)} tensors")
    return files, tensors


def _try_saving(model: PreTrainedModel, path: str | Path) -> list[str]:
    """Save what is beside the weights, which must not fail at the end of a run. Returns what will be changed."""
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(path)
        except OSError:  # the file is missing, or no JSON
            if (Path(path) / "generation_config.json").exists():
                raise
    with tempfile.TemporaryDirectory() as scratch:
        model.config.save_pretrained(scratch)
    return mend_generation(model)


def _targets(model: PreTrainedModel, stored: Collection[str], own: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the name in the model of each stored tensor, as `from_pretrained` finds it."""
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    targets: dict[str, str] = {}
    for name in stored:
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(own))
        if target not in own and name in own:
            target, _ = rename_source_key(name, [], [], model.base_model_prefix, dict(own))
        targets[name] = target
    return targets


def _is_ignorable(name: str, role: Role, model: PreTrainedModel) -> bool:
    """True for a stored tensor that the role leaves out, that is computed, or that predicts further tokens (MTP)."""
    text = model.config.get_text_config().to_dict()
    layer = re.search(r"\blayers\.(\d+)\.", name)
    first, further = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    is_mtp = bool(layer and first and further and first <= int(layer[1]) < first + further)
    buffer_names = (f".{buffer}" for buffer, _ in model.named_non_persistent_buffers())
    return name.startswith(role.unused) or is_mtp or any(buffer.endswith(f".{name}") for buffer in buffer_names)


def _hint(role: Role, missing: Collection[str], unexpected: Collection[str], config: PreTrainedConfig) -> str:
    """Return what is known to cause such a difference, as a sentence."""
    if role is REWARD_MODEL and missing and all(name.startswith(SCORE) for name in missing):
        return (
            f"It is a language model ({', '.join(config.architectures or ())}) without the head of a reward model: "
            "train one with `lockstep train-reward-model`, or "
        )
    prefixes = {name[: -len(own)] for own in missing for name in unexpected if name.endswith(f".{own}")}
    if len(prefixes) == 1:
        return f"All names begin with {prefixes.pop()!r}, which a wrapper adds: save the model inside it, or "
    return "Correct config.json, write the files again, or "


def read_adapter(path: str, *, setting: str, model: PeftModel) -> dict[str, torch.Tensor]:
    """Read the matrices of an adapter. model: with adapters of the same settings, whose values may have no memory.

    Raises `ConfigError` if the files cannot be read, have other matrices than the model, or values that are not finite.
    """
    import peft

    try:
        tensors: dict[str, torch.Tensor] = peft.load_peft_weights(path, device="cpu")
    except Exception as error:  # of many kinds for damaged files
        raise ConfigError(
            f"{setting}={path} has no adapter that peft reads ({reason(error)}); set it to a directory with "
            "adapter_config.json and adapter_model.safetensors, such as <run>/model/adapter"
        ) from error
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes, model_shapes = ({name: one.shape for name, one in each.items()} for each in (tensors, expected))
    if shapes != model_shapes:
        other = {name for name in shapes.keys() | model_shapes.keys() if shapes.get(name) != model_shapes.get(name)}
        layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
        remedy = f"model.lora.target_modules=[{','.join(layers)}]" if setting == "model.lora.path" else setting
        raise ConfigError(
            f"{setting}={path} adapts other layers, or layers of another model, than model.path and its settings name "
            f"({first_names(other)}): set {remedy}{'' if layers else ' to an adapter with matrices'}"
        )
    if bad := [name for name, one in tensors.items() if not (one.is_floating_point() and is_finite(one))]:
        raise ConfigError(
            f"{setting}={path}: {len(bad)} tensor(s) are not of finite numbers ({first_names(bad)}); restore its "
            f"files, or set {setting} to another adapter"
        )
    return tensors
