"""Each rank's state, every so many steps, also in the memory of another rank, on another node if there are several.

For restarts without a disk: if a rank is lost, its neighbour has its state, the others have their own, all of one step.
Copies travel over connections of their own, on threads of low priority; training waits for one copy in its own memory.

Memory: a rank holds the last two snapshots of its own and of the rank it keeps them for, four times its state: while a
new one is on its way, the one before must stay whole everywhere.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata
from torsh_distributed.checkpoint.replicas.snapshot_memory import Snapshot, SnapshotMemory, SnapshotShelf, directory_of
from torsh_distributed.checkpoint.replicas.snapshot_server import (
    CHUNK_BYTES,
    SnapshotServer,
    connect_to_server,
    give_way,
)
from torsh_distributed.checkpoint.saving.box_agreement import BoxAgreement
from torsh_distributed.checkpoint.saving.box_assignment import to_plain
from torsh_distributed.checkpoint.saving.file_image import FileImage
from torsh_distributed.checkpoint.saving.node_ranks import gathered
from torsh_distributed.comm.groups.process_group import before_destroy
from torsh_distributed.comm.meeting.network_interface import address_for_peers, network_identity
from torsh_distributed.comm.meeting.node_identity import node_identity
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.comm.serialization import serialize
from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.errors import CheckpointError, InvalidArgument
from torsh_distributed.parallel.state.held_state import HeldState


def holders_of(nodes: Sequence[str]) -> list[int]:
    """For every rank the one that keeps its copy: on the next node, at the same place there; on one node the next rank.

    `nodes` is each rank's node. Where nodes have different numbers of ranks, some keep several copies.
    """
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return [(rank + 1) % len(nodes) for rank in range(len(nodes))]
    members = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in order}
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [
        members[following[node]][members[node].index(rank) % len(members[following[node]])]
        for rank, node in enumerate(nodes)
    ]


def holders_of_lost(holders: Sequence[int], survivors: Collection[int]) -> dict[int, int]:
    """For every lost rank the survivor that keeps its copy; CheckpointError if that one is lost as well."""
    found = {rank: holder for rank, holder in enumerate(holders) if rank not in survivors}
    gone = {rank: holder for rank, holder in found.items() if holder not in survivors}
    if gone:
        rank, holder = next(iter(gone.items()))
        raise CheckpointError(
            f"the state of rank {rank} is gone from memory: "
            f"rank {rank} and rank {holder}, which kept its copy, are lost",
            hint="load the newest checkpoint from the disk",
            lost=sorted(found),
        )
    return found


_log = logging.getLogger(__name__)


class NeighbourReplicas:
    """Keeps the ranks' state in each other's memory; every rank of the world makes one and makes the same calls.

    It outlives the process group that it was made under: after `regroup`, pass it to `recover`, then close it.
    """

    def __init__(self) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None or group.size() == 1:
            raise InvalidArgument(
                "a copy in another rank's memory needs another rank", hint="leave checkpoint.replica_every_steps out"
            )
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()
        mine = [node_identity(), network_identity(), secrets.token_bytes(32), secrets.token_hex(8)]
        everyone = gathered(mine, group)
        self.secret: bytes = everyone[0][2]
        self.holders = holders_of([node for node, *_ in everyone])
        """By rank: who keeps its copy."""
        directory = directory_of(everyone[0][3], self.rank)
        self._kept = None if directory is None else SnapshotMemory(directory, self.holders)
        self._shelf = SnapshotShelf(self._kept)
        shares_loopback = len({network for _, network, *_ in everyone}) == 1
        self._server = SnapshotServer(listen_address(shares_loopback=shares_loopback), self.secret, self._shelf)
        self.addresses: list[tuple[str, int]] = [tuple(one) for one in gathered(list(self._server.address), group)]
        self._boxes = BoxAgreement(group)
        self._images: list[FileImage] = []
        self._sender = SerialThread("snapshot-sender")
        self._sending: Future[None] | None = None
        self._connection: Connection | None = None
        self._latest: int | None = None
        self._agreed: int | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._forget = before_destroy(self.close)

    @property
    def shelf(self) -> SnapshotShelf:
        """The snapshots in this rank's memory."""
        return self._shelf

    def where_lost(self, survivors: Collection[int]) -> dict[int, int]:
        """Lost rank to the survivor that keeps its copy; CheckpointError if for one of them both are lost.

        Ranks are those of the world that this was made under. Nothing is communicated.
        """
        return holders_of_lost(self.holders, survivors)

    def update(self, state: HeldState, own: Mapping[str, Any], metadata: CheckpointMetadata) -> bool:
        """Copy the state of a step and send it on, in the background; every rank calls this after the same steps.

        Returns False, and does nothing, if an earlier copy is still on its way somewhere. A copy that did not arrive is
        a warning and an event: the next one is sent in full, and until then the one before counts.
        """
        everyone = gathered([self._progress(), self._boxes.signature(state.tensors)], self._group)
        progress = [one for one, _ in everyone]
        if "moving" in progress:
            events.emit(self._event("replica skipped", metadata.step))
            return False
        if "failed" not in progress:
            if self._agreed is None and self._latest is not None and self._kept is not None:
                self._kept.forget_other_worlds()
            self._agreed = self._latest
        started = time.monotonic()
        has_changed = self._boxes.settle([signature for _, signature in everyone])
        dropped = self._shelf.keep_only(self.rank, self._agreed)
        if has_changed:
            self._images = []
        for memory in dropped:
            if all(memory is not image.memory for image in self._images):
                self._shelf.release(memory)
        image = self._spare_image(state)
        image.copy_in(state.tensors)
        facts = {
            "metadata": asdict(metadata),
            "claims": to_plain(self._boxes.claims[self.rank]),
            "boxes": image.boxes(),
            "own": dict(own),
            "values": state.values if self.rank == 0 else None,
        }
        snapshot = Snapshot(self.rank, metadata.step, image.memory, serialize(facts))
        self._shelf.put(snapshot)
        self._latest = metadata.step
        events.emit(self._event("replica copied", metadata.step, image.num_bytes, time.monotonic() - started))
        self._sending = self._sender.submit(self._send, snapshot, self._agreed)
        return True

    def wait(self) -> None:
        """Wait until this rank's last copy has arrived, or has failed to."""
        if self._sending is not None:
            self._sending.exception()

    @property
    def num_bytes(self) -> int:
        """Host memory that the snapshots take on this rank."""
        return self._shelf.num_bytes

    def close(self) -> None:
        """Drop all copies, and end connections and threads; happens by itself when the process group is destroyed.

        In a job whose workers may be started again the copies stay in shared memory, for those.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connection = self._connection
        self._forget()
        if connection is not None:
            connection.close()
        self._server.close()
        self._sender.stop()
        self.wait()
        self._images = []
        self._shelf = SnapshotShelf()

    def _progress(self) -> str:
        if self._sending is None:
            return "arrived"
        if not self._sending.done():
            return "moving"
        return "arrived" if self._sending.exception() is None else "failed"

    def _spare_image(self, state: HeldState) -> FileImage:
        """Memory that the last complete snapshot does not use."""
        kept = None if self._agreed is None else self._shelf.get(self.rank, self._agreed)
        for image in self._images:
            if kept is None or image.memory is not kept.memory:
                return image
        self._images.append(self._boxes.image(state.tensors, self._shelf.allocate))
        return self._images[-1]

    def _send(self, snapshot: Snapshot, keep: int | None) -> None:
        """On the sender's thread."""
        give_way()
        started = time.monotonic()
        try:
            connection = self._connected()
            data = snapshot.view()
            header = {"kind": "put", "rank": self.rank, "step": snapshot.step, "num_bytes": len(data), "keep": keep}
            connection.send(header, snapshot.facts)
            for start in range(0, len(data), CHUNK_BYTES):
                connection.send({}, data[start : start + CHUNK_BYTES])
            connection.receive()
        except OSError as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            holder = self.holders[self.rank]
            text = f"the copy of step {snapshot.step} did not reach rank {holder}: {error}"
            if not self._is_closed:
                _log.warning("%s", text)
            events.emit(self._event("replica failed", snapshot.step, error=text))
            raise CheckpointError(text, hint="training goes on; the next copy is sent in full") from error
        spent_s = time.monotonic() - started
        events.emit(self._event("replica stored", snapshot.step, snapshot.memory.nbytes, spent_s))

    def _connected(self) -> Connection:
        if self._connection is None:
            connection = connect_to_server(self.addresses[self.holders[self.rank]], self.secret)
            with self._lock:
                self._connection = connection
                if self._is_closed:
                    connection.close()
        return self._connection

    def _event(
        self,
        action: str,
        step: int,
        num_bytes: int | None = None,
        duration_s: float | None = None,
        error: str | None = None,
    ) -> events.CheckpointEvent:
        place = f"memory of rank {self.holders[self.rank]}"
        return events.CheckpointEvent(
            action=action, path=place, step=step, num_bytes=num_bytes, duration_s=duration_s, error=error
        )


def listen_address(*, shares_loopback: bool) -> str:
    """Loopback if all ranks are on this machine, else the address at which the other nodes reach it."""
    if shares_loopback:
        return "127.0.0.1"
    address = address_for_peers(os.environ.get("MASTER_ADDR", ""))
    if address is None:
        raise CheckpointError(
            "this node has no address at which the others reach it",
            hint="set MASTER_ADDR to an address of the network between the nodes",
        )
    return address
