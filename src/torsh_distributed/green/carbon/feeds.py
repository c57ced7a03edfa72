"""Where intensities come from: a file, Great Britain's grid operator, Electricity Maps, WattTime, a country's mean.

`series_of` asks one: OSError if it cannot be reached, InvalidArgument if it answers something else. None is invented.
"""

from __future__ import annotations

import base64
import csv
import difflib
import http.client
import io
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from torsh_distributed import known_variables
from torsh_distributed.errors import InvalidArgument, first_line, missing_extra
from torsh_distributed.green.carbon.intensity import Basis, Intensity, IntensitySeries, read_time
from torsh_distributed.green.meters.load_estimate import library_file

_TIMEOUT_S = 10.0
_WHOLE_ANSWER_S = 20.0
_MAX_ANSWER_BYTES = 1 << 23
_HALF_HOUR_S = 1800.0
_HOUR_S = 3600.0
_G_PER_KWH_OF_LB_PER_MWH = 0.45359237
_NEEDS = {
    "gb": "the zone GB, or none",
    "electricity_maps": "a zone, such as DE",
    "watttime": "a zone, such as CAISO_NORTH",
    "file": "a file",
    "country": "a zone: a name or code, such as DEU",
    "fixed": "a number",
}
_MIX = "codecarbon/data/private_infra/global_energy_mix.json"


class CarbonFeed(Protocol):
    """A source of intensities. `period_s` is how often it has something new."""

    period_s: float

    def fetch(self, now: float) -> list[Intensity]:
        """What it knows of now, and of the time ahead if it forecasts. A strange answer may end in a KeyError or so."""


def series_of(feed: CarbonFeed, now: float) -> IntensitySeries:
    """What a feed knows. Raises OSError if it cannot be reached, InvalidArgument if it answers something else."""
    try:
        return IntensitySeries(feed.fetch(now))
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"the feed answered something else than intensities ({type(error).__name__}: {first_line(error)})",
            hint="is this the address of such a feed?",
        ) from error


