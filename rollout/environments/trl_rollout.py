"""A function written for TRL's `rollout_func` (the contract of TRL 1.16), played one episode at a time.

    def play(prompts, trainer):
        tokenizer = trainer.processing_class
        ids = tokenizer.apply_chat_template(prompts[0], add_generation_prompt=True, return_dict=False)
        (turn,) = trainer.generate([ids])
        return {**{key: [value] for key, value in turn.items()}, "env_reward": [1.0]}

The function drives the episode in a thread of its own. It samples with `trainer.generate` only, whose calls are the
record of the episode, and the record is what is trained. What the function returns is compared with the record token
by token (`check_against_record`); where they differ the rollout is FAILED. Fields beyond TRL's three are facts of the
outcome. TRL itself need not be installed.

Not covered: `trainer` is no `GRPOTrainer`; it has what `Trainer` below lists. TRL 1.16 ships no helper that samples for
such a function: `generate_rollout_completions` of earlier versions reached into the trainer's own vLLM and has to be
replaced by `trainer.generate`. Images. The function renders its prompts itself, so nothing keeps control tokens out of
them. There is no sandbox, and a function that hangs is abandoned, not stopped (`rollout/system/deadline.py`).
"""

from __future__ import annotations

import asyncio
import copy
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from rollout.engine.protocol import Engine, Sampling
from rollout.environments.prompt import PROMPT_COLUMNS, Prompt
from rollout.episode.environment import RunsItself
from rollout.errors import CallLimitError, ConfigError, ContextFullError, EngineError, EvidenceError
from rollout.records import EngineCall, FinishReason, Message, Rollout, RolloutStatus
from rollout.system.deadline import DeadlineExceeded, call_with_deadline, is_async
from rollout.system.user_functions import load_function

if TYPE_CHECKING:  # transformers is slow to import, and environments are made by name while settings are checked
    from transformers import PreTrainedTokenizerFast

    from rollout.chat.chat import Chat
    from rollout.episode.episode import CallRecord

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_NOT_FACTS = (*REQUIRED, "env_mask", "logprob_token_ids")

LOGPROB_TOLERANCE = 1e-4
"""What passes through float32 or a JSON file comes back a little different; another token's logprob is further off."""


