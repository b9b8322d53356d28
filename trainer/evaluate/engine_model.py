"""The model that lm-eval asks, answered by the engine: texts become token ids here, and sampled ids texts.

lm-eval makes prompts, few-shot examples and chat turns, and reads answers with its filters and metrics. Token ids are
those of its Hugging Face backend (`lm_eval/models/huggingface.py` of lm-evaluation-harness): special tokens as the
tokenizer adds them, spaces at the end of a context moved to its continuation, and context and continuation encoded
together and then split.

A stop text ends sampling at the next multiple of `STOP_CHECK_TOKENS`, because engines see token ids only; the answer is
cut at it. A stop text that is a single control token, such as `<|im_end|>`, ends sampling at once.

Covered: `generate_until`, `loglikelihood` (also of `multiple_choice` tasks) and `loglikelihood_rolling`.
Not covered: images and audio.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]  # an extra: pip install "lm-eval<0.5"
from lm_eval.models.utils import (  # type: ignore[import-not-found]
    handle_stop_sequences,
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found]
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.conversation import request_seed
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import FinishReason

log = logging.getLogger(__name__)

STOP_CHECK_TOKENS = 64
"""Sampled tokens between two searches for a stop text. Each continues the request, whose prefix is cached."""
DEFAULT_MAX_TOKENS = 256
"""Sampled tokens of a task that names no limit, as in lm-eval's own backends."""
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings of other backends that change nothing with these values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Sampling settings of a `generate_until` request."""

    until: tuple[str, ...]
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Generation:
        """Read the `generation_kwargs` of a task. Raises `ConfigError` for one that the engine does not have."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), DEFAULT_MAX_TOKENS))
        samples = bool(options.pop("do_sample"))
        until = tuple(map(str, handle_stop_sequences(options.pop("until"), None)))
        # do_sample without a temperature is temperature 1, as in the backends of lm-eval.
        temperature = float(options.pop("temperature", 1.0)) * samples
        max_tokens, top_p = int(options.pop("max_gen_toks")), float(options.pop("top_p", 1.0))
        top_k, min_p = int(options.pop("top_k", 0)), float(options.pop("min_p", 0.0))
        if other := {name: value for name, value in options.items() if NEUTRAL.get(name) != value}:
            raise ConfigError(
                f"generation_kwargs of {', '.join(f'{name}={value}' for name, value in other.items())}, expected "
                "until, max_gen_toks, do_sample, temperature, top_p, top_k and min_p; remove the others from the task"
            )
        if max_tokens < 1:
            raise ConfigError(f"generation_kwargs of max_gen_toks={max_tokens}, expected at least 1")
        return cls(
            until=until, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=max(0, top_k), min_p=min_p
        )


