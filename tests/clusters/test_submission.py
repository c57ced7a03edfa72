"""Durations and sizes of memory, as people write them."""

from __future__ import annotations

import pytest

from torsh_distributed.clusters.submission import clock_time, parse_duration, parse_memory
from torsh_distributed.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("12h", 43200), ("2d", 172800), ("12:00", 43200), ("1-00:00:30", 86430)],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "soon", "1:2", "inf", "nan"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a duration"):
        parse_duration(text)


def test_a_clock_time_is_read_back() -> None:
    for seconds in (1, 59, 60, 3600, 86400, 100_000):
        assert parse_duration(clock_time(seconds)) == seconds
    assert clock_time(0.5) == "00:00:01"


def test_memory_is_bytes() -> None:
    sizes = {"8G": 8 * 2**30, "512M": 2**29, "1.5k": 1536, "100": 100, "2GiB": 2**31, "1TB": 2**40}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for text in ("", "G", "-1G", "8X", "0", "9" * 400, "99999999T"):
        with pytest.raises(InvalidArgument, match="is not an amount of memory"):
            parse_memory(text)
