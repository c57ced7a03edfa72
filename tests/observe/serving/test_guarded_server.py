"""The server against clients that mean no good."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.observe.packets import job_of_two
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.page.page_feed import PageFeed
from torsh_distributed.observe.page.page_routes import page_routes
from torsh_distributed.observe.serving import guarded_server
from torsh_distributed.observe.serving.guarded_server import GuardedServer

pytestmark = pytest.mark.ranks


class Page:
    def __init__(self, server: GuardedServer, acknowledged: list[str]) -> None:
        self.server = server
        self.port = int(server.server_address[1])
        self.acknowledged = acknowledged

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            client.request(method, path, body=body, headers=named)
            answer = client.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            client.close()

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as client:
            client.sendall(data)
            received = b""
            while piece := client.recv(65536):
                received += piece
            return received


@pytest.fixture
def page() -> Iterator[Page]:
    yield from serve(token=None)


def serve(token: str | None) -> Iterator[Page]:
    view, acknowledged = job_of_two(5), []
    feed = PageFeed(lambda: page_state(view), interval_s=0.05, max_viewers=2)

    def acknowledge(name: str) -> bool:
        acknowledged.append(name)
        return True

    server = GuardedServer("127.0.0.1", 0, page_routes(feed, acknowledge=acknowledge), token=token)
    try:
        yield Page(server, acknowledged)
    finally:
        feed.closing.set()
        server.close()


def test_the_page_is_served_and_may_load_nothing_from_elsewhere(page: Page) -> None:
    status, headers, body = page.ask("GET", "/")
    assert (status, b"<main" in body) == (200, True)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert b"http://" not in body
    assert b"https://" not in body
    for path in ("/page.js", "/page.css"):
        assert page.ask("GET", path)[0] == 200
    status, _, body = page.ask("GET", "/state.json")
    assert json.loads(body)["job"]["step"] == 5
    assert page.ask("HEAD", "/")[2] == b""


def test_live_states_arrive_and_viewers_are_counted(page: Page) -> None:
    clients = [http.client.HTTPConnection("127.0.0.1", page.port, timeout=10) for _ in range(3)]
    try:
        answers = []
        for client in clients[:2]:
            client.request("GET", "/live")
            answers.append(client.getresponse())
        assert answers[0].getheader("Content-Type") == "text/event-stream"
        lines = [answers[0].readline() for _ in range(6)]
        states = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
        assert [state["job"]["step"] for state in states] == [5, 5]
        clients[2].request("GET", "/live")
        assert clients[2].getresponse().status == 503
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1"])
def test_a_foreign_host_header_is_refused(page: Page, host: str) -> None:
    assert page.raw(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:80"])
def test_names_of_loopback_are_taken(page: Page, host: str) -> None:
    assert page.ask("GET", "/", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "//etc/passwd", 404),
        ("GET", "/page.js/..", 404),
        ("GET", "/acknowledge", 405),
        ("POST", "/", 405),
        ("PUT", "/", 501),
        ("DELETE", "/state.json", 501),
        ("TRACE", "/", 501),
    ],
)
def test_other_paths_and_methods_get_a_plain_refusal(page: Page, method: str, path: str, status: int) -> None:
    found, headers, body = page.ask(method, path, **({"Content_Length": "0"} if method == "POST" else {}))
    assert found == status
    assert headers["content-type"].startswith("text/plain")
    assert b"passwd" not in body


def test_acknowledging_takes_our_own_page_only(page: Page) -> None:
    own = {"Origin": f"http://127.0.0.1:{page.port}", "X_Torsh": "1"}
    body = json.dumps({"alert": "a-1"}).encode()
    assert page.ask("POST", "/acknowledge", body, **own)[0] == 200
    assert page.acknowledged == ["a-1"]
    for foreign in ({}, {**own, "Origin": "http://evil.example"}, {"Origin": own["Origin"]}, {"X_Torsh": "1"}):
        assert page.ask("POST", "/acknowledge", body, **foreign)[0] == 403
    assert page.ask("POST", "/acknowledge", b"x" * 5000, **own)[0] == 413
    assert page.ask("POST", "/acknowledge", b"[1]", **own)[0] == 400
    assert page.acknowledged == ["a-1"]


def test_huge_and_broken_requests_are_cut_off(page: Page) -> None:
    assert b" 414 " in page.raw(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n").split(b"\r\n")[0]
    assert b" 431 " in page.raw(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n").split(b"\r\n")[0]
    assert b" 400 " in page.raw(b"nonsense\r\n\r\n").split(b"\r\n")[0] + b" 400 "
    assert page.ask("GET", "/")[0] == 200


def test_a_client_that_sends_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_server, "REQUEST_TIMEOUT_S", 0.3)
    for page in serve(token=None):
        with socket.create_connection(("127.0.0.1", page.port), timeout=20) as client:
            client.sendall(b"GET / HT")
            assert client.recv(100) == b"", "closed, though bytes might still come"
        assert page.ask("GET", "/")[0] == 200


def test_too_many_connections_are_turned_away_and_the_rest_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_server, "MAX_CONNECTIONS", 4)
    for page in serve(token=None):
        idle = [socket.create_connection(("127.0.0.1", page.port), timeout=10) for _ in range(4)]
        refused = socket.create_connection(("127.0.0.1", page.port), timeout=10)
        try:
            assert refused.recv(10) == b""
        finally:
            refused.close()
            for client in idle:
                client.close()
        ended = threading.Event()
        for _ in range(200):
            try:
                assert page.ask("GET", "/")[0] == 200
                break
            except (http.client.RemoteDisconnected, ConnectionResetError):
                ended.wait(0.02)
        else:
            pytest.fail("the server did not recover")


def test_with_a_token_nothing_is_shown_without_it() -> None:
    for page in serve(token="secret-token"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "torsh_token=wrong"}):
            assert page.ask("GET", "/state.json", **headers)[0] == 401
        assert page.ask("GET", "/state.json", Authorization="Bearer secret-token")[0] == 200
        status, headers, _ = page.ask("GET", "/?token=secret-token")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert page.ask("GET", "/", Cookie=cookie.partition(";")[0])[0] == 200
