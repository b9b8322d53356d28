"""Environment `trl_rollout`: a function written for TRL's `rollout_func` (the contract of TRL 1.16).

    def play(prompts, trainer):
        tokenizer = trainer.processing_class
        ids = tokenizer.apply_chat_template(prompts[0], add_generation_prompt=True, return_dict=False)
        (turn,) = trainer.generate([ids])
        return {**{key: [value] for key, value in turn.items()}, "env_reward": [1.0]}

TRL itself need not be installed. The function runs the episode in a thread of its own. It samples with
`trainer.generate` only. The engine calls made there are the record of the episode, and the record is trained. The
function's output must equal the record token by token (`check_against_record`). Fields beyond TRL's three are facts of
the outcome.

Not covered: `trainer` has the attributes of `Trainer` below, not all of `GRPOTrainer`. TRL 1.16 ships no helper that
samples for such a function: `generate_rollout_completions` of earlier versions reached into the trainer's own vLLM;
replace it by `trainer.generate`. Images. The function renders its prompts itself, so text in them can become control
tokens. The function runs without a sandbox; one that hangs is abandoned, not stopped (`rollout/system/deadline.py`).
"""

from __future__ import annotations

import asyncio
import copy
import operator
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, SupportsFloat

from transformers import PreTrainedTokenizerFast

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.drivers import RunEpisode, Table
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.episode.contract import read_facts
from lockstep.rollout.episode.conversation import CallRecord, request_seed
from lockstep.rollout.episode.ending import ending
from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.episode.episode import failure_of
from lockstep.rollout.errors import CallLimitError, ConfigError, ContextFullError, DataError, EvidenceError
from lockstep.rollout.records import EngineCall, Message, Rollout, RolloutStatus, image_parts
from lockstep.rollout.system.deadline import call_with_deadline, is_async

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_NOT_FACTS = (*REQUIRED, "env_mask", "logprob_token_ids")
_LIMITS = {ContextFullError: RolloutStatus.CONTEXT_FULL, CallLimitError: RolloutStatus.MAX_TURNS}

LOGPROB_TOLERANCE = 1e-4
"""Difference by rounding in float32 or a JSON file; the logprob of another token differs by more."""


@asynccontextmanager
async def by_their_function(table: Table, environments: Sequence[Any]) -> AsyncIterator[RunEpisode]:
    """Play functions that sample with `Trainer.generate`, with a copy of the tokenizer, whose settings they change."""
    yield partial(
        run_trl_episode,
        table=table,
        tokenizer=await asyncio.to_thread(copy.deepcopy, table.chat.tokenizer),
        slots={type(one): asyncio.Semaphore(one.max_concurrent) for one in environments},
    )


