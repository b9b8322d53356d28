"""Images from a message to the engine's logprobs, against transformers' own forward of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.conversation import CallRecord, Conversation
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import EngineError, EvidenceError, SyncError
from lockstep.rollout.media.processing import FAMILIES, ImageProcessing
from lockstep.rollout.records import EngineCall, ImageSpan, PromptIds, TrainingRow, image_parts
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import CanarySettings, ImageRow
from lockstep.rollout.weights.canary_prompt import canary_prompt
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.batch.packing import PackedBatch, collate, whole_row
from lockstep.trainer.model.layers.vision import image_source, tower_parts
from lockstep.trainer.model.policy import Policy
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.vision import full_logprobs, image_processing, picture, save_tiny

BOUND = 1e-5
"""Largest difference of two float32 programs that compute the same [nats]."""


@dataclass
class Seeing:
    """An engine that sees images, its model in transformers, and their chat."""

    family: str
    loop: BackgroundLoop
    engine: EmbeddedEngine
    model: PreTrainedModel
    chat: Chat
    images: ImageProcessing

    def generate(self, prompt: PromptIds, **sampling: Any) -> EngineCall:
        """Sample with this seed, or with the first that samples no image token, which random weights make likely."""
        request = Sampling(**{"max_tokens": 6, "seed": 0, "ignore_eos": True} | sampling)
        for seed in range(0 if "seed" in sampling else 20):
            with suppress(EvidenceError):
                return self.loop.run(self.engine.generate(prompt, replace(request, seed=seed), prompt.images))
        return self.loop.run(self.engine.generate(prompt, request, prompt.images))

    def mismatch(self, call: EngineCall) -> float:
        """Return the largest difference between the logprobs of engine and model."""
        expected = full_logprobs(self.model, self.images, call.all_ids, call.images)[len(call.prompt) - 1 :]
        return float((torch.tensor(call.sampled_logprobs) - expected).abs().max())

    def trainer_mismatch(self, policy: Policy, calls: Sequence[EngineCall]) -> float:
        """Return the largest difference between the logprobs of the engine and of a pack of all these calls."""
        rows = [rows_from_calls([call])[0] for call in calls]
        found = trained_logprobs(policy, self.images, rows)
        sampled = np.concatenate([row.sampling_logprobs[row.loss_mask] for row in rows])
        return float(np.abs(found - sampled).max())


def trained_logprobs(policy: Policy, images: ImageProcessing, rows: Sequence[TrainingRow]) -> np.ndarray:
    """Return the trainer's logprobs of the trained tokens of these rows in one pack."""
    with torch.no_grad():
        return policy(pack_of(policy, images, rows), temperature=1.0)[0].float().numpy()


def pack_of(policy: Policy, images: ImageProcessing, rows: Sequence[TrainingRow]) -> PackedBatch:
    return collate(rows, range(len(rows)), images=image_source(policy.causal_lm.config, images.prepared))


@contextmanager
def seeing_engine(family: str, directory: Path, *, max_images: int) -> Iterator[Seeing]:
    """Yield an engine of a tiny model that sees images."""
    save_tiny(family, directory)
    images = image_processing(directory)
    settings = EngineSettings(
        model=directory, max_model_len=320, max_images=max_images, kv_cache_gib=0.0625, num_threads=1
    )
    with BackgroundLoop() as loop:
        with forks_for_spawns():
            engine = EmbeddedEngine(settings, loop=loop, log_path=directory / "engine.log", images=images)
        yield Seeing(
            family=family,
            loop=loop,
            engine=engine,
            model=AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval(),
            chat=Chat.from_pretrained(directory, images=images),
            images=images,
        )
        loop.run(engine.close())


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    with seeing_engine(request.param, tmp_path_factory.mktemp(request.param), max_images=3) as seeing:
        yield seeing


def asks(*numbers: int, role: str = "user") -> dict[str, Any]:
    """Make a message with these pictures."""
    parts = [{"type": "image", "image": picture(number, 56 + 28 * (number % 2), 84)} for number in numbers]
    return {"role": role, "content": [{"type": "text", "text": "see "}, *parts, {"type": "text", "text": " what?"}]}


@pytest.mark.v2
@pytest.mark.parametrize("numbers", [(), (1,), (1, 2), (2, 1, 1)])
def test_sampled_tokens_have_the_logprobs_of_the_whole_model(seeing: Seeing, numbers: tuple[int, ...]) -> None:
    prompt = seeing.chat.prompt([asks(*numbers)])
    assert len(prompt.images) == len(numbers)
    seeing.loop.run(seeing.engine.reset_prefix_cache())
    computed, cached = seeing.generate(prompt), seeing.generate(prompt)
    for call in (computed, cached):
        assert call.images == prompt.images
        assert call.prompt_ids == tuple(prompt)
        assert seeing.mismatch(call) < BOUND


