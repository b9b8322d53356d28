"""Cases: rollouts from plain text up to the run's own prompts, each adding one element of the pipeline.

    simple_text      plain text, no chat template: the two models alone
    single_turn      one question through the chat template
    multi_turn       two more questions: prompts that extend what was sampled
    training_path    the run's data, environment, tools and sampler

If earlier cases agree and a later one does not, the fault is in what that case adds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments.single_turn import SingleTurn
from lockstep.rollout.environments.user import SimulatedUser
from lockstep.rollout.episode.conversation import request_seed
from lockstep.rollout.episode.environment import Environment
from lockstep.rollout.records import Rollout
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.trainer.build import images_of_data, make_sampler, make_sampling
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Prompts, training_data

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
TRAINING_PROMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rollouts to diagnose together."""

    name: str
    purpose: str
    rollouts: tuple[Rollout, ...]

    @property
    def trainable(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.is_trainable]


async def sample_cases(config: Config, *, engine: Engine, chat: Chat) -> list[Case]:
    """Sample all cases with the run's settings, deterministically. Raises `EngineError` and `DataError`."""
    sampling = make_sampling(config.rollout, chat, with_routes=config.plan.replays_engine)
    data = training_data(config.data, config.environment, config.reward, **images_of_data(config.model, chat))
    order = Prompts(data, seed=config.seed, shuffle=config.data.shuffle)
    prompts = order.take(min(TRAINING_PROMPTS, sum(map(len, data))))
    sampler = make_sampler(config, engine=engine, chat=chat)
    text, single, multi, training_path = await asyncio.gather(
        _plain_text(config.seed, engine, chat, sampling),
        _conversations(config.seed, engine, chat, sampling, follow_ups=()),
        _conversations(config.seed, engine, chat, sampling, follow_ups=FOLLOW_UPS),
        # The first prompts of the run, as its first step would sample them.
        sampler.collect(prompts, samples_per_prompt=SAMPLES_PER_PROMPT, sampling=sampling, step=0),
    )
    return [
        Case(name="simple_text", purpose="plain text, no chat template", rollouts=text),
        Case(name="single_turn", purpose="one question through the chat template", rollouts=single),
        Case(name="multi_turn", purpose="questions follow", rollouts=multi),
        Case(name="training_path", purpose="the run's data, environment and sampler", rollouts=tuple(training_path)),
    ]


async def _plain_text(seed: int, engine: Engine, chat: Chat, sampling: Sampling) -> tuple[Rollout, ...]:
    """Sample continuations of fixed length, because plain text has no end of turn."""

    async def one(number: int) -> Rollout:
        text = TEXTS[number % len(TEXTS)]
        prompt_ids = list(chat.tokenizer.encode(text))
        request = replace(
            sampling,
            max_tokens=min(sampling.max_tokens, max(1, engine.max_model_len - len(prompt_ids))),
            stop_token_ids=(),
            ignore_eos=True,
            seed=request_seed(seed, number),
        )
        call = await engine.generate(prompt_ids, request)
        return Rollout(rollout_id=number, group_id=number % len(TEXTS), calls=(call,), example={"prompt": text})

    return tuple(await asyncio.gather(*map(one, range(SAMPLES_PER_PROMPT * len(TEXTS)))))


async def _conversations(
    seed: int, engine: Engine, chat: Chat, sampling: Sampling, *, follow_ups: tuple[str, ...]
) -> tuple[Rollout, ...]:
    def environment() -> Environment:
        return SimulatedUser(turns=follow_ups) if follow_ups else SingleTurn()

    turns = 1 + len(follow_ups)
    sampler = Sampler(engine=engine, chat=chat, make_environment=environment, max_turns=turns, seed=seed)
    examples = [{"prompt": question} for question in QUESTIONS]
    return tuple(
        await sampler.collect(examples, samples_per_prompt=SAMPLES_PER_PROMPT, sampling=sampling, step=len(follow_ups))
    )
