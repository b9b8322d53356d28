"""Logits of the whole vocabulary, from vLLM's own head: heard in its workers, sent by `collective_rpc` as text.

vLLM's `prompt_logprobs=-1` gives the same numbers as Python objects, many times slower (docs/diagnosis.md). Here a hook
keeps the hidden states that reach the head while a prompt is scored, and the head computes chosen rows again. Which of
the states are the prompt's is known by its scores, so other requests may run meanwhile. A tensor would cross between
processes only with pickle (`VLLM_ALLOW_INSECURE_SERIALIZATION`), so bytes cross as base64, over HTTP too.

Not covered: several data-parallel engines behind one address, where another one may be asked than scored.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lockstep.rollout.engine.repairs.cpu_logprobs import log_softmax
from lockstep.rollout.errors import EngineError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
    from vllm.v1.worker.worker_base import WorkerBase

    from lockstep.rollout.engine.protocol import PooledEngine
    from lockstep.rollout.records import ImageSpan

MAX_TOKENS = 512
"""Longest prompt. vLLM holds the logits of a whole prompt twice when it scores one, and does not count them when it
plans its memory (issue 52054 of vllm-project/vllm): 0.6 GiB for 512 tokens and a vocabulary of 151,936."""
MAX_CALLS = 32
"""Number of calls of the head that are remembered; the prompt's are among the last."""
SPARE_ROWS = 64
"""Rows of other requests that are computed with those of the prompt."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}
"""Largest |Δ log π| between a prompt's scores and its logits, computed again, by the dtype of the logits."""
ATTEMPTS = 3


class HeardLogits:
    """Extension of vLLM's workers (`worker_extension_cls`): methods that `collective_rpc` calls by name."""

    _head_states: Sequence[Tensor] = ()
    _head_hooks: Sequence[RemovableHandle] = ()

    def hear_logits(self) -> None:
        """Keep the hidden states that reach the head, until `heard_logits`."""
        self._stop_hearing()  # of a request that failed, or a trainer that died
        model = cast("WorkerBase", self).get_model()
        self._head_states = calls = deque[Tensor](maxlen=MAX_CALLS)
        keep = calls.append
        heads = [module for name, module in model.named_modules() if name.split(".")[-1] == "logits_processor"]
        self._head_hooks = [one.register_forward_pre_hook(lambda _, args: keep(args[1].clone())) for one in heads]

    @torch.inference_mode()
    def heard_logits(self, ids: list[int], scores: list[float], places: list[int]) -> list[Any] | None:
        """Return distance, dtype, shape and base64 of the logits behind `ids[:place + 1]` for each place.

        Those heard rows are taken that score the ids as the engine did; distance: largest |Δ log π| to `scores`. None:
        no logits were heard, or only another worker has them. A collective of the workers.
        """
        calls = self._stop_hearing()
        model = cast("VllmModelForTextGeneration[Tensor]", cast("WorkerBase", self).get_model())
        expected_N, length = torch.tensor(scores), len(scores)
        best, rows = math.inf, None
        for states in calls:
            for start in range(0, len(states) - length + 1, SPARE_ROWS):
                part = states[start : start + length + SPARE_ROWS - 1]
                logits = model.compute_logits(part)
                if logits is None:
                    continue
                logp_RN = log_softmax(logits)[:, torch.tensor(ids[1:], device=logits.device)].cpu()
                for first in range(len(part) - length + 1):
                    distance = (logp_RN[first : first + length].diagonal() - expected_N).abs().max().item()
                    if distance < best:
                        best, rows = distance, logits[[first + place for place in places]].cpu()
        if rows is None:
            return None
        raw = base64.b64encode(rows.contiguous().view(torch.uint8).numpy().tobytes()).decode()
        return [best, str(rows.dtype).removeprefix("torch."), list(rows.shape), raw]

    def _stop_hearing(self) -> Sequence[Tensor]:
        for hook in self._head_hooks:
            hook.remove()
        calls, self._head_states, self._head_hooks = self._head_states, (), ()
        return calls


async def hear(
    engine: PooledEngine, ids: Sequence[int], places: Sequence[int], images: Sequence[ImageSpan] = ()
) -> tuple[Tensor, int]:
    """Let an engine score a prompt; return its (places, V) logits behind `ids[:place + 1]`, and the bytes sent.

    Logits are those before temperature and masks. Raises `EngineError`.
    """
    problem = "no logits were heard"
    for _ in range(ATTEMPTS):
        await engine.ask_workers("hear_logits")
        scores = await (engine.score(ids, images) if images else engine.score(ids))
        for answer in await engine.ask_workers("heard_logits", list(ids), scores, list(places)):
            if answer is None:
                continue
            try:
                distance, limit, logits = _table(answer, num_rows=len(places))
            except (TypeError, ValueError, KeyError, RuntimeError) as error:
                raise EngineError(
                    f"{engine.name}: its workers sent no table of logits ({type(error).__name__}: {error}); restart it "
                    "with the version of Lockstep that trains, or set sync.distributions_every=0"
                ) from error
            if distance <= limit:
                return logits, len(answer[3])
            problem = f"the nearest are {distance:.2g} away, expected at most {limit:g}"
    raise EngineError(
        f"{engine.name}: none of the logits of its head belong to the prompt that it scored, in {ATTEMPTS} attempts "
        f"({problem}); set sync.distributions_every=0, or use one engine per address"
    )


def _table(answer: Any, *, num_rows: int) -> tuple[float, float, Tensor]:
    """Return distance, its limit, and the (num_rows, V) logits of `HeardLogits.heard_logits`."""
    distance, name, shape, raw = answer
    limit, dtype = TOLERANCES[name], getattr(torch, name)
    logits = torch.frombuffer(bytearray(base64.b64decode(raw, validate=True)), dtype=dtype).view(shape)
    if logits.ndim != 2 or len(logits) != num_rows:
        raise ValueError(f"found the shape {list(logits.shape)}, expected {num_rows} rows")
    return float(distance), limit, logits
