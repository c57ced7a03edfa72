"""Connections that come up in a block are found and cut; others and listeners are left alone."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.backends.gloo import new_connections, patient_threads
from torsh_distributed.comm.backends.hierarchical import TorshOptions
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.manager import GroupManager, twin_group


def test_only_new_connections_are_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as old, listener.accept()[0] as old_peer:
            with new_connections() as found:
                new, new_peer = socket.create_connection(address), listener.accept()[0]
            with new, new_peer:
                new.settimeout(20)
                assert found.cut() == 2
                assert new.recv(1) == b"", "a blocked read returns"
                assert found.cut() == 0, "cutting twice does nothing"
                old.sendall(b"x")
                assert old_peer.recv(1) == b"x"


def test_connections_to_the_store_and_closed_ones_are_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with new_connections(except_port=address[1]) as found, socket.create_connection(address), listener.accept()[0]:
            pass
        assert found.inodes == {}
        with new_connections() as found:
            client, peer = socket.create_connection(address), listener.accept()[0]
        with peer:
            client.close()
            assert found.cut() == 1, "the descriptor of the client is no longer that connection"


def policies() -> dict[int, tuple[str, int]]:
    """Name and policy of every thread of this process."""
    return {
        int(task.name): ((task / "comm").read_text().strip(), os.sched_getscheduler(int(task.name)))
        for task in Path("/proc/self/task").iterdir()
    }


def gloo_policies(known: set[int]) -> tuple[set[int], set[int]]:
    """Policies of gloo's threads that are not known yet, and of all threads that are not gloo's; makes them known."""
    found = {task: named for task, named in policies().items() if task not in known}
    known |= set(found)
    # torch 2.11 leaves the thread for sockets unnamed, but starts it together with these.
    theirs = {policy for name, policy in found.values() if name.startswith(("gloo_", "pt_gloo_"))}
    others = {policy for name, policy in policies().values() if not name.startswith(("gloo_", "pt_gloo_", "python"))}
    return theirs, others | {os.sched_getscheduler(threading.get_native_id())}


def bring_up() -> list[tuple[set[int], set[int]]]:
    known = set(policies())
    process_group.start_world(
        "gloo",
        rank=int(os.environ["RANK"]),
        world_size=2,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=20,
    )
    found = [gloo_policies(known)]
    groups = GroupManager()
    groups.create_group("pair", [1, 0])
    found.append(gloo_policies(known))
    twin_group(resolve_group(None))
    found.append(gloo_policies(known))
    groups.close()
    process_group.destroy_process_group()
    return found


def test_gloo_is_patient_in_the_world_and_in_groups_and_the_caller_is_not(world: World) -> None:
    for found in world.run(bring_up, num_ranks=2, backend=None):
        assert found == [({os.SCHED_BATCH}, {os.SCHED_OTHER})] * 3


def bring_up_two_nodes() -> tuple[set[int], set[int]]:
    known = set(policies())
    options = TorshOptions(node=f"node {dist.get_rank()}")
    group = dist.new_group(backend="torsh", pg_options=options)
    all_reduce(torch.ones(3), group=group)
    return gloo_policies(known)


def test_so_it_is_between_nodes_in_a_plain_script(world: World) -> None:
    for found in world.run(bring_up_two_nodes, num_ranks=2, backend="shm"):
        assert found == ({os.SCHED_BATCH}, {os.SCHED_OTHER})


def policy_of_a_thread_started_here() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(threading.get_native_id())))
    thread.start()
    thread.join()
    return found[0]


def test_only_threads_of_the_block_inherit_it() -> None:
    with pytest.raises(ZeroDivisionError), patient_threads():
        assert policy_of_a_thread_started_here() == os.SCHED_BATCH
        raise ZeroDivisionError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_thread_started_here() == os.SCHED_OTHER


def under_another_policy() -> tuple[int, int]:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with patient_threads():
        inside = policy_of_a_thread_started_here()
    return inside, os.sched_getscheduler(0)


def test_a_job_that_chose_its_policy_keeps_it(world: World) -> None:
    assert world.run(under_another_policy, num_ranks=1, backend=None) == [(os.SCHED_IDLE, os.SCHED_IDLE)]


def test_where_the_policy_cannot_change_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with caplog.at_level("INFO"), patient_threads():
        assert policy_of_a_thread_started_here() == os.SCHED_OTHER
    assert "cannot be changed here" in caplog.text
