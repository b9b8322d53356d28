"""Engine protocols: token ids in, token ids with evidence out. Text never crosses them.

Engine            sampler of episodes: `rollout/engine/pool.py` or one of the following
PooledEngine      pool member
SyncedEngine      engine whose weights this rank replaces (`rollout/engine/embedded.py`,
                  `rollout/server/server_engine.py`)
SleepingEngine    synced engine that can free its memory between rollouts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.rollout.errors import ConfigError

if TYPE_CHECKING:  # settings are checked before torch is imported, and the checks read this module
    import torch

    from lockstep.rollout.engine.token_scores import TokenScores
    from lockstep.rollout.records import EngineCall, ImageSpan
    from lockstep.rollout.system.background_loop import BackgroundLoop

POLICY, BASE = "policy", "base"
"""Names of the trained adapter, and of the model without adapters."""
ONLINE_SCHEMES = (
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "mxfp8",
    "int8_per_channel_weight_only",
    "nvfp4_per_token",
)
"""Quantizations that vLLM 0.32 applies to whole weights as they arrive, so that a weight update can replace them. The
last two quantize experts only."""
MAX_SUPPORT = 20
"""Most logprobs vLLM returns per sampled token (its `max_logprobs`). For a top_k up to this they are the whole support:
tokens excluded by truncated sampling have logprob -inf, or the filler over HTTP."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's buffers (`MaxLoRARanks`)."""


def buffer_rank(rank: int) -> int:
    """Return the smallest rank of vLLM's buffers that holds this one. Raises `ValueError` above all of them."""
    for one in RANKS:
        if rank <= one:
            return one
    raise ValueError(f"vLLM has adapters up to rank {RANKS[-1]}, found {rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings, always sent in full: vLLM takes missing ones from the model's generation_config.json."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy, for evaluation only: a greedy token has no distribution to train against."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Sample past the end-of-sequence token, for responses of fixed length."""
    seed: int | None = None
    """Per request; the same seed gives the same tokens in any batch."""
    drawn: int = 0
    """Sampled tokens at the end of the prompt, after which an embedded engine goes on as if it had just drawn them."""
    name: str | None = None
    """Name of the request in an embedded engine, by which `partial_answers.py` finds it; None: the engine gives one."""
    is_trained: bool = True
    """False in evaluation, which needs no support of truncated sampling."""
    with_routes: bool = False
    """Return the experts of trained requests, from an engine that was started to return them."""
    model: str = POLICY
    """Name of the adapter to sample with, of an engine that takes adapters: the policy's, or one it was started with;
    `BASE`: none."""
    affinity: tuple[int, ...] | None = None
    """Key of requests that share a prefix. A pool sends them to one engine, which has the prefix cached."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, found {self.max_tokens}")
        if self.temperature < 0:
            raise ConfigError(f"temperature must not be negative, found {self.temperature}")

    @property
    def truncates(self) -> bool:
        """True if the engine must return the support: tokens are drawn from part of the vocabulary and trained."""
        if self.temperature == 0 or not self.is_trained:
            return False
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def needs_routes(self) -> bool:
        """True if the engine must return routed experts."""
        return self.with_routes and self.is_trained


class Engine(Protocol):
    """A sampler with versioned weights."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        """Sample one completion; `max_tokens` is reduced to the room left in the context.

        images: those of the prompt, whose ids are in it (`rollout/media/processing.py`).

        Raises:
            EngineError: the prompt does not fit, has ids outside the vocabulary, or images that the engine does not
                take; the engine is dead, hangs or refuses; or its weights have no valid version.
            RequestError: this request failed repeatedly in a live engine.
            EvidenceError: ids, logprobs or version spans of the answer are missing or inconsistent, or a token that
                only an image may bring was sampled.
        """
        ...

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """Return log π(ids[i] | ids[:i]) at temperature 1 for i >= 1, without cached prefixes.

        At most `max_model_len - 1` ids, because vLLM samples one more token; more where its context is longer.
        """
        ...

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        """Return the scores of `score`, and the rank of each scored token in its distribution; 1: the most probable."""
        ...

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        """Return the scores of `score` with the `top_k` most probable tokens at each position, at most `MAX_SUPPORT`.

        Raises `EvidenceError` for scores that are missing, not finite, or of other tokens.
        """
        ...

    async def close(self) -> None:
        """Release the engine; closing twice is allowed."""


class PooledEngine(Engine, Protocol):
    """An engine beside others that serve the same model (`rollout/engine/pool.py`)."""

    name: str
    """Description for messages."""
    loop: BackgroundLoop
    """Event loop in which all coroutines run."""
    dtype: torch.dtype
    vocab_size: int

    async def ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the workers (`rollout/weights/whole/heard_logits.py`) and return the answer of each."""
        ...


class SyncedEngine(PooledEngine, Protocol):
    """An engine whose weights the trainer replaces (`rollout/weights/sync.py`). Every method raises `EngineError`."""

    host: str
    """Host name or address of its workers."""
    num_workers: int
    """Number of processes that hold weights and join a transfer."""
    weight_transfer_backend: str

    @property
    def takes_adapters(self) -> bool:
        """True if updates bring LoRA adapters, which it applies to the weights on disk
        (`rollout/engine/adapters.py`)."""
        ...

    @property
    def quantization(self) -> str | None:
        """Scheme by which it quantizes the weights that arrive, or by which those of its checkpoint are quantized.

        None: it computes with unquantized weights.
        """
        ...

    def restart_if_dead(self) -> bool:
        """Restart a dead engine of this process with the weights on disk, from outside its loop; True if it did."""
        ...

    async def check_alive(self) -> None:
        """Raise if the engine is dead. An engine whose workers hang counts as alive."""

    async def pause(self, mode: str) -> None:
        """Stop sampling and clear the KV cache. mode: wait (drain), keep (freeze requests in place) or abort."""

    async def resume(self) -> None: ...

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the process group of the transfer."""

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive the weights announced by `update_info`; return when they have arrived."""

    async def finish_weight_update(self, label: str) -> None:
        """Sample with the new weights from the next token on. label: their version."""

    async def label_weights(self, label: str) -> None:
        """Label the weights that sample from now on: with a version, or as unusable."""

    async def weight_version(self) -> int:
        """Return the version of the next sampled token."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Clear cached prefixes. Raises if requests hold blocks; pause first."""

    async def weight_checksums(self) -> dict[str, str]:
        """Return the SHA-256 of every parameter as the engine holds it (`rollout/weights/checksums.py`)."""
        ...


class SleepingEngine(SyncedEngine, Protocol):
    """An engine that shares its GPU with the trainer and frees memory while the trainer computes."""

    async def sleep(self, level: int) -> None:
        """Stop sampling and free memory. Level 1 moves the weights to main memory; level 2 discards them.

        After level 2 the weights have no version until the next sync. The KV cache is lost either way.
        """

    async def wake(self, part: str) -> None:
        """Allocate memory again: first of the "weights", and after their update of the "kv_cache".

        The engine samples again when it has both.
        """
