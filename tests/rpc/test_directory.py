"""Whose secret the workers of a store have, and who of them is there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from torsh_distributed.comm.store import open_store
from torsh_distributed.comm.trust.job_secret import TOKEN_VARIABLE
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.rpc.directory import WorkerDirectory


@pytest.fixture
def store() -> Iterator[dist.Store]:
    with open_store("memory://") as found:
        yield found


def secret(store: dist.Store, token: str | None, monkeypatch: pytest.MonkeyPatch) -> bytes:
    with monkeypatch.context() as patch:
        if token is None:
            patch.delenv(TOKEN_VARIABLE, raising=False)
        else:
            patch.setenv(TOKEN_VARIABLE, token)
        return WorkerDirectory(store).secret()


def test_workers_without_a_job_share_a_secret_of_the_store(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({secret(store, None, monkeypatch) for _ in range(3)}) == 1


def test_a_jobs_secret_is_used_and_not_put_into_the_store(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert secret(store, "the token", monkeypatch) == b"the token"
    assert b"token" not in dist.PrefixStore("rpc", store).get("secret")


@pytest.mark.parametrize(("first", "second"), [(None, "one"), ("one", None), ("one", "other")])
def test_a_worker_with_another_secret_is_refused_in_words(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, first: str | None, second: str | None
) -> None:
    secret(store, first, monkeypatch)
    with pytest.raises(ConfigurationError, match="same TORSH_JOB_TOKEN"):
        secret(store, second, monkeypatch)


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_who_leaves_while_it_is_looked_up_is_not_waited_for(store: dist.Store, kind: str) -> None:
    shared = store if kind == "ours" else dist.HashStore()
    shared.set_timeout(timedelta(seconds=1))
    here, there = WorkerDirectory(shared), WorkerDirectory(shared)

    def come_and_go() -> None:
        for _ in range(200):
            there.remove(there.add("guest", "socket", None, None))

    seen = set()
    with ThreadPoolExecutor(1) as pool:
        guest = pool.submit(come_and_go)
        while not guest.done():
            seen.add(len(here.workers()))
        guest.result()
    assert seen <= {0, 1}
    assert dist.PrefixStore("rpc", shared).get("names") == b'"guest"\n'
    with pytest.raises(InvalidArgument, match="there is no worker named 'guest'"):
        here.find("guest")
