"""Feeds against a local HTTP server that answers in the documented form."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.carbon import feeds
from torsh_distributed.green.carbon.feeds import (
    CountryFeed,
    ElectricityMapsFeed,
    FileFeed,
    NationalGridFeed,
    WattTimeFeed,
    ask,
    make_feed,
)
from torsh_distributed.green.carbon.grid_watch import GridWatch, carbon_event
from torsh_distributed.green.carbon.intensity import Intensity, IntensitySeries, read_time

NOW = read_time("2026-11-18T16:10Z")
RAW = 0
"""In place of a status: the answer is sent as it is."""


class Server:
    """Answers of a feed by path; keeps the headers it was asked with."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.asked = threading.Semaphore(0)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.headers.append(dict(self.headers))
                server.asked.release()
                unknown = 404, {"message": "unknown zone"}
                status, answer = server.answers.get(self.path.split("?")[0], server.answers.get("*", unknown))
                if status != RAW:
                    self.send_response(status)
                    self.end_headers()
                try:
                    for part in answer if isinstance(answer, Iterator) else [answer]:
                        self.wfile.write(part if isinstance(part, bytes) else json.dumps(part).encode())
                except ConnectionError:
                    """Who asked has enough."""

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_great_britain_has_half_hours_measured_and_forecast(server: Server) -> None:
    server.answers["/intensity/2026-11-18T15:40Z/fw48h"] = (
        200,
        {
            "data": [
                {
                    "from": "2026-11-18T15:30Z",
                    "to": "2026-11-18T16:00Z",
                    "intensity": {"forecast": 266, "actual": 263, "index": "moderate"},
                },
                {
                    "from": "2026-11-18T16:00Z",
                    "to": "2026-11-18T16:30Z",
                    "intensity": {"forecast": 250, "actual": None, "index": "moderate"},
                },
            ]
        },
    )
    series = IntensitySeries(NationalGridFeed(server.url).fetch(NOW))
    assert [(one.g_per_kwh, one.basis) for one in series.values] == [(263, "measured"), (250, "forecast")]
    now = series.at(NOW)
    assert now is not None
    assert (now.g_per_kwh, now.age_s(NOW), now.is_stale(NOW), now.signal) == (250, 0.0, False, "average")
    assert series.at(NOW - 7200) is None, "nothing is known of that time, and nothing is invented"


def test_electricity_maps_sends_its_token_and_does_without_a_forecast(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="token"):
        ElectricityMapsFeed("DE", server.url)
    monkeypatch.setenv("TORSH_ELECTRICITY_MAPS_TOKEN", "s3cret")
    latest = {
        "zone": "DE",
        "carbonIntensity": 302,
        "datetime": "2026-11-18T16:00:00.000Z",
        "updatedAt": "2026-11-18T16:05:00.000Z",
        "emissionFactorType": "lifecycle",
        "isEstimated": False,
    }
    server.answers["/carbon-intensity/latest"] = (200, latest)
    server.answers["/carbon-intensity/forecast"] = (403, {"error": "not in your plan"})
    (only,) = ElectricityMapsFeed("DE", server.url).fetch(NOW)
    assert (only.g_per_kwh, only.basis, only.zone) == (302, "measured", "DE")
    assert {headers["Auth-Token"] for headers in server.headers} == {"s3cret"}
    ahead = {"zone": "DE", "forecast": [{"carbonIntensity": 280, "datetime": "2026-11-18T17:00:00.000Z"}]}
    server.answers["/carbon-intensity/forecast"] = (200, ahead)
    assert [one.basis for one in ElectricityMapsFeed("DE", server.url).fetch(NOW)] == ["measured", "forecast"]


