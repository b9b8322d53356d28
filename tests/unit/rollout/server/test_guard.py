"""API key check around an application that reports when it was reached."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.rollout.server.guard import KEY_ENV, RequireKey

KEY = "a-key"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


async def ask(path: str = "/update_weights", *, kind: str = "http", headers: Any = ()) -> Any:
    """Return the text of the application, or the status or close code of the guard."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send("reached")

    async def receive() -> Any:
        raise AssertionError("the body of a refused request must not be read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers)}
    await RequireKey(application)(scope, receive, send)
    return sent[0] if sent == ["reached"] else sent[0].get("status") or sent[0].get("code")


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_the_key_opens_every_route(kind: str):
    for name in (b"authorization", b"Authorization"):
        assert await ask(kind=kind, headers=[(b"x", b"y"), (name, f"Bearer {KEY}".encode())]) == "reached"


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "presented",
    [None, b"", b"Bearer ", b"Bearer a-ke", b"Bearer a-keyy", b"Bearer A-KEY", b"a-key", b"Basic a-key", b"Bearer\xff"],
)
async def test_a_missing_or_wrong_key_is_refused(kind: str, presented: bytes | None):
    headers = [] if presented is None else [(b"authorization", presented)]
    assert await ask(kind=kind, headers=headers) == (401 if kind == "http" else 1008)
    # The first of two headers counts, for the guard as for an application behind it.
    both = [*headers, (b"authorization", f"Bearer {KEY}".encode())]
    assert (await ask(kind=kind, headers=both) == "reached") == (presented is None)


async def test_only_the_exact_health_path_is_open():
    assert await ask("/health") == "reached"
    for path in ("/health/", "//health", "/health/../update_weights", "/HEALTH", "/healthy", "", "/"):
        assert await ask(path) == 401


async def test_lifespan_events_are_not_guarded():
    assert await ask(kind="lifespan") == "reached"


@pytest.mark.parametrize("value", [None, ""])
def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch, value: str | None):
    if value is None:
        monkeypatch.delenv(KEY_ENV)
    else:
        monkeypatch.setenv(KEY_ENV, value)
    with pytest.raises(RuntimeError, match=KEY_ENV):
        RequireKey(lambda scope, receive, send: None)  # type: ignore[arg-type,return-value]
