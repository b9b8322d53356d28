"""Partial answers of an embedded engine: what its requests in flight had sampled when weights last changed.

Between two changes of the weights the tokens are in the process of the scheduler (`rollout/engine/scheduler.py`); a
change brings them to vLLM's output processor, which holds them until the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_answers import answer_of, engine_call
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import EngineCall, ImageSpan, SamplingSupport, VersionSpan
from lockstep.rollout.vllm_names import check_vllm

if TYPE_CHECKING:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState


def partial_call(
    engine: Any, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
) -> EngineCall | None:
    """Return what a request in flight has sampled by older weights, as an aborted call; in the loop of the engine.

    sampling: with the name of the request. None: it is not in this engine, has sampled nothing, or asked for the
    experts of its tokens, which arrive at its end; and for engines that are not in this process.
    """
    if not isinstance(engine, EmbeddedEngine) or sampling.needs_routes or sampling.name is None:
        return None
    check_vllm("partial")
    from vllm.v1.engine import FinishReason

    processor: OutputProcessor = engine.llm.output_processor
    for request_id in processor.external_req_ids.get(sampling.name, ()):
        state: RequestState = processor.request_states[request_id]
        tokens: IncrementalDetokenizer | None = state.detokenizer
        if tokens is not None and tokens.num_output_tokens():
            return engine_call(
                prompt_ids,
                answer_of(state._new_completion_output([], FinishReason.ABORT, None)),
                images=images,
                with_support=sampling.truncates,
                max_tokens=sampling.max_tokens,
                vocab_size=engine.vocab_size,
                source=engine.name,
            )
    return None


def joined(first: EngineCall, rest: EngineCall) -> EngineCall:
    """Return a partial call and the rest of it as one call. rest: its prompt is that of the first with its tokens."""
    start = len(first.sampled_ids)
    support = None
    if first.support is not None and rest.support is not None:
        support = SamplingSupport(
            offsets=np.concatenate([first.support.offsets, first.support.offsets[-1] + rest.support.offsets[1:]]),
            token_ids=np.concatenate([first.support.token_ids, rest.support.token_ids]),
        )
    return replace(
        rest,
        prompt=first.prompt,
        sampled_ids=first.sampled_ids + rest.sampled_ids,
        sampled_logprobs=first.sampled_logprobs + rest.sampled_logprobs,
        version_spans=(
            *first.version_spans,
            *(VersionSpan(version=s.version, start=start + s.start, end=start + s.end) for s in rest.version_spans),
        ),
        support=support,
        images=first.images,
    )
