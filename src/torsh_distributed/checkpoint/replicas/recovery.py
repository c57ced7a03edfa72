"""Training state put together again from the memory of the ranks that are left.

Every rank of the new world calls `recover`: survivors with their `NeighbourReplicas`, those that have just joined with
None. After all workers were started again nobody has survived, and `recover_kept` takes what they left in memory that
outlives them. The result is loaded like a checkpoint, under any plan and at any world size, bit for bit: a rank takes
its own boxes from its memory, and the others over a connection to whoever has them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata, data_file
from torsh_distributed.checkpoint.files.tensor_index import StoredBox, TensorIndex
from torsh_distributed.checkpoint.loading.saved_snapshot import SavedSnapshot
from torsh_distributed.checkpoint.replicas.neighbour_replicas import NeighbourReplicas, holders_of_lost, listen_address
from torsh_distributed.checkpoint.replicas.snapshot_memory import FoundSnapshot, Snapshot, SnapshotShelf, find_kept
from torsh_distributed.checkpoint.replicas.snapshot_server import SnapshotServer, connect_to_server
from torsh_distributed.checkpoint.saving.box_agreement import index_of
from torsh_distributed.checkpoint.saving.box_assignment import from_plain
from torsh_distributed.checkpoint.saving.node_ranks import gathered
from torsh_distributed.comm.meeting.network_interface import network_identity
from torsh_distributed.comm.serialization import deserialize
from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SurvivorReport:
    """What a survivor has in memory; ranks are those of the old world."""

    rank: int
    holders: tuple[int, ...]
    address: tuple[str, int]
    secret: bytes
    inventory: tuple[tuple[int, int], ...]
    """Rank and step of each snapshot."""


@dataclass(frozen=True)
class RecoveryPlan:
    """The step to go back to, and from whose memory each old rank's part of it comes."""

    step: int
    sources: tuple[int, ...]
    """By old rank: the old rank of the survivor that has its snapshot; itself if it is left."""


def plan_recovery(reports: Sequence[SurvivorReport]) -> RecoveryPlan:
    """The newest step of which the survivors hold every part; CheckpointError says why there is none. Pure."""
    if not reports:
        raise CheckpointError("no rank is left that has a copy in memory", hint="load the newest checkpoint")
    by_rank = {one.rank: one for one in reports}
    holders = reports[0].holders
    holders_of_lost(holders, by_rank.keys())
    steps = sorted({step for one in reports for _, step in one.inventory}, reverse=True)
    missing: dict[int, list[int]] = {}
    for step in steps:
        sources = [_source(rank, step, by_rank, holders) for rank in range(len(holders))]
        if None not in sources:
            return RecoveryPlan(step, tuple(one for one in sources if one is not None))
        missing[step] = [rank for rank, source in enumerate(sources) if source is None]
    if not steps:
        raise CheckpointError(
            "no state was copied before the failure", hint="load the newest checkpoint, or lower replica_every_steps"
        )
    raise CheckpointError(
        "no step is complete in the memory of the ranks that are left: "
        + "; ".join(f"step {step} lacks rank {', '.join(map(str, ranks))}" for step, ranks in missing.items()),
        hint="load the newest checkpoint",
    )


def _source(rank: int, step: int, by_rank: Mapping[int, SurvivorReport], holders: Sequence[int]) -> int | None:
    for one in (rank, holders[rank]):
        if one in by_rank and (rank, step) in by_rank[one].inventory:
            return one
    return None


def recover(replicas: NeighbourReplicas | None, *, group: dist.ProcessGroup | None = None) -> RecoveredState:
    """The newest state that the survivors hold together; every rank of the new world (or `group`) calls this.

    Raises CheckpointError on every rank if a part of it is lost. The survivors keep their `replicas` open until all
    ranks have loaded.
    """
    chosen = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
    if replicas is None:
        return _assembled([], SnapshotShelf(), chosen)
    mine = SurvivorReport(
        replicas.rank,
        tuple(replicas.holders),
        replicas.addresses[replicas.rank],
        replicas.secret,
        tuple(replicas.shelf.inventory()),
    )
    return _assembled([mine], replicas.shelf, chosen)


def recover_kept(group: dist.ProcessGroup | None) -> RecoveredState | None:
    """The newest state that workers of an earlier attempt have left in memory; None if there is none that is whole.

    Every rank of a job that was started again calls this.
    """
    found = find_kept(
        part=known_variables.whole_number("LOCAL_RANK"), num_parts=known_variables.whole_number("LOCAL_WORLD_SIZE")
    )
    offers = gathered({world: [_plain(one) for one in _reports(kept)] for world, kept in found.items()}, group)
    reports: dict[str, list[SurvivorReport]] = {}
    for theirs in offers:
        for world, plain in theirs.items():
            reports.setdefault(world, []).extend(map(_report_of, plain))
    chosen = _newest_world(reports)
    if chosen is None:
        return None
    everyone = gathered([network_identity(), secrets.token_bytes(32)], group)
    secret = everyone[0][1]
    shelf = SnapshotShelf()
    for one in found.get(chosen, []):
        shelf.put(Snapshot(one.rank, one.step, one.memory, one.facts))
    address = listen_address(shares_loopback=len({network for network, _ in everyone}) == 1)
    server = SnapshotServer(address, secret, shelf)
    mine = [replace(one, address=server.address, secret=secret) for one in _reports(found.get(chosen, []))]
    return _assembled(mine, shelf, group, server)


