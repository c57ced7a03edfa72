"""The torsh backend between nodes under TLS: every operation, strangers, and what happens when a rank is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.backends.hierarchical.test_wire import everything, start, stop
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.comm.trust.job_tls import (
    CERTIFICATE_VARIABLE,
    background_backend,
    make_certificate,
    require_encryption,
)
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable

pytestmark = pytest.mark.needs_command("openssl")


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """The variables of a rank under TLS."""
    return {**make_certificate(tmp_path).variables(), "TORSH_JOB_TOKEN": "the secret of a test"}


@pytest.mark.parametrize("nodes", ["abca", pytest.param("ab", marks=pytest.mark.matrix)])
def test_every_operation_gives_what_it_must(world: World, nodes: str, tls: dict[str, str]) -> None:
    world.run(everything, nodes, num_ranks=len(nodes), backend=None, timeout_s=60, env=tls)


def meet_strangers(nodes: str) -> tuple[str, str]:
    """Strangers connect to whatever listens while the group is made, and after it."""
    assert CERTIFICATE_VARIABLE in os.environ
    before = _listeners()
    start(nodes)
    values = torch.full((3 * 2**20 + 1,), float(dist.get_rank() + 1))
    all_reduce(values)
    assert values.unique().tolist() == [sum(range(1, len(nodes) + 1))]
    left = _listeners() - before
    stop()
    return str(sorted(left)), str(dist.is_initialized())


def _listeners() -> set[str]:
    """Ports of this network on which anyone listens."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    inodes = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return {line.split()[1] for line in lines if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes}


def test_no_port_stays_open_when_the_group_is_made(world: World, tls: dict[str, str]) -> None:
    first, *_ = world.run(meet_strangers, "abc", num_ranks=3, backend=None, timeout_s=60, env=tls)
    # Rank 0 hosts torch's store, for this test alone.
    assert first[0].count(":") <= 1
    assert first[1] == "False"


def lose_a_rank(nodes: str) -> str:
    start(nodes)
    if dist.get_rank() == 1:
        abort("for a test")
        return ""
    with pytest.raises(CommunicationError) as raised:
        all_reduce(torch.ones(2**20))
    return raised.value.message


def test_a_rank_that_leaves_is_noticed_at_once(world: World, tls: dict[str, str]) -> None:
    results = world.run(lose_a_rank, "ab", num_ranks=2, backend=None, timeout_s=30, env=tls)
    assert "between the nodes" in results[0] or "left the group" in results[0]


def test_backends_without_encryption_are_refused(monkeypatch: pytest.MonkeyPatch, tls: dict[str, str]) -> None:
    require_encryption("gloo")
    assert background_backend() == "gloo"
    for name, value in tls.items():
        monkeypatch.setenv(name, value)
    assert background_backend() == "torsh"
    require_encryption("torsh")
    for name in ("gloo", "nccl", "mpi", "cpu:gloo,cuda:nccl"):
        with pytest.raises(FeatureNotAvailable, match="cannot encrypt"):
            require_encryption(name)


def refuse_plain_gloo() -> str:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True)
    with pytest.raises(RuntimeError) as raised:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return str(raised.value)


def test_torch_itself_does_not_fall_back_to_plain_gloo(world: World) -> None:
    """The wheel's gloo has no TLS; told to use it, it fails instead of sending in the clear."""
    (said,) = world.run(refuse_plain_gloo, num_ranks=1, backend=None, env={"GLOO_DEVICE_TRANSPORT": "TCP_TLS"})
    assert said
