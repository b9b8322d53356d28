"""Refusal of runs that cannot be located, with the setting to change, before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.lab.locate.setup import Subject, refuse_unfit
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.schema import Config


@pytest.mark.parametrize(("change", "advice"), [
    (lambda c: setattr(c.rollout, "engine", "server"), "set rollout.engine=embedded"),
    (lambda c: setattr(c.rollout, "quantization", "fp8_per_channel"), "set rollout.quantization=null"),
    (lambda c: setattr(c.rollout, "compile_engine", True), "set rollout.compile_engine=false"),
    (lambda c: setattr(c.model, "compile", True), "set model.compile=false"),
    (lambda c: setattr(c.model.lora, "rank", 8), "set model.lora.rank=0"),
    (lambda c: setattr(c.model.images, "max_per_prompt", 1), "set model.images.max_per_prompt=0"),
])  # fmt: skip
def test_what_cannot_be_located_is_refused_with_a_remedy(change: Callable[[Config], None], advice: str) -> None:
    config = Config()
    config.model.path = "a model that is never read"
    change(config)
    with pytest.raises(ConfigError, match=rf"--locate: .*{advice}"):
        refuse_unfit(
            Subject(
                model=config.model, rollout=config.rollout, correction=config.correction, seed=0, engine_context=512,
                rotary_context=512,
            )
        )  # fmt: skip
