"""`torsh store serve`, as a user runs it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torsh_distributed.comm.store import open_store
from torsh_distributed.errors import InvalidArgument

pytestmark = pytest.mark.ranks


@contextmanager
def serving(*options: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and the address it printed."""
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "store", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert line.startswith("serving tcp://127.0.0.1:"), line + server.communicate(timeout=20)[1]
            yield server, line.split()[1].rstrip(";")
        finally:
            server.kill()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_ends_well(ending: signal.Signals) -> None:
    with serving() as (server, url), open_store(url) as store, open_store(url) as other:
        store.set("key", "1", ttl_s=60)
        assert other.get("key") == b"1"
        server.send_signal(ending)
        out, err = server.communicate(timeout=20)
    assert server.returncode == 0, err
    assert f"ended by {ending.name}" in out
    assert err == ""


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORSH_STORE_TOKEN", "secret")
    with serving() as (_, url):
        with pytest.raises(InvalidArgument, match="a different token"):
            open_store(url)
        with open_store(url, token="secret") as store:
            store.set("key", "1")


def test_a_port_in_use_is_one_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "store", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
