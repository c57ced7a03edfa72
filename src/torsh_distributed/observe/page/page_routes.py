"""What the page's server answers: the page, its files, the state, the live stream, and acknowledging an alert."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from torsh_distributed.observe.page.html_report import asset, html_page, html_report
from torsh_distributed.observe.serving.guarded_server import PageAnswer, PageRequest, Route

MakeState = Callable[[], dict[str, Any]]


class PageFeed:
    """Encodes the state for all viewers together. `live` yields it for server-sent events until `closing` is set."""

    def __init__(self, make_state: MakeState, *, interval_s: float = 1.0, max_viewers: int = 32) -> None:
        self._make_state = make_state
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._encoded = b""
        self._made_s = -1e9
        self._room = threading.BoundedSemaphore(max_viewers)
        self.closing = threading.Event()

    def state(self) -> bytes:
        """The newest state, at most `interval_s` old."""
        with self._lock:
            if time.monotonic() - self._made_s >= self._interval_s:
                self._encoded = json.dumps(self._make_state(), default=str, allow_nan=False).encode()
                self._made_s = time.monotonic()
            return self._encoded

    def live(self) -> Iterator[bytes] | None:
        """Messages for an EventSource, one a second; None if too many look already."""
        if not self._room.acquire(blocking=False):
            return None
        return self._stream()

    def _stream(self) -> Iterator[bytes]:
        try:
            yield b"retry: 2000\n\n"
            while True:
                yield b"data: " + self.state() + b"\n\n"
                if self.closing.wait(self._interval_s):
                    yield b"data: " + self._last() + b"\n\n"
                    return
        finally:
            self._room.release()

    def _last(self) -> bytes:
        self._made_s = -1e9
        return self.state()


_JSON = "application/json"


def page_routes(feed: PageFeed, *, acknowledge: Callable[[str], bool] | None = None) -> Mapping[tuple[str, str], Route]:
    """The routes over a feed; `acknowledge` takes an alert's id and says whether it is known."""

    def file(name: str, content_type: str) -> Route:
        text = asset(name).encode()
        return lambda _: PageAnswer(text, content_type)

    def live(request: PageRequest) -> PageAnswer:
        pieces = feed.live()
        if pieces is None:
            return PageAnswer(b"too many viewers\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return PageAnswer(content_type="text/event-stream", pieces=pieces)

    def report(request: PageRequest) -> PageAnswer:
        text = html_report(json.loads(feed.state())).encode()
        # To be saved: its script is inside, which the server's policy forbids and the file's own allows.
        saved = {"Content-Disposition": "attachment; filename=report.html"}
        return PageAnswer(text, "text/html; charset=utf-8", headers=saved)

    def take_acknowledgement(request: PageRequest) -> PageAnswer:
        try:
            name = json.loads(request.body)["alert"]
        except (ValueError, KeyError, TypeError):
            return PageAnswer(b"not understood\n", status=HTTPStatus.BAD_REQUEST)
        is_known = acknowledge is not None and isinstance(name, str) and acknowledge(name)
        return PageAnswer(json.dumps({"acknowledged": is_known}).encode(), _JSON)

    page = html_page().encode()
    return {
        ("GET", "/"): lambda _: PageAnswer(page, "text/html; charset=utf-8"),
        ("GET", "/page.js"): file("page.js", "text/javascript; charset=utf-8"),
        ("GET", "/page.css"): file("page.css", "text/css; charset=utf-8"),
        ("GET", "/state.json"): lambda _: PageAnswer(feed.state(), _JSON),
        ("GET", "/live"): live,
        ("GET", "/report.html"): report,
        ("POST", "/acknowledge"): take_acknowledgement,
    }