def test_packs_of_the_trainer_have_the_logprobs_of_the_engine(seeing: Seeing) -> None:
    policy = Policy(deepcopy(seeing.model), sees_images=True)
    calls = [seeing.generate(seeing.chat.prompt([asks(*numbers)])) for numbers in ((), (1,), (1, 2), (2, 1, 1), (3,))]
    assert seeing.trainer_mismatch(policy, calls) < BOUND
    assert seeing.trainer_mismatch(policy, calls[::-1][:2]) < BOUND, "a slice in another order"


def test_an_image_of_a_tool_in_turn_2_and_its_rows(seeing: Seeing) -> None:
    answers = "user" if seeing.family == "gemma3" else "tool"  # whose template has no tools

    async def play(seed: int) -> list[EngineCall]:
        record = CallRecord(
            engine=seeing.engine, chat=seeing.chat, sampling=Sampling(max_tokens=5, ignore_eos=True), seed=1
        )
        conversation = Conversation(record, [asks(1)], (), seed=seed)
        await conversation.ask()
        await conversation.ask([asks(2, role=answers)])
        parts = [part for message in conversation.messages for part in image_parts(message)]
        assert [part.keys() for part in parts] == [{"type", "digest"}] * 2
        return record.calls

    for seed in range(20):
        with suppress(EvidenceError):  # of a sampled image token, which random weights make likely
            first, second = seeing.loop.run(play(seed))
            break
    else:
        pytest.fail("every turn had an image token")
    assert (len(first.images), len(second.images)) == (1, 2)
    assert second.prompt_ids[: len(first.all_ids)] == first.all_ids
    assert second.images[:1] == first.images
    assert max(seeing.mismatch(first), seeing.mismatch(second)) < BOUND
    policy = Policy(deepcopy(seeing.model), sees_images=True)
    assert seeing.trainer_mismatch(policy, [first, second]) < BOUND
    (row,) = rows_from_calls([first, second])
    expected = full_logprobs(seeing.model, seeing.images, row.ids.tolist(), row.images)
    mask = row.loss_mask[1:]
    assert abs(expected.numpy()[mask] - row.sampling_logprobs[1:][mask]).max() < BOUND
    assert row.num_trained == 10


def test_another_first_image_with_the_same_ids_is_not_taken_from_the_prefix_cache(seeing: Seeing) -> None:
    cat, dog = (seeing.chat.prompt([asks(number, 2)]) for number in (1, 3))
    assert list(cat) == list(dog)
    about_cat, about_dog = seeing.generate(cat), seeing.generate(dog)
    assert max(seeing.mismatch(about_cat), seeing.mismatch(about_dog)) < BOUND
    forced = full_logprobs(seeing.model, seeing.images, about_cat.all_ids, dog.images)[len(dog) - 1 :]
    assert float((torch.tensor(about_cat.sampled_logprobs) - forced).abs().max()) > 0.1, "images matter"


def test_scores_of_a_prompt_with_images(seeing: Seeing) -> None:
    prompt = seeing.chat.prompt([asks(1, 2)])
    scores = torch.tensor(seeing.loop.run(seeing.engine.score(prompt, prompt.images)))
    assert float((scores - full_logprobs(seeing.model, seeing.images, prompt, prompt.images)).abs().max()) < BOUND


def test_images_that_do_not_belong_to_the_ids_are_refused(seeing: Seeing) -> None:
    prompt = seeing.chat.prompt([asks(1, 2)])
    first, second = prompt.images
    wrong: list[tuple[str, Sequence[int], list[ImageSpan]]] = [
        ("that are not those of its 0 images", prompt, []),
        ("that are not those of its 1 images", prompt, [first]),
        ("that are not those of its 2 images", [*prompt, prompt[first.start]], [first, second]),
        ("that are not those of its 2 images", prompt, [first, second.shifted(1)]),
        ("that are not those of its 2 images", prompt[: second.end - 1], [first, second]),
        ("that are not those of its 1 images", prompt[: second.end - 1], [first]),
        ("that are not those of its 2 images", prompt[: first.end], [first, second]),
        ("has 4 images, and the engine takes 3", prompt, [first, second] * 2),
    ]
    for says, ids, images in wrong:
        with pytest.raises(EngineError, match=says):
            seeing.generate(PromptIds(ids, images))
    same_length = [
        ImageSpan(start=first.start, end=first.end, digest=second.digest),
        ImageSpan(start=second.start, end=second.end, digest=first.digest),
    ]
    if seeing.family != "gemma3":  # all of whose images have the same number of tokens
        with pytest.raises(EngineError, match="tokens, expected"):
            seeing.generate(PromptIds(prompt, same_length))


