"""What the page's server answers: the page, its files, the state, the live stream, and acknowledging an alert."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from torsh_distributed.observe.page.html_report import asset, html_page, html_report
from torsh_distributed.observe.page.page_feed import PageFeed
from torsh_distributed.observe.serving.guarded_server import PageAnswer, PageRequest, Route

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
