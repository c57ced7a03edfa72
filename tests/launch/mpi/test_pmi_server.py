"""PMI-1 as MPICH speaks it, line by line, and the server's socket."""

from __future__ import annotations

import socket

import pytest

from torsh_distributed.launch.mpi.pmi_server import PmiServer, PmiWorld


def test_values_put_by_one_rank_are_got_by_another() -> None:
    world = PmiWorld(2)
    assert world.answer(0, "cmd=put kvsname=x key=P0-addr value=abc#12=") == [(0, "cmd=put_result rc=0")]
    assert world.answer(1, "cmd=get kvsname=x key=P0-addr") == [(1, "cmd=get_result rc=0 value=abc#12=")]
    assert world.answer(1, "cmd=get kvsname=x key=nothing") == [(1, "cmd=get_result rc=-1 msg=key_not_found")]


def test_the_barrier_opens_for_all_at_once_and_again() -> None:
    world = PmiWorld(3)
    for _ in range(2):
        assert world.answer(2, "cmd=barrier_in") == []
        assert world.answer(0, "cmd=barrier_in") == []
        assert sorted(world.answer(1, "cmd=barrier_in")) == [(rank, "cmd=barrier_out rc=0") for rank in range(3)]


def test_ranks_are_told_that_they_share_a_node() -> None:
    [(_, reply)] = PmiWorld(4).answer(0, "cmd=get kvsname=x key=PMI_process_mapping")
    assert reply == "cmd=get_result rc=0 value=(vector,(0,1,4))"


def test_two_worlds_have_different_names() -> None:
    names = {PmiWorld(1).answer(0, "cmd=get_my_kvsname")[0][1] for _ in range(2)}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("cmd=publish_name service=a port=b", "cmd=publish_name_result rc=-1 msg=not_supported"),
        ("endcmd", "cmd=spawn_result rc=-1 msg=not_supported"),
    ],
)
def test_what_is_not_supported_is_refused(line: str, reply: str) -> None:
    assert PmiWorld(1).answer(0, line) == [(0, reply)]


def talk(server: PmiServer, *lines: str) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(10)
        link.connect(f"\0{server.address}")
        link.sendall("".join(f"{line}\n" for line in lines).encode())
        try:
            return link.recv(1000)
        except ConnectionResetError:
            return b""


def test_every_attempt_has_a_world_of_its_own() -> None:
    with PmiServer(1) as server:
        put = "cmd=put kvsname=x key=a value=1"
        assert talk(server, "0 0", put) == b"cmd=put_result rc=0\n"
        assert talk(server, "1 0", "cmd=get kvsname=x key=a") == b"cmd=get_result rc=-1 msg=key_not_found\n"
        assert talk(server, "0 0", "cmd=get kvsname=x key=a") == b"cmd=get_result rc=0 value=1\n"


def test_a_stranger_is_hung_up_on_and_the_workers_are_served_on() -> None:
    with PmiServer(1) as server:
        assert talk(server, "hello?") == b""
        assert talk(server, "0 0", "cmd=get kvsname=x") == b""
        assert talk(server, "0 0", "cmd=get_appnum") == b"cmd=appnum appnum=0 rc=0\n"
