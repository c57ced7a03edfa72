"""The state of an elastic training: committed by the script, restored after a failure, made equal by `sync`."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.migrate.horovod.basics import rank
from torsh_distributed.migrate.horovod.collectives.object_encoding import broadcast_object, decode_object, encode_object
from torsh_distributed.migrate.horovod.elastic.state_handlers import StateHandler, handler_for
from torsh_distributed.migrate.horovod.horovod_errors import HostsUpdatedInterrupt

_NAME = "horovod-commit.pt"


class CommitFile:
    """A file in the job's directory, which only this user can open and which the launcher removes with the job."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt

    @classmethod
    def of_job(cls) -> Self | None:
        """The file of the job that this process belongs to; None if its workers are never started again."""
        progress = os.environ.get("TORSH_PROGRESS_FILE")
        if not progress or known_variables.whole_number("TORCHELASTIC_MAX_RESTARTS") == 0:
            return None
        attempt = known_variables.whole_number("TORCHELASTIC_RESTART_COUNT")
        return cls(Path(progress).parent / _NAME, attempt)

    def write(self, commit: dict[str, Any]) -> None:
        """Replace the commit; a crash meanwhile leaves the one before."""
        draft = self._path.with_suffix(".draft")
        tensors: list[Tensor] = []
        structure = torch.frombuffer(bytearray(encode_object(commit, tensors)), dtype=torch.uint8)
        torch.save({"structure": structure, "tensors": tensors}, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self._path)

    def read(self) -> dict[str, Any] | None:
        """The commit of an earlier attempt; None in the first."""
        if self._attempt == 0 or not self._path.exists():
            return None
        held = torch.load(self._path, map_location="cpu", weights_only=True)
        commit: dict[str, Any] = decode_object(held["structure"].numpy().tobytes(), held["tensors"])
        return commit


REMOVED_ONLY = 1
"""`on_hosts_updated`: hosts were only removed."""


class State:
    """What survives a failure. Subclasses say how it is saved, restored and synchronised."""

    def __init__(self, **kwargs: Any) -> None:
        self._host_messages: SimpleQueue[tuple[float, int]] = SimpleQueue()
        self._last_updated_s = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._news: Callable[[], int | None] | None = None

    def watch(self, news: Callable[[], int | None]) -> None:
        """Ask `news` at every commit whether members come or go: what `on_hosts_updated` would be told, or None."""
        self._news = news

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these, in order, after a reset: to change the learning rate for another number of ranks, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after the ranks have met again, before they synchronise."""
        self._host_messages = SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Note that members come or go; the next `check_host_updates` raises on all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and raise if the members have changed. Costs a copy: not at every small step."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 was told that the members change."""
        change = None if self._news is None else self._news()
        if change is not None:
            self.on_hosts_updated(time.time(), change)
        last_s, removed_only = self._last_updated_s, True
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > last_s:
                last_s = timestamp
            removed_only = removed_only and result == REMOVED_ONLY
        # Rank 0 decides, so all ranks leave the loop at the same commit.
        previous_s, last_s, removed_only = broadcast_object(
            (self._last_updated_s, last_s, removed_only), 0, "elastic.update"
        )
        self._last_updated_s = last_s
        if previous_s < last_s:
            raise HostsUpdatedInterrupt(removed_only)

    def save(self) -> None:
        """Keep a copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state equal on all ranks; every rank calls this."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to other ranks; nothing by default."""

    def agree(self) -> None:
        """Tell each other what only one rank knows, before some leave; every rank calls this. Nothing by default."""

    def load_commit(self) -> None:
        """Continue from a commit of an earlier attempt of this job, if there is one; nothing by default."""


class ObjectState(State):
    """Plain values as attributes: `ObjectState(epoch=0, batch=0)`."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        self._bcast_object = bcast_object
        self._get_rank = get_rank
        self._saved_state: dict[str, Any] = kwargs
        super().__init__(**kwargs)
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    @override
    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    @override
    def restore(self) -> None:
        self._set_attributes()

    @override
    def sync(self) -> None:
        if not self._saved_state:
            return
        current = {name: getattr(self, name) for name in self._saved_state}
        self._saved_state = self._bcast_object(current, name="elastic.objects")
        self._set_attributes()


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain values: `TorchState(model, optimizer, epoch=0, batch=0)`.

    A handler is chosen by type; what has none is a plain value. Under `torsh run --max-restarts` rank 0 also writes
    each commit to a file of the job, so training continues from it when all workers were started again.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        parts = {"model": model, "optimizer": optimizer, **kwargs}
        self._handlers: dict[str, StateHandler] = {}
        plain: dict[str, Any] = {}
        for name, value in parts.items():
            if value is None and name in ("model", "optimizer"):
                continue
            handler = handler_for(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
        self._commit_file = CommitFile.of_job()
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(**plain)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers")
        if handlers is not None and name in handlers:
            handlers[name].set_value(value)
        super().__setattr__(name, value)

    @override
    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    @override
    def agree(self) -> None:
        for handler in self._handlers.values():
            handler.agree()

    @override
    def commit(self) -> None:
        self.agree()
        self.save()
        if self._commit_file is not None and self._get_rank() == 0:
            self._commit_file.write(
                {
                    "parts": {name: handler.saved() for name, handler in self._handlers.items()},
                    "values": self._saved_state,
                    "time": time.time(),
                }
            )
        self.check_host_updates()

    @override
    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    @override
    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    @override
    def reset(self) -> None:
        for handler in self._handlers.values():
            if hasattr(handler.value, "reset") and hasattr(handler.value, "record_batch"):
                handler.value.reset()

    @override
    def load_commit(self) -> None:
        if self._commit_file is None or self._get_rank() != 0:
            return
        found = self._commit_file.read()
        if found is None:
            return
        for name, handler in self._handlers.items():
            if name in found["parts"]:
                handler.load(found["parts"][name])
        self._saved_state = {**self._saved_state, **found["values"]}
        self._set_attributes()

    @property
    def handled(self) -> Sequence[str]:
        """The names of the parts that have a handler."""
        return list(self._handlers)
