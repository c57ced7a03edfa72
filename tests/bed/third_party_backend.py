"""A backend of another package: it registers itself with torch when it is imported, as torch asks of extensions.

It counts all-reduces and hands every call to gloo, so results can be compared with gloo's.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

NAME = "counted"
calls: list[str] = []


class CountedBackend(dist.ProcessGroup):
    """A process group in Python around gloo's backend."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # not in torch's stubs
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    def setGroupName(self, name: str) -> None:  # noqa: N802 - c10d's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - c10d's name
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        return NAME

    def allreduce(self, tensors, options=None):  # type: ignore[no-untyped-def]
        calls.append("allreduce")
        return self._inner.allreduce(tensors, options or dist.AllreduceOptions())

    def broadcast(self, tensors, options):  # type: ignore[no-untyped-def]
        return self._inner.broadcast(tensors, options)

    def allgather(self, outputs, inputs, options=None):  # type: ignore[no-untyped-def]
        return self._inner.allgather(outputs, inputs, options or dist.AllgatherOptions())

    def barrier(self, options=None):  # type: ignore[no-untyped-def]
        return self._inner.barrier(options or dist.BarrierOptions())


dist.Backend.register_backend(NAME, CountedBackend, devices=["cpu"])
