"""A free port is given to one test only, and the kernel does not give it away."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bed import ports
from tests.bed.ports import free_port


def test_a_port_is_given_to_one_test_only() -> None:
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(lambda _: free_port(), range(200)))
    assert len(set(given)) == 200


def test_the_kernel_does_not_choose_it() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = free_port()
    assert port < low or port > high or low < 11_000


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path))
    first = free_port()
    with socket.create_server(("127.0.0.1", first + 1)):
        assert free_port() > first + 1
