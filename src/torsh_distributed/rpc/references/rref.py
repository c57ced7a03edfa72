"""`RRef`: a reference to an object that stays at its owner."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from typing_extensions import override

from torsh_distributed.errors import BackendNotInitialized, FeatureNotAvailable, InvalidArgument
from torsh_distributed.rpc.calling.remote_future import RemoteFuture, as_torch_future
from torsh_distributed.rpc.directory import WorkerInfo
from torsh_distributed.rpc.references.object_table import ObjectTable


class ReferenceCounts(Protocol):
    """What the worker knows of its references."""

    def hold(self, owner: str, key: str) -> None:
        """This process has one more reference to an object."""

    def let_go(self, owner: str, key: str) -> None:
        """One reference less."""


class ReferenceHolder(Protocol):
    """The worker that a reference works through."""

    name: str
    timeout_s: float
    objects: ObjectTable

    @property
    def references(self) -> ReferenceCounts:
        """What it counts."""

    def call(self, to: str, function: Any, args: Any = (), *, timeout_s: float | None = None) -> Any:
        """Call a function of another worker."""

    def call_async(
        self, to: str, function: Any, args: Any = (), kwargs: Any = None, *, timeout_s: float | None = None
    ) -> RemoteFuture:
        """The same without waiting."""

    def remote(
        self, to: str, function: Any, args: Any = (), kwargs: Any = None, *, timeout_s: float | None = None
    ) -> RRef:
        """The same, with a result that stays there."""

    def find(self, to: str) -> WorkerInfo:
        """Where a worker is."""


_started: ReferenceHolder | None = None


def set_started(worker: ReferenceHolder | None) -> None:
    """The worker of this process, for `RRef(value)`; None when it has ended."""
    global _started
    _started = worker


class RRef:
    """A reference to an object that lives at its owner; it can be passed in calls.

    The owner keeps the object as long as somebody holds a reference: each holder renews its lease, and one that
    dies stops renewing. `RRef(value)` makes one to an object of this worker.
    """

    def __init__(self, value: Any) -> None:
        worker = _started
        if worker is None:
            raise BackendNotInitialized("there is no worker to own the object", hint="call rpc.start(name) first")
        self._bind(worker, worker.name, worker.objects.add(value, worker.name), None)

    @classmethod
    def to(cls, worker: ReferenceHolder, owner: str, key: str, created: Future[Any] | None = None) -> RRef:
        """A reference to an object of `owner`; `created` ends when the object is there."""
        reference = cls.__new__(cls)
        reference._bind(worker, owner, key, created)
        return reference

    def _bind(self, worker: ReferenceHolder, owner: str, key: str, created: Future[Any] | None) -> None:
        self._worker = worker
        self._owner = owner
        self.key = key
        self._created = created
        worker.references.hold(owner, key)
        self._release = weakref.finalize(self, worker.references.let_go, owner, key)
        self._release.atexit = False  # the lease ends by itself

    def owner(self) -> WorkerInfo:
        """The worker where the object lives."""
        return self._worker.find(self._owner)

    def owner_name(self) -> str:
        """Its name."""
        return self._owner

    def is_owner(self) -> bool:
        """Whether the object lives in this process."""
        return self._owner == self._worker.name

    def wait_until_created(self) -> None:
        """Until the object is there; raises what making it raised."""
        if self._created is not None:
            self._created.result()

    def local_value(self) -> Any:
        """The object itself, at its owner."""
        if not self.is_owner():
            raise InvalidArgument(
                "the object lives in another process", hint="fetch it with to_here()", owner=self._owner
            )
        self.wait_until_created()  # a call to this very worker may not have arrived yet
        return self._worker.objects.get(self.key).result(self._worker.timeout_s)

    def to_here(self, timeout: float | None = None) -> Any:
        """A copy of the object, fetched from its owner; there it is the object itself."""
        if self.is_owner():
            return self.local_value()
        return self._worker.call(self._owner, "@fetch", (self.key,), timeout_s=timeout)

    def call(
        self, method: str, args: Any = (), kwargs: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Call a public method of the object, whose class its owner has exposed."""
        return self.call_async(method, args, kwargs, timeout_s=timeout_s).result()

    def call_async(
        self, method: str, args: Any = (), kwargs: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> RemoteFuture:
        """The same, without waiting for the result."""
        self.wait_until_created()
        return self._worker.call_async(self._owner, (self.key, method), args, kwargs, timeout_s=timeout_s)

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """`reference.rpc_sync().method(...)` calls a method and waits for its result."""
        return _Methods(lambda method, args, kwargs: self.call(method, args, kwargs, timeout_s=_seconds(timeout)))

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """`reference.rpc_async().method(...)` calls a method: a `torch.futures.Future`."""
        return _Methods(
            lambda method, args, kwargs: as_torch_future(
                self.call_async(method, args, kwargs, timeout_s=_seconds(timeout))
            )
        )

    def remote(self, timeout: float = -1.0) -> Any:
        """`reference.remote().method(...)` calls a method and leaves its result at the owner: another reference."""

        def call(method: str, args: Any, kwargs: Any) -> RRef:
            self.wait_until_created()
            return self._worker.remote(self._owner, (self.key, method), args, kwargs, timeout_s=_seconds(timeout))

        return _Methods(call)

    def backward(self, *_: object, **__: object) -> None:
        """torch's reference has it; gradients do not go through calls here."""
        raise FeatureNotAvailable(
            "autograd across remote calls is not offered",
            hint="compute gradients where the parameters are, and send tensors; or train with parallelize",
        )

    def release(self) -> None:
        """Give the reference up now; it also happens when it is no longer referred to."""
        self._release()

    @override
    def __repr__(self) -> str:
        return f"RRef({self.key!r} at {self._owner!r})"


class _Methods:
    """Methods of an object elsewhere, as attributes."""

    def __init__(self, call: Callable[[str, Any, Any], Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(method, args, kwargs)


def _seconds(timeout: float) -> float | None:
    return None if timeout < 0 else timeout
