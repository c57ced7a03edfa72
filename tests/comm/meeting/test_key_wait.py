"""Every store's own way to report a timeout counts as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from torsh_distributed.comm.meeting.key_wait import wait_for_keys

STORES: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "tcp": lambda folder: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


@pytest.mark.parametrize("kind", STORES)
def test_all_keys_must_be_set_in_time(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    store.set("one", "")
    assert wait_for_keys(store, ["one"], 5.0)
    assert not wait_for_keys(store, ["one", "two"], 0.05)


def test_a_store_that_is_gone_is_not_a_timeout() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    del host
    with pytest.raises(dist.DistNetworkError):
        wait_for_keys(client, ["one"], 5.0)
