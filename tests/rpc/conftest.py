"""Workers that share a process, for what does not need two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rpc import exposed_functions as there
from torsh_distributed.comm.store import open_store
from torsh_distributed.rpc import RpcWorker

MakeWorker = Callable[..., RpcWorker]


@pytest.fixture
def make_worker() -> Iterator[MakeWorker]:
    """Workers by name in one store; closed after the test."""
    workers: list[RpcWorker] = []
    with open_store("memory://") as store:

        def make(name: str, **options: Any) -> RpcWorker:
            workers.append(RpcWorker(name, store, **options))
            return workers[-1]

        yield make
        for gate in there.gates.values():
            gate.set()
        for worker in workers:
            worker.close()
    for kept in (there.gates, there.seen, there.later, there.kept):
        kept.clear()


@pytest.fixture
def caller(make_worker: MakeWorker) -> RpcWorker:
    """A worker beside one named `callee`."""
    make_worker("callee")
    return make_worker("caller")
