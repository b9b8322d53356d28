"""A vLLM server somewhere else: the `SyncedEngine` protocol over HTTP, token ids in, ids and evidence out.

The server is plain vLLM 0.32 with Lockstep installed beside it (for the gloo transfer and the guard of its routes);
`python scripts/serve_engine.py` starts one, docs/engines.md has the command it runs. What would make its samples
unusable is found when the run connects: logprobs of another kind, chunked prefill where it kills the engine, another
dtype than the trainer's.

A server that somebody restarts under a run has the weights it loaded, not those of the run. It cannot sample for the
run unnoticed: its tokens carry a version that this process never gave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Self
from urllib.parse import urlsplit

import torch

from rollout.engine.engine_answers import Answer, check_prompt, engine_call, sample_params, score_params, version_number
from rollout.engine.protocol import Sampling
from rollout.errors import ConfigError, EngineError, EvidenceError, RequestError
from rollout.records import EngineCall
from rollout.server import compact
from rollout.server.client import ServerClient, wait_until_healthy
from rollout.server.liveness import Liveness
from rollout.system.background_loop import BackgroundLoop

GENERATE = "/inference/v1/generate"
PROBE = "/is_paused"
"""Answered by the engine's core, so that a server whose core hangs does not look well, as it does on `/health`."""
PROBE_EVERY_S = 5.0
QUESTION_TIMEOUT_S = 60.0
"""Of what a healthy server answers in milliseconds. Its first description of itself takes seconds."""
NEEDED_LOGPROBS_MODE = "processed_logprobs"
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""What reading an answer raises that is not what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about itself."""

    max_model_len: int
    dtype: torch.dtype
    num_workers: int
    weight_transfer_backend: str
    is_compact: bool = False
    """Whether it has Lockstep's own generate route."""