def test_watttime_is_marginal_and_in_pounds(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORSH_WATTTIME_USER", "me")
    monkeypatch.setenv("TORSH_WATTTIME_PASSWORD", "pw")
    server.answers["/login"] = (200, {"token": "t0ken"})
    meta = {"region": "CAISO_NORTH", "units": "lbs_co2_per_mwh", "data_point_period_seconds": 300}
    data = [{"point_time": "2026-11-18T16:10:00+00:00", "value": 1000.0}]
    server.answers["/v3/forecast"] = (200, {"data": data, "meta": meta})
    (found,) = WattTimeFeed("CAISO_NORTH", server.url).fetch(NOW)
    assert found.g_per_kwh == pytest.approx(453.59237)
    assert found.signal == "marginal"
    assert base64.b64decode(server.headers[0]["Authorization"].removeprefix("Basic ")) == b"me:pw"
    assert server.headers[1]["Authorization"] == "Bearer t0ken"
    server.answers["/v3/forecast"] = (200, {"data": data, "meta": {**meta, "units": "percent"}})
    with pytest.raises(InvalidArgument, match="unit"):
        WattTimeFeed("CAISO_NORTH", server.url).fetch(NOW)


@pytest.mark.needs_library("codecarbon")
def test_a_country_has_the_mean_of_its_year_and_one_that_does_not_exist_is_named() -> None:
    (found,) = CountryFeed("DEU").fetch(NOW)
    assert found.basis == "yearly mean"
    assert 200 < found.g_per_kwh < 600
    assert CountryFeed("germany").fetch(NOW) == [found]
    with pytest.raises(InvalidArgument, match="no country is called 'Germoney'") as caught:
        CountryFeed("Germoney").fetch(NOW)
    assert "germany" in (caught.value.hint or "")


def test_a_file_has_times_and_grams_and_each_row_holds_until_the_next(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,g_per_kwh,renewable_share\n2026-11-18T17:00Z,100,0.8\n2026-11-18T16:00Z,200,\n")
    series = IntensitySeries(FileFeed(path).fetch(NOW))
    assert [(one.g_per_kwh, one.renewable_share) for one in series.values] == [(200.0, None), (100.0, 0.8)]
    assert series.values[-1].end == read_time("2026-11-18T18:00Z")
    path.write_text("time, g_per_kwh\n2026-11-18T16:00Z, 150\n", encoding="utf-8-sig")  # as spreadsheets write it
    assert [one.g_per_kwh for one in FileFeed(path).fetch(NOW)] == [150.0]
    path.write_text("hour;grams\n1;2\n")
    with pytest.raises(InvalidArgument, match="time,g_per_kwh"):
        FileFeed(path).fetch(NOW)
    path.write_text("time,g_per_kwh\n2026-11-18T17:00Z,much\n")
    with pytest.raises(InvalidArgument, match="a row"):
        FileFeed(path).fetch(NOW)


def test_what_is_late_is_marked_and_what_is_absurd_is_left_out() -> None:
    value = Intensity(300.0, NOW - 9000, NOW - 7200, "average", "measured", "gb", "GB")
    series = IntensitySeries([value, Intensity(-5.0, NOW, NOW + 1, "average", "forecast", "gb", "GB")])
    assert series.num_absurd == 1
    assert series.at(NOW) == value
    event = carbon_event(value, NOW)
    assert (event.is_stale, event.age_s) == (True, 7200.0)
    assert series.at(NOW + 25 * 3600) is None, "a day later it says nothing about now"


def test_a_feed_that_is_down_or_answers_nonsense_is_said_once_and_gives_nothing(server: Server) -> None:
    server.answers["/intensity/2026-11-18T15:40Z/fw48h"] = (200, b"<html>")
    with pytest.raises(InvalidArgument, match="not JSON"):
        NationalGridFeed(server.url).fetch(NOW)
    with pytest.raises(InvalidArgument, match="does not know"):
        ask(f"{server.url}/nowhere")
    with pytest.raises(InvalidArgument, match="https"):
        ask("file:///etc/passwd")
    said: list[str] = []
    with GridWatch(NationalGridFeed("http://127.0.0.1:1"), note=said.append) as watch:
        assert watch.wait_for_first(20.0)
        assert watch.at(NOW) is None
    assert len(said) == 1
    assert "cannot be reached" in said[0]


def _gb(**row: Any) -> tuple[int, Any]:
    times = {"from": "2026-11-18T16:00Z", "to": "2026-11-18T16:30Z", "intensity": {"forecast": 250}}
    return 200, {"data": [{**times, **row}]}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((RAW, b"hello\r\n\r\n"), "does not speak HTTP"),
        ((200, b"[" * 100_000), "not JSON"),
        (_gb(intensity=250), "something else than intensities"),
        (_gb(intensity={"forecast": True}), "something else than intensities"),
        (_gb(**{"from": 3}), "something else than intensities"),
        (_gb(**{"from": "0001-01-01T00:00+14:00"}), "not a time"),
        ((200, {"data": [{}]}), "none for now; it has no value at all"),
        (_gb(), "none for now; it has values from 2026-11-18T16:00Z to 2026-11-18T16:30Z"),
    ],
)
def test_what_no_feed_answers_is_said_once_and_the_feed_is_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, Any], told: str
) -> None:
    """It had ended the thread that asks, or was not said: no gram was counted from then on, without a word."""
    server.answers["*"] = answer
    monkeypatch.setattr(NationalGridFeed, "period_s", 0.01)
    said: list[str] = []
    with GridWatch(NationalGridFeed(server.url), note=said.append):
        for _ in range(3):
            assert server.asked.acquire(timeout=20.0)
    assert len(said) == 1
    assert told in said[0]


def test_an_answer_that_comes_in_drops_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_WHOLE_ANSWER_S", 0.0)
    server.answers["/slow"] = (200, iter(lambda: b" ", None))
    with pytest.raises(TimeoutError, match="too slowly"):
        ask(f"{server.url}/slow")


def test_a_feed_that_does_not_go_with_the_zone_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="needs the zone GB"):
        make_feed("gb", zone="DE", file=None, url=None, g_per_kwh=None)
