"""A small HTTP server for pages that browsers and scrapers on a shared machine may reach.

Every request has a time limit and a size limit, connections are counted, the Host header must be one of this machine's
(so no foreign site can reach the page through a name that resolves here), only known paths and methods are answered,
and every answer forbids to load or run anything from elsewhere.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Self

from typing_extensions import override

MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 4096
REQUEST_TIMEOUT_S = 10.0
_COOKIE = "torsh_token"
_LOOPBACK_NAMES = frozenset({"localhost"})
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PageRequest:
    """What a route gets to see of a request."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class PageAnswer:
    """What a route answers: a body, or pieces that are sent as they come."""

    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    pieces: Iterator[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[PageRequest], PageAnswer]


class GuardedServer(ThreadingHTTPServer):
    """Serves `routes`, keyed by method and path, from threads that end with the process.

    With `token`, every request needs it: as `?token=` once, which sets a cookie, or as a bearer token.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, routes: Mapping[tuple[str, str], Route], *, token: str | None = None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes = routes
        self.token = token
        self.closing = threading.Event()
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._is_loopback = _is_loopback(host)
        self.deadlines: dict[socket.socket, float] = {}
        """Connections that have not sent a whole request yet, and when they are cut off."""
        super().__init__((host, port), _Handler)
        self._names = _LOOPBACK_NAMES if self._is_loopback else _LOOPBACK_NAMES | {socket.gethostname().lower()}
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, name="torsh-page")
        self._thread.daemon = True
        self._thread.start()

    @property
    def url(self) -> str:
        """Where a person opens it."""
        host, port = self.server_address[:2]
        shown = str(host)
        if shown in ("0.0.0.0", "::"):  # noqa: S104 - shown, not bound
            shown = socket.gethostname()
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/" + (
            f"?token={self.token}" if self.token else ""
        )

    def is_own_name(self, header: str | None) -> bool:
        """Whether a Host header names this machine by an address or by a name that no stranger can choose."""
        if not header:
            return False
        name = urllib.parse.urlsplit(f"//{header}").hostname or ""
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self._is_loopback

    @override
    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @override
    def service_actions(self) -> None:
        """Cut off clients that send their request too slowly; called several times a second."""
        now_s = time.monotonic()
        for connection, deadline_s in list(self.deadlines.items()):
            if now_s > deadline_s:
                self.deadlines.pop(connection, None)
                with contextlib.suppress(OSError):  # it left by itself
                    connection.shutdown(socket.SHUT_RDWR)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or sent nonsense is no news."""
        _log.debug("a request failed", exc_info=True)

    def close(self) -> None:
        """Stop serving."""
        self.closing.set()
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=5)

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    """One connection: a few requests, each within the time limit."""

    protocol_version = "HTTP/1.1"
    timeout = REQUEST_TIMEOUT_S
    server: GuardedServer
    server_version = "torsh"
    sys_version = ""

    @override
    def handle_one_request(self) -> None:
        """One request, whose head and body must be here within the time limit."""
        self.server.deadlines[self.connection] = time.monotonic() + REQUEST_TIMEOUT_S
        try:
            super().handle_one_request()
        finally:
            self.server.deadlines.pop(self.connection, None)

    def do_GET(self) -> None:
        """Answer GET."""
        self._serve("GET")

    def do_HEAD(self) -> None:
        """Answer HEAD as GET, without the body."""
        self._serve("GET", is_head=True)

    def do_POST(self) -> None:
        """Answer POST from the page itself."""
        self._serve("POST")

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their text is the client's."""

    @override
    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Plain text, never what the client sent."""
        self._send(PageAnswer(HTTPStatus(code).phrase.encode() + b"\n", status=HTTPStatus(code)), is_head=False)
        self.close_connection = True

    def _serve(self, method: str, *, is_head: bool = False) -> None:
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query)[:10])
        if not self.server.is_own_name(self.headers.get("Host")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        if not self._has_token(query):
            self.send_error(HTTPStatus.UNAUTHORIZED)
            return
        if self.server.token and "token" in query and method == "GET":
            cookie = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            moved = PageAnswer(status=HTTPStatus.SEE_OTHER, headers={"Location": "/", "Set-Cookie": cookie})
            self._send(moved, is_head=is_head)
            return
        route = self.server.routes.get((method, parts.path))
        if route is None:
            is_other = any(path == parts.path for _, path in self.server.routes)
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED if is_other else HTTPStatus.NOT_FOUND)
            return
        body = b""
        if method == "POST":
            if not self._is_from_page():
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
                return
            body = self.rfile.read(int(length))
        self.server.deadlines.pop(self.connection, None)
        try:
            answer = route(PageRequest(parts.path, query, dict(self.headers.items()), body))
        except Exception:
            _log.exception("a page could not be made")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._send(answer, is_head=is_head)

    def _has_token(self, query: Mapping[str, str]) -> bool:
        if self.server.token is None:
            return True
        given = query.get("token") or self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not given:
            try:
                cookies = SimpleCookie(self.headers.get("Cookie", ""))
            except CookieError:
                return False
            given = cookies[_COOKIE].value if _COOKIE in cookies else ""
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _is_from_page(self) -> bool:
        """Whether a request that changes something comes from our own page: browsers cannot forge these headers."""
        origin = urllib.parse.urlsplit(self.headers.get("Origin", ""))
        return origin.netloc == self.headers.get("Host") and self.headers.get("X-Torsh") == "1"

    def _send(self, answer: PageAnswer, *, is_head: bool) -> None:
        self.send_response(answer.status)
        for name, value in {**_HEADERS, **answer.headers, "Content-Type": answer.content_type}.items():
            self.send_header(name, value)
        if answer.pieces is None:
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if not is_head:
                self.wfile.write(answer.body)
            return
        self.close_connection = True
        self.send_header("Connection", "close")
        self.end_headers()
        if not is_head:
            for piece in answer.pieces:
                self.wfile.write(piece)
                self.wfile.flush()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def needs_token(host: str) -> bool:
    """Whether others than this machine reach a server on that address."""
    return not _is_loopback(host)