def test_a_sampled_image_token_costs_the_turn(seeing: Seeing) -> None:
    prompt = seeing.chat.prompt([asks(1)])
    refusals: list[str] = []
    for seed in range(200):
        try:
            call = seeing.generate(prompt, seed=seed, max_tokens=16)
        except EvidenceError as error:
            refusals.append(str(error))
            continue
        assert seeing.images.reserved_ids.isdisjoint(call.sampled_ids)
        assert seeing.mismatch(call) < BOUND
        if len(refusals) == 2:
            break
    assert len(refusals) >= 2, "none was sampled"
    assert all("stand for an image that is not there" in refusal for refusal in refusals)


@pytest.mark.parametrize("clears", ["pause", "reset_prefix_cache"])
def test_an_update_of_the_vision_tower_reaches_images_that_were_seen(
    seeing: Seeing, clears: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = seeing.engine, seeing.chat.prompt([asks(1)])
    before = seeing.generate(prompt)

    async def keep_caches(*_: str) -> None:
        if clears == "reset_prefix_cache":
            await engine.llm.pause_generation(mode="wait", clear_cache=False)
        else:
            await engine.llm.reset_prefix_cache()

    monkeypatch.setattr(engine, "reset_prefix_cache" if clears == "pause" else "pause", keep_caches)
    with torch.no_grad():
        for part in tower_parts(seeing.model).values():
            for parameter in part.parameters():
                parameter.mul_(1.5 if seeing.family.startswith("qwen3_5") else 1.1)
    sync = WeightSync(module=seeing.model, engines=[engine], deadline_s=60)
    try:
        sync.push(1 + seeing.loop.run(engine.weight_version()))
    finally:
        sync.close()
    assert seeing.mismatch(before) > 0.01, "the tower matters"
    assert seeing.mismatch(seeing.generate(prompt)) < BOUND


@pytest.mark.parametrize("resets", [True, False])
def test_two_updates_of_a_trained_tower_and_a_canary_with_an_image(
    seeing: Seeing, resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loop = seeing.engine, seeing.loop
    policy = Policy(deepcopy(seeing.model), sees_images=True, trains_tower=True)
    seen = [seeing.chat.prompt([asks(*numbers)]) for numbers in ((), (1,), (2, 1))]
    calls = [seeing.generate(prompt) for prompt in seen]

    def score(ids: Sequence[int]) -> list[float]:
        return trained_logprobs(policy, seeing.images, [whole_row(ids)]).tolist()

    def train() -> None:
        packed = pack_of(policy, seeing.images, [rows_from_calls([call])[0] for call in calls])
        policy(packed, temperature=1.0)[0].sum().backward()
        with torch.no_grad():
            for part in tower_parts(policy.causal_lm).values():
                for parameter in part.parameters():
                    assert parameter.grad is not None
                    parameter += 0.01 * parameter.grad.sign()
        policy.zero_grad()

    canary = CanarySettings(image=ImageRow(ids=canary_prompt(seeing.images), score=score))
    sync = WeightSync(module=policy.model, engines=[engine], deadline_s=60, score_canary=score, canary=canary)
    version = loop.run(engine.weight_version())
    try:
        assert sync.push(version + 1).canary_image_diff < BOUND
        if resets:
            for number in (2, 3):
                train()
                report = sync.push(version + number)
                assert max(report.canary_image_diff, report.canary_abs_diff) < BOUND
                calls = [seeing.generate(prompt) for prompt in seen]
                assert seeing.trainer_mismatch(policy, calls) < BOUND
        else:
            seeing.generate(seen[1])  # whose image the engine keeps
            with monkeypatch.context() as patch:

                async def keep_images(*_: str) -> None:
                    await engine.llm.pause_generation(mode="wait", clear_cache=False)
                    await engine.llm.reset_prefix_cache()

                patch.setattr(engine, "pause", keep_images)
                patch.setattr(engine, "reset_prefix_cache", keep_nothing)
                train()
                with pytest.raises(SyncError, match=r"a row with an image.* kept its features .*equal the sent ones"):
                    sync.push(version + 2)
            loop.run(engine.resume())
            assert seeing.trainer_mismatch(policy, [seeing.generate(seen[1])]) > 0.01, "the tower matters"
            loop.run(engine.pause("wait"))
            loop.run(engine.reset_prefix_cache())
            loop.run(engine.resume())
            assert seeing.trainer_mismatch(policy, [seeing.generate(seen[1])]) < BOUND
    finally:
        sync.close()
        seeing.model.load_state_dict(policy.model.state_dict())


async def keep_nothing() -> None:
    """Stand in for a reset."""