class RemoteEngine:
    """One vLLM server. Make one with `connect`; all coroutines run in its `loop`."""

    def __init__(
        self,
        client: ServerClient,
        facts: ServerFacts,
        *,
        loop: BackgroundLoop,
        vocab_size: int,
        request_timeout_s: float,
        silence_timeout_s: float,
    ) -> None:
        self._client = client
        self._request_timeout_s = request_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self.name = f"the engine at {client.url}"
        self.host = urlsplit(client.url).hostname or ""
        self.loop = loop
        self.max_model_len = facts.max_model_len
        self.dtype = facts.dtype
        self.num_workers = facts.num_workers
        self.weight_transfer_backend = facts.weight_transfer_backend
        self.vocab_size = vocab_size
        self._route = compact.ROUTE if facts.is_compact else GENERATE
        self._given_labels: set[str] = set()
        self._liveness = Liveness(
            self._ask,
            name=self.name,
            every_s=min(PROBE_EVERY_S, silence_timeout_s),
            silent_for_s=silence_timeout_s,
        )

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        loop: BackgroundLoop,
        vocab_size: int,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        start_timeout_s: float = 600.0,
        silence_timeout_s: float = 60.0,
    ) -> Self:
        """Wait until the server is ready, and check that it can be used.

        Args:
            url: `http://<host>:<port>`, without a path.
            vocab_size: rows of the model's embedding; ids beyond it are refused here.
            api_key: the server's key.
            request_timeout_s: of one request.
            start_timeout_s: how long the server may still be loading.
            silence_timeout_s: without any answer for so long while requests wait, the server is taken for dead.

        Raises:
            EngineError: no server, or one that refuses.
            ConfigError: the server runs with settings under which its samples cannot be trained on.
        """

        async def ask() -> tuple[ServerClient, ServerFacts]:
            client = ServerClient(url, api_key=api_key)
            try:
                await wait_until_healthy(client, timeout_s=start_timeout_s)
                described = await client.get("/server_info?config_format=json", timeout_s=QUESTION_TIMEOUT_S)
                facts = read_facts(client.url, described)
                return client, replace(facts, is_compact=await client.has(compact.ROUTE, timeout_s=QUESTION_TIMEOUT_S))
            except BaseException:
                await client.close()
                raise

        client, facts = loop.run(ask())
        return cls(
            client,
            facts,
            loop=loop,
            vocab_size=vocab_size,
            request_timeout_s=request_timeout_s,
            silence_timeout_s=silence_timeout_s,
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> EngineCall:
        """Sample one completion; `max_tokens` is cut to what the context leaves.

        Raises:
            EngineError: the prompt does not fit or holds ids outside the vocabulary, the server is gone, hangs or
                refuses, or its weights are not those that this process gave it.
            RequestError: this request failed again and again, in a server that lives.
            EvidenceError: the answer lacks ids, logprobs or version spans that agree with each other.
        """
        room = check_prompt(prompt_ids, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        answer = await self._sample(self._route, prompt_ids, sample_params(sampling, room=room))
        if self._route == compact.ROUTE:
            read = read_compact(answer, source=self.name)
        else:
            read = read_answer(answer, with_support=sampling.truncates, source=self.name)
        self._check_labels(read)
        return engine_call(prompt_ids, read, with_support=sampling.truncates, source=self.name)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """log π(ids[i] | ids[:i]) at temperature 1 for i = 1 .. len(ids) - 1, computed anew (no cached prefix).

        One token of the context must be free: at most `max_model_len - 1` ids.
        """
        check_prompt(ids, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        return read_scores(await self._sample(GENERATE, ids, score_params()), ids, source=self.name)

    def restart_if_dead(self) -> bool:
        return False  # it belongs to whoever started it

    async def check_alive(self) -> None:
        await self._client.get("/health", timeout_s=QUESTION_TIMEOUT_S, attempts=1)

    async def pause(self, mode: str) -> None:
        if mode == "abort":  # what requests have sampled is sent when they are frozen, not when they are given up
            await self._client.post("/pause?mode=keep&clear_cache=false", timeout_s=QUESTION_TIMEOUT_S)
        # A drain takes as long as the longest request.
        await self._client.post(f"/pause?mode={mode}&clear_cache=true", timeout_s=self._request_timeout_s)

    async def resume(self) -> None:
        await self._client.post("/resume", timeout_s=QUESTION_TIMEOUT_S)

    async def weight_version(self) -> int:
        """The version that the next sampled token will carry."""
        described = await self._client.get("/weight_info", timeout_s=QUESTION_TIMEOUT_S)
        return version_number(read_label(described, source=self.name), source=self.name)

    async def label_weights(self, label: str) -> None:
        await self._client.post("/update_weight_version", {"new_version": label}, timeout_s=QUESTION_TIMEOUT_S)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes. Raises `EngineError` if blocks are in use (pause first)."""
        answer = await self._client.post("/reset_prefix_cache", timeout_s=QUESTION_TIMEOUT_S)
        if answer != {"success": True}:
            raise EngineError(f"{self.name} did not reset its prefix cache, as requests hold blocks; pause it first")

    async def weight_checksums(self) -> dict[str, str]:
        answer = await self._client.post("/weight_checker", {"action": "checksum"}, timeout_s=self._request_timeout_s)
        return read_checksums(answer, source=self.name)

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        await self._update("init_weight_transfer_engine", {"init_info": init_info})

    async def start_weight_update(self) -> None:
        await self._update("start_weight_update")

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        await self._update("update_weights", {"update_info": update_info})

    async def finish_weight_update(self, label: str) -> None:
        await self._update("finish_weight_update", {"weight_version": label})
        self._given_labels.add(label)

    async def close(self) -> None:
        """Leave the server; it goes on. Closing twice is allowed."""
        await self._client.close()

    async def _sample(self, route: str, ids: Sequence[int], params: Mapping[str, Any]) -> Any:
        body = {"token_ids": list(ids), "sampling_params": params}
        try:
            return await self._liveness.guard(self._client.post(route, body, timeout_s=self._request_timeout_s))
        except RequestError as error:
            try:
                await self._ask()
            except EngineError:
                raise EngineError(str(error)) from error  # not this request failed, but the engine
            raise

    async def _ask(self) -> None:
        """Raises `EngineError` unless the engine's core answers."""
        await self._client.get(PROBE, timeout_s=self._silence_timeout_s, attempts=1)

    async def _update(self, route: str, body: object = None) -> None:
        """A step of a weight update: never repeated, and limited by the deadline of the sync, not by one of its own."""
        with self._liveness.excused():
            await self._client.post(f"/{route}", body, timeout_s=None, attempts=1)

    def _check_labels(self, answer: Answer) -> None:
        """Only once this process has given the server weights: until then it samples with what it has loaded."""
        unknown = {label for label, _, _ in answer.versions} - self._given_labels
        if self._given_labels and unknown:
            raise EngineError(
                f"{self.name} samples with weights that it calls {min(unknown)!r}, which this run never gave it: it "
                "was restarted, another run updates it, or an update of its weights failed; resume from the last "
                "checkpoint, with servers of this run's own"
            )


def read_facts(url: str, described: Any) -> ServerFacts:
    """The facts in an answer of `/server_info`. Raises `ConfigError` for a server that must be started otherwise."""
    try:
        config = described["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        transfer = config["weight_transfer_config"] or {}
        facts = ServerFacts(
            max_model_len=int(model["max_model_len"]),
            dtype=getattr(torch, str(model["dtype"]).removeprefix("torch.")),
            num_workers=int(parallel["world_size"]) * int(parallel["data_parallel_size"]),
            weight_transfer_backend=str(transfer.get("backend")),
        )
        logprobs_mode = str(model["logprobs_mode"])
        is_cpu = "cpu" in str(config["device_config"])
        chunks = bool(config["scheduler_config"]["enable_chunked_prefill"])
    except MALFORMED as error:
        raise ConfigError(
            f"{url}/server_info does not describe a vLLM 0.32 server ({type(error).__name__}: {error}); "
            "start it with `python scripts/serve_engine.py`"
        ) from error
    if logprobs_mode != NEEDED_LOGPROBS_MODE:
        raise ConfigError(
            f"{url} returns {logprobs_mode}, which are not the logprobs its tokens were sampled with; restart it with "
            f"--logprobs-mode {NEEDED_LOGPROBS_MODE}"
        )
    if is_cpu and chunks:
        raise ConfigError(
            f"{url} runs on a CPU with chunked prefill, where the first partial prefill of a request with a seed kills "
            "it; restart it with --no-enable-chunked-prefill"
        )
    return facts


def read_answer(answer: Any, *, with_support: bool, source: str) -> Answer:
    """The completion in an answer of the generate route. Raises `EvidenceError` if it is not one completion."""
    try:
        (choice,) = answer["choices"]
        positions = choice["logprobs"]["content"]
        candidates = [position["top_logprobs"] if with_support else (position,) for position in positions]
        starts, end = [], 0
        for one in candidates:
            starts.append(end)
            end += len(one)
        return Answer(
            sampled_ids=[_token_id(token) for token in choice["token_ids"]],
            candidate_ids=[_token_id(candidate["token_id"]) for one in candidates for candidate in one],
            candidate_logprobs=[float(candidate["logprob"]) for one in candidates for candidate in one],
            starts=starts,
            finish_reason=str(choice["finish_reason"]),
            versions=[
                (str(span["version"]), index(span["start"]), index(span["end"]))
                for span in choice["weight_versions"] or ()
            ],
        )
    except MALFORMED as error:
        raise EvidenceError(f"{source}: the answer is not one completion with logprobs ({_shown(error)})") from error


def read_compact(answer: Any, *, source: str) -> Answer:
    """The completion in an answer of the compact route. Raises `EvidenceError` if it is none."""
    try:
        return compact.decode(answer)
    except MALFORMED as error:
        raise EvidenceError(f"{source}: the answer is not one completion with logprobs ({_shown(error)})") from error


def read_scores(answer: Any, ids: Sequence[int], *, source: str) -> list[float]:
    """The logprobs of a prompt's ids but the first. Raises `EvidenceError` if they are of other ids."""
    try:
        first, *others = answer["prompt_logprobs"]
        if first or len(others) != len(ids) - 1:  # nothing predicts the first id: vLLM says null or {}
            raise ValueError(f"{len(others)} logprobs for {len(ids)} ids, with {first} for the first")
        return [float(position[str(token)]["logprob"]) for token, position in zip(ids[1:], others, strict=True)]
    except MALFORMED as error:
        raise EvidenceError(
            f"{source}: {len(ids)} ids were sent to be scored, but the logprobs are not of these ids ({_shown(error)})"
        ) from error


def read_label(described: Any, *, source: str) -> str:
    """The label of a server's weights. Raises `EngineError` if the answer has none."""
    try:
        return str(described["weight_version"])
    except MALFORMED as error:
        raise EngineError(f"{source}: no weight version in {described!r:.200}") from error


def read_checksums(answer: Any, *, source: str) -> dict[str, str]:
    """Checksums by parameter. Raises `EngineError` if the answer has none."""
    try:
        return {str(name): str(checksum) for name, checksum in answer["checksums"].items()}
    except MALFORMED as error:
        raise EngineError(f"{source}: no checksums in {answer!r:.200}") from error


def _token_id(value: Any) -> int:
    if not 0 <= (token := index(value)) < 2**31:
        raise ValueError(f"{token} is no token id")
    return token


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
