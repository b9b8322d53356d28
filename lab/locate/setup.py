"""Models and row of a location, from the settings of a run, and refusal of what cannot be located."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from lockstep.lab.diagnosis.cases import TEXTS
from lockstep.lab.locate.engine_trace import EngineTrace, trace_engine
from lockstep.lab.locate.landmarks import refuse_unknown
from lockstep.lab.locate.location import Location, locate
from lockstep.rollout.chat.chat import load_tokenizer
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.stored_model import read_config
from lockstep.trainer.build import load_policy
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.engines.start import engine_settings
from lockstep.trainer.model.decoder import decoder_setup
from lockstep.trainer.model.policy import Policy

PROMPT_TOKENS = 64
SAMPLED_TOKENS = 64
"""Both are bounded by half of `rollout.max_model_len`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Settings of a run that say what its engine and its trainer compute."""

    model: ModelConfig
    rollout: RolloutConfig
    correction: CorrectionConfig
    seed: int
    engine_context: int
    """See `Config.engine_context`."""
    rotary_context: int | None
    """See `Config.rotary_context`."""


def refuse_unfit(subject: Subject) -> None:
    """Raise `ConfigError` for what cannot be located, with what to type instead, before anything heavy starts."""
    model, rollout = subject.model, subject.rollout
    refused = {
        "rollout.engine=server: the engine must be in this process; set rollout.engine=embedded": (
            rollout.engine == "server"
        ),
        f"rollout.quantization={rollout.quantization}: the engine computes with other weights on purpose; set "
        "rollout.quantization=null, or compare log-probabilities without --locate": rollout.quantization is not None,
        "rollout.compile_engine=true: hooks do not fire in a compiled engine; set rollout.compile_engine=false. What "
        "only the compiled engine does shows without --locate": rollout.compile_engine,
        "model.compile=true: hooks do not fire in a compiled trainer; set model.compile=false": model.is_compiled,
        f"model.lora.rank={model.lora.rank}: adapters are not located; set model.lora.rank=0, and model.path "
        "to weights that contain the adapter": model.lora.rank > 0,
        f"model.images.max_per_prompt={model.images.max_per_prompt}: vision towers are not located; set "
        "model.images.max_per_prompt=0": model.sees_images,
        "several processes: start it once, with `lockstep diagnose --locate`": int(os.environ.get("WORLD_SIZE", "1"))
        > 1,
    }
    for problem, applies in refused.items():
        if applies:
            raise ConfigError(f"--locate: {problem}")
    stored = read_config(model.path, setting="model.path", trust_remote_code=model.trust_remote_code)
    refuse_unknown(stored.get_text_config().model_type)


def locate_run(subject: Subject) -> Location:
    """Trace the engine of a run, then examine its trainer on the same row. Raises `LockstepError`."""
    refuse_unfit(subject)
    trace = trace_of(subject)
    policy, reference = load(subject), load(subject, is_reference=True)
    return locate(policy, reference, trace)


def trace_of(subject: Subject) -> EngineTrace:
    """Sample one row of plain text: the settings of a run choose the engine, its seed and its temperature."""
    model, rollout = subject.model, subject.rollout
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code, template=None)
    half = rollout.max_model_len // 2
    prompt_ids = list(tokenizer.encode("\n\n".join(TEXTS)))[: min(PROMPT_TOKENS, half)]
    settings = engine_settings(model, rollout, subject.correction, seed=subject.seed, context=subject.engine_context)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as logs:
        return trace_engine(
            settings,
            prompt_ids,
            sampled=min(SAMPLED_TOKENS, half),
            temperature=rollout.temperature,
            log_path=Path(logs) / "engine.log",
        )


def load(subject: Subject, *, is_reference: bool = False) -> PreTrainedModel:
    """Load the model as a run trains it, in float32. is_reference: with the plain implementation of experts."""
    policy: Policy = load_policy(subject.model, decoder_setup(subject.model, subject.rotary_context))
    return prepared_reference(policy) if is_reference else policy.causal_lm


def prepared_reference(policy: Policy) -> PreTrainedModel:
    """Return the model of a policy with experts that take every dtype."""
    model = policy.causal_lm
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model
