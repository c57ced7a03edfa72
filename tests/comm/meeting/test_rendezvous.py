"""Ranks that do not fit together are told so, all of them, by name and in time."""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import torsh_distributed  # noqa: F401 - wraps torch's function
from tests.bed.world import World
from torsh_distributed.comm.meeting.node_identity import pack_nodes
from torsh_distributed.comm.meeting.rendezvous import (
    Arrival,
    Roster,
    _ranges,
    job_store_url,
    join,
    open_job_store,
    open_store,
)
from torsh_distributed.comm.meeting.software_versions import own_software
from torsh_distributed.comm.store import Store, TcpStoreServer
from torsh_distributed.comm.trust.job_secret import write_secret_file
from torsh_distributed.errors import ConfigurationError, OperationTimeout


def meet(ranks: list[int | None], world_sizes: list[int], timeout_s: float) -> tuple[int, ...] | None:
    """Process i joins as ranks[i] of world_sizes[i]; None stays away."""
    index = int(os.environ["RANK"])
    rank = ranks[index]
    if rank is None:
        return None
    port = int(os.environ["MASTER_PORT"])
    # Process 0 hosts the store, whatever rank it takes, and outlives the others' reading.
    store = open_store("127.0.0.1", port, is_host=index == 0, timeout_s=60)
    # All who come are there before the time runs: on a busy machine their starts are seconds apart.
    store.set(f"up/{index}", b"")
    store.wait([f"up/{other}" for other, its_rank in enumerate(ranks) if its_rank is not None])
    try:
        return join(store, rank=rank, world_size=world_sizes[index], timeout_s=timeout_s, node=f"n{index // 2}").nodes
    finally:
        done = store.add("done", 1)
        store.set(f"done/{done}", b"")
        if index == 0:
            present = [f"done/{i + 1}" for i in range(sum(r is not None for r in ranks))]
            store.wait(present)


def test_every_rank_learns_where_the_others_live(world: World) -> None:
    expected = (0, 0, 1)
    assert world.run(meet, [0, 1, 2], [3, 3, 3], 20.0, num_ranks=3, backend=None) == [expected] * 3


def test_a_rank_with_another_torch_is_named_with_both_versions() -> None:
    store, other = dist.HashStore(), asdict(own_software()) | {"torch": "1.13.0"}
    store.add("arrivals", 1)
    arrival = Arrival(rank=1, world_size=2, host="b", pid=7, node="b", network="b", software=other)
    store.set("arrival/1", json.dumps(asdict(arrival)))
    store.set("read/2", "")  # rank 0 leaves when the other has read the verdict
    with pytest.raises(ConfigurationError, match=r"rank 1 \(pid 7 on b\) runs other software than rank 0") as caught:
        join(store, rank=0, world_size=2, timeout_s=60)
    assert f"torch is 1.13.0 there and {own_software().torch} on node 0" in str(caught.value)


@pytest.mark.parametrize("ahead_s", [-60.0, 60.0])
def test_a_rank_learns_how_far_its_clock_is_from_that_of_rank_0(ahead_s: float) -> None:
    store = dist.HashStore()
    has_gpus = {"has_gpu_each": False, "has_gpus": False}
    verdict = {"nodes": pack_nodes("ab"), "shares_loopback": False, **has_gpus, "unusable_backends": {}}
    verdict["clock_s"] = time.time() - ahead_s
    store.set("verdict/0", json.dumps(verdict))
    roster = join(store, rank=1, world_size=2, timeout_s=60)
    assert roster.clock_ahead_s == pytest.approx(ahead_s, abs=30)


def test_absent_ranks_are_named_on_every_rank(world: World) -> None:
    outcomes = world.outcomes(meet, [0, 1, None, None], [5] * 4, 2.0, num_ranks=4, backend=None)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, OperationTimeout)
        assert outcome.error.context["missing_ranks"] == [2, 3, 4]
        assert "2 of 5 ranks joined in time; missing: 2-4" in str(outcome.error)


def test_an_absent_rank_0_is_named_by_the_others(world: World) -> None:
    outcomes = world.outcomes(meet, [1, 2], [3, 3], 2.0, backend=None)
    for outcome in outcomes:
        assert isinstance(outcome.error, OperationTimeout)
        assert outcome.error.context["missing_ranks"] == [0]


