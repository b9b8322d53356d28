"""Images sampled by a real vLLM server, against transformers' own forward of the whole model.

Each test runs with both routes: Lockstep's, and vLLM's own of a server that was started by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError
from lockstep.rollout.records import EngineCall, PromptIds
from lockstep.rollout.server import carried_images
from lockstep.rollout.server.generate_route import ROUTE
from lockstep.rollout.server.server_engine import GENERATE, ServerEngine
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import WeightSync
from tests.fixtures.servers import KEY, EngineServer, launch_plain, running
from tests.fixtures.vision import full_logprobs, image_processing, picture, save_tiny

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
BOUND = 1e-5
"""Largest difference of two float32 programs that compute the same [nats]."""


@dataclass
class Served:
    engine: ServerEngine
    model: PreTrainedModel
    chat: Chat
    loop: BackgroundLoop
    posts: list[dict[str, Any]]
    """Bodies of requests with images."""
    skipped: list[str]
    """Parts of addresses: what they ask for is not done."""

    def generate(self, prompt: PromptIds) -> EngineCall:
        sampling = Sampling(max_tokens=6, seed=0, ignore_eos=True)
        return self.loop.run(self.engine.generate(prompt, sampling, prompt.images))

    def mismatch(self, call: EngineCall) -> float:
        """Return the largest difference between the logprobs of server and model."""
        assert self.chat.images is not None
        expected = full_logprobs(self.model, self.chat.images, call.all_ids, call.images)[len(call.prompt) - 1 :]
        return float((torch.tensor(call.sampled_logprobs) - expected).abs().max())

    @property
    def has_own_route(self) -> bool:
        return self.engine._route == ROUTE

    def sent(self) -> list[int]:
        """Return the number of images whose tensors each request carried, and forget the requests."""
        counts = [
            sum("tensors" in one for one in body["images"])
            if self.has_own_route
            else sum(one is not None for one in body["features"]["kwargs_data"]["image"])
            for body in self.posts
        ]
        self.posts.clear()
        return counts


@contextmanager
def server_of(model: Path, directory: Path, route: str) -> Iterator[EngineServer]:
    if route == ROUTE:
        with running(model, directory, **{"model.images.max_per_prompt": 2}) as (server,):
            yield server
        return
    server = launch_plain(
        model, directory / "plain.log", "--limit-mm-per-prompt", '{"image": 2}', "--no-mm-device-do-normalize"
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module", params=[ROUTE, GENERATE], ids=["lockstep", "vllm"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = save_tiny("qwen2_5_vl", tmp_path_factory.mktemp("served"))
    images = image_processing(directory)
    with BackgroundLoop() as loop, server_of(directory, directory, request.param) as server:
        engine = ServerEngine(server.url, loop=loop, vocab_size=512, api_key=KEY, images=images)
        assert engine._route == request.param
        posts: list[dict[str, Any]] = []
        skipped: list[str] = []
        post = engine._client.post

        async def counted(path: str, body: Any = None, **options: Any) -> Any:
            if isinstance(body, dict) and ("images" in body or "features" in body):
                posts.append(body)
            if path in skipped:
                return None
            for part in skipped:
                path = path.replace(part, "clear_cache=false")
            return await post(path, body, **options)

        engine._client.post = counted  # type: ignore[method-assign]
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        yield Served(engine, model, Chat.from_pretrained(directory, images=images), loop, posts, skipped)
        loop.run(engine.close())


def asks(*numbers: int) -> dict[str, Any]:
    parts = [{"type": "image", "image": picture(number, 56 + 28 * (number % 2), 84)} for number in numbers]
    return {"role": "user", "content": [{"type": "text", "text": "see "}, *parts, {"type": "text", "text": " what?"}]}


def test_images_travel_once_and_are_scored_as_by_transformers(served: Served) -> None:
    assert served.engine.max_images == 2
    asked = [] if not served.has_own_route else [0]
    """Lockstep's route answers a request without the tensors by naming what it lacks."""
    for numbers, sent in (((), []), ((1,), [*asked, 1]), ((1,), [0]), ((2, 1), [*asked, 1]), ((2, 2), [0])):
        call = served.generate(served.chat.prompt([asks(*numbers)]))
        assert served.mismatch(call) < BOUND
        assert served.sent() == sent
        assert len(call.images) == len(numbers)


def test_an_image_of_turn_2_stands_behind_that_of_turn_1(served: Served) -> None:
    first = served.generate(served.chat.prompt([asks(11)]))
    prompt = served.chat.extend(first, [asks(11), {"role": "assistant", "content": "so"}], [asks(12)])
    assert prompt is not None
    served.sent()
    second = served.generate(prompt)
    assert second.images[0] == first.images[0]
    assert len(second.images) == 2
    assert second.images[1].start > len(first.all_ids)
    assert served.mismatch(second) < BOUND
    assert served.sent() == [0, 1] if served.has_own_route else [1]


def test_scores_of_a_row_with_images_are_those_of_the_model(served: Served) -> None:
    prompt = served.chat.prompt([asks(3, 4)])
    scores = served.loop.run(served.engine.score(prompt, prompt.images))
    assert served.chat.images is not None
    expected = full_logprobs(served.model, served.chat.images, prompt, prompt.images)
    assert float((torch.tensor(scores) - expected).abs().max()) < BOUND


def test_a_server_that_forgot_an_image_is_sent_it_again(served: Served) -> None:
    served.generate(served.chat.prompt([asks(100)]))
    if served.has_own_route:
        for number in range(101, 102 + carried_images.KEPT_IMAGES):
            served.generate(served.chat.prompt([asks(number)]))
    else:
        served.loop.run(served.engine._client.post("/reset_mm_cache", timeout_s=60))
    served.sent()
    assert served.mismatch(served.generate(served.chat.prompt([asks(100)]))) < BOUND
    assert served.sent() == [0, 1]


@pytest.mark.parametrize(
    ("skipped", "is_stale"),
    [
        (["clear_cache=true"], False),
        (["/reset_encoder_cache"], False),
        (["clear_cache=true", "/reset_encoder_cache"], True),
    ],
)
def test_after_an_update_of_the_tower_images_are_computed_again(
    served: Served, skipped: list[str], is_stale: bool
) -> None:
    """The pause and the reset each drop the features of images; without both the server samples from the old tower."""
    prompt = served.chat.prompt([asks(5)])
    before = served.generate(prompt)
    served.skipped[:] = skipped
    with torch.no_grad():
        for name, parameter in served.model.named_parameters():
            if "visual" in name:
                parameter *= 1.5
    sync = WeightSync(module=served.model, engines=[served.engine], deadline_s=60)
    try:
        sync.push(1 + served.loop.run(served.engine.weight_version()))
    finally:
        sync.close()
        served.skipped.clear()
    assert served.mismatch(before) > 0.01, "the tower matters"
    served.sent()
    mismatch = served.mismatch(served.generate(prompt))
    assert mismatch > 0.01 if is_stale else mismatch < BOUND
    assert served.sent() == [0 if served.has_own_route else 1], "vLLM's cache of images is emptied by the pause"


def test_ids_that_do_not_fit_their_images_are_refused(served: Served) -> None:
    prompt = served.chat.prompt([asks(1)])
    short = PromptIds([*prompt[: prompt.images[0].start], *prompt[prompt.images[0].end :]], prompt.images)
    with pytest.raises(EngineError, match="image tokens that are not those of its 1 images"):
        served.generate(short)
