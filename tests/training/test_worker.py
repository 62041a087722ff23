"""How a rank finds out that its launcher has gone before it could look."""

from __future__ import annotations

import socket

import pytest

from tests.training.processes import reserved_port
from wlb.training.worker import _store_answers


def test_a_store_that_refuses_is_gone(monkeypatch: pytest.MonkeyPatch):
    with reserved_port() as port:
        surroundings = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0", "MASTER_ADDR": "localhost"}
        for name, value in {**surroundings, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        assert not _store_answers()
        with socket.create_server(("127.0.0.1", port)):
            assert _store_answers()
        # One address is enough, of a host with an IPv6 address in its hosts file and no IPv6.
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.1", "255.255.255.255")
        ]
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: addresses)
        assert not _store_answers()
