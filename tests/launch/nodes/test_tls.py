"""`torsh run --tls` on two nodes: what crosses the network is read by nobody, and who does not encrypt stays out.

A listener on node 0's link keeps every packet. The job puts the same words into its store, its records and its tensors;
without TLS all of them are found in the packets, which shows that the listener works.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.network import Host, Lab

pytestmark = [pytest.mark.needs_netns, pytest.mark.ranks, pytest.mark.needs_command("openssl")]

LISTENER = """
import socket, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
link.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
link.bind(("eth0", 0))
link.settimeout(0.2)
print("listens", flush=True)
with open(sys.argv[1], "wb") as file:
    while True:
        try:
            file.write(link.recv(1 << 17)[40:])
        except TimeoutError:
            file.flush()
"""
SCRIPT = """
import os, sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torsh_distributed as td
from torsh_distributed.comm.meeting.rendezvous import open_job_store

td.init()
rank, size = td.rank(), td.world_size()
store = open_job_store(os.environ["TORSH_STORE"], timedelta(seconds=30))
store.set(f"note-{rank}", b"words-in-the-store " * 20)
store.wait([f"note-{other}" for other in range(size)], timedelta(seconds=30))
words = torch.frombuffer(bytearray(b"words-in-a-tensor  " * 4096), dtype=torch.uint8).clone()
received = words if rank == 0 else torch.zeros_like(words)
dist.broadcast(received, 0)
assert torch.equal(received, words)
total = torch.full((2**20 + 3,), float(rank + 1))
td.all_reduce(total)
assert total.unique().tolist() == [sum(range(1, size + 1))]
print("words-in-the-output", "rank", rank, "encrypted" if "TORSH_TLS_CERT" in os.environ else "plain", flush=True)
td.destroy_process_group()
"""


def command(host: Host, folder: Path, node_rank: int, *options: str) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    nodes = ["--nnodes", "2", "--node-rank", str(node_rank), "--master-addr", "10.111.0.1", "--master-port", "29615"]
    nodes += ["--nproc-per-node", "1", "--start-method", "spawn"]  # there is nobody to share an import with
    nodes += ["--token-file", str(folder / "token"), "--join-timeout", "30"]
    return [sys.executable, "-m", "torsh_distributed.run", *nodes, *options, str(folder / "train.py")]


def run_both(lab: Lab, folder: Path, first: list[str], second: list[str]) -> tuple[list[int], str, bytes]:
    """Exit codes, what the launchers said, and what was on the wire."""
    hosts = lab.hosts(2)
    packets = folder / "packets"
    listener = hosts[0].popen([sys.executable, "-c", LISTENER, str(packets)], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    assert listener.stdout.readline() == "listens\n"
    launchers = [
        host.popen(command(host, folder, rank, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank, (host, options) in enumerate(zip(hosts, (first, second), strict=True))
    ]
    said = [launcher.communicate(timeout=100)[0] for launcher in launchers]
    size = -1
    while size != packets.stat().st_size:  # until the listener has written what it has heard
        size = packets.stat().st_size
        time.sleep(0.5)
    listener.kill()
    listener.wait(timeout=10)
    listener.stdout.close()
    return [launcher.returncode for launcher in launchers], "\n".join(said), packets.read_bytes()


WORDS = (b"words-in-the-store", b"words-in-a-tensor", b"nproc_per_node")


def test_nothing_can_be_read_on_the_way(lab: Lab, tmp_path: Path) -> None:
    codes, said, packets = run_both(lab, tmp_path, ["--tls"], ["--tls"])
    assert codes == [0, 0], said
    assert said.count("encrypted") == 2, said
    assert [word for word in WORDS if word in packets] == []
    assert len(packets) > 4 * 2**20, "and there was something to read"


@pytest.mark.matrix
def test_without_tls_the_listener_hears_everything(lab: Lab, tmp_path: Path) -> None:
    codes, said, packets = run_both(lab, tmp_path, [], [])
    assert codes == [0, 0], said
    assert [word for word in WORDS if word not in packets] == []


@pytest.mark.matrix
def test_a_node_that_does_not_encrypt_stays_out(lab: Lab, tmp_path: Path) -> None:
    brief = ["--join-timeout", "4"]
    codes, said, packets = run_both(lab, tmp_path, ["--tls", *brief], brief)
    assert 0 not in codes, said
    assert "--tls if the others have it" in said
    assert [word for word in WORDS if word in packets] == []


@pytest.mark.matrix
def test_plain_gloo_is_refused_in_words(lab: Lab, tmp_path: Path) -> None:
    script = SCRIPT.replace("td.init()", "td.init(backend='gloo')")
    (tmp_path / "plain.py").write_text(script)
    hosts = lab.hosts(2)
    launchers = [
        host.popen(
            [*command(host, tmp_path, rank, "--tls")[:-1], str(tmp_path / "plain.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate(hosts)
    ]
    said = "\n".join(launcher.communicate(timeout=100)[0] for launcher in launchers)
    assert all(launcher.returncode for launcher in launchers)
    assert "gloo cannot encrypt what goes between nodes" in said


TRAINING = """
import sys

import torch
import torsh_distributed as td

td.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
plan = td.Plan(dp=2)
engine = td.parallelize(model, optimizer, plan, loss_fn=torch.nn.functional.mse_loss)
generator = torch.Generator().manual_seed(td.rank())
losses = []
for step in range(6):
    batch = (torch.randn(16, 32, generator=generator), torch.ones(16, 1))
    loss = torch.as_tensor(float(engine.step(batch)))
    td.all_reduce(loss, "mean")
    losses.append(round(loss.item(), 6))
engine.save(sys.argv[1])
engine.load(sys.argv[1])
if td.rank() == 0:
    print("losses", losses, flush=True)
td.destroy_process_group()
"""


@pytest.mark.matrix
def test_training_under_tls_has_the_losses_of_training_without(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    found = []
    for number, options in enumerate(([], ["--tls"])):
        line = [str(tmp_path / "training.py"), str(tmp_path / f"checkpoint-{number}")]
        launchers = [
            host.popen(
                [*command(host, tmp_path, rank, *options)[:-1], *line],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank, host in enumerate(lab.hosts(2))
        ]
        said = "\n".join(launcher.communicate(timeout=100)[0] for launcher in launchers)
        assert [launcher.returncode for launcher in launchers] == [0, 0], said
        found.append(next(line.partition("losses")[2] for line in said.splitlines() if "losses [" in line))
    assert found[0] == found[1]