class TRLRollout(RunsItself):
    declaration = Declaration(reads="prompt", max_turns=8, driver=by_their_function, is_deterministic=False)

    def __init__(
        self, rollout_func: str | Callable[..., Any] | None = None, *, prompt_column: str | None = None, **limits: Any
    ):
        """rollout_func, limits: `function`, `timeout_s` and `max_concurrent` of `RunsItself`.

        Raises `ConfigError`: as `RunsItself`, and for an async function, which TRL's contract excludes.
        """
        super().__init__("rollout_func", rollout_func, **limits)
        if is_async(self.function):
            raise ConfigError("rollout_func is async, but TRL calls a plain function; write `def`, not `async def`")
        self._prompt = PromptReader(column=prompt_column)

    def read_row(self, example: Mapping[str, Any]) -> tuple[Message, ...]:
        messages = self._prompt.messages(example)
        if any(map(image_parts, messages)):
            raise DataError("a rollout_func of TRL gets token ids, not images; use another environment for these rows")
        return messages

    def prompt(self, example: Mapping[str, Any]) -> tuple[Any, tuple[Message, ...]]:
        """Return the row's prompt as TRL passes it (a text stays a text), and as messages. Raises `DataError`."""
        messages = self.read_row(example)
        column = self._prompt.find(example)
        assert column is not None, "its messages were read"
        value = example[column]
        return (value if isinstance(value, str) else [dict(message) for message in messages]), messages


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArgs:
    """Sampling settings under the names of TRL's `GRPOConfig`. Read-only: `generate` always samples with them."""

    max_completion_length: int
    """Limit of one call of `generate`, per prompt."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    num_generations: int = 1
    num_generations_eval: int = 1


class Trainer:
    """Stand-in for TRL's trainer with `processing_class`, `args`, `num_generations` and `generate`."""

    def __init__(
        self, record: CallRecord, tokenizer: PreTrainedTokenizerFast, sampling: Sampling, *, seed: int
    ) -> None:
        self.processing_class = tokenizer
        self.args = TrainerArgs(
            max_completion_length=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        self.num_generations = self.num_generations_eval = 1
        self.calls: list[EngineCall] = []
        """Calls in the order of their requests; the record has them in the order of their answers."""
        self._record = record
        self._seed = seed
        self._num_asked = 0
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the trainer of a rollout_func has no {name!r}; it has processing_class, args, num_generations and "
            "generate(prompt_ids), which samples in place of TRL's own generation"
        )

    def generate(self, prompt_ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Sample one completion for each prompt, all at the same time. Each is a call of the episode's record.

        Returns for each prompt its `prompt_ids`, `completion_ids` and `logprobs`, one number per sampled id.

        Raises:
            ValueError: a prompt is empty or holds a value that is not a token id.
            ContextFullError, CallLimitError: the prompt is too long, or the episode has no calls left. If the function
                does not catch these, the episode ends, and what was sampled before is trained.
            EngineError, EvidenceError: the engine failed. The episode ends with it, even if the function catches it.
        """
        prompts = [self._checked(ids) for ids in prompt_ids]
        first, self._num_asked = self._num_asked, self._num_asked + len(prompts)
        calls = asyncio.run_coroutine_threadsafe(self._sample(prompts, first), self._loop).result()
        return [
            {
                "prompt_ids": list(call.prompt_ids),
                "completion_ids": list(call.sampled_ids),
                "logprobs": list(call.sampled_logprobs),
            }
            for call in calls
        ]

    def _checked(self, prompt: Any) -> list[int]:
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise ValueError(f"generate takes one list of token ids per prompt, found {prompt!r} ({error})") from error
        limit = len(self.processing_class)
        if not ids or not 0 <= min(ids) <= max(ids) < limit:
            raise ValueError(f"a prompt for generate must hold token ids from 0 to {limit - 1}, found {ids}")
        return ids

    async def _sample(self, prompts: Sequence[Sequence[int]], first: int) -> list[EngineCall]:
        # All are awaited even if one fails: the samples of the others are in the record, and must be returned.
        seeds = (request_seed(self._seed, number) for number in range(first, first + len(prompts)))
        requests = (self._record.sample(ids, seed=seed) for ids, seed in zip(prompts, seeds, strict=True))
        results = await asyncio.gather(*requests, return_exceptions=True)
        calls = [result for result in results if isinstance(result, EngineCall)]
        self.calls += calls
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return calls


async def run_trl_episode(
    *,
    table: Table,
    tokenizer: PreTrainedTokenizerFast,
    slots: Mapping[type, asyncio.Semaphore],
    environment: TRLRollout,
    example: Mapping[str, Any],
    sampling: Sampling,
    max_turns: int,
    rollout_id: int,
    group_id: int,
    seed: int,
) -> Rollout:
    """Run the function on one data row, as `run_episode` runs an environment, with at most `max_turns` engine calls.

    The rollout is FAILED if the function raises, does not end in time, or returns something else than TRL's contract
    says, or other tokens than were sampled.
    `messages` are the row's prompt and every sampled turn; text that the function adds exists as token ids only. One of
    the `slots` of its class is held while the function runs. tokenizer: the function's own copy.

    Raises `EngineError` if the engine failed.
    """
    prompt, messages = environment.prompt(example)
    record = CallRecord(engine=table.engine, chat=table.chat, sampling=sampling, seed=seed, max_calls=lambda: max_turns)
    trainer = Trainer(record, tokenizer, sampling, seed=seed)
    try:
        async with slots[type(environment)]:
            start = time.perf_counter()
            result = await call_with_deadline(
                environment.function, [copy.deepcopy(prompt)], trainer, timeout_s=environment.timeout_s
            )
    finally:
        record.close()
    calls = tuple(record.calls)
    limit = next((status for kind, status in _LIMITS.items() if isinstance(result.error, kind)), None)
    status, error = ending("rollout_func", error=result.error, failure=record.failure, limit=limit, calls=calls)
    outcome: Mapping[str, Any] = {}
    if result.error is None and status is not RolloutStatus.FAILED:
        try:
            output = _checked_form(result.value)
            outcome = read_facts({name: _first(value) for name, value in output.items() if name not in _NOT_FACTS})
            check_against_record(output, trainer.calls)
        except Exception as mismatch:  # an EvidenceError, or of values of the function's own classes
            status, error = RolloutStatus.FAILED, failure_of(mismatch)
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=calls,
        messages=(*messages, *(table.chat.parse(call.sampled_ids, (), prompt_ids=call.prompt_ids) for call in calls)),
        call_messages=tuple(range(len(messages), len(messages) + len(calls))),
        example=example,
        status=status,
        outcome=outcome,
        error=error,
        duration_s=time.perf_counter() - start,
    )


def check_against_record(output: Mapping[str, Any], calls: Sequence[EngineCall]) -> None:
    """Compare a function's output for one prompt with its engine calls, in the order of their requests.

    * `completion_ids`, those of `env_mask` 1 if it has a mask, are the sampled ids of all calls in their order.
    * `logprobs` of these tokens are the engine's, or None as a whole.
    * `prompt_ids` are the prompt of the first call. Without a mask, they may be the prompts of all calls one after
      another, as functions return that concatenate their turns.
    * With a mask, the tokens before each sampled stretch are the prompt of its call.

    Raises `EvidenceError` if they differ, or the function made no call.
    """
    if not calls:
        raise EvidenceError("rollout_func did not sample; call trainer.generate(prompt_ids), whose ids are recorded")
    prompt, completion = _integers(output, "prompt_ids"), _integers(output, "completion_ids")
    is_masked = output.get("env_mask") is not None
    mask = _integers(output, "env_mask") if is_masked else [1] * len(completion)
    if len(mask) != len(completion):
        raise EvidenceError(f"rollout_func returned {len(completion)} completion_ids, but an env_mask of {len(mask)}")
    sampled_at = [position for position, is_sampled in enumerate(mask) if is_sampled]
    recorded_ids = list(chain.from_iterable(call.sampled_ids for call in calls))
    _refuse_difference("completion_ids", [completion[position] for position in sampled_at], recorded_ids)
    prompts = list(chain.from_iterable(call.prompt_ids for call in calls))
    if is_masked or prompt != prompts:
        _refuse_difference("prompt_ids", prompt, list(calls[0].prompt_ids))
    if not all(mask):
        starts = accumulate((len(call.sampled_ids) for call in calls), initial=0)
        for call, start in zip(calls, starts, strict=False):
            if call.sampled_ids:
                context = prompt + completion[: sampled_at[start]]
                _refuse_difference("tokens before a sampled stretch", context, list(call.prompt_ids))
    if output["logprobs"] is not None:
        _check_logprobs(output["logprobs"][0], sampled_at, len(completion), calls)


def _check_logprobs(logprobs: Any, sampled_at: Sequence[int], num_ids: int, calls: Sequence[EngineCall]) -> None:
    try:
        logprobs = list(logprobs)
    except TypeError as error:
        raise EvidenceError(f"rollout_func returned logprobs that are not a list ({error})") from error
    if len(logprobs) != num_ids:
        raise EvidenceError(f"rollout_func returned {num_ids} completion_ids, but {len(logprobs)} logprobs")
    for position, engine_logprob in zip(
        sampled_at, chain.from_iterable(c.sampled_logprobs for c in calls), strict=True
    ):
        logprob = logprobs[position]
        if not isinstance(logprob, SupportsFloat) or not abs(float(logprob) - engine_logprob) <= LOGPROB_TOLERANCE:
            raise EvidenceError(
                f"rollout_func returned logprob {logprob} for token {position} of completion_ids, the engine recorded "
                f"{engine_logprob}; return the logprobs of trainer.generate"
            )


def _refuse_difference(name: str, found: Sequence[int], recorded: Sequence[int]) -> None:
    if found == recorded:
        return
    same = next((i for i, (a, b) in enumerate(zip(found, recorded, strict=False)) if a != b), None)
    where = f"they differ at token {same}" if same is not None else "one ends where the other goes on"
    raise EvidenceError(
        f"rollout_func returned {len(found)} {name}, the engine recorded {len(recorded)}, and {where}; return all ids "
        "of trainer.generate, and mark ids that were not sampled with 0 in env_mask"
    )


def _integers(output: Mapping[str, Any], name: str) -> list[int]:
    try:
        return [operator.index(item) for item in output[name][0]]
    except TypeError as error:
        raise EvidenceError(f"rollout_func returned {name} that are not integers ({error})") from error


def _checked_form(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or any(name not in value for name in REQUIRED):
        form = f"keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
        raise EvidenceError(f"rollout_func returned {form}; expected a dictionary with {', '.join(REQUIRED)}")
    for name in (*REQUIRED, "env_mask"):
        items = value.get(name)
        if items is None and name in ("logprobs", "env_mask"):
            continue
        if not isinstance(items, list | tuple) or len(items) != 1:
            form = f"{len(items)} items" if isinstance(items, list | tuple) else type(items).__name__
            raise EvidenceError(
                f"rollout_func returned {form} as {name}; expected a list with one item: it is called with one prompt "
                "and trainer.num_generations=1"
            )
    return value


def _first(value: Any) -> Any:
    """Return the one item of a list, which holds a value per prompt as in TRL; any other value is for all prompts."""
    return value[0] if isinstance(value, list) and value else value
