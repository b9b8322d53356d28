"""CPU time of the gateway per turn of a long rollout, with echoed token ids and without, and how it grows.

    python benchmarks/gateway.py [--turns 500] [--sampled 50]

Plays one conversation against a scripted engine and times the gateway's own work per request: reading the JSON, making
the prompt, recording the answer and writing the JSON. The harness sends the whole conversation each time, so the bytes
of a rollout grow with the square of its turns; the work in Python does not. Reports the exponent k of
(CPU time of a rollout) ∝ turns^k: 1 is linear, 2 is the growth of the bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from harness.results import argument_parser, fitted_exponent, report

from lockstep.integrations.gateway.completion import complete
from lockstep.integrations.gateway.dialects.chat_completions import CHAT_COMPLETIONS
from lockstep.integrations.gateway.dialects.dialect import Reply
from lockstep.integrations.gateway.prompt_maker import PromptMaker
from lockstep.integrations.gateway.request import Offer, read_json
from lockstep.integrations.gateway.session import Session
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from tests.fixtures.gateway import ScriptedEngine
from tests.fixtures.tokenizers import chat_tokenizer


async def rollout_times(*, turns: int, sampled: int, sends_ids: bool) -> tuple[list[float], int]:
    """Return the CPU seconds of the gateway after each turn, and the bytes of the last request."""
    tokenizer = chat_tokenizer("qwen3")
    chat = Chat(tokenizer)
    words = tokenizer.encode("the user asks and the assistant answers ", add_special_tokens=False)
    turn = (*(words * sampled)[: sampled - 1], chat.stop_token_ids[0])
    engine = ScriptedEngine(lambda *_: turn, max_model_len=turns * (sampled + 100))
    sampling = Sampling(max_tokens=sampled, stop_token_ids=chat.stop_token_ids)
    prompts = PromptMaker(chat, max_model_len=engine.max_model_len)
    session = Session("", offered=(sampling,), any_model=True)
    offer = Offer(session=session, sampling=[sampling], vocab_size=len(tokenizer), max_model_len=engine.max_model_len)
    messages: list[Any] = [{"role": "user", "content": "say it"}]
    times, raw, cpu_s = [], b"", 0.0
    for number in range(turns):
        engine.prompts.clear()
        raw = json.dumps({"model": "policy", "messages": messages}).encode()
        start = time.process_time()
        request = CHAT_COMPLETIONS.read(read_json(raw), offer)
        completion = await complete(engine, chat, prompts, session, request)
        reply = Reply(completion=completion, model="policy", decode=chat.decode)
        answer = json.dumps(CHAT_COMPLETIONS.body(reply))
        cpu_s += time.process_time() - start
        times.append(cpu_s)
        message = json.loads(answer)["choices"][0]["message"]
        if not sends_ids:
            message = {"role": message["role"], "content": message["content"]}
        messages += [message, {"role": "user", "content": f"and again, {number}"}]
    assert session.prompts["extended"] == turns - 1
    return times, len(raw)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--sampled", type=int, default=50, help="tokens of a turn")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.sampled = 32, 8
    rows, numbers = [], {}
    for name, sends_ids in (("with ids", True), ("without ids", False)):
        times, size = asyncio.run(rollout_times(turns=args.turns, sampled=args.sampled, sends_ids=sends_ids))
        points = [args.turns // 4, args.turns // 2, args.turns]
        seconds = [times[turns - 1] for turns in points]
        for turns, cpu_s in zip(points, seconds, strict=True):
            rows.append({"messages": name, "turns": turns, "CPU s": cpu_s, "ms per turn": cpu_s / turns * 1000})
        numbers[f"exponent {name}"] = fitted_exponent(points, seconds)
        numbers[f"last request {name} [KiB]"] = size / 1024
    report("gateway", rows, numbers, as_json=args.json)


if __name__ == "__main__":
    main()
