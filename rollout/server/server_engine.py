"""Client of a vLLM server: the `SyncedEngine` protocol over HTTP.

The server is plain vLLM with Lockstep installed for the gloo transfer and the middleware (docs/engines.md).
Settings that make its samples unusable are found when the run connects.

A server restarted during a run has the weights it loaded, not those of the run. Its tokens then carry a version that
this process never sent, and are refused: the server is another process than before (`rollout/server/server_roster.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import torch

from lockstep.rollout.engine.adapters import refuse_adapter
from lockstep.rollout.engine.arguments import EXTENSION
from lockstep.rollout.engine.engine_answers import (
    Answer,
    check_prompt,
    engine_call,
    integer,
    number,
    refuse_images,
    sample_params,
    score_params,
    single_version,
    version_number,
)
from lockstep.rollout.engine.protocol import BASE, POLICY, Sampling
from lockstep.rollout.engine.token_scores import TokenScores, token_scores
from lockstep.rollout.errors import (
    ConfigError,
    EngineError,
    EngineLostError,
    EvidenceError,
    LockstepError,
    RequestError,
)
from lockstep.rollout.records import EngineCall, ImageSpan
from lockstep.rollout.server.client import ATTEMPTS, ServerClient, wait_until_healthy
from lockstep.rollout.server.generate_route import ROUTE, decode_answer, decode_array, decode_scores
from lockstep.rollout.server.liveness import Liveness
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.vllm_names import WINDOW

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing
    from lockstep.rollout.server.image_features import ImageFeatures

T = TypeVar("T")

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
PROBE = "/is_paused"
"""Answered by the engine core; `/health` also answers while the core hangs."""
PROBE_EVERY_S = 5.0
CONTROL_TIMEOUT_S = 60.0
"""Limit of calls that a healthy server answers in milliseconds; only the first `/server_info` takes seconds."""
NEEDED_LOGPROBS_MODE = "processed_logprobs"
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors of reading an answer of another structure than expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's description of itself."""

    max_model_len: int
    dtype: torch.dtype
    num_workers: int
    weight_transfer_backend: str
    instance: str
    """vLLM's id of the process, which a restarted server does not keep."""
    returns_routes: bool
    """True if `Sampling.with_routes` may be set."""
    max_rank: int = 0
    """Largest rank of its adapters; 0: it takes whole weights."""
    quantization: str | None = None
    max_images: int = 0
    """Most images of a prompt."""
    hears_logits: bool = False
    """True if its workers send distributions over the vocabulary (`rollout/weights/whole/heard_logits.py`)."""
    keeps_images: bool = False
    """True if vLLM's own route takes images that it was sent before by their hash."""


