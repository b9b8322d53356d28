"""Addresses of servers: named, in files, behind host names."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.server.url_list import is_watched, listed_urls


def test_addresses_are_read_from_all_entries_in_order_and_once(tmp_path: Path) -> None:
    path = tmp_path / "servers.txt"
    path.write_text("# of the night\nhttp://b:8000/\n\nhttp://c:8000  # the slow one\nhttp://a:8000\nhttp://b:8000\n")
    entries = ["http://a:8000", str(path)]
    assert [is_watched(entry) for entry in entries] == [False, True]
    assert listed_urls(entries) == ["http://a:8000", "http://b:8000", "http://c:8000"]
    path.write_text("http://d:8000\n")
    assert listed_urls(entries) == ["http://a:8000", "http://d:8000"]


def test_a_host_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple]:
        assert (host, port) == ("engines", 8000)
        found = [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET6, "fd00::1"), (socket.AF_INET, "10.0.0.1")]
        return [(family, socket.SOCK_STREAM, 6, "", (host, port)) for family, host in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert is_watched("dns://engines:8000")
    expected = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    assert listed_urls(["dns://engines:8000"]) == expected


def test_a_list_that_cannot_be_read_now_is_an_error_that_may_pass(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"servers\.txt cannot be read: .*expected a file with an address per line"):
        listed_urls([str(tmp_path / "servers.txt")])
    with pytest.raises(EngineError, match=r"no-such-host\.invalid cannot be resolved"):
        listed_urls(["dns://no-such-host.invalid:8000"])


def test_a_line_that_is_not_an_address_is_named(tmp_path: Path) -> None:
    path = tmp_path / "servers.txt"
    path.write_text("http://a:8000\nengine-7\n")
    with pytest.raises(ConfigError, match=r"line 2 of .*engine-7 is not an http\(s\) address"):
        listed_urls([str(path)])