def _newest_world(reports: Mapping[str, Sequence[SurvivorReport]]) -> str | None:
    """The world whose ranks left the newest whole state; equal on all ranks."""
    steps: dict[str, int] = {}
    for world, left in sorted(reports.items()):
        try:
            steps[world] = plan_recovery(left).step
        except CheckpointError as error:
            _log.warning("what earlier workers left in memory is not whole: %s", error.message)
    return max(steps, key=lambda world: steps[world], default=None)


def _reports(kept: Sequence[FoundSnapshot]) -> list[SurvivorReport]:
    """What each rank of the earlier world had, of what is here."""
    by_keeper: dict[int, list[FoundSnapshot]] = {}
    for one in kept:
        by_keeper.setdefault(one.keeper, []).append(one)
    return [
        SurvivorReport(keeper, theirs[0].holders, ("", 0), b"", tuple((one.rank, one.step) for one in theirs))
        for keeper, theirs in by_keeper.items()
    ]


def _assembled(
    mine: Sequence[SurvivorReport],
    shelf: SnapshotShelf,
    group: dist.ProcessGroup | None,
    server: SnapshotServer | None = None,
) -> RecoveredState:
    reports = [_report_of(one) for theirs in gathered([_plain(one) for one in mine], group) for one in theirs]
    plan = plan_recovery(reports)
    own = {one.rank for one in mine}
    facts: dict[int, bytes] = {}
    for rank, source in enumerate(plan.sources):
        if source in own:
            found = shelf.get(rank, plan.step)
            assert found is not None, "it was in the report"
            facts[rank] = found.facts
    everyone = {rank: data for theirs in gathered(facts, group) for rank, data in theirs.items()}
    parts = [deserialize(everyone[rank]) for rank in range(len(plan.sources))]
    return RecoveredState(plan, parts, {one.rank: one for one in reports}, shelf, server)


def _plain(report: SurvivorReport) -> list[Any]:
    return [report.rank, report.holders, report.address, report.secret, report.inventory]


def _report_of(plain: Sequence[Any]) -> SurvivorReport:
    rank, holders, address, secret, inventory = plain
    return SurvivorReport(
        rank,
        tuple(holders),
        (address[0], address[1]),
        secret,
        tuple((owner, step) for owner, step in inventory),
    )


class RecoveredState(SavedSnapshot):
    """A state in the memory of the survivors; close it once all ranks have loaded it."""

    load_action = "replica loaded"

    def __init__(
        self,
        plan: RecoveryPlan,
        parts: Sequence[Mapping[str, Any]],
        reports: Mapping[int, SurvivorReport],
        shelf: SnapshotShelf,
        server: SnapshotServer | None = None,
    ) -> None:
        index: TensorIndex = index_of([from_plain(one["claims"]) for one in parts], [one["boxes"] for one in parts])
        metadata = CheckpointMetadata(**parts[0]["metadata"])
        num_bytes = sum(length for one in parts for _, _, _, _, length, _ in one["boxes"])
        place = f"memory of the ranks at step {plan.step}"
        super().__init__(place, metadata, index, parts[0]["values"], num_bytes=num_bytes)
        self.plan = plan
        self._own = [one["own"] for one in parts]
        self._owner = {data_file(rank): rank for rank in range(len(parts))}
        self._reports = reports
        self._shelf = shelf
        self._server = server
        self._connections: dict[int, Connection] = {}

    @override
    def own_values(self, rank: int) -> Any:
        return self._own[rank] if rank < len(self._own) else None

    @override
    def read_bytes(self, stored: StoredBox, begin: int, into: memoryview) -> None:
        rank = self._owner[stored.file]
        start = stored.start + stored.data_start + begin
        held = self._shelf.get(rank, self.plan.step)
        if held is not None:
            into[:] = held.view()[start : start + len(into)]
            return
        source = self.plan.sources[rank]
        request = {"kind": "read", "rank": rank, "step": self.plan.step, "start": start, "length": len(into)}
        try:
            connection = self._connected(source)
            connection.send(request)
            header, _ = connection.receive(lambda header, length: into if length == len(into) else into[:0])
        except OSError as error:
            raise CheckpointError(
                f"the state of rank {rank} could not be read from the memory of rank {source}: {error}",
                hint="another rank was lost: recover again with those that are left, or load the newest checkpoint",
            ) from error
        if "error" in header:
            raise CheckpointError(f"rank {source} answers: {header['error']}", hint="load the newest checkpoint")

    def close(self) -> None:
        """End the connections to the other ranks."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}
        if self._server is not None:
            self._server.close()

    def _connected(self, source: int) -> Connection:
        if source not in self._connections:
            report = self._reports[source]
            self._connections[source] = connect_to_server(report.address, report.secret)
        return self._connections[source]
