"""An engine that samples nothing: it says what a script says, so that everything around an engine can be looked at.

Its log-probabilities are zeros. They hold a place in the record and are evidence of nothing: never train on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.chat.chat import Chat
from rollout.engine.protocol import Sampling
from rollout.errors import EngineError
from rollout.records import EngineCall, FinishReason


class ScriptedEngine:
    """An `Engine` for one episode, whose turns come from `next_turn`."""

    def __init__(self, chat: Chat, next_turn: Callable[[], str], *, max_model_len: int) -> None:
        """next_turn: the text of the next assistant turn, as a model would sample it, without its stop token."""
        self._chat = chat
        self._next_turn = next_turn
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> EngineCall:
        """The next turn as tokens, cut at `sampling.max_tokens`, with the stop token if it fits."""
        ids = list(self._chat.tokenizer.encode(self._next_turn(), add_special_tokens=False))
        stops = sampling.stop_token_ids[:1]
        whole = (*ids, *stops)
        sampled = whole[: sampling.max_tokens]
        return EngineCall(
            prompt_ids=tuple(prompt_ids),
            sampled_ids=sampled,
            sampled_logprobs=(0.0,) * len(sampled),
            finish_reason=FinishReason.STOP if stops and sampled == whole else FinishReason.LENGTH,
        )

    async def score(self, ids: Sequence[int]) -> list[float]:
        raise EngineError("a script has no weights to score with")

    async def close(self) -> None: ...
