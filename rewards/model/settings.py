"""Settings of the reward function `model` (`rewards/model/reward.py`), checked without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lockstep.rollout.errors import ConfigError

INPUTS = ("messages", "tokens")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a reward model. Raises `ConfigError` for settings that contradict each other."""

    path: str
    """Directory or hub id of a sequence classifier with one label."""
    input: str = "messages"
    """One of `INPUTS`."""
    by_turn: bool = False
    """Score the conversation up to the end of each turn, one reward per turn (`algorithm.turn_rewards=true`)."""
    policy_path: str | None = None
    """For input=tokens: path of the policy's tokenizer; None: that of the reward model."""
    stop: str | None = None
    """Text of the single token that ends a response for the score, for example "."; None: no cut, no rejection."""
    stop_after: int = 0
    """First index of a sampled token at which `stop` counts."""
    rejected: float = -1.0
    """Score of a response without a stop token that counts."""
    max_tokens: int = 4096
    """Longer inputs are cut on the left, so that the end is scored."""
    batch_size: int = 32
    device: str | None = None
    """For example cuda:1; auto: spread the layers over all GPUs; None: the GPU of this process, or the CPU."""
    dtype: str = "float32"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        rules = {
            "input": (self.input in INPUTS, f"one of {', '.join(INPUTS)}"),
            "batch_size": (_is_count(self.batch_size, 1), "a whole number of at least 1"),
            "max_tokens": (_is_count(self.max_tokens, 1), "a whole number of at least 1"),
            "stop_after": (_is_count(self.stop_after, 0), "a whole number of at least 0"),
            "rejected": (type(self.rejected) in (int, float) and math.isfinite(self.rejected), "a number"),
            "dtype": (self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        }
        for name, (is_sound, what) in rules.items():
            if not is_sound:
                raise ConfigError(
                    f"reward.settings.model.{name}={getattr(self, name)}: expected {what}; leave it out for the default"
                )
        if self.stop is not None and self.input != "tokens":
            raise ConfigError(
                "reward.settings.model.stop counts sampled tokens; set reward.settings.model.input=tokens with it"
            )


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
