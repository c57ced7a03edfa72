"""Addresses: the known ones open, the others are refused with a proposal."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.comm.store import open_store
from torsh_distributed.errors import InvalidArgument


@pytest.mark.parametrize(
    ("url", "proposal"),
    [
        ("memroy://", "memory://"),
        ("redi://127.0.0.1:6379/0", "redis://"),
        ("flie:///tmp/x", "file:///"),
        ("tpc://127.0.0.1:1", "tcp://"),
        ("etcd://127.0.0.1:2379", "for example tcp://"),
        ("just-a-word", "for example tcp://"),
        ("", "for example tcp://"),
    ],
)
def test_an_unknown_scheme_proposes_the_nearest(url: str, proposal: str) -> None:
    with pytest.raises(InvalidArgument, match="unknown kind of store") as caught:
        open_store(url)
    assert proposal in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://name", "no name"),
        ("file://relative/path", "absolute path"),
        ("file:relative", "absolute path"),
        ("tcp://127.0.0.1", "host and a port"),
        ("tcp://:29500", "host and a port"),
        ("tcp://127.0.0.1:99999", "0 to 65535"),
        ("tcp://127.0.0.1:0", "port 0 is for the server"),
        ("redis://", "host and a port"),
    ],
)
def test_a_malformed_address_is_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        open_store(url)


def test_a_directory_is_not_a_file_store(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="directory"):
        open_store(tmp_path.as_uri())


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="tcp"):
        open_store("memory://", is_server=True)
    with pytest.raises(InvalidArgument, match="tcp"):
        open_store("memory://", token="secret")
    with pytest.raises(InvalidArgument, match="above 0"):
        open_store("memory://", timeout_s=0)


def test_a_path_with_odd_characters_is_one_path(tmp_path: Path) -> None:
    path = tmp_path / "a b%ü"
    with open_store(path.as_uri()) as store:
        store.set("key", "1")
        assert store.url == path.as_uri()
    assert path.exists()


def test_every_memory_store_is_a_new_one() -> None:
    with open_store("memory://") as one, open_store("memory://") as other:
        one.set("key", "1")
        assert other.num_keys() == 0
