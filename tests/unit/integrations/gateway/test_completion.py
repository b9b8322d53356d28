"""Tests of the end of an answer at a stop string."""

from __future__ import annotations

from lockstep.integrations.gateway.completion import cut_at_stop
from lockstep.rollout.records import EngineCall, FinishReason, VersionSpan


def test_the_first_stop_string_ends_the_call_with_its_evidence():
    call = EngineCall(
        prompt_ids=(1,),
        sampled_ids=tuple(b"ab STOP cd END"),
        sampled_logprobs=tuple(-float(i) for i in range(14)),
        finish_reason=FinishReason.LENGTH,
        version_spans=(VersionSpan(version=1, start=0, end=5), VersionSpan(version=2, start=5, end=14)),
    )
    cut, stop = cut_at_stop(call, ["END", "ST", "STOP"], lambda ids: bytes(ids).decode())
    assert stop == "ST"
    assert bytes(cut.sampled_ids) == b"ab ST"
    assert cut.sampled_logprobs == call.sampled_logprobs[:5]
    assert cut.version_spans == (VersionSpan(version=1, start=0, end=5),)
    assert cut.finish_reason is FinishReason.STOP
    assert cut_at_stop(call, ["no"], lambda ids: bytes(ids).decode()) == (call, None)
    for stops, first in ((["d", "STOP"], "STOP"), (["TOP", "STOP"], "STOP")):
        assert cut_at_stop(call, stops, lambda ids: bytes(ids).decode())[1] == first