class ServerEngine:
    """One vLLM server, connected on creation; all coroutines run in its `loop`."""

    def __init__(
        self,
        url: str,
        *,
        loop: BackgroundLoop,
        vocab_size: int,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        start_timeout_s: float = 600.0,
        silence_timeout_s: float = 60.0,
        images: ImageProcessing | None = None,
    ) -> None:
        """Wait until the server is ready and check its settings.

        Raises `EngineError` if the server is missing or refuses, `ConfigError` if the samples of a server with these
        settings cannot be trained on.

        url: `http://<host>:<port>`, without a path. start_timeout_s: time the server may take to load.
        vocab_size: number of rows of the model's embedding; larger ids are refused here.
        silence_timeout_s: time without any answer to waiting requests after which the server counts as dead.
        images: of prompts; None for a model that sees none.
        """

        async def connect() -> tuple[ServerClient, ServerFacts, str]:
            client = ServerClient(url, api_key=api_key)
            try:
                await wait_until_healthy(client, timeout_s=start_timeout_s)
                description = await client.get("/server_info?config_format=json", timeout_s=CONTROL_TIMEOUT_S)
                facts = read_facts(client.url, description)
                has_compact = await client.has_route(ROUTE, timeout_s=CONTROL_TIMEOUT_S)
                return client, facts, ROUTE if has_compact else GENERATE
            except BaseException:
                await client.close()
                raise

        self._client, facts, self._route = loop.run(connect())
        self._request_timeout_s = request_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self.url = self._client.url
        self.name = f"the engine at {self.url}"
        self.instance = facts.instance
        self.host = urlsplit(self._client.url).hostname or ""
        self.loop = loop
        self.context = facts.max_model_len
        """Context of vLLM; `score` takes up to one id less."""
        self.max_model_len = facts.max_model_len
        self.dtype = facts.dtype
        self.num_workers = facts.num_workers
        self.returns_routes = facts.returns_routes
        self.max_rank = facts.max_rank
        self.takes_adapters = facts.max_rank > 0
        self.quantization = facts.quantization
        self.max_images = facts.max_images
        self.hears_logits = facts.hears_logits
        self._images = images
        self._kept_images: set[str] | None = set() if facts.keeps_images else None
        """Digests of images that vLLM's own route was sent, and may have kept; None: it keeps none."""
        self.weight_transfer_backend = facts.weight_transfer_backend
        self.vocab_size = vocab_size
        self._sent_labels: set[str] = set()
        self._admits = asyncio.Event()
        """Unset from a pause that drains or aborts until the server resumes: vLLM 0.33 refuses requests meanwhile."""
        self._admits.set()
        self._given_up = ""
        """Why it is not used any more."""
        self._liveness = Liveness(
            self._probe,
            name=self.name,
            every_s=min(PROBE_EVERY_S, silence_timeout_s),
            silence_s=silence_timeout_s,
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        """See `Engine.generate`. Also raises `EngineError` for weights that this process never sent."""
        room = check_prompt(prompt_ids, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        params = sample_params(sampling, room=room)
        raw = await self._sample(self._route, prompt_ids, params, sampling.model, images)
        answer = read_answer(raw, with_support=sampling.truncates, source=self.name, is_compact=self._route == ROUTE)
        await self._check_labels(answer)
        if self._images is not None:
            self._images.refuse_sampled(answer.sampled_ids, self.name)
        return engine_call(
            prompt_ids,
            answer,
            images=images,
            with_support=sampling.truncates,
            with_routes=sampling.needs_routes,
            max_tokens=params["max_tokens"],
            vocab_size=self.vocab_size,
            source=self.name,
        )

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        """See `Engine.score`."""
        if not images:
            return read_scores(await self._score(ids), ids, source=self.name)
        check_prompt(ids, max_model_len=self.context, vocab_size=self.vocab_size)
        answer = await self._sample(self._route, ids, score_params(), POLICY, images)
        is_compact = self._route == ROUTE
        scored_ids, logprobs, _ = read_top_scores(answer, ids, 0, source=self.name, is_compact=is_compact)
        if scored_ids != list(ids[1:]):
            raise EvidenceError(f"{self.name}: the logprobs do not belong to the {len(ids)} ids that were sent")
        return logprobs

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        """See `Engine.score_ranked`."""
        refuse_images(images, source=self.name)
        answer = await self._score(ids)
        return read_scores(answer, ids, source=self.name), read_ranks(answer, ids, source=self.name)

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        """See `Engine.score_top`."""
        check_prompt(ids, max_model_len=self.context, vocab_size=self.vocab_size)
        answer = await self._sample(self._route, ids, score_params(top_k), POLICY, images)
        scored_ids, logprobs, labels = read_top_scores(
            answer, ids, top_k, source=self.name, is_compact=self._route == ROUTE
        )
        return token_scores(
            ids,
            scored_ids,
            logprobs,
            top_k=top_k,
            version=single_version(labels, self.name),
            vocab_size=self.vocab_size,
            source=self.name,
        )

    async def _score(self, ids: Sequence[int]) -> Any:
        check_prompt(ids, max_model_len=self.context, vocab_size=self.vocab_size)
        return await self._sample(GENERATE, ids, score_params(), POLICY)

    def restart_if_dead(self) -> bool:
        return False  # a run does not own its servers

    async def check_alive(self) -> None:
        await self._client.get("/health", timeout_s=CONTROL_TIMEOUT_S, attempts=1)

    async def check_process(self) -> None:
        """Raise `EngineLostError` if the server does not answer, or is another process than the connected one."""
        description = await self._control("GET", "/server_info?config_format=json")
        if read_instance(description, source=self.name) != self.instance:
            raise EngineLostError(f"{self.name} was restarted: it has the weights that it loaded, not those of the run")

    def give_up(self, reason: str) -> None:
        """Raise `EngineLostError` in all requests that wait, and in later ones. Call it in the loop."""
        self._given_up = reason
        self._admits.set()
        self._liveness.give_up(reason)

    async def pause(self, mode: str) -> None:
        if mode != "keep":
            self._admits.clear()
        if mode == "abort":  # buffered tokens are sent when requests freeze, not when they are aborted
            await self._control("POST", "/pause?mode=keep&clear_cache=false")
        # Draining takes as long as the longest request.
        await self._control("POST", f"/pause?mode={mode}&clear_cache=true", timeout_s=self._request_timeout_s)
        if self._kept_images:
            self._kept_images.clear()

    async def resume(self) -> None:
        await self._control("POST", "/resume")
        self._admits.set()

    async def weight_version(self) -> int:
        label = read_label(await self._control("GET", "/weight_info"), source=self.name)
        return version_number(label, source=self.name)

    async def label_weights(self, label: str) -> None:
        await self._control("POST", "/update_weight_version", {"new_version": label})

    async def reset_prefix_cache(self) -> None:
        answer = await self._control("POST", "/reset_prefix_cache")
        if answer != {"success": True}:
            raise EngineError(f"{self.name} did not reset its prefix cache: requests hold blocks; pause it first")
        if self._images is not None:  # vLLM keeps what the vision tower computed apart from the KV cache
            await self._control("POST", "/reset_encoder_cache")

    async def weight_checksums(self) -> dict[str, str]:
        answer = await self._client.post("/weight_checker", {"action": "checksum"}, timeout_s=self._request_timeout_s)
        return read_checksums(answer, source=self.name)

    async def ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        if not self.hears_logits:
            raise ConfigError(
                f"{self.name} cannot send distributions: it was started without --worker-extension-cls {EXTENSION}; "
                "restart it with `lockstep serve-engine`, or set sync.distributions_every=0"
            )
        body = {"method": method, "args": arguments}
        answer = await self._client.post("/collective_rpc", body, timeout_s=self._request_timeout_s, attempts=1)
        with _malformed_raises(EvidenceError, f"{self.name}: /collective_rpc did not answer with a list"):
            return list(answer["results"])

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        await self._update("init_weight_transfer_engine", {"init_info": init_info})

    async def start_weight_update(self) -> None:
        await self._liveness.guard(self._client.post("/start_weight_update", timeout_s=None, attempts=1))

    async def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        await self._update("update_weights", {"update_info": update_info})

    async def finish_weight_update(self, label: str) -> None:
        await self._update("finish_weight_update", {"weight_version": label})
        self._sent_labels.add(label)

    async def close(self) -> None:
        """Close the connection; the server keeps running. Closing twice is allowed."""
        await self._client.close()

    async def _sample(
        self, route: str, ids: Sequence[int], params: Mapping[str, Any], model: str, images: Sequence[ImageSpan] = ()
    ) -> Any:
        body: dict[str, Any] = {"token_ids": list(ids), "sampling_params": params}
        if not images:
            return await self._posted(route, body, model)
        if self._images is None:
            refuse_images(images, source=self.name)
        if route == GENERATE:

            async def post(fields: dict[str, Any], attempts: int) -> Any:
                return await self._posted(route, {**body, **fields}, model, attempts)

            return await self._features.answer(ids, images, post)
        from lockstep.rollout.server.carried_images import MISSING, image_fields  # runs without images do not load it

        assert self._images is not None
        missing: Sequence[str] = ()
        while True:  # an image may leave the server before it is used, if others come in between
            fields = image_fields(images, self._images, dtype=self.dtype, missing=missing)
            answer = await self._posted(route, {**body, "images": fields}, model)
            if not (isinstance(answer, dict) and MISSING in answer):
                return answer
            missing = [str(digest) for digest in answer[MISSING]]

    @cached_property
    def _features(self) -> ImageFeatures:
        from lockstep.rollout.server.image_features import ImageFeatures

        assert self._images is not None
        return ImageFeatures(
            self._images,
            max_images=self.max_images,
            dtype=self.dtype,
            kept=self._kept_images,
            source=self.name,
        )

    async def _posted(self, route: str, body: dict[str, Any], model: str, attempts: int = ATTEMPTS) -> Any:
        if not self.takes_adapters:
            refuse_adapter(model, source=self.name)
        elif model != BASE:
            body["model"] = model
        try:
            await asyncio.wait_for(self._admits.wait(), self._request_timeout_s)
        except TimeoutError:
            raise EngineError(
                f"{self.name} stayed paused for {self._request_timeout_s:g} s, the limit of a request; read why the "
                "weight sync did not end, or raise rollout.request_timeout_s"
            ) from None
        self._raise_if_given_up()
        try:
            post = self._client.post(route, body, timeout_s=self._request_timeout_s, attempts=attempts)
            return await self._liveness.guard(post)
        except RequestError as error:
            self._raise_if_given_up()
            try:
                await self._probe()
            except EngineError:
                raise EngineLostError(str(error)) from error  # the engine failed, not only this request
            raise

    def _raise_if_given_up(self) -> None:
        if self._given_up:
            raise EngineLostError(self._given_up)

    async def _control(
        self, method: str, path: str, body: object = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """Make a call that an engine core answers. Raises `EngineLostError` when it falls silent."""
        timeout_s = max(timeout_s, PROBE_EVERY_S + 2 * self._silence_timeout_s)  # silence is noticed first
        ask = self._client.get(path, timeout_s=timeout_s) if method == "GET" else None
        return await self._liveness.guard(ask or self._client.post(path, body, timeout_s=timeout_s))

    async def _probe(self) -> None:
        """Raise `EngineError` unless the engine core answers."""
        await self._client.get(PROBE, timeout_s=self._silence_timeout_s, attempts=1)

    async def _update(self, route: str, body: object = None) -> None:
        """Make one step of a weight update: never retried, and limited by the sync's deadline only."""
        with self._liveness.suspended():
            await self._client.post(f"/{route}", body, timeout_s=None, attempts=1)

    async def _check_labels(self, answer: Answer) -> None:
        """Raise `EngineError` for unknown labels, once this process has sent weights to the server; `EngineLostError`
        if the server was restarted."""
        unknown = {label for label, _, _ in answer.versions} - self._sent_labels
        if self._sent_labels and unknown:
            await self.check_process()
            raise EngineError(
                f"{self.name} samples with weights labeled {min(unknown)!r}, which this run never sent: another run "
                "updates it, or a weight update failed; resume from the last checkpoint, with servers that no other "
                "run uses"
            )


def read_facts(url: str, described: Any) -> ServerFacts:
    """Read an answer of `/server_info`. Raises `ConfigError` for a server with unusable settings."""
    message = (
        f"{url}/server_info does not describe a server of vLLM {WINDOW}{_version_note(described)}; start it with "
        "`lockstep serve-engine`"
    )
    with _malformed_raises(ConfigError, message):
        config = described["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        transfer = config["weight_transfer_config"] or {}
        facts = ServerFacts(
            max_model_len=_count(model["max_model_len"]),
            dtype=_dtype(model["dtype"]),
            num_workers=_count(parallel["world_size"]) * _count(parallel["data_parallel_size"]),
            weight_transfer_backend=str(transfer.get("backend")),
            instance=str(config["instance_id"]),
            returns_routes=bool((config.get("aux_output_config") or {}).get("enable_return_routed_experts")),
            max_rank=integer((config.get("lora_config") or {}).get("max_lora_rank", 0)),
            quantization=None if model.get("quantization") is None else str(model["quantization"]),
            max_images=_max_images(model.get("multimodal_config") or {}),
            hears_logits=parallel.get("worker_extension_cls") == EXTENSION,
            keeps_images=_keeps_images(model.get("multimodal_config") or {}, parallel),
        )
        normalizes = bool((model.get("multimodal_config") or {}).get("mm_device_do_normalize"))
        logprobs_mode = str(model["logprobs_mode"])
        is_cpu = "cpu" in str(config["device_config"])
        is_chunked = bool(config["scheduler_config"]["enable_chunked_prefill"])
        overrides = model.get("hf_overrides") or {}
        has_float32_head = facts.dtype == torch.float32 or overrides.get("head_dtype") == "float32"
    if logprobs_mode != NEEDED_LOGPROBS_MODE:
        raise ConfigError(
            f"{url} returns {logprobs_mode}, expected the logprobs of the sampling distribution; restart it with "
            f"--logprobs-mode {NEEDED_LOGPROBS_MODE}"
        )
    if facts.max_images and normalizes:
        raise ConfigError(
            f"{url} normalizes images on its device, which are normalized already; restart it with "
            "--no-mm-device-do-normalize"
        )
    if is_cpu and is_chunked:
        raise ConfigError(
            f"{url} runs on a CPU with chunked prefill, where a partial prefill of a request with a seed kills it; "
            "restart it with --no-enable-chunked-prefill"
        )
    if not (is_cpu or has_float32_head):
        log.warning(
            "%s computes logits in %s and the trainer in float32, so logprobs differ by about 0.04 nats; restart it "
            """with --hf-overrides '{"head_dtype": "float32"}'""",
            url,
            str(facts.dtype).removeprefix("torch."),
        )
    return facts


def _version_note(described: Any) -> str:
    """Return the version that a server tells, for a message."""
    system = described.get("system_env") if isinstance(described, dict) else None
    version = system.get("vllm_version") if isinstance(system, dict) else None
    return f", but of vLLM {version}" if version else ""


def read_answer(answer: Any, *, with_support: bool, source: str, is_compact: bool = False) -> Answer:
    """Read an answer of vLLM's generate route, or of Lockstep's. Raises `EvidenceError` for another."""
    with _malformed_raises(EvidenceError, f"{source}: the answer is not one completion with logprobs"):
        if is_compact:
            return decode_answer(answer)
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
            candidate_logprobs=[number(candidate["logprob"]) for one in candidates for candidate in one],
            starts=starts,
            finish_reason=str(choice["finish_reason"]),
            versions=[
                (str(span["version"]), integer(span["start"]), integer(span["end"]))
                for span in choice["weight_versions"] or ()
            ],
            routes=decode_array(choice.get("routed_experts")),
        )


def read_scores(answer: Any, ids: Sequence[int], *, source: str) -> list[float]:
    """Return the logprobs of all ids but the first. Raises `EvidenceError` if they belong to other ids."""
    return _read_scored(answer, ids, lambda token: number(token["logprob"]), source=source)


def read_ranks(answer: Any, ids: Sequence[int], *, source: str) -> list[int]:
    """Return the ranks of all ids but the first, 1 for the most probable. Raises `EvidenceError` as `read_scores`."""
    return _read_scored(answer, ids, lambda token: integer(token["rank"]), source=source)


def read_top_scores(
    answer: Any, ids: Sequence[int], top_k: int, *, source: str, is_compact: bool = False
) -> tuple[list[int], list[float], list[str]]:
    """Return ids and logprobs in the flat form of `token_scores`, and the labels of the weights.

    Raises `EvidenceError` if a token has no logprob, or a position has less than `top_k` ranked ones.
    """
    with _malformed_raises(EvidenceError, f"{source}: the logprobs do not belong to the {len(ids)} ids that were sent"):
        if is_compact:
            return decode_scores(answer)
        (choice,) = answer["choices"]
        others = _scored_positions(answer, ids)
        scored_ids: list[int] = []
        logprobs: list[float] = []
        for token, position in zip(ids[1:], others, strict=True):
            # A token that is not among the most probable ones has an entry beside theirs.
            is_beside = len(position) > top_k
            name_by_rank = {
                integer(entry["rank"]): name
                for name, entry in position.items()
                if not (is_beside and name == str(token))
            }
            names = [str(token), *(name_by_rank[rank] for rank in range(1, top_k + 1))]
            scored_ids += [_token_id(int(name)) for name in names]
            logprobs += [number(position[name]["logprob"]) for name in names]
        return scored_ids, logprobs, [str(span["version"]) for span in choice["weight_versions"] or ()]


def _read_scored(answer: Any, ids: Sequence[int], read: Callable[[Any], T], *, source: str) -> list[T]:
    with _malformed_raises(EvidenceError, f"{source}: the logprobs do not belong to the {len(ids)} ids that were sent"):
        positions = _scored_positions(answer, ids)
        return [read(position[str(token)]) for token, position in zip(ids[1:], positions, strict=True)]


def _scored_positions(answer: Any, ids: Sequence[int]) -> list[Any]:
    """Return the entries of all ids but the first."""
    first, *others = answer["prompt_logprobs"]
    if first or len(others) != len(ids) - 1:  # the first id has no logprob: vLLM sends null or {}
        raise ValueError(f"{len(others)} logprobs for {len(ids)} ids, with {first} for the first")
    return others


def read_label(described: Any, *, source: str) -> str:
    """Return the weight label in an answer of `/weight_info`. Raises `EngineError` without one."""
    with _malformed_raises(EngineError, f"{source}: no weight version in {described!r:.200}"):
        return str(described["weight_version"])


def read_instance(described: Any, *, source: str) -> str:
    """Return the id of the process in an answer of `/server_info`. Raises `EngineError` without one."""
    with _malformed_raises(EngineError, f"{source}: no instance_id in {described!r:.200}"):
        return str(described["vllm_config"]["instance_id"])


def read_checksums(answer: Any, *, source: str) -> dict[str, str]:
    """Return checksums by parameter. Raises `EngineError` without them."""
    with _malformed_raises(EngineError, f"{source}: no checksums in {answer!r:.200}"):
        return {str(name): str(checksum) for name, checksum in answer["checksums"].items()}


def _max_images(config: Mapping[str, Any]) -> int:
    """Return the limit of images of a prompt, which vLLM describes as a number or as options."""
    limit = (config.get("limit_per_prompt") or {}).get("image", 0)
    return integer(limit.get("count", 0) if isinstance(limit, Mapping) else limit)


def _keeps_images(config: Mapping[str, Any], parallel: Mapping[str, Any]) -> bool:
    """True if the engine core has a cache of images; without one, a request that names an image by hash kills it."""
    is_one = parallel["data_parallel_size"] == parallel.get("_api_process_count") == 1
    return is_one and config.get("mm_processor_cache_type") == "lru" and number(config["mm_processor_cache_gb"]) > 0


def _count(value: Any) -> int:
    if not 1 <= (count := integer(value)) < 2**31:
        raise ValueError(f"{count} is not a count of at least 1")
    return count


def _dtype(value: Any) -> torch.dtype:
    dtype = getattr(torch, str(value).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{value} is not a dtype")
    return dtype


def _token_id(value: Any) -> int:
    if not 0 <= (token := integer(value)) < 2**31:
        raise ValueError(f"{token} is not a token id")
    return token


@contextmanager
def _malformed_raises(kind: type[LockstepError], message: str) -> Iterator[None]:
    try:
        yield
    except MALFORMED as error:
        raise kind(f"{message} ({type(error).__name__}: {error})") from error
