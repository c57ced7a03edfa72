"""The pages for probes: what they say, and that nobody can keep others from them."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from torsh_distributed.errors import InvalidArgument, IoError
from torsh_distributed.launch.control.health_endpoint import HealthEndpoint
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.spec import parse_health

pytestmark = pytest.mark.ranks  # a server is started

RUNNING = [0]


@pytest.fixture
def port() -> Iterator[int]:
    """A launcher's loop on a thread, with the pages."""
    RUNNING[0] = 0
    waking, woken = socket.socketpair()
    with Loop() as loop, HealthEndpoint(loop, "127.0.0.1", 0, lambda: (RUNNING[0], 2)) as endpoint:
        loop.watch(woken.fileno(), lambda: loop.stop(0))
        thread = threading.Thread(target=loop.run)
        thread.start()
        yield endpoint.port
        waking.send(b"x")
        thread.join(10)
    waking.close()
    woken.close()


def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_node_is_ready_when_all_its_workers_run(port: int) -> None:
    assert ask(port, "/healthz") == (200, b'{"workers": 0, "of": 2}\n')
    assert ask(port, "/readyz") == (503, b'{"workers": 0, "of": 2}\n')
    RUNNING[0] = 2
    assert ask(port, "/readyz?verbose") == (200, b'{"workers": 2, "of": 2}\n')
    assert ask(port, "/healthz", "HEAD") == (200, b"")


def test_nothing_else_is_told(port: int) -> None:
    assert ask(port, "/")[0] == ask(port, "/../etc/passwd")[0] == 404
    assert ask(port, "/healthz", "POST") == (405, b"")


def test_those_who_say_nothing_keep_nobody_out(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    long = socket.create_connection(("127.0.0.1", port))
    long.sendall(b"GET /" + b"x" * 100_000)
    assert ask(port, "/healthz")[0] == 200
    for sock in (*silent, long):
        sock.close()
    assert ask(port, "/healthz")[0] == 200


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with Loop() as loop, pytest.raises(IoError, match=f"127.0.0.1:{port}"):
        HealthEndpoint(loop, "127.0.0.1", port, lambda: (0, 1))


def test_the_option_is_a_port_or_an_address() -> None:
    assert parse_health("8081") == ("127.0.0.1", 8081)
    assert parse_health("[::1]:8081") == ("::1", 8081)
    for wrong in ("host", "70000", ":1", "a:b"):
        with pytest.raises(InvalidArgument):
            parse_health(wrong)
