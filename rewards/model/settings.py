"""Settings of the reward model as a reward (`rewards/model/reward.py`), without torch, which validation does not
load."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import ConfigError

INPUTS = ("messages", "tokens")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Raises `ConfigError` for settings that contradict each other."""

    path: str
    """Directory or hub id of a sequence classifier with one label."""
    input: str = "messages"
    """One of `INPUTS`."""
    policy_path: str | None = None
    """For input=tokens: where the policy's tokenizer is; None: it is the reward model's own."""
    stop: str | None = None
    """Text of the one token that ends a response for the score, for example "."; None: nothing is cut or rejected."""
    stop_after: int = 0
    """First index of a sampled token at which `stop` counts."""
    rejected: float = -1.0
    """Score of a response without a stop token that counts."""
    max_tokens: int = 4096
    """Longer texts are cut on the left: what is scored is the end."""
    batch_size: int = 32
    device: str | None = None
    """For example cuda:1; auto: its layers spread over all GPUs; None: the GPU of this process if there is one."""
    dtype: str = "float32"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.input not in INPUTS:
            raise ConfigError(
                f"reward.settings.model.input={self.input}: expected one of {', '.join(INPUTS)}; "
                "set reward.settings.model.input=messages"
            )
        if self.stop is not None and self.input != "tokens":
            raise ConfigError(
                "reward.settings.model.stop counts sampled tokens; set reward.settings.model.input=tokens with it"
            )
        for name, count in (("batch_size", self.batch_size), ("max_tokens", self.max_tokens)):
            if not isinstance(count, int) or count < 1:
                raise ConfigError(
                    f"reward.settings.model.{name}={count} must be at least 1; leave it out for the default"
                )
