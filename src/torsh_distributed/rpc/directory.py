"""Who takes calls in this job, by name: each worker writes its address to the store, and may come or go at any time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from torsh_distributed.comm.meeting.network_interface import network_identity
from torsh_distributed.comm.transport.connection import Address, open_socket
from torsh_distributed.comm.trust.job_secret import job_secret, sign
from torsh_distributed.errors import ConfigurationError, InvalidArgument

_NOBODY = "none"
_CONNECT_S = 5.0
_LOG_KEY = "names"
_OF_A_JOB, _PURPOSE = "of a job: ", "rpc directory"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker that takes calls."""

    name: str
    id: int
    """In the order in which they came, or the rank that it was started with."""
    host: str
    pid: int
    network: str
    """Equal for workers that share a loopback."""
    unix_name: str
    tcp_address: tuple[str, int] | None

    @property
    def address(self) -> Address:
        """Where this process reaches it."""
        if self.network == network_identity() or self.tcp_address is None:
            return self.unix_name
        return self.tcp_address


class WorkerDirectory:
    """The names in the store."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self._store = dist.PrefixStore("rpc", store)
        self._waiting: dist.Store | None = None

    def secret(self) -> bytes:
        """What members of the job prove to each other: the job's secret, or one that the first worker puts here.

        Without a launcher that gives one, whoever reaches the store is a member, as for everything else in it. A job's
        secret is not put here, only what tells two of them apart: workers of another job are refused in words.
        """
        own = job_secret()
        offered = secrets.token_hex(32) if own is None else _OF_A_JOB + sign(own, _PURPOSE, b"")
        found = self._store.compare_set("secret", "", offered).decode()
        if found != offered and (own is not None or found.startswith(_OF_A_JOB)):
            raise ConfigurationError(
                "the workers of this store have another secret than this process",
                hint="start both with the same TORSH_JOB_TOKEN: `torsh run`, and what runs outside of its job",
                here="a job's secret" if own is not None else "none",
                there="another job's secret" if found.startswith(_OF_A_JOB) else "none",
            )
        return found.encode() if own is None else own

    def add(self, name: str, unix_name: str, tcp_address: tuple[str, int] | None, rank: int | None) -> WorkerInfo:
        """Write this process down. InvalidArgument if another one that lives has the name."""
        info = WorkerInfo(
            name=name,
            id=self._store.add("count", 1) - 1 if rank is None else rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            network=network_identity(),
            unix_name=unix_name,
            tcp_address=tcp_address,
        )
        text = json.dumps(asdict(info))
        there = self._store.compare_set(f"worker/{name}", "", text).decode()
        if there != text:
            if _answers(_parsed(there)):
                raise InvalidArgument(
                    "a worker with this name takes calls already",
                    hint="every process needs its own name",
                    name=name,
                    there=f"pid {_parsed(there).pid} on {_parsed(there).host}",
                )
            self._store.set(f"worker/{name}", text)  # it was killed, and this one takes its place
        elif name not in self._log():  # once, however often it leaves and comes back
            self._store.append(_LOG_KEY, f"{json.dumps(name)}\n")  # type: ignore[attr-defined]  # not in torch's stubs
        return info

    def note(self, key: str, text: str) -> None:
        """Write something down for other workers."""
        self._store.set(f"note/{key}", text)

    def noted(self, key: str) -> str | None:
        """What a worker wrote down; None if nothing."""
        return self._store.get(f"note/{key}").decode() if self._store.check([f"note/{key}"]) else None

    def find(self, name: str) -> WorkerInfo:
        """The worker of this name; InvalidArgument with those that are there if there is none."""
        # `get` after `check` would wait for what was removed in between. No worker's text is this: nothing is set.
        text = self._store.compare_set(f"worker/{name}", _NOBODY, _NOBODY).decode()
        if text == _NOBODY:
            raise InvalidArgument(
                f"there is no worker named {name!r}",
                hint="start it first, or wait for it with rpc.wait_for_workers",
                name=name,
                workers=", ".join(self.names()) or "none",
            )
        return _parsed(text)

    def wait(self, names: list[str], timeout_s: float) -> None:
        """Until workers with all these names are there; torch's store raises after the time."""
        self._wait([f"worker/{name}" for name in names], timeout_s)

    def meet(self, what: str, num_workers: int, timeout_s: float, *, waits: bool = True) -> None:
        """Say that this worker is at this point, and wait until all are."""
        if self._store.add(f"{what}/count", 1) == num_workers:
            self._store.set(f"{what}/all", "")
        if waits:
            self._wait([f"{what}/all"], timeout_s)

    def _wait(self, keys: list[str], timeout_s: float) -> None:
        """On a connection of its own: a client of torch's store does nothing else while one thread waits in it, and
        calls that arrive meanwhile look workers up."""
        if self._waiting is None:
            self._waiting = dist.PrefixStore("rpc", self.store.clone())  # type: ignore[attr-defined]  # not in stubs
        self._waiting.wait(keys, timedelta(seconds=timeout_s))

    def names(self) -> list[str]:
        """The workers that are there, in the order in which they first came."""
        return [name for name in self._log() if self._store.check([f"worker/{name}"])]

    def _log(self) -> dict[str, None]:
        """All that were ever there, in that order; two that came at one moment may have written the same name."""
        if not self._store.check([_LOG_KEY]):
            return {}
        return dict.fromkeys(json.loads(line) for line in self._store.get(_LOG_KEY).decode().splitlines())

    def workers(self) -> list[WorkerInfo]:
        """Those that are there, in the same order."""
        found = []
        for name in self.names():
            with contextlib.suppress(InvalidArgument):  # it has left since
                found.append(self.find(name))
        return found

    def remove(self, info: WorkerInfo) -> None:
        """This process leaves."""
        key = f"worker/{info.name}"
        if self._store.check([key]) and _parsed(self._store.get(key).decode()) == info:
            self._store.delete_key(key)


def _parsed(text: str) -> WorkerInfo:
    fields = json.loads(text)
    tcp_address = fields.pop("tcp_address")
    return WorkerInfo(tcp_address=None if tcp_address is None else (tcp_address[0], tcp_address[1]), **fields)


def _answers(info: WorkerInfo) -> bool:
    """Whether somebody still listens at a worker's address."""
    try:
        open_socket(info.address, _CONNECT_S).close()
    except OSError:
        return False
    return True
