"""A worker's side: the parameters of several servers as if they were one; pushes are sent until they are applied."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from torsh_distributed import events
from torsh_distributed.errors import CommunicationError, InvalidArgument, RemoteError, TorshError
from torsh_distributed.rpc.calling.remote_future import RemoteFuture
from torsh_distributed.rpc.parameters.packed_tensors import GradientPacker, Packed, check_codec, packed_bytes, unpack
from torsh_distributed.rpc.parameters.parameter_server import SERVICE
from torsh_distributed.rpc.parameters.push_rounds import Consistency
from torsh_distributed.rpc.parameters.server_links import FIRST_WAIT_S, LONGEST_WAIT_S, ServerLinks
from torsh_distributed.rpc.parameters.server_stats import ServerStats
from torsh_distributed.rpc.parameters.shard import RowGradients, RowTable
from torsh_distributed.rpc.rpc_worker import RpcWorker

_FOR_EVER_S = 1e6


class ParameterClient:
    """Trains with the parameters that servers hold. One thread at a time.

    A push and a pull wait for servers that are being started again, up to `timeout_s`; so does a push for other
    workers, as the consistency says. `push_codec` is any codec for gradients (what it leaves out is sent later),
    `pull_codec` one that is near to every value: fp16, bf16, int8, nbit:BITS.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        worker: RpcWorker | None = None,
        push_codec: str | None = None,
        pull_codec: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        check_codec(pull_codec, values_only=True)
        self._packer = GradientPacker(push_codec)
        self._links = ServerLinks(servers, worker, timeout_s)
        self._pull_codec = pull_codec
        self._homes: dict[str, str] = {}
        self._tables: dict[str, tuple[int, int]] = {}
        self._members: dict[str, dict[str, int]] = {}
        self._versions: dict[str, int] = {}
        self._presences: list[_Presence] = []

    @property
    def name(self) -> str:
        """Of this worker."""
        return self._links.worker.name

    @property
    def versions(self) -> dict[str, int]:
        """The newest version of each server's part that was pulled; with bsp they are equal."""
        return dict(self._versions)

    # Beginning

    def create(
        self,
        parameters: Mapping[str, Tensor | RowTable],
        *,
        optimizer: str = "SGD",
        consistency: Consistency | None = None,
        **options: Any,
    ) -> None:
        """Put parameters on the servers and join. Every worker calls it with the same names, shapes and settings; the
        first one's values count. `options` are those of the optimizer, such as `lr`.

        Each tensor goes to the server that has the least yet, the largest first; a table's row r to server r % servers.
        """
        names = self._links.names
        tables = {name: value for name, value in parameters.items() if isinstance(value, RowTable)}
        tensors = {name: value.detach().cpu() for name, value in parameters.items() if isinstance(value, Tensor)}
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        loads = dict.fromkeys(names, 0)
        for name in sorted(tensors, key=lambda one: (-tensors[one].nbytes, one)):
            home = min(names, key=loads.__getitem__)
            parts[home][name] = tensors[name]
            loads[home] += tensors[name].nbytes
        chosen = consistency or Consistency()
        args = {
            name: (parts[name], tables, optimizer, options, chosen, [index, len(names)])
            for index, name in enumerate(names)
        }
        self._links.call("create", args)
        self.join()

    def join(self) -> None:
        """Train with the parameters that are there. Also after a push that failed: it then is applied, or dropped."""
        self._stop_presences()
        found = self._links.call_all("describe")
        self._homes.clear()
        self._tables.clear()
        for index, (server, facts) in enumerate(found.items()):
            spec = facts["spec"]
            if spec["place"] != [index, len(found)]:
                raise InvalidArgument(
                    "these are not the servers that the parameters were made for, in that order",
                    server=server,
                    place=spec["place"],
                    servers=", ".join(found),
                )
            for name, shape in spec["shapes"].items():
                if name in spec["tables"]:
                    self._tables[name] = (shape[0], shape[1])
                else:
                    self._homes[name] = server
        self._members = self._links.call_all("join", self.name)
        self._presences = [
            _Presence(self._links.worker, server, member["incarnation"]) for server, member in self._members.items()
        ]

    # Training

    def pull(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Parameters, each server's as of one version; all but tables if no names are given."""
        wanted = list(self._homes) if names is None else list(names)
        parts: dict[str, list[str]] = {server: [] for server in self._links.names} if names is None else {}
        for name in wanted:
            parts.setdefault(self._home(name), []).append(name)
        begun_s = time.monotonic()
        replies = self._links.call("pull", {server: (part, self._pull_codec) for server, part in parts.items()})
        found = {}
        for server, (version, packed) in replies.items():
            self._versions[server] = version
            found.update({name: unpack(one) for name, one in packed.items()})
        self._tell("pull", begun_s, [one for _, packed in replies.values() for one in packed.values()])
        return {name: found[name] for name in wanted}

    def pull_into(self, module: nn.Module) -> None:
        """Copy the servers' values to a module's parameters of the same names; InvalidArgument if it has none."""
        own = {name: param for name, param in module.named_parameters() if name in self._homes}
        if not own and self._homes:
            raise InvalidArgument(
                "no parameter of this module is on the servers",
                hint="names are those of create(); a wrapper puts its own in front, so give the module within",
                module=", ".join(name for name, _ in module.named_parameters())[:200],
            )
        with torch.no_grad():
            for name, value in self.pull(list(own)).items():
                own[name].copy_(value)

    def pull_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows of a table, in the order of `rows` (any shape) and on their device: (*rows.shape, dim)."""
        num_rows, dim = self._table(name)
        flat = rows.reshape(-1).to("cpu", torch.int64)
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_rows:
            raise InvalidArgument("a row is not in the table", name=name, num_rows=num_rows, most=int(flat.max()))
        places = self._places(flat)
        args = {
            server: ({name: torch.div(flat[place], len(self._links.names), rounding_mode="floor")}, self._pull_codec)
            for server, place in places.items()
        }
        begun_s = time.monotonic()
        replies = self._links.call("pull_rows", args)
        self._versions.update({server: version for server, (version, _) in replies.items()})
        values = {server: unpack(packed[name]) for server, (_, packed) in replies.items()}
        if len(places) == 1:
            [found] = values.values()
        else:
            found = torch.empty(flat.numel(), dim)
            for server, value in values.items():
                found[places[server]] = value
        self._tell("pull", begun_s, [packed[name] for _, packed in replies.values()])
        return found.view(*rows.shape, dim).to(rows.device)

    def push(
        self,
        gradients: Mapping[str, Tensor],
        rows: Mapping[str, RowGradients] | None = None,
        *,
        weight: float = 1.0,
    ) -> int:
        """Apply gradients, and of tables those of rows; returns the version with them.

        With bsp `weight`, such as the number of samples, is this push's share of the mean. When it returns, the push is
        in the parameters once, whatever was killed; if it raises, `join` again: it is then applied or dropped.
        """
        if not self._members:
            raise InvalidArgument("this worker has not joined", hint="call create() or join() first")
        if not weight > 0:
            raise InvalidArgument("the weight of a push is above 0", weight=weight)
        whole: dict[str, dict[str, Any]] = {server: {} for server in self._links.names}
        for name, gradient in gradients.items():
            whole[self._home(name)][name] = self._packer.pack(name, gradient)
        sparse = self._packed_rows(rows or {})
        self._packer.step()
        args = {
            server: (
                self.name,
                member["incarnation"],
                member["sequence"] + 1,
                self._versions.get(server),
                weight,
                whole[server],
                sparse[server],
            )
            for server, member in self._members.items()
        }
        members, self._members = self._members, {}
        begun_s = time.monotonic()
        replies: dict[str, int] = self._links.call("push", args)
        for member in members.values():
            member["sequence"] += 1
        self._members = members
        staleness = max((replies[name] - 1 - base for name, base in self._versions.items()), default=None)
        sent = [one for part in whole.values() for one in part.values()]
        sent += [one for part in sparse.values() for _, one in part.values()]
        self._tell("push", begun_s, sent, staleness=staleness)
        return max(replies.values())

    def _tell(
        self,
        operation: Literal["push", "pull"],
        begun_s: float,
        packed: list[Packed],
        *,
        staleness: int | None = None,
    ) -> None:
        """Emit the event of a push or a pull, if somebody listens."""
        if events.wanted(events.ParameterEvent):
            events.emit(
                events.ParameterEvent(
                    operation=operation,
                    version=max(self._versions.values(), default=0),
                    num_bytes=packed_bytes(packed),
                    duration_s=time.monotonic() - begun_s,
                    staleness=staleness,
                )
            )

    def push_from(self, module: nn.Module, *, weight: float = 1.0) -> int:
        """Push the gradients of a module's parameters."""
        gradients = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
        return self.push(gradients, weight=weight)

    def _packed_rows(self, rows: Mapping[str, RowGradients]) -> dict[str, dict[str, Any]]:
        parts: dict[str, dict[str, Any]] = {server: {} for server in self._links.names}
        for name, (indices, gradient) in rows.items():
            num_rows, dim = self._table(name)
            flat, values = indices.reshape(-1).to("cpu", torch.int64), gradient.detach().reshape(-1, dim).cpu()
            if flat.numel() != values.shape[0] or (
                flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_rows
            ):
                raise InvalidArgument(
                    "rows are numbers within the table, with a gradient each",
                    name=name,
                    num_rows=num_rows,
                    rows=tuple(indices.shape),
                    gradient=tuple(gradient.shape),
                )
            for server, place in self._places(flat).items():
                local = torch.div(flat[place], len(self._links.names), rounding_mode="floor")
                step = self._members[server]["sequence"]
                parts[server][name] = (local, self._packer.pack_rows(name, values[place], step))
        return parts

    def _places(self, rows: Tensor) -> dict[str, Tensor | slice]:
        """For each server where in `rows` its rows are; all of them without a copy where there is one server."""
        names = self._links.names
        if len(names) == 1:
            return {names[0]: slice(None)}
        return {server: (rows % len(names) == index).nonzero()[:, 0] for index, server in enumerate(names)}

    def _home(self, name: str) -> str:
        if name not in self._homes:
            raise InvalidArgument(
                "no server has a parameter of this name" + (": it is a table" if name in self._tables else ""),
                hint="tables are pulled and pushed by rows" if name in self._tables else "create() or join() first",
                name=name,
            )
        return self._homes[name]

    def _table(self, name: str) -> tuple[int, int]:
        if name not in self._tables:
            raise InvalidArgument("no server has a table of this name", name=name, tables=", ".join(self._tables))
        return self._tables[name]

    # The rest

    def set_options(self, **options: Any) -> None:
        """Change the optimizer's options, such as `lr`, from the next step on; one worker does it for all."""
        self._links.call_all("set_options", options)

    def publish(self) -> int:
        """Give followers a copy of the parameters as they are; returns its number. With bsp: between two pushes of
        this worker, when all servers have the same version."""
        found = self._links.call_all("describe")
        number = 1 + max(int(facts["publication"]) for facts in found.values())
        self._links.call_all("publish", number)
        return number

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the servers' optimizer keeps for each parameter, as torch has it; without tables."""
        return {name: one for found in self._links.call_all("optimizer_state").values() for name, one in found.items()}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from these parameters and this state of the optimizer. One worker calls it, while none pushes."""
        parts: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {name: ({}, {}) for name in self._links.names}
        for name, tensor in tensors.items():
            parts[self._home(name)][0][name] = tensor.detach().cpu()
        for name, found in state.items():
            parts[self._home(name)][1][name] = {
                key: value.cpu() if isinstance(value, Tensor) else value for key, value in found.items()
            }
        self._links.call("restore", parts)

    def wait_for_end(self) -> None:
        """Leave, and wait until no worker trains any more: what is pulled then is final."""
        if self._members:
            self.leave()
        self._links.call_all("end")

    def save(self, path: str) -> None:
        """Each server copies its state to `path/NAME` on its node, to be started from there (`keep`)."""
        self._links.call("save", {name: (f"{path}/{name}",) for name in self._links.names})

    def stats(self) -> dict[str, ServerStats]:
        """Of every server."""
        found: dict[str, ServerStats] = self._links.call_all("stats")
        return found

    def leave(self) -> None:
        """Train no longer: others do not wait for this worker."""
        self._stop_presences()
        members, self._members = self._members, {}
        self._links.call("leave", {name: (self.name, member["incarnation"]) for name, member in members.items()})

    def _stop_presences(self) -> None:
        presences, self._presences = self._presences, []
        for presence in presences:
            presence.close()

    def close(self) -> None:
        """Leave, if the servers are there; otherwise they find out by themselves."""
        try:
            if self._members and not self._links.worker.is_closed:
                self.leave()
        except TorshError:
            self._members = {}
        finally:
            self._stop_presences()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Presence:
    """A call that lasts as long as this worker: by its end the server learns that the worker is gone.

    A thread makes it again when the server was killed, since this worker may be computing for long.
    """

    def __init__(self, worker: RpcWorker, server: str, incarnation: int) -> None:
        self._worker = worker
        self._server = server
        self._args = (worker.name, incarnation)
        self._is_closed = threading.Event()
        self._changed = threading.Event()
        self._future: RemoteFuture | None = None
        self._renew()
        self._thread = threading.Thread(target=self._run, name="parameters-presence", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        self._future = self._worker.call_async(self._server, (SERVICE, "presence"), self._args, timeout_s=_FOR_EVER_S)
        self._future.add_done_callback(lambda _: self._changed.set())

    def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._is_closed.is_set():
            self._changed.wait()
            self._changed.clear()
            if self._is_closed.is_set() or (self._future is not None and self._has_been_refused(self._future)):
                return
            try:
                self._renew()
                wait_s = FIRST_WAIT_S
            except (CommunicationError, InvalidArgument):  # not there yet, or its name is not
                self._changed.set()
                self._is_closed.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _has_been_refused(self, future: RemoteFuture) -> bool:
        return future.done() and not future.cancelled() and isinstance(future.exception(), RemoteError)

    def close(self) -> None:
        self._is_closed.set()
        self._changed.set()
        if self._future is not None:
            self._future.cancel()
        self._thread.join()
