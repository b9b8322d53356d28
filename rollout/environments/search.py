"""Environment `search`: the model writes `<search>query</search>`, reads `<information>`, and ends with `<answer>`.

The search server speaks the protocol of Search-R1 (github.com/PeterGriffinJin/Search-R1,
search_r1/llm_agent/generation.py): POST {"queries": [...], "topk": 3, "return_scores": true} to its URL, answered by
{"result": [[{"document": {"contents": "title\\ntext"}, "score": 0.5}, ...]]}, one list per query.

The first closed tag of a turn is its action. Search results are a user turn, so their tokens are read and never
trained. Search-R1 cuts a turn behind its action and continues the same turn; here the turn ends where the model ends
it, and what it writes behind its action earns nothing.

Not covered: batches of queries of several episodes, and rerankers. Results are untrusted text: the model reads them,
and nothing runs them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, SearchError
from lockstep.rollout.records import Message, content_text
from lockstep.rollout.replies import limited_session, read_body, read_json
from lockstep.rollout.system.deadline import uncounted

MAX_ANSWER_BYTES = 4 * 2**20
MAX_CONCURRENT = 64
"""Most requests to search servers at once; others wait. Each takes a socket."""
INVALID = (
    "My previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again."
)
"""Search-R1's text, as a user turn."""
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class _Unavailable(Exception):
    """A failure that may pass: the request is sent again."""


class SearchEnvironment:
    """Searches until the model answers; the episode limits the number of turns."""

    # Four searches and the answer.
    declaration = Declaration(reads="prompt", max_turns=5, opens="a search server", is_deterministic=False)
    tools: Tools = ()

    def __init__(
        self,
        *,
        url: str | None = None,
        topk: int = 3,
        max_result_chars: int = 2000,
        attempts: int = 6,
        attempt_timeout_s: float = 30.0,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
    ):
        """url: of the search server. topk: documents per query. max_result_chars: longer results are cut (Search-R1
        cuts at 500 tokens). attempts, attempt_timeout_s: of a request, before its episode fails with `SearchError`.

        Raises `ConfigError`: there is no URL, or a number is out of range.
        """
        if url is None or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"environment search: url={url} is not the address of a search server; set "
                "environment.settings.url=http://127.0.0.1:8000/retrieve"
            )
        if topk < 1 or max_result_chars < 1 or attempts < 1 or not attempt_timeout_s > 0:
            raise ConfigError(
                f"environment search: found topk={topk}, max_result_chars={max_result_chars}, attempts={attempts} and "
                f"attempt_timeout_s={attempt_timeout_s}; set each above 0, for example environment.settings.topk=3"
            )
        self._url = url
        self._topk = topk
        self._max_result_chars = max_result_chars
        self._attempts = attempts
        self._attempt_timeout_s = attempt_timeout_s
        self._prompt = PromptReader(column=prompt_column, system=system_prompt)

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self._prompt.messages(example)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self.read_row(example)

    async def step(self, message: Message) -> Step:
        """Answer an assistant turn. `outcome["answer"]` is empty unless the action of the turn is an answer. Raises
        `SearchError`."""
        match = _ACTION.search(content_text(message))
        if match is None:
            return Step(messages=(_user(INVALID),), outcome={"answer": "", "invalid_actions": 1})
        action, text = match[1], match[2].strip()
        if action == "answer":
            return Step(done=True, outcome={"answer": text})
        with uncounted():  # it has its own limits
            results = await self._search(text)
        return Step(messages=(_user(f"<information>{results}</information>"),), outcome={"answer": "", "searches": 1})

    async def _search(self, query: str) -> str:
        body = {"queries": [query], "topk": self._topk, "return_scores": True}
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=0.25, max=8.0),
            retry=retry_if_exception_type((_Unavailable, aiohttp.ClientConnectionError, TimeoutError)),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    answer = await self._post(body)
        except (_Unavailable, aiohttp.ClientError, TimeoutError) as error:
            raise SearchError(
                f"search server {self._url}: no answer in {self._attempts} attempts ({type(error).__name__}: {error}); "
                "start it, or set environment.settings.url, and continue with resume=auto"
            ) from error
        return _as_text(answer, self._url)[: self._max_result_chars].strip()

    async def _post(self, body: Mapping[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._attempt_timeout_s)
        slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT))
        async with (
            slots,
            limited_session(timeout=timeout) as session,
            session.post(self._url, json=body, allow_redirects=False) as response,
        ):
            if response.status == 429 or response.status >= 500:
                raise _Unavailable(f"status {response.status}")
            try:
                raw = await read_body(response, MAX_ANSWER_BYTES)
                if response.status == 200:
                    return read_json(raw)
            except ValueError as error:
                raise SearchError(f"search server {self._url}: its answer is not JSON ({error})") from error
            raise SearchError(
                f"search server {self._url}: status {response.status}, expected 200: "
                f"{raw[:200].decode(errors='replace')}; check environment.settings.url"
            )


def _as_text(answer: Any, url: str) -> str:
    """Return the documents of the only query as Search-R1 formats them. Raises `SearchError`."""
    try:
        (documents,) = answer["result"]
        contents = [document["document"]["contents"] for document in documents]
        if not all(isinstance(content, str) for content in contents):
            raise TypeError("contents is not text")
    except (KeyError, TypeError, ValueError) as error:
        raise SearchError(
            f"search server {url}: found {answer!s:.120}, expected "
            '{"result": [[{"document": {"contents": "title\\ntext"}}]]} '
            f"({type(error).__name__}: {error})"
        ) from error
    lines = []
    for number, content in enumerate(contents, start=1):
        title, _, text = content.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    # A JSON server may send lone surrogates, which a tokenizer cannot encode.
    return "".join(lines).encode("utf-8", "replace").decode("utf-8")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
