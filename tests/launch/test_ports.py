"""`--port-range`: nothing of a job listens anywhere else, torch's own sockets included."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.bed.world import World
from tests.lab.network import Lab
from tests.launch.jobs import launch, write_script
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch import ports
from torsh_distributed.launch.nodes.listening_sockets import listen_in_range
from torsh_distributed.launch.ports import RANGE_VARIABLE, can_be_preloaded, meeting_variables, port_variables
from torsh_distributed.launch.spec import Entry, JobSpec, parse_port_range
from torsh_distributed.native import PORT_LIMIT

built = pytest.mark.skipif(
    not (PORT_LIMIT.target.exists() and can_be_preloaded(str(PORT_LIMIT.target))),
    reason="the library was not built (no C compiler), or its path has a space",
)

LISTENING = """
import torch.distributed as dist
dist.init_process_group("gloo")
listening = []
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            listening.append(int(fields[1].rpartition(":")[2], 16))
dist.barrier()
leave(f"ports-{rank}", " ".join(map(str, sorted(set(listening)))))
dist.destroy_process_group()
"""


@built
@pytest.mark.matrix
def test_two_nodes_on_gloo_listen_within_the_range_alone(world: World, lab: Lab, tmp_path: Path) -> None:
    script = write_script(tmp_path, LISTENING)
    outcomes = launch(
        world,
        script,
        num_nodes=2,
        hosts=lab.hosts(2),
        port_range=(31_000, 31_020),
        per_node=[{"master_addr": "10.111.0.1", "master_port": None}] * 2,
    )
    assert [outcome.value for outcome in outcomes] == [0, 0], [outcome.output for outcome in outcomes]
    for rank in range(4):
        ports = [int(port) for port in (tmp_path / f"ports-{rank}").read_text().split()]
        assert len(ports) >= 2, ports
        assert all(31_000 <= port <= 31_020 for port in ports), ports


@built
def test_a_socket_on_any_port_gets_one_of_the_range_and_others_are_left_alone() -> None:
    code = """
        import socket
        some = [socket.create_server(("127.0.0.1", 0), reuse_port=False) for _ in range(3)]
        print(sorted(sock.getsockname()[1] for sock in some))
        chosen = socket.create_server(("127.0.0.1", 31_150)).getsockname()[1]
        six = socket.socket(socket.AF_INET6); six.bind(("::1", 0))
        datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); datagram.bind(("127.0.0.1", 0))
        print(chosen, 31_100 <= six.getsockname()[1] <= 31_102, 31_100 <= datagram.getsockname()[1] <= 31_102)
        try:
            socket.create_server(("127.0.0.1", 0))
        except OSError as error:
            print(error.errno)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=port_variables((31_100, 31_102), {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["[31100, 31101, 31102]", "31150 True False", str(errno.EADDRINUSE)], done


def test_the_store_takes_the_first_free_port_and_says_when_there_is_none() -> None:
    with listen_in_range("127.0.0.1", (31_200, 31_202), besides=31_200) as first:
        assert first.getsockname()[1] == 31_201
        with (
            listen_in_range("127.0.0.1", (31_201, 31_202), besides=0),
            pytest.raises(CommunicationError, match=r"no port of 31201-31202 on 127\.0\.0\.1 is free"),
        ):
            listen_in_range("127.0.0.1", (31_201, 31_202), besides=0)
    assert isinstance(first, socket.socket)


def test_a_path_that_the_linker_would_split_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "a b" / PORT_LIMIT.target.name
    target.parent.mkdir()
    target.touch()
    monkeypatch.setattr(ports, "PORT_LIMIT", PORT_LIMIT._replace(target=target))
    with pytest.raises(FeatureNotAvailable, match="no path with a space"):
        ports.require_port_limit()


@pytest.mark.parametrize(
    ("text", "message"),
    [("29500", "FIRST-LAST"), ("a-b", "FIRST-LAST"), ("2-1", "between 1 and 65535"), ("1-70000", "between 1")],
)
def test_what_is_no_range_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        JobSpec(entry=Entry(target="x.py"), port_range=parse_port_range(text))


def test_the_master_port_is_the_first_of_the_range_and_never_outside() -> None:
    assert JobSpec(entry=Entry(target="x.py"), port_range=(29_600, 29_700)).meeting_port == 29_600
    assert JobSpec(entry=Entry(target="x.py")).meeting_port == 29_500
    with pytest.raises(InvalidArgument, match="outside the port range 29600-29700"):
        JobSpec(entry=Entry(target="x.py"), port_range=(29_600, 29_700), master_port=29_500)


def test_where_ranks_meet_is_left_out_of_the_ports_that_anything_else_takes() -> None:
    """srun and mpiexec listen under the same limit."""
    found = meeting_variables((29_600, 29_700), {})
    assert (found["MASTER_PORT"], found[RANGE_VARIABLE]) == ("29600", "29601-29700")
    with pytest.raises(InvalidArgument, match="needs two or more"):
        meeting_variables((29_600, 29_600), {})
