"""Episodes of a task in its real environment, played by a scripted player or by the model.

Conversations are text here, which is faster for thousands of short ones than `rollout/chat/chat.py`; a test compares
the token ids of both.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL.Image import Image
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from lockstep.demo.tasks import DemoTask, Row, answer_text
from lockstep.demo.tokenizer import IMAGE, TURN_END
from lockstep.demo.vision import expanded, image_inputs
from lockstep.rollout.chat.tool_calls import parse_hermes
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.mixed import environment_of
from lockstep.rollout.episode.environment import Environment, RunsItself, ShowsImages
from lockstep.rollout.records import Message, image_parts

MAX_TURN_TOKENS = 48


@dataclass(slots=True)
class Episode:
    """An unfinished conversation. `text` is rendered; `spans` are the [start, end) of assistant turns in it."""

    environment: Environment
    text: str
    spans: list[tuple[int, int]] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    """In the order of their tokens in the text."""
    last_reply: str = ""
    last_turn: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Token ids of a whole conversation, and the mask of those in assistant turns."""

    ids: list[int]
    is_learned: list[bool]
    images: Sequence[Image] = ()


async def begin(task: DemoTask, row: Row, tokenizer: PreTrainedTokenizerFast) -> Episode:
    environment = environment_of(make_environment(task.name), row)
    assert not isinstance(environment, RunsItself), "tasks of the demo have turns to play"
    if isinstance(environment, ShowsImages):
        environment.sees_images = task.draw_image is not None
    messages = await environment.reset(row)
    images: list[Image] = []
    if task.draw_image is not None:
        images = [task.draw_image(row)]
        parts = [{"type": "image"}, {"type": "text", "text": messages[-1]["content"]}]
        messages = [*messages[:-1], {**messages[-1], "content": parts}]
    return Episode(environment=environment, text=expanded(_render(tokenizer, messages, environment)), images=images)


async def advance(episode: Episode, turn: str) -> None:
    """Append an assistant turn and the environment's answer."""
    start = len(episode.text)
    episode.text += turn + TURN_END
    episode.spans.append((start, len(episode.text)))
    episode.last_turn = turn
    step = await episode.environment.step(parse_hermes(turn).message(sampled_ids=()))
    episode.done = step.done
    if step.done:
        return
    replies = [_content_text(message["content"]) for message in step.messages]
    episode.last_reply = replies[-1]
    for message in step.messages:
        episode.images += [part["image"] for part in image_parts(message)]
    responses = expanded("".join(f"\n<tool_response>\n{reply}\n</tool_response>" for reply in replies))
    episode.text += f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"


def demonstrate(
    task: DemoTask,
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    *,
    noisy: bool,
) -> list[Episode]:
    """Play each row to its end with the scripted player."""

    async def play(row: Row) -> Episode:
        episode = await begin(task, row, tokenizer)
        player = task.play(row, rng, noisy)
        turn = next(player)
        while True:
            await advance(episode, turn)
            try:
                turn = player.send(episode.last_reply)
            except StopIteration:
                return episode

    async def play_in_order() -> list[Episode]:
        return [await play(row) for row in rows]  # in order: they share the random generator

    return asyncio.run(play_in_order())


def tokenize(episode: Episode, tokenizer: PreTrainedTokenizerFast) -> Demonstration:
    """Tokenize a whole conversation; a token is learned if it lies in an assistant turn."""
    encoding = tokenizer(episode.text, return_offsets_mapping=True, add_special_tokens=False)
    is_learned = [
        any(start <= first and last <= end for start, end in episode.spans)
        for first, last in encoding["offset_mapping"]
    ]
    return Demonstration(ids=encoding["input_ids"], is_learned=is_learned, images=episode.images)


@torch.no_grad()
def sampled_reward(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: DemoTask,
    rows: Sequence[Row],
    *,
    seed: int,
    greedy: bool = False,
) -> float:
    """Return the mean demo reward of the model on these rows, each played once at temperature 1 (or greedily)."""

    async def play_all() -> float:
        episodes = [await begin(task, row, tokenizer) for row in rows]
        for _ in range(task.max_turns):
            open_episodes = [episode for episode in episodes if not episode.done]
            if not open_episodes:
                break
            turns = _sample_turns(
                model,
                tokenizer,
                [episode.text for episode in open_episodes],
                generator,
                greedy=greedy,
                images=[image for episode in open_episodes for image in episode.images],
            )
            for episode, turn in zip(open_episodes, turns, strict=True):
                await advance(episode, turn)
        right = [
            episode.done and episode.last_turn == answer_text(row["answer"])
            for episode, row in zip(episodes, rows, strict=True)
        ]
        return sum(right) / len(right)

    generator = torch.Generator().manual_seed(seed)
    return asyncio.run(play_all())


def _sample_turns(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    generator: torch.Generator,
    *,
    greedy: bool,
    images: Sequence[Image] = (),
) -> list[str]:
    """Sample one assistant turn for each text, without its end-of-turn token. images: those of all texts in order."""
    prompt = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    ids_BT, mask_BT = prompt["input_ids"], prompt["attention_mask"]
    end_id = tokenizer.convert_tokens_to_ids(TURN_END)
    cache = DynamicCache(config=model.config)
    sampled_ids: list[torch.Tensor] = []
    ended_B = torch.zeros(len(texts), dtype=torch.bool)
    inputs = {"position_ids": (mask_BT.cumsum(1) - 1).clamp(min=0)}
    if images:
        inputs = image_inputs(model, ids_BT, mask_BT, images)
    while len(sampled_ids) < MAX_TURN_TOKENS and not ended_B.all():
        logits_BV = model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        ).logits[:, -1]
        inputs = {"position_ids": inputs["position_ids"][..., -1:] + 1}
        if images:
            logits_BV[:, model.config.image_token_id] = -torch.inf  # it would stand for an image that is not there
        if greedy:
            ids_BT = logits_BV.argmax(-1, keepdim=True)
        else:
            ids_BT = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        sampled_ids.append(ids_BT[:, 0])
        ended_B |= ids_BT[:, 0] == end_id
        mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], dim=1)
    turns = torch.stack(sampled_ids, dim=1).tolist()
    return [str(tokenizer.decode(ids)).split(TURN_END)[0] for ids in turns]


def _content_text(content: Any) -> str:
    """Return the text of a message, with images as the template writes them."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"<|vision_start|>{IMAGE}<|vision_end|>") for part in content)


def _render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], environment: Environment) -> str:
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in environment.tools] or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(text, str)
    return text
