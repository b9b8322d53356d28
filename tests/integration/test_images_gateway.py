"""Images from a client of the gateway to the logprobs of the engine, against the whole model in transformers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lockstep.integrations.gateway.server import Gateway
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.media.image_files import image_digest
from tests.fixtures.vision import full_logprobs, picture
from tests.integration.test_images import BOUND, Seeing, seeing_engine

FIRST, SECOND = picture(1, 56, 84), picture(2, 84, 56)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    with seeing_engine("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"), max_images=2) as seeing:
        yield seeing


@pytest.fixture
def gateway(seeing: Seeing) -> Iterator[Gateway]:
    gateway = Gateway(
        engine=seeing.engine,
        chat=seeing.chat,
        offered=[Sampling(max_tokens=5, ignore_eos=True)],
        settings=GatewaySettings(max_images=2),
    )
    seeing.loop.run(gateway.start())
    yield gateway
    seeing.loop.run(gateway.close())


def shows(image: Any, text: str) -> list[dict[str, Any]]:
    file = io.BytesIO()
    image.save(file, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]


def test_an_image_of_the_user_and_one_of_a_tool_are_trained_as_they_were_sampled(
    seeing: Seeing, gateway: Gateway
) -> None:
    user: Any = {"role": "user", "content": shows(FIRST, "see")}
    tool: Any = {"role": "tool", "tool_call_id": "1", "content": shows(SECOND, "a door")}

    def play(name: str) -> list[str]:
        url = gateway.base_url.replace("/v1", f"/s/{name}/v1")
        with openai.OpenAI(base_url=url, api_key=gateway.api_key, max_retries=0) as client:
            messages, kinds = [user], []
            for seed, new in enumerate((tool, {"role": "user", "content": "go on"}, None)):
                answer = client.chat.completions.create(model="policy", messages=messages, seed=seed)
                messages += [answer.choices[0].message, new]
                kinds.append((answer.model_extra or {})["prompt_kind"])
        return kinds

    for number in range(20):
        name = f"session-{number}"
        try:
            kinds = play(name)
            break
        except openai.InternalServerError:  # a sampled image token, which random weights make likely
            assert name not in gateway._named or isinstance(gateway._named[name].failure, EvidenceError)
    else:
        pytest.fail("every conversation had an image token")
    assert kinds == ["root", "extended", "extended"]
    calls = gateway._named[name].calls
    assert [[span.digest for span in call.images] for call in calls] == [
        [image_digest(FIRST)],
        *[[image_digest(FIRST), image_digest(SECOND)]] * 2,
    ]
    assert max(seeing.mismatch(call) for call in calls) < BOUND
    (row,) = rows_from_calls(calls)
    assert row.num_trained == 15
    expected = full_logprobs(seeing.model, seeing.images, row.ids.tolist(), row.images)
    mask = row.loss_mask[1:]
    assert abs(expected.numpy()[mask] - row.sampling_logprobs[1:][mask]).max() < BOUND


def test_more_images_than_the_engine_takes_do_not_reach_it(seeing: Seeing, gateway: Gateway) -> None:
    with openai.OpenAI(base_url=gateway.base_url, api_key=gateway.api_key, max_retries=0) as client:
        three: Any = {"role": "user", "content": [*shows(FIRST, "a"), *shows(SECOND, "b"), *shows(FIRST, "c")]}
        with pytest.raises(openai.BadRequestError, match="has 3 images, and the model reads at most 2"):
            client.chat.completions.create(model="policy", messages=[three])
    assert gateway._anonymous.failure is None
