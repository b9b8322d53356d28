"""Engines in place of a model: one that answers with given texts, and a recording that is played again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.engine.token_scores import TokenScores
from lockstep.rollout.errors import EngineError, EvidenceError
from lockstep.rollout.records import EngineCall, ImageSpan, ids_with_images
from lockstep.trainer.tools.dry_run import sampled_answer

Key = tuple[tuple[int, ...], int | None]
"""Prompt with its images, and seed of a request."""


class CannotScore:
    """Part of an engine that episodes do not use."""

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        raise EngineError("this engine has no model and cannot score")

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        raise EngineError("this engine has no model and cannot score")

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        raise EngineError("this engine has no model and cannot score")

    async def close(self) -> None: ...


class ScriptedEngine(CannotScore):
    """Engine whose turns are given as token ids, without the end of the turn. Turns are cut at the token limit."""

    def __init__(self, answer: Callable[[Sequence[int]], Awaitable[Sequence[int]]], *, max_model_len: int) -> None:
        """answer: returns the ids of the turn after a prompt."""
        self.max_model_len = max_model_len
        self._answer = answer

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        return await sampled_answer(list(await self._answer(prompt_ids)), prompt_ids, sampling, images)


class RecordingEngine(CannotScore):
    """An engine whose answers are kept by prompt and seed."""

    def __init__(self, engine: Engine) -> None:
        self.max_model_len = engine.max_model_len
        self.calls: dict[Key, EngineCall] = {}
        self._engine = engine

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        call = await self._engine.generate(prompt_ids, sampling, images)
        self.calls[ids_with_images(tuple(prompt_ids), images), sampling.seed] = call
        return call

    def replay(self) -> ReplayingEngine:
        return ReplayingEngine(self.calls, max_model_len=self.max_model_len)


class ReplayingEngine(CannotScore):
    """Engine that gives the recorded answer to a recorded request, and `EvidenceError` to any other."""

    def __init__(self, calls: dict[Key, EngineCall], *, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._calls = calls

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        call = self._calls.get((ids_with_images(tuple(prompt_ids), images), sampling.seed))
        if call is None:
            raise EvidenceError(
                "the environment wrote another prompt than the first time, after the same sampled turns"
            )
        return call
