"""What a sampler is, to the rest of Lockstep: token ids in, token ids with evidence out.

Text never crosses this protocol.

    Engine          what episodes sample from: `rollout/engine/pool.py`, or one of
    SyncedEngine    an engine whose weights the trainer replaces: `rollout/engine/embedded.py` over vLLM in this
    process,
                    `rollout/server/server_engine.py` over a vLLM server
    PooledEngine    either of these, or one whose weights another rank replaces (`rollout/server/remote_rank_engine.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollout.errors import ConfigError
from rollout.records import EngineCall

if TYPE_CHECKING:
    import torch

    from rollout.system.background_loop import BackgroundLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings, always sent in full: what is left out would come from the model's generation_config.json."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy (evaluation only: a greedy token has no distribution to train against)."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Sample past the end-of-sequence token (fixed-length responses)."""
    seed: int | None = None
    """Of this request alone; the same seed gives the same tokens in any batch."""
    is_trained: bool = True
    """False in evaluation, where nobody asks which tokens truncated sampling drew from."""
    affinity: tuple[int, ...] | None = None
    """Requests with the same key begin alike. A pool keeps them on one engine, which has their beginning cached."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, found {self.max_tokens}")
        if self.temperature < 0:
            raise ConfigError(f"temperature must not be negative, found {self.temperature}")

    @property
    def truncates(self) -> bool:
        """Whether the engine must say from which part of the vocabulary tokens were drawn: where they were drawn from
        a part (a greedy token is not drawn at all), and are going to be trained."""
        if self.temperature == 0 or not self.is_trained:
            return False
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class Engine(Protocol):
    """A sampler with versioned weights."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> EngineCall:
        """Sample one completion.

        Raises:
            EngineError: the engine is dead or refused the request.
            EvidenceError: the answer lacks ids, logprobs or version spans that agree with each other.
        """
        ...

    async def score(self, ids: Sequence[int]) -> list[float]:
        """log π(ids[i] | ids[:i]) at temperature 1 for i = 1 .. len(ids) - 1."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop sampling. mode: wait (drain), keep (freeze in place), abort. Clears the KV cache."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class PooledEngine(Engine, Protocol):
    """An engine beside others that serve the same model (`rollout/engine/pool.py`)."""

    name: str
    """For messages: what and where it is."""
    loop: BackgroundLoop
    """All coroutines run in it."""
    dtype: torch.dtype
    vocab_size: int


class SyncedEngine(PooledEngine, Protocol):
    """An engine whose weights the trainer replaces (`rollout/weights/sync.py`). Every method raises `EngineError`."""

    host: str
    """Where its workers are: a host name or an address."""
    num_workers: int
    """Processes that each hold weights, and take part in a transfer."""
    weight_transfer_backend: str

    def restart_if_dead(self) -> bool:
        """Start the engine anew, with the weights on disk, if it has died and belongs to this process; whether it was.

        Called outside of its loop.
        """
        ...

    async def check_alive(self) -> None:
        """Raise if the engine is dead. Answered beside whatever its workers do: one that hangs in them passes."""
        ...

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the group that weights travel in."""
        ...

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive what `update_info` announces; returns when it has arrived."""
        ...

    async def finish_weight_update(self, label: str) -> None:
        """Sample with the new weights from the next token on. label: their version."""
        ...

    async def label_weights(self, label: str) -> None:
        """What tokens say of the weights from now on: a version, or that nobody vouches for them."""
        ...

    async def weight_version(self) -> int: ...

    async def reset_prefix_cache(self) -> None: ...

    async def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every parameter as the engine holds it (`rollout/weights/checksums.py`)."""
        ...


class SleepingEngine(SyncedEngine, Protocol):
    """An engine that shares its GPU with the trainer, and gives up memory while that one computes."""

    async def sleep(self, level: int) -> None:
        """Stop sampling and free memory. 1: the weights move to main memory; 2: they are given up, too, and what wakes
        up is no version until a sync gives it one. The KV cache is lost either way."""
        ...

    async def wake(self) -> None:
        """Take the memory again."""
        ...
