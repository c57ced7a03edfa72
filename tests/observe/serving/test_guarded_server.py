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
from torsh_distributed.observe.page.page_routes import PageFeed, page_routes
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
    assert b" 431 " in page.raw(b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n").split(b"\r\n")[0]
    assert b"Bad Request" in page.raw(b"nonsense\r\n\r\n")
    own = f"Host: 127.0.0.1\r\nOrigin: http://127.0.0.1:{page.port}\r\nX-Torsh: 1\r\n".encode()
    for length in (b"-1", b"1e9", b"99999999999999999999", b"0x10", b"\xc2\xb2"):
        head = page.raw(b"POST /acknowledge HTTP/1.1\r\n" + own + b"Content-Length: " + length + b"\r\n\r\n")
        assert head.split(b" ")[1] in (b"403", b"413"), head
    chunked = page.raw(b"POST /acknowledge HTTP/1.1\r\n" + own + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    assert b" 200 " not in chunked.split(b"\r\n")[0]
    assert page.acknowledged == []
    assert page.ask("GET", "/")[0] == 200


def test_a_client_that_sends_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_server, "REQUEST_TIMEOUT_S", 0.3)
    for page in serve(token=None):
        with socket.create_connection(("127.0.0.1", page.port), timeout=20) as client:
            client.sendall(b"GET / HT")
            assert client.recv(100) == b"", "closed, though bytes might still come"
        assert page.ask("GET", "/")[0] == 200


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte in time, but never the whole: a limit on each read alone would keep it connected for ever."""
    monkeypatch.setattr(guarded_server, "REQUEST_TIMEOUT_S", 0.5)
    for page in serve(token=None):
        with socket.create_connection(("127.0.0.1", page.port), timeout=20) as client:
            assert answer_to_drops(client) == b""
        assert page.ask("GET", "/")[0] == 200


def answer_to_drops(client: socket.socket) -> bytes:
    """What comes back while a byte is sent twenty times a second."""
    is_cut = threading.Event()

    def drip() -> None:
        while not is_cut.wait(0.05):
            try:
                client.sendall(b"x")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        return client.recv(100)
    except ConnectionResetError:
        return b""
    finally:
        is_cut.set()
        dripping.join()


def test_requests_from_other_sites_read_and_change_nothing(page: Page) -> None:
    """What a page elsewhere can make a browser send: its answer may not be read there, nor shown in a frame."""
    foreign = {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site"}
    status, headers, _ = page.ask("GET", "/state.json", **foreign)
    assert "access-control-allow-origin" not in headers
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert status in (200, 403)
    asked = {**foreign, "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "x-torsh"}
    status, headers, _ = page.ask("OPTIONS", "/acknowledge", **asked)
    assert status == 501
    assert not [name for name in headers if name.startswith("access-control")]
    for origin in ("null", "http://127.0.0.1", f"https://127.0.0.1:{page.port}.evil.example", ""):
        assert page.ask("POST", "/acknowledge", b'{"alert": "a-1"}', Origin=origin, X_Torsh="1")[0] == 403
    assert page.acknowledged == []


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