def test_duplicate_ranks_are_an_error_on_all_at_once(world: World) -> None:
    started = time.monotonic()
    outcomes = world.outcomes(meet, [0, 1, 1], [3, 3, 3], 100.0, num_ranks=3, backend=None)
    assert time.monotonic() - started < 90, "it must not wait for the deadline"
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigurationError)
        assert "two processes joined as rank 1" in str(outcome.error)
        assert str(outcome.error).count("pid ") == 2


def test_two_processes_as_rank_0_are_told(world: World) -> None:
    for outcome in world.outcomes(meet, [0, 0], [2, 2], 20.0, backend=None):
        assert "two processes joined as rank 0" in str(outcome.error)


def test_differing_world_sizes_are_shown_with_both_sides(world: World) -> None:
    for outcome in world.outcomes(meet, [0, 1], [2, 3], 20.0, backend=None):
        assert isinstance(outcome.error, ConfigurationError)
        assert "says 2, rank 1" in str(outcome.error)
        assert "says 3" in str(outcome.error)


def test_a_store_that_nobody_hosts_is_named_within_the_deadline() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        port = taken.getsockname()[1]
        with pytest.raises(OperationTimeout, match=f"127.0.0.1:{port} did not answer within 0.3 s") as caught:
            open_store("127.0.0.1", port, is_host=False, timeout_s=0.3)
    assert caught.value.context["missing_ranks"] == [0]


def test_a_taken_port_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="choose a free MASTER_PORT"):
            open_store("127.0.0.1", port, is_host=True, timeout_s=1.0)


def test_a_foreign_master_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be an address of the node on which rank 0 runs"):
        open_store("192.0.2.1", 29500, is_host=True, timeout_s=1.0)


def test_the_store_listens_on_the_given_address_alone() -> None:
    store = open_store("127.0.0.1", 0, is_host=True, timeout_s=5.0)
    assert isinstance(store, dist.TCPStore)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=2)


def test_a_roster_counts_uneven_nodes() -> None:
    roster = Roster((0, 1, 0, 0))
    assert roster.node_order == (0, 1)
    assert roster.node_ranks(3) == (0, 2, 3)
    assert [roster.local_rank(rank) for rank in range(4)] == [0, 0, 1, 2]
    assert [roster.node_rank(rank) for rank in range(4)] == [0, 1, 0, 0]


@pytest.mark.parametrize(("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3], "1, 3")])
def test_missing_ranks_read_as_ranges(ranks: list[int], text: str) -> None:
    assert _ranges(ranks) == text


torch_rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
TIMEOUT = timedelta(seconds=10)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TcpStoreServer:
    write_secret_file(tmp_path / "secret", "the job's")
    server = TcpStoreServer(token="the job's")
    monkeypatch.setenv("TORSH_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("TORSH_STORE", server.url)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "4000")
    yield server  # type: ignore[misc]  # a fixture
    server.close()


def test_the_jobs_own_address_is_the_launchers_store(member: TcpStoreServer) -> None:
    assert job_store_url("node0", 4000) == member.url
    assert job_store_url("node0", 4001) is None
    assert job_store_url("node1", 4000) is None


def test_torchs_env_and_our_init_meet_in_it(member: TcpStoreServer) -> None:
    theirs = torch_rendezvous._create_c10d_store("node0", 4000, 0, 2, TIMEOUT)
    ours = open_store("node0", 4000, is_host=False, timeout_s=10, has_torch_agent=True)
    assert isinstance(theirs, Store)
    assert isinstance(ours, Store)
    theirs.set("key", "value")
    assert ours.get("key") == b"value"
    theirs.close()
    ours.close()


def test_another_address_is_torchs_own_store(member: TcpStoreServer) -> None:
    store = torch_rendezvous._create_c10d_store("127.0.0.1", 0, 0, 1, TIMEOUT)
    assert isinstance(store, dist.TCPStore)


def test_a_process_without_the_secret_is_told(member: TcpStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORSH_SECRET_FILE")
    with pytest.raises(ConfigurationError, match="asks for a secret"):
        open_job_store(member.url, TIMEOUT)


def test_a_rank_that_hosts_the_store_asks_for_the_secret(member: TcpStoreServer) -> None:
    with open_store("127.0.0.1", 0, is_host=True, timeout_s=10) as host:  # type: ignore[attr-defined]  # ours
        assert isinstance(host, Store)
        port = int(host.url.rpartition(":")[2])
        with open_store("127.0.0.1", port, is_host=False, timeout_s=10) as other:  # type: ignore[attr-defined]
            other.set("key", "value")
            assert host.get("key") == b"value"
