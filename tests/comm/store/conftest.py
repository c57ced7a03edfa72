"""Places where stores can live, for tests: each opens fresh stores, and says how other processes reach them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bed.ports import free_port
from torsh_distributed.comm.store import Store, TcpStoreServer, open_store

REDIS = pytest.param("redis", marks=pytest.mark.needs_redis)


@dataclass(frozen=True)
class Place:
    """One empty store; `open` gives a client of it."""

    kind: str
    url: str

    def open(self, *, timeout_s: float = 10.0) -> Store:
        return open_store(self.url, timeout_s=timeout_s)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A real Redis server for this test alone."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        seen = ""
        while "Ready to accept connections" not in seen:
            line = server.stdout.readline()
            assert line, f"redis-server ended:\n{seen}"
            seen += line
        yield f"redis://127.0.0.1:{port}/0"
        server.terminate()


def _make_place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    if kind == "memory":
        yield Place(kind, "memory://")
    elif kind == "file":
        yield Place(kind, (tmp_path / "job.store").as_uri())
    elif kind == "tcp":
        with TcpStoreServer() as server:
            yield Place(kind, server.url)
    else:
        yield Place(kind, request.getfixturevalue("redis_url"))


@pytest.fixture(params=["memory", "file", "tcp", REDIS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each of the four kinds."""
    yield from _make_place(request.param, tmp_path, request)


@pytest.fixture(params=["file", "tcp", REDIS])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each kind that several processes can share."""
    yield from _make_place(request.param, tmp_path, request)


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    """An open store of each of the four kinds."""
    with place.open() as opened:
        yield opened


@pytest.fixture
def tcp_url() -> Iterator[str]:
    """A TCP store served by the test process."""
    with TcpStoreServer() as server:
        yield server.url