class FileFeed:
    """CSV with the columns `time` and `g_per_kwh`, and `renewable_share` where it is known. A row holds until the next.

    The last one holds as long as the one before it.
    """

    period_s = 2.0

    def __init__(self, path: str | Path, zone: str = "file") -> None:
        self._path = Path(path)
        self._zone = zone

    def fetch(self, now: float) -> list[Intensity]:
        """The whole file."""
        try:
            text = self._path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a mark
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"the file of intensities {self._path} cannot be read: {getattr(error, 'strerror', None) or 'no text'}",
                hint="give a CSV file with the columns time and g_per_kwh",
            ) from error
        with io.StringIO(text, newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            if reader.fieldnames is None or not {"time", "g_per_kwh"} <= set(reader.fieldnames):
                raise InvalidArgument(
                    "a file of intensities begins with the line time,g_per_kwh",
                    hint="a third column renewable_share, from 0 to 1, may follow",
                    file=str(self._path),
                )
            try:
                rows = [(read_time(row["time"]), float(row["g_per_kwh"]), _share_of(row)) for row in reader]
            except (TypeError, ValueError, csv.Error) as error:
                raise InvalidArgument(
                    "a row of this file of intensities is not understood",
                    hint="a row is such as 2026-11-18T16:00Z,212.5",
                    file=str(self._path),
                    line=reader.line_num,
                    reason=first_line(error),
                ) from error
        rows.sort(key=lambda row: row[0])
        last_s = rows[-1][0] - rows[-2][0] if len(rows) > 1 else _HOUR_S
        ends = [row[0] for row in rows[1:]] + [rows[-1][0] + last_s] if rows else []
        return [
            Intensity(value, start, end, "average", "given", "file", self._zone, share)
            for (start, value, share), end in zip(rows, ends, strict=True)
        ]


def _share_of(row: Mapping[str, Any]) -> float | None:
    """The renewable share of a row of a file, if it has one."""
    text = row.get("renewable_share")
    if not text:
        return None
    share = float(text)
    if not 0 <= share <= 1:
        raise ValueError(f"a renewable share is from 0 to 1, not {share:g}")
    return share


class FixedFeed:
    """One value of the user's."""

    period_s = float("inf")

    def __init__(self, g_per_kwh: float, zone: str = "given") -> None:
        self._value = Intensity(g_per_kwh, None, None, "average", "given", "fixed", zone)

    def fetch(self, now: float) -> list[Intensity]:
        """That value."""
        return [self._value]


class CountryFeed:
    """The mean of a year, by codecarbon's table, where nothing better is known. The zone is a name or DEU, FRA, …"""

    period_s = float("inf")

    def __init__(self, zone: str) -> None:
        self._zone = zone

    def fetch(self, now: float) -> list[Intensity]:
        """The mean of the newest year of the table."""
        path = library_file(_MIX)
        if path is None:
            raise missing_extra("green", "the yearly mean of a country")
        table = json.loads(path.read_text(encoding="utf-8"))
        names = {str(row.get("country_name", "")).lower(): code for code, row in table.items()}
        code = self._zone.upper() if self._zone.upper() in table else names.get(self._zone.lower())
        if code is None:
            near = difflib.get_close_matches(self._zone.upper(), table, n=3) or difflib.get_close_matches(
                self._zone.lower(), names, n=3
            )
            raise InvalidArgument(
                f"no country is called {self._zone!r} in the table of yearly means",
                hint=f"give a code of three letters, such as DEU; near: {', '.join(near) or 'none'}",
            )
        row = table[code]
        start = datetime(int(row["year"]), 1, 1, tzinfo=UTC).timestamp()
        value = float(row["carbon_intensity"])
        return [Intensity(value, start, None, "average", "yearly mean", "country", f"{code} {row['year']}")]


class NationalGridFeed:
    """Great Britain, half hours, 48 hours ahead; no key. Data: carbonintensity.org.uk, CC BY 4.0."""

    period_s = _HALF_HOUR_S

    def __init__(self, url: str | None = None) -> None:
        self._url = url or "https://api.carbonintensity.org.uk"

    def fetch(self, now: float) -> list[Intensity]:
        """The half hour before, the present one and 48 hours ahead."""
        begin = datetime.fromtimestamp(now - _HALF_HOUR_S, UTC).strftime("%Y-%m-%dT%H:%MZ")
        answer = ask(f"{self._url}/intensity/{begin}/fw48h")
        found = []
        for row in _rows(answer, "data", self._url):
            intensity = row.get("intensity") or {}
            actual = intensity.get("actual")
            value = actual if actual is not None else intensity.get("forecast")
            if value is None:
                continue
            basis: Basis = "measured" if actual is not None else "forecast"
            start, end = read_time(row["from"]), read_time(row["to"])
            found.append(Intensity(_number(value), start, end, "average", basis, "gb", "GB"))
        return found


class ElectricityMapsFeed:
    """Any zone of Electricity Maps, by hours; needs a token. A forecast needs a paid plan."""

    period_s = _HOUR_S

    def __init__(self, zone: str, url: str | None = None) -> None:
        self._zone = zone
        self._url = url or "https://api.electricitymap.org/v3"
        self._token = known_variables.text("TORSH_ELECTRICITY_MAPS_TOKEN")
        if not self._token:
            raise InvalidArgument(
                "Electricity Maps asks for a token", hint="set TORSH_ELECTRICITY_MAPS_TOKEN", zone=zone
            )

    def fetch(self, now: float) -> list[Intensity]:
        """The newest value, and the forecast where the plan has one."""
        headers = {"auth-token": self._token}
        query = urllib.parse.urlencode({"zone": self._zone})
        latest = ask(f"{self._url}/carbon-intensity/latest?{query}", headers)
        try:
            ahead = ask(f"{self._url}/carbon-intensity/forecast?{query}", headers)
        except PermissionError:  # the plan has none
            ahead = {"forecast": []}
        values = [self._value(row, now) for row in [latest, *_rows(ahead, "forecast", self._url)]]
        newest = {one.start: one for one in values}  # the forecast may begin with the present hour
        newest |= {values[0].start: values[0]}
        return list(newest.values())

    def _value(self, row: Mapping[str, Any], now: float) -> Intensity:
        start = read_time(str(row.get("datetime", "")))
        value = _number(row.get("carbonIntensity"))
        basis: Basis = "forecast" if start > now or row.get("isEstimated") else "measured"
        return Intensity(value, start, start + _HOUR_S, "average", basis, "electricity_maps", self._zone)


class WattTimeFeed:
    """WattTime's marginal intensity, five minutes, a day ahead; needs an account."""

    period_s = 300.0

    def __init__(self, zone: str, url: str | None = None) -> None:
        self._zone = zone
        self._url = url or "https://api.watttime.org"
        self._user = known_variables.text("TORSH_WATTTIME_USER")
        self._password = known_variables.text("TORSH_WATTTIME_PASSWORD")
        if not (self._user and self._password):
            raise InvalidArgument(
                "WattTime asks for an account", hint="set TORSH_WATTTIME_USER and TORSH_WATTTIME_PASSWORD", zone=zone
            )

    def fetch(self, now: float) -> list[Intensity]:
        """The forecast from now on: its first value is the present one."""
        basic = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        token = ask(f"{self._url}/login", {"Authorization": f"Basic {basic}"}).get("token", "")
        query = urllib.parse.urlencode({"region": self._zone, "signal_type": "co2_moer"})
        answer = ask(f"{self._url}/v3/forecast?{query}", {"Authorization": f"Bearer {token}"})
        meta = answer.get("meta") or {}
        if meta.get("units", "lbs_co2_per_mwh") != "lbs_co2_per_mwh":
            raise InvalidArgument("WattTime answered in a unit that is not known", units=str(meta["units"])[:60])
        period_s = float(meta.get("data_point_period_seconds", self.period_s))
        found = []
        for row in _rows(answer, "data", self._url):
            start = read_time(str(row["point_time"]))
            value = _number(row["value"]) * _G_PER_KWH_OF_LB_PER_MWH
            found.append(Intensity(value, start, start + period_s, "marginal", "forecast", "watttime", self._zone))
        return found


def ask(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON object at an address. Raises PermissionError if it is not for us, InvalidArgument if it is not there."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise InvalidArgument("a feed has an address that begins with https://", got=url[:100])
    request = urllib.request.Request(url, headers={"Accept": "application/json", **(headers or {})})  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - checked above
            body = _body(answer, time.monotonic() + _WHOLE_ANSWER_S)
    except urllib.error.HTTPError as error:
        with error:
            told = error.read(300).decode(errors="replace")
        if error.code in (401, 403):
            raise PermissionError(f"the feed refuses this account or plan ({error.code}): {told}") from None
        if error.code in (400, 404):
            hint = "is the zone spelt as the feed has it?"
            raise InvalidArgument(f"the feed does not know this ({error.code})", hint=hint, got=told) from None
        raise OSError(f"the feed answers {error.code}: {told}") from None
    except urllib.error.URLError as error:
        raise OSError(f"the feed cannot be reached: {error.reason}") from None
    except ConnectionError:  # one of them is an HTTPException too
        raise
    except http.client.HTTPException as error:
        raise OSError(f"the feed does not speak HTTP: {error!r}") from None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidArgument("the feed answered something that is not JSON", got=repr(body[:60])) from None
    if not isinstance(found, dict):
        raise InvalidArgument("the feed answered something else", got=repr(body[:60]))
    return found


def _body(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """All of an answer; raises TimeoutError if it comes in drops."""
    parts, left = list[bytes](), _MAX_ANSWER_BYTES
    while left > 0 and (part := answer.read1(left)):
        parts.append(part)
        left -= len(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the feed answers too slowly")
    return b"".join(parts)


def _number(value: object) -> float:
    """A number of an answer; raises TypeError for anything else: `true` is no gram."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:60]!r} is no intensity")
    return float(value)


def _rows(answer: Mapping[str, Any], name: str, url: str) -> list[Mapping[str, Any]]:
    rows = answer.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise InvalidArgument(f"the feed answered without {name!r}", url=url, got=str(answer)[:200])
    return rows


def make_feed(
    source: str, *, zone: str | None, file: str | None, url: str | None, g_per_kwh: float | None
) -> CarbonFeed:
    """The feed that a plan or a command line names; raises InvalidArgument for one that there is not."""
    match source:
        case "fixed" if g_per_kwh is not None:
            return FixedFeed(g_per_kwh, zone or "given")
        case "file" if file is not None:
            return FileFeed(file, zone or "file")
        case "gb" if zone in (None, "GB"):
            return NationalGridFeed(url)
        case "electricity_maps" if zone is not None:
            return ElectricityMapsFeed(zone, url)
        case "watttime" if zone is not None:
            return WattTimeFeed(zone, url)
        case "country" if zone is not None:
            return CountryFeed(zone)
    if source not in _NEEDS:
        raise InvalidArgument(f"there is no feed {source!r}", hint=f"the feeds are {', '.join(_NEEDS)}")
    raise InvalidArgument(
        f"the feed {source!r} needs {_NEEDS[source]}",
        hint="other grids than Great Britain's: electricity_maps or watttime, or a file of your own",
        zone=zone,
    )
