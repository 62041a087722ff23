"""How a rank finds out that its launcher has gone before it could look."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.training.processes import reserved_port
from wlb.training.worker import _store_answers


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Nobody listens there."""
    with reserved_port() as free:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("GROUP_RANK", "0")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(free))
        yield free


def test_a_store_that_refuses_is_gone(port: int):
    assert not _store_answers()


def test_a_store_that_listens_answers(port: int):
    with socket.create_server(("127.0.0.1", port)):
        assert _store_answers()


def test_one_address_that_refuses_is_enough(port: int, monkeypatch: pytest.MonkeyPatch):
    """Of a host with an IPv6 address in its hosts file and no IPv6."""
    unreachable = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("255.255.255.255", port))
    refusing = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [refusing, unreachable])
    assert not _store_answers()
