"""CPU time per sampled token from the engine's answer to the trainer's rows, in Python and numpy.

    python benchmarks/records.py [--rollouts 64] [--prompt 500] [--sampled 1000]

Times each stage separately, in CPU microseconds per sampled token: validating the record of a call, making the rows of
a rollout, encoding and decoding the bytes that ranks exchange, counting matching tokens, and the JSON of a saved
rollout. The goal is `us_per_token` of at most 2 without the JSON: at 10,000 tokens per second, 2 % of a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness.results import argument_parser, report

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.episode.token_metrics import count_tokens
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.rollout.rollout_lines import calls_as_json
from lockstep.trainer.batch.batch_bytes import decode, encode
from lockstep.trainer.batch.step_batch import StepBatch


def answers(*, rollouts: int, prompt: int, sampled: int) -> list[dict[str, Any]]:
    """Make answers of an engine in Python's own number types."""
    rng = np.random.default_rng(0)
    return [
        {
            "prompt_ids": tuple(rng.integers(0, 1000, prompt).tolist()),
            "sampled_ids": tuple(rng.integers(0, 1000, sampled).tolist()),
            "sampled_logprobs": tuple((-rng.random(sampled)).tolist()),
            "finish_reason": FinishReason.STOP,
            "version_spans": (VersionSpan(version=0, start=0, end=sampled),),
        }
        for _ in range(rollouts)
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--sampled", type=int, default=1000)
    args = parser.parse_args()
    if args.quick:
        args.rollouts, args.prompt, args.sampled = 4, 20, 50
    microseconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        microseconds[stage] = (time.process_time() - start) / (args.rollouts * args.sampled) * 1e6
        return result

    engine_answers = answers(rollouts=args.rollouts, prompt=args.prompt, sampled=args.sampled)
    calls = timed("record of the call", lambda: [EngineCall(**answer) for answer in engine_answers])
    rows = timed("rows", lambda: [rows_from_calls([call], rollout_id=i) for i, call in enumerate(calls)])
    rollouts = [Rollout(rollout_id=i, group_id=0, calls=(call,)) for i, call in enumerate(calls)]
    timed("JSON", lambda: [calls_as_json(rollout.calls) for rollout in rollouts])
    batch = timed("batch (makes the rows again)", lambda: StepBatch.of(rollouts, mask_truncated=False))
    payload = timed("bytes", lambda: encode(batch))
    timed("batch from bytes", lambda: decode(payload))
    timed("match", lambda: [count_tokens(r.calls, of_rollout) for r, of_rollout in zip(rollouts, rows, strict=True)])
    json_us = microseconds.pop("JSON")
    table = [{"stage": stage, "µs per sampled token": value} for stage, value in microseconds.items()]
    whole = sum(value for stage, value in microseconds.items() if stage != "rows")
    report("records", table, {"us_per_token": whole, "json_us_per_token": json_us}, as_json=args.json)


if __name__ == "__main__":
    main()
