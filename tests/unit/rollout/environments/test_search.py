"""The search environment against a local HTTP server with the protocol of Search-R1."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments import search as module
from lockstep.rollout.environments.search import SearchEnvironment
from lockstep.rollout.errors import ConfigError, SearchError

CORPUS = {"paris": "Paris\nParis is the capital of France.", "rome": "Rome\nRome is the capital of Italy."}


def retrieve(body: dict) -> dict:
    """Answer as search_r1/search/retrieval_server.py does: documents whose text has a word of the query."""
    results = []
    for query in body["queries"]:
        words = query.lower().split()
        hits = [text for text in CORPUS.values() if any(word in text.lower() for word in words)]
        results.append([{"document": {"id": "0", "contents": text}, "score": 1.0} for text in hits[: body["topk"]]])
    return {"result": results}


@asynccontextmanager
async def server(answer: Callable[[dict], object] = retrieve) -> AsyncIterator[tuple[str, list[dict]]]:
    """Serve POST /retrieve; yield its URL and the requests it gets."""
    requests: list[dict] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append(await request.json())
        found = answer(requests[-1])
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)

    app = web.Application()
    app.router.add_post("/retrieve", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/retrieve", requests
    finally:
        await runner.cleanup()


def says(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


async def test_a_search_is_answered_with_documents_between_tags():
    async with server() as (url, requests):
        environment = SearchEnvironment(url=url, topk=2)
        assert (await environment.reset({"question": "capital of France?"}))[0]["content"] == "capital of France?"
        step = await environment.step(says("<think>hm</think><search> capital </search>"))
    assert requests == [{"queries": ["capital"], "topk": 2, "return_scores": True}]
    assert not step.done
    assert step.outcome == {"answer": "", "searches": 1}
    (turn,) = step.messages
    assert turn["role"] == "user", "so that its tokens are never trained"
    assert turn["content"] == (
        "<information>Doc 1(Title: Paris) Paris is the capital of France.\n"
        "Doc 2(Title: Rome) Rome is the capital of Italy.</information>"
    )


async def test_an_answer_ends_the_episode_without_a_request():
    async with server() as (url, requests):
        step = await SearchEnvironment(url=url).step(says("<answer> Paris </answer>"))
    assert step.done
    assert step.outcome == {"answer": "Paris"}
    assert requests == []


async def test_the_first_closed_tag_is_the_action_and_an_answer_behind_it_does_not_count():
    text = "<search>rome</search><information>made up</information><answer>Rome</answer>"
    async with server() as (url, _):
        step = await SearchEnvironment(url=url).step(says(text))
    assert not step.done
    assert step.outcome["answer"] == ""
    assert "capital of Italy" in step.messages[0]["content"]


@pytest.mark.parametrize("text", ["", "Paris", "<search>paris", "<answer>Paris<answer>", "<search>x</answer>"])
async def test_a_turn_without_an_action_is_told_so(text):
    step = await SearchEnvironment(url="http://127.0.0.1:1/retrieve").step(says(text))
    assert step.outcome == {"answer": "", "invalid_actions": 1}
    assert "<search> and </search>" in step.messages[0]["content"]


async def test_long_results_are_cut_and_no_result_is_empty():
    async with server() as (url, _):
        step = await SearchEnvironment(url=url, max_result_chars=12).step(says("<search>paris</search>"))
        assert step.messages[0]["content"] == "<information>Doc 1(Title:</information>"
        step = await SearchEnvironment(url=url).step(says("<search>zzz</search>"))
        assert step.messages[0]["content"] == "<information></information>"


async def test_a_busy_server_is_asked_again(monkeypatch):
    monkeypatch.setattr(module, "wait_random_exponential", lambda **limits: lambda state: 0)
    count = iter(range(9))

    def busy_twice(body: dict) -> object:
        return web.Response(status=503) if next(count) < 2 else retrieve(body)

    async with server(busy_twice) as (url, requests):
        step = await SearchEnvironment(url=url).step(says("<search>paris</search>"))
    assert len(requests) == 3
    assert "capital of France" in step.messages[0]["content"]


async def test_a_dead_server_ends_the_run_with_its_address_instead_of_training_on_errors(monkeypatch):
    monkeypatch.setattr(module, "wait_random_exponential", lambda **limits: lambda state: 0)
    async with server() as (url, _):
        pass
    with pytest.raises(SearchError, match=r"no answer in 2 attempts .*resume=auto") as raised:
        await SearchEnvironment(url=url, attempts=2).step(says("<search>paris</search>"))
    assert url in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "found"),
    [({"detail": "no"}, "KeyError"), ([], "TypeError"), ({"result": []}, "ValueError"),
     ({"result": [["text"]]}, "TypeError"), ({"result": [[{"document": {"contents": 7}}]]}, "not text"),
     (web.Response(text="<html>"), "not JSON"), (web.Response(status=404, text="nothing"), "status 404")],
)  # fmt: skip
async def test_another_answer_than_the_protocol_s_is_an_error(answer, found):
    async with server(lambda body: answer) as (url, _):
        with pytest.raises(SearchError, match=found):
            await SearchEnvironment(url=url).step(says("<search>paris</search>"))


async def test_a_redirect_is_not_followed():
    async with server(lambda body: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})) as (url, _):
        with pytest.raises(SearchError, match="status 302"):
            await SearchEnvironment(url=url).step(says("<search>paris</search>"))


@pytest.mark.parametrize("settings", [{}, {"url": "retrieve"}, {"url": "http://x", "topk": 0},
                                      {"url": "http://x", "attempt_timeout_s": 0}])  # fmt: skip
def test_settings_are_checked_before_the_run(settings):
    with pytest.raises(ConfigError, match=r"environment\.settings\."):
        make_environment("search", **settings)