class TRLRollout(RunsItself):
    """Names the function."""

    def __init__(
        self,
        rollout_func: str | Callable[..., Any] | None = None,
        *,
        prompt_column: str | None = None,
        timeout_s: float = 600.0,
        max_concurrent: int = 64,
    ):
        """rollout_func: the function, or `path/to/file.py:function`. The rest as for `RunsItself`.

        Raises:
            ConfigError: no function is given, it cannot be loaded, or it is async, which TRL's contract is not.
        """
        if rollout_func is None:
            raise ConfigError("no function is set; set environment.settings.rollout_func=path/to/file.py:function")
        super().__init__(timeout_s=timeout_s, max_concurrent=max_concurrent)
        self.rollout_func = load_function(rollout_func) if isinstance(rollout_func, str) else rollout_func
        if is_async(self.rollout_func):
            raise ConfigError("rollout_func is async, but TRL calls a plain function; write `def`, not `async def`")
        self._column = prompt_column

    def prompt(self, example: Mapping[str, Any]) -> tuple[Any, tuple[Message, ...]]:
        """The row's prompt as TRL hands it over (a text stays a text), and as messages. Raises `DataError`."""
        messages = Prompt(column=self._column).messages(example)
        names = PROMPT_COLUMNS if self._column is None else (self._column,)
        value = next(example[name] for name in names if example.get(name) is not None)
        return (value if isinstance(value, str) else [dict(message) for message in messages]), messages


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArgs:
    """Sampling settings under the names of TRL's `GRPOConfig`. To be read: `generate` samples with them in any case."""

    max_completion_length: int
    """Of one call of `generate`, per prompt."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    num_generations: int = 1
    num_generations_eval: int = 1


class Trainer:
    """What a function gets in place of TRL's trainer: `processing_class`, `args`, `num_generations` and `generate`."""

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
        self._answered: dict[int, EngineCall] = {}
        self._record = record
        self._seed = seed
        self._num_asked = 0
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the trainer that a rollout_func gets here has no {name!r}; it has processing_class, args, "
            "num_generations and generate(prompt_ids), which samples in place of TRL's own generation"
        )

    @property
    def calls(self) -> list[EngineCall]:
        """In the order in which they were asked for, where the record has them as they were answered."""
        return [call for _, call in sorted(self._answered.items())]

    def generate(self, prompt_ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Sample one completion for each prompt, all at the same time. Each is a call of the episode's record.

        Args:
            prompt_ids: one list of token ids per prompt.

        Returns:
            For each prompt its `prompt_ids`, `completion_ids` and `logprobs`, the latter one number per sampled id.

        Raises:
            ValueError: a prompt is empty or holds something else than ids of the vocabulary.
            ContextFullError, CallLimitError: the prompt is too long, or the episode has no calls left. A function
                that lets these pass ends its episode, and what was sampled before is trained.
            EngineError, EvidenceError: the engine failed. The episode ends with it, whoever catches it.
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
        # All are awaited though one may fail: what another one samples is in the record, and must be returned.
        numbered = enumerate(prompts, first)
        results = await asyncio.gather(*(self._one(ids, n) for n, ids in numbered), return_exceptions=True)
        calls = [result for result in results if isinstance(result, EngineCall)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return calls

    async def _one(self, prompt: Sequence[int], number: int) -> EngineCall:
        from rollout.episode.episode import request_seed  # see the imports above

        call = await self._record.sample(prompt, seed=request_seed(self._seed, number))
        self._answered[number] = call
        return call


async def run_rollout_func_episode(
    *,
    engine: Engine,
    chat: Chat,
    tokenizer: PreTrainedTokenizerFast,
    slots: asyncio.Semaphore,
    environment: TRLRollout,
    example: Mapping[str, Any],
    sampling: Sampling,
    max_turns: int,
    rollout_id: int,
    group_id: int,
    seed: int,
) -> Rollout:
    """Run the function on one data row, as `run_episode` runs an environment.

    The rollout is FAILED where the function raises, does not end in time, or returns something else than what was
    sampled. `messages` are the row's prompt and every sampled turn; what the function wrote in between are token ids.

    Args:
        tokenizer: the function's own copy (`copy_tokenizer`).
        slots: held while the function runs.
        max_turns: engine calls at most.

    Raises:
        EngineError: the engine failed.
        ConfigError: what the function returned has not the form of TRL's contract.
    """
    from rollout.episode.episode import CallRecord  # see the imports above

    prompt, messages = environment.prompt(example)
    record = CallRecord(engine=engine, chat=chat, sampling=sampling, seed=seed, max_calls=lambda: max_turns)
    trainer = Trainer(record, tokenizer, sampling, seed=seed)
    try:
        async with slots:
            started = time.perf_counter()
            finished = await call_with_deadline(
                environment.rollout_func, [copy.deepcopy(prompt)], trainer, timeout_s=environment.timeout_s
            )
    finally:
        record.close()
    if isinstance(record.failure, EngineError):
        raise record.failure
    calls = tuple(record.calls)
    outcome: Mapping[str, Any] = {}
    status, error = _ending(record, finished.error)
    if finished.error is None and status is not RolloutStatus.FAILED:
        output = _read(finished.value)
        outcome = {name: _first(value) for name, value in output.items() if name not in _NOT_FACTS}
        try:
            check_against_record(output, trainer.calls)
        except EvidenceError as mismatch:
            status, error = RolloutStatus.FAILED, f"EvidenceError: {mismatch}"
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=calls,
        messages=(*messages, *(chat.parse(call.sampled_ids, ()) for call in calls)),
        example=example,
        status=status,
        outcome=outcome,
        error=error,
        duration_s=time.perf_counter() - started,
    )


async def copy_tokenizer(chat: Chat) -> PreTrainedTokenizerFast:
    """A tokenizer for functions: padding and truncation are settings of the object, and Lockstep's must not change."""
    return await asyncio.to_thread(copy.deepcopy, chat.tokenizer)


def check_against_record(output: Mapping[str, Any], calls: Sequence[EngineCall]) -> None:
    """Compare what a function returned for one prompt with the engine calls it made, in the order it asked for them.

    * `completion_ids`, those of `env_mask` 1 where there is a mask, are the sampled ids of all calls in their order.
    * `logprobs` of these tokens are the engine's, or None as a whole.
    * `prompt_ids` are the prompt of the first call, or the prompts of all calls one after another, as functions do that
      add up their turns.
    * Where a mask marks tokens of the environment, the tokens before each sampled stretch are the prompt of its call.

    Args:
        output: `prompt_ids`, `completion_ids`, `logprobs` and perhaps `env_mask`, each a list with one item.

    Raises:
        EvidenceError: they differ, or there is nothing to compare with.
    """
    if not calls:
        raise EvidenceError("rollout_func did not sample; call trainer.generate(prompt_ids), whose ids are recorded")
    prompt, completion = _integers(output, "prompt_ids"), _integers(output, "completion_ids")
    is_masked = output.get("env_mask") is not None
    mask = _integers(output, "env_mask") if is_masked else [1] * len(completion)
    if len(mask) != len(completion):
        raise EvidenceError(f"rollout_func returned {len(completion)} completion_ids, but an env_mask of {len(mask)}")
    sampled_at = [position for position, is_sampled in enumerate(mask) if is_sampled]
    recorded = list(chain.from_iterable(call.sampled_ids for call in calls))
    _refuse_difference("completion_ids", [completion[position] for position in sampled_at], recorded)
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
        raise EvidenceError(f"rollout_func returned logprobs that are no list ({error})") from error
    if len(logprobs) != num_ids:
        raise EvidenceError(f"rollout_func returned {num_ids} completion_ids, but {len(logprobs)} logprobs")
    recorded = chain.from_iterable(call.sampled_logprobs for call in calls)
    for position, truth in zip(sampled_at, recorded, strict=True):
        try:
            is_close = math.isclose(float(logprobs[position]), truth, rel_tol=0.0, abs_tol=LOGPROB_TOLERANCE)
        except (TypeError, ValueError):
            is_close = False
        if not is_close:
            raise EvidenceError(
                f"rollout_func returned logprob {logprobs[position]} for token {position} of completion_ids, the "
                f"engine recorded {truth}; return what trainer.generate gave"
            )


def _refuse_difference(name: str, found: Sequence[int], recorded: Sequence[int]) -> None:
    if found == recorded:
        return
    same = next((i for i, (a, b) in enumerate(zip(found, recorded, strict=False)) if a != b), None)
    where = f"they differ at token {same}" if same is not None else "one ends where the other goes on"
    raise EvidenceError(
        f"rollout_func returned {len(found)} {name}, the engine recorded {len(recorded)}, and {where}; return the ids "
        "that trainer.generate gave, all of them, and mark what was not sampled with 0 in env_mask"
    )


def _integers(output: Mapping[str, Any], name: str) -> list[int]:
    try:
        return [operator.index(item) for item in output[name][0]]
    except TypeError as error:
        raise EvidenceError(f"rollout_func returned {name} that are no integers ({error})") from error


def _read(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or any(name not in value for name in REQUIRED):
        found = f"keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
        raise ConfigError(f"rollout_func returned {found}; expected a dictionary with {', '.join(REQUIRED)}")
    for name in (*REQUIRED, "env_mask"):
        items = value.get(name)
        if items is None and name in ("logprobs", "env_mask"):
            continue
        if not isinstance(items, list | tuple) or len(items) != 1:
            found = f"{len(items)} items" if isinstance(items, list | tuple) else type(items).__name__
            raise ConfigError(
                f"rollout_func returned {found} as {name}; expected a list with one item: it is called with one prompt "
                "and trainer.num_generations=1"
            )
    return value


def _first(value: Any) -> Any:
    """A list holds one value per prompt, as in TRL; anything else is for all of them."""
    return value[0] if isinstance(value, list) and value else value


def _ending(record: CallRecord, error: BaseException | None) -> tuple[RolloutStatus, str | None]:
    if record.failure is not None:
        return RolloutStatus.FAILED, f"{type(record.failure).__name__}: {record.failure}"
    if isinstance(error, ContextFullError):
        return RolloutStatus.CONTEXT_FULL, None
    if isinstance(error, CallLimitError):
        return RolloutStatus.MAX_TURNS, None
    if isinstance(error, DeadlineExceeded):
        return RolloutStatus.FAILED, f"rollout_func did not finish: {error}; raise environment.settings.timeout_s"
    if error is not None:
        return RolloutStatus.FAILED, f"rollout_func raised {type(error).__name__}: {error}"
    was_cut = bool(record.calls) and record.calls[-1].finish_reason is FinishReason.LENGTH
    return (RolloutStatus.TRUNCATED if was_cut else RolloutStatus.COMPLETED), None
