"""Episodes of functions written for TRL's rollout_func: their output is checked against the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lockstep.integrations.environments.trl_rollout import Trainer, check_against_record
from lockstep.rewards.composition import make_reward_set
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, ContextFullError, EngineError, EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.policies import CHAT, TOKENIZER, Policy, last_turn, sampling

GO = [{"role": "user", "content": "go"}]
Output = dict[str, Any]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


SURE = ids_of("\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n")


def answers(prompt: str) -> str:
    return "yes indeed" if "sure" in last_turn(prompt) else "seven"


def two_turns(prompts: list[Any], trainer: Trainer) -> Output:
    prompt = CHAT.prompt(GO)
    (first,) = trainer.generate([prompt])
    (second,) = trainer.generate([prompt + first["completion_ids"] + SURE])
    return {
        "prompt_ids": [prompt],
        "completion_ids": [first["completion_ids"] + SURE + second["completion_ids"]],
        "logprobs": [first["logprobs"] + [0.0] * len(SURE) + second["logprobs"]],
        "env_mask": [[1] * len(first["logprobs"]) + [0] * len(SURE) + [1] * len(second["logprobs"])],
        "env_reward": [0.5],
        "environment_reward": [0.25],
        "source": "game",
    }


def added_up(prompts: list[Any], trainer: Trainer) -> Output:
    """Concatenate all prompts and all completions, as some functions do."""
    output = two_turns(prompts, trainer)
    first, second = trainer.calls
    return {
        "prompt_ids": [[*first.prompt_ids, *second.prompt_ids]],
        "completion_ids": [[*first.sampled_ids, *second.sampled_ids]],
        "logprobs": [[*first.sampled_logprobs, *second.sampled_logprobs]],
        "env_reward": output["env_reward"],
    }


async def run(function: Callable[..., Any], engine: Any = None, *, count: int = 1, **settings: Any) -> list[Rollout]:
    max_turns, example = settings.pop("max_turns", 4), settings.pop("example", {"question": "go"})
    sampler = Sampler(
        engine=engine or Policy(answers),  # type: ignore[arg-type]
        chat=CHAT,
        make_environment=lambda: make_environment("trl_rollout", rollout_func=function, **settings),
        max_turns=max_turns,
        seed=1,
    )
    return await sampler.collect([example], samples_per_prompt=count, sampling=sampling(), step=0)


async def run_one(function: Callable[..., Any], engine: Any = None, **settings: Any) -> Rollout:
    (rollout,) = await run(function, engine, **settings)
    return rollout


@pytest.mark.parametrize("function", [two_turns, added_up])
async def test_every_sampled_token_is_trained_once_from_the_record(function: Callable[..., Output]):
    rollout = await run_one(function)
    assert (rollout.status, rollout.error) == (RolloutStatus.COMPLETED, None)
    (row,) = rows_from_calls(rollout.calls)
    sampled = [*ids_of("seven<|im_end|>"), *ids_of("yes indeed<|im_end|>")]
    assert row.ids[row.loss_mask].tolist() == sampled
    assert [message["content"] for message in rollout.messages] == ["go", "seven", "yes indeed"]
    assert rollout.outcome["env_reward"] == 0.5


async def test_further_fields_are_facts_for_rewards():
    rollout = await run_one(two_turns)
    assert rollout.outcome == {"env_reward": 0.5, "environment_reward": 0.25, "source": "game"}
    (scored,) = await make_reward_set(["environment_reward"]).score([rollout])
    assert scored.reward == 0.25


def other_id(output: Output) -> None:
    output["completion_ids"][0][0] += 1


def other_logprob(output: Output) -> None:
    output["logprobs"][0][-1] -= 0.001


def nan_for_a_logprob(output: Output) -> None:
    output["logprobs"][0][0] = float("nan")


def none_for_a_logprob(output: Output) -> None:
    output["logprobs"][0][0] = None


def cut_short(output: Output) -> None:
    for name in ("completion_ids", "logprobs", "env_mask"):
        output[name][0].pop()


def other_prompt(output: Output) -> None:
    output["prompt_ids"][0].pop(0)


def environment_token_as_sampled(output: Output) -> None:
    output["env_mask"][0][output["env_mask"][0].index(0)] = 1


def sampled_token_as_environment(output: Output) -> None:
    output["env_mask"][0][0] = 0


def other_environment_token(output: Output) -> None:
    output["completion_ids"][0][output["env_mask"][0].index(0)] += 1


def no_mask(output: Output) -> None:
    del output["env_mask"]


def short_mask(output: Output) -> None:
    output["env_mask"][0].pop()


def short_logprobs(output: Output) -> None:
    output["logprobs"][0].pop()


def text(output: Output) -> None:
    output["completion_ids"] = ["seven"]


DIFFERENCES = [
    (other_id, "completion_ids, .* differ at token 0"),
    (other_logprob, "returned logprob"),
    (nan_for_a_logprob, "returned logprob nan"),
    (none_for_a_logprob, "returned logprob None"),
    (cut_short, "one ends where the other goes on"),
    (other_prompt, "prompt_ids"),
    (environment_token_as_sampled, "completion_ids, .* differ"),
    (sampled_token_as_environment, "completion_ids, .* differ at token 0"),
    (other_environment_token, "tokens before a sampled stretch"),
    (no_mask, "completion_ids"),
    (short_mask, "env_mask of"),
    (short_logprobs, "logprobs"),
    (text, "not integers"),
]


@pytest.mark.parametrize(("change", "says"), DIFFERENCES, ids=lambda value: getattr(value, "__name__", ""))
async def test_output_that_differs_from_the_record_fails_the_rollout(change: Callable[[Output], None], says: str):
    def function(prompts: list[Any], trainer: Trainer) -> Output:
        output = two_turns(prompts, trainer)
        change(output)
        return output

    rollout = await run_one(function)
    assert rollout.status is RolloutStatus.FAILED
    assert not rollout.is_trainable
    assert rollout.error is not None
    with pytest.raises(EvidenceError, match=says):
        raise EvidenceError(rollout.error)
    assert rollout.error.startswith("EvidenceError: rollout_func returned")


async def test_a_call_missing_from_the_output_fails_the_rollout():
    def best_of_two(prompts: list[Any], trainer: Trainer) -> Output:
        turn, _ = trainer.generate([CHAT.prompt(GO)] * 2)
        return {key: [value] for key, value in turn.items()}

    rollout = await run_one(best_of_two)
    assert rollout.status is RolloutStatus.FAILED
    assert len(rollout.calls) == 2


async def test_samples_beside_a_refused_prompt_must_be_returned_too():
    def swallows(prompts: list[Any], trainer: Trainer) -> Output:
        with pytest.raises(ContextFullError):
            trainer.generate([CHAT.prompt(GO), SURE * 1000])
        (turn,) = trainer.generate([CHAT.prompt(GO)])
        return {key: [value] for key, value in turn.items()}

    rollout = await run_one(swallows)
    assert len(rollout.calls) == 2
    assert rollout.error is not None
    assert "completion_ids" in rollout.error


async def test_a_function_that_does_not_sample_fails_the_rollout():
    rollout = await run_one(
        lambda prompts, trainer: {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[0.0]]}
    )
    assert rollout.error is not None
    assert "did not sample" in rollout.error


def test_logprobs_may_be_left_out_and_trailing_environment_tokens_are_free():
    call = EngineCall(prompt_ids=(1, 2), sampled_ids=(3,), sampled_logprobs=(-0.5,), finish_reason=FinishReason.STOP)
    output = {"prompt_ids": [[1, 2]], "completion_ids": [[3, 9]], "logprobs": None, "env_mask": [[1, 0]]}
    check_against_record(output, [call])
    check_against_record({**output, "logprobs": [[-0.50001, None]]}, [call])
    with pytest.raises(EvidenceError):
        check_against_record({**output, "logprobs": [[-0.51, None]]}, [call])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "returned NoneType"),
        ({"prompt_ids": [[1]]}, "returned keys prompt_ids; expected"),
        ({"prompt_ids": [[1]] * 2, "completion_ids": [[1]] * 2, "logprobs": None}, "2 items as prompt_ids"),
        ({"prompt_ids": None, "completion_ids": [[1]], "logprobs": None}, "NoneType as prompt_ids"),
    ],
)
async def test_output_in_another_form_than_the_contract_fails_the_rollout(value: Any, says: str):
    (rollout,) = await run(lambda prompts, trainer: value)
    assert rollout.status is RolloutStatus.FAILED
    assert says in str(rollout.error)


async def test_the_function_sees_the_prompt_and_the_settings():
    seen: list[Any] = []

    def function(prompts: list[Any], trainer: Trainer) -> Output:
        seen.append((prompts, trainer.args, trainer.processing_class))
        return two_turns(prompts, trainer)

    await run_one(function)
    await run_one(function, example={"prompt": GO})
    (text_row, args, tokenizer), (message_row, _, _) = seen
    assert text_row == ["go"]
    assert message_row == [GO]
    assert (args.max_completion_length, args.temperature, args.num_generations) == (256, 1.0, 1)
    assert tokenizer is not TOKENIZER
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()


async def test_seeds_depend_on_the_episode_and_the_number_of_the_call():
    def seeds(engine: Policy) -> Mapping[Any, Any]:
        return engine.seeds

    one, again = Policy(answers), Policy(answers)
    await run(two_turns, one)
    await run(two_turns, again)
    assert seeds(one) == seeds(again)
    assert len(set(one.seeds.values())) == 2


async def test_episodes_run_at_the_same_time_up_to_the_limit():
    wide, narrow = (Policy(answers, delay_s=lambda prompt: 0.05) for _ in range(2))
    rollouts = await run(two_turns, wide, count=4)
    await run(two_turns, narrow, count=4, max_concurrent=1)
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert wide.most_at_once > 1
    assert narrow.most_at_once == 1


async def test_limits_end_the_episode_and_samples_before_are_trained():
    rollout = await run_one(two_turns, max_turns=1)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert rollout.is_trainable
    full = await run_one(two_turns, Policy(answers, max_model_len=len(CHAT.prompt(GO)) + 4))
    assert full.status is RolloutStatus.CONTEXT_FULL
    assert full.is_trainable


@pytest.mark.parametrize(
    ("prompt_ids", "says"), [([[]], "must hold token ids"), ([[10**9]], "must hold"), ([1, 2], "one list of token ids")]
)
async def test_an_invalid_prompt_fails_its_own_episode(prompt_ids: Any, says: str):
    rollout = await run_one(lambda prompts, trainer: trainer.generate(prompt_ids))
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error is not None
    assert says in rollout.error


async def test_a_missing_attribute_of_trl_is_named():
    rollout = await run_one(lambda prompts, trainer: trainer.vllm_generation)
    assert rollout.error is not None
    assert "no 'vllm_generation'" in rollout.error


async def test_a_function_that_hangs_fails_its_own_episode():
    rollout = await run_one(lambda prompts, trainer: time.sleep(0.3), timeout_s=0.05)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error is not None
    assert "did not finish" in rollout.error


async def test_bad_evidence_fails_the_rollout_even_if_the_function_catches_it():
    def catches(prompts: list[Any], trainer: Trainer) -> Output:
        with pytest.raises(EvidenceError):
            trainer.generate([CHAT.prompt(GO)])
        return {"prompt_ids": [[1]], "completion_ids": [[]], "logprobs": [[]]}

    rollout = await run_one(catches, Policy(answers, fails=lambda prompt: EvidenceError("logprobs are missing")))
    assert rollout.error == "EvidenceError: logprobs are missing"


async def test_a_dead_engine_ends_the_run():
    with pytest.raises(EngineError, match="dead"):
        await run(two_turns, Policy(answers, fails=lambda prompt: EngineError("dead")))


async def test_wrong_settings_and_rows_are_refused():
    async def function(prompts: list[Any], trainer: Trainer) -> None: ...

    for settings, says in (
        ({}, "set environment.settings.rollout_func"),
        ({"rollout_func": function}, "async"),
        ({"rollout_func": two_turns, "timeout_s": 0}, "timeout_s"),
        ({"rollout_func": two_turns, "max_concurrent": 0}, "max_concurrent"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_environment("trl_rollout", **settings)
    (rollout,) = await run(two_turns, example={"text": "go"})
    assert "DataError: no prompt in a data row" in str(rollout.error)