class EngineModel(TemplateLM):
    """An lm-eval model over an engine. Methods are called from the main thread; requests run in the engine's loop."""

    def __init__(
        self,
        *,
        engine: EnginePool,
        tokenizer: PreTrainedTokenizerFast,
        stop_token_ids: Sequence[int],
        seed: int,
        max_concurrent: int,
        on_stage: Callable[[str, int], None] = lambda name, total: None,
        on_answer: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """stop_token_ids: ids that end every generated answer. max_concurrent: requests in the engine at once.

        on_stage: called with the kind and the number of requests when lm-eval sends them. on_answer: called with the
        number of sampled tokens of each answer.
        """
        super().__init__()
        self.tokenizer: Any = tokenizer  # its stubs allow lists of ids for single ones
        self._engine = engine
        self._stop_token_ids = tuple(stop_token_ids)
        self._seed = seed
        self._max_concurrent = max_concurrent
        self._on_stage = on_stage
        self._on_answer = on_answer
        self._bos = tokenizer.decode(self.prefix_token_id)
        self._control = tokenizer.get_added_vocab()
        self.num_requests = 0
        self.num_truncated = 0
        """Requests whose context lost tokens at its beginning, because it did not fit into the engine's context."""

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self._engine.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None and has_bos_prefix(string, self._bos):  # a chat template has written it
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        def render(messages: list[dict[str, str]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        try:
            return render(chat_history)
        except JinjaError:  # templates without a system role refuse it
            return render([message for message in chat_history if message["role"] != "system"])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of whole texts, in disjoint windows with as much context as fits."""
        windows: list[tuple[None, list[int], list[int]]] = []
        ends: list[int] = []
        for request in requests:
            (text,) = request.args
            # The engine samples one more token, and the first id of a window is context.
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        return [math.fsum(scores[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        longest = self.max_length - 1  # the engine samples one more token
        for texts, _, continuation in requests:
            if not 1 <= len(continuation) < longest:
                raise DataError(
                    f"a continuation of {len(continuation)} tokens cannot be scored, expected 1 to {longest - 1}: "
                    f"{texts!r:.200}; raise rollout.max_model_len, or change the task"
                )
        self.num_truncated += sum(len(context) + len(target) > longest for _, context, target in requests)

        async def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
            logprobs, ranks = await self._engine.score_ranked([*context, *continuation][-longest:])
            count = len(continuation)
            self._on_answer(0)
            return math.fsum(logprobs[-count:]), all(rank == 1 for rank in ranks[-count:])

        return self._answers("scoring", [lambda one=one: score(one[1], one[2]) for one in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return sampled answers, cut at their first stop text."""
        repeats: Counter[tuple[Any, ...]] = Counter()
        work = []
        for request in requests:
            context, kwargs = request.args
            key = (request.task_name, request.doc_id, request.idx)
            generation = Generation.of(kwargs)
            prompt = self.tok_encode(context)
            context_ids, _ = maybe_truncate(prompt, generation.max_tokens, self.max_length, verbose=False)
            self.num_truncated += len(context_ids) < len(prompt)
            work.append(
                lambda ids=context_ids, of=generation, key=(*key, repeats[key]): self._generate(ids, of, key)  # type: ignore[misc]
            )
            repeats[key] += 1
        return self._answers("sampling", work)

    async def _generate(self, prompt: list[int], generation: Generation, key: tuple[Any, ...]) -> str:
        """key: task, document, request of the document, and repetition: the seed depends on them only."""
        ends = [text for text in generation.until if text and text not in self._control]
        controls = [self._control[text] for text in generation.until if text in self._control]
        stop_ids = tuple(dict.fromkeys((*self._stop_token_ids, *controls)))
        sampled_ids: list[int] = []
        while True:
            left = generation.max_tokens - len(sampled_ids)
            call = await self._engine.generate(
                [*prompt, *sampled_ids],
                Sampling(
                    max_tokens=min(left, STOP_CHECK_TOKENS) if ends else left,
                    temperature=generation.temperature,
                    top_p=generation.top_p,
                    top_k=generation.top_k,
                    min_p=generation.min_p,
                    stop_token_ids=stop_ids,
                    seed=request_seed(self._seed, *key, len(sampled_ids)),
                    is_trained=False,
                ),
            )
            sampled_ids += call.sampled_ids
            text = str(self.tokenizer.decode(sampled_ids, skip_special_tokens=True))
            is_over = call.finish_reason is FinishReason.STOP or len(sampled_ids) >= generation.max_tokens
            if is_over or not call.sampled_ids or any(end in text for end in ends):
                self._on_answer(len(sampled_ids))
                return postprocess_generated_text(text, list(generation.until), None)

    def _answers(self, kind: str, work: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
        """Run the requests in the engine's loop, `max_concurrent` at once; the first failure ends the others."""
        self.num_requests += len(work)
        self._on_stage(kind, len(work))

        async def run() -> list[Any]:
            slots = asyncio.Semaphore(self._max_concurrent)

            async def one(begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
                async with slots:
                    return await begin()

            tasks = [asyncio.create_task(one(begin)) for begin in work]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        return self._engine.loop.run(run())
