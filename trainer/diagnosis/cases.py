"""What is sampled to look at: from plain text to the run's own prompts, one thing more in every case.

    simple_text      plain text, no chat template: the two models alone
    single_turn      one question through the chat template
    multi_turn       questions follow: prompts are extended by what was sampled
    training_path    the run's data, environment, tools and sampler
    alignment        the same rollouts: do logprobs fit their own positions better than the neighbouring ones?
    retokenisation   the same rollouts: what would be left of them if they went through text?

Where the first cases agree and a later one does not, the fault is in what that case adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from rollout.chat.chat import Chat
from rollout.engine.protocol import Engine, Sampling
from rollout.environments.single_turn import SingleTurn
from rollout.environments.user import SimulatedUser
from rollout.episode.conversation import request_seed
from rollout.episode.environment import Environment
from rollout.records import Rollout
from rollout.sampler.sampler import Sampler
from trainer.build import make_sampler, make_sampling
from trainer.config.schema import Config
from trainer.data.prompts import Prompts, training_data

TEXTS = (
    "The three largest cities of the country are",
    "def mean(values):\n    ",
    "It was a dark night, and nobody on the ship had slept. The captain",
    "1, 1, 2, 3, 5, 8,",
    "Dear Ms. O'Neill,\n\nthank you for your letter of 3 May. ",
    "Zutaten: 250 g Mehl, 2 Eier, 1/2 l Milch –",
)
QUESTIONS = (
    "What is 17 + 25?",
    "Name three colours.",
    "Write a sentence about the sea.",
    "How many days has a week?",
)
FOLLOW_UPS = ("Are you sure?", "Say it once more, in other words.")
SAMPLES_PER_PROMPT = 2
REEXAMINED = ("alignment", "retokenisation")
"""Cases that look at the rollouts of another case once more."""
TRAINING_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rollouts to diagnose together, and what they are to show."""

    name: str
    purpose: str
    rollouts: tuple[Rollout, ...]


async def sample_cases(config: Config, *, engine: Engine, chat: Chat) -> list[Case]:
    """Sample all cases with the run's own settings. Deterministic for a given seed.

    Raises `EngineError` if the engine dies, `DataError` if the run's data cannot be read.
    """
    sampling = make_sampling(config, chat, temperature=config.rollout.temperature)
    text, single, multi, trained = await asyncio.gather(
        _plain_text(engine, chat.tokenizer, sampling, seed=config.seed),
        _conversations(config, engine, chat, sampling, turns=()),
        _conversations(config, engine, chat, sampling, turns=FOLLOW_UPS),
        _training_path(config, engine, chat, sampling),
    )
    return [
        Case(name="simple_text", purpose="plain text, no chat template", rollouts=text),
        Case(name="single_turn", purpose="one question through the chat template", rollouts=single),
        Case(name="multi_turn", purpose="questions follow", rollouts=multi),
        Case(name="training_path", purpose="the run's data, environment and sampler", rollouts=trained),
        *reexamined(trained),
    ]


def saved_cases(rollouts: Sequence[Rollout]) -> list[Case]:
    """The cases of rollouts that a run has saved."""
    saved = tuple(rollouts)
    return [Case(name="saved_rollouts", purpose="as a run has saved them", rollouts=saved), *reexamined(saved)]


def reexamined(rollouts: tuple[Rollout, ...]) -> list[Case]:
    purposes = ("logprobs against neighbouring positions", "what would be left after decode and encode")
    return [
        Case(name=name, purpose=purpose, rollouts=rollouts) for name, purpose in zip(REEXAMINED, purposes, strict=True)
    ]


async def _plain_text(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, *, seed: int
) -> tuple[Rollout, ...]:
    """Continuations of fixed length: a text has no end of turn."""

    async def one(number: int) -> Rollout:
        text = TEXTS[number % len(TEXTS)]
        prompt_ids = list(tokenizer.encode(text))  # type: ignore[arg-type]
        room = max(1, engine.max_model_len - len(prompt_ids))
        request = replace(
            sampling,
            max_tokens=min(sampling.max_tokens, room),
            stop_token_ids=(),
            ignore_eos=True,
            seed=request_seed(seed, number),
        )
        call = await engine.generate(prompt_ids, request)
        return Rollout(rollout_id=number, group_id=number % len(TEXTS), calls=(call,), example={"prompt": text})

    return tuple(await asyncio.gather(*(one(number) for number in range(SAMPLES_PER_PROMPT * len(TEXTS)))))


async def _conversations(
    config: Config, engine: Engine, chat: Chat, sampling: Sampling, *, turns: tuple[str, ...]
) -> tuple[Rollout, ...]:
    def environment() -> Environment:
        return SimulatedUser(turns=turns) if turns else SingleTurn()

    sampler = Sampler(
        engine=engine, chat=chat, make_environment=environment, max_turns=1 + len(turns), seed=config.seed
    )
    examples = [{"prompt": question} for question in QUESTIONS]
    return tuple(
        await sampler.collect(examples, samples_per_prompt=SAMPLES_PER_PROMPT, sampling=sampling, step=len(turns))
    )


async def _training_path(config: Config, engine: Engine, chat: Chat, sampling: Sampling) -> tuple[Rollout, ...]:
    """The first prompts of the run, as its first step would sample them."""
    data = training_data(config)
    order = Prompts(data, seed=config.seed, shuffle=config.data.shuffle)
    prompts = order.take(min(TRAINING_PROMPTS, sum(map(len, data))))
    sampler = make_sampler(config, engine=engine, chat=chat)
    return tuple(await sampler.collect(prompts, samples_per_prompt=SAMPLES_PER_PROMPT, sampling=sampling, step=0))
