"""Jobs between two machines: hosts of the network lab, with a link that can be cut."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.bed.world import World
from tests.lab.network import Host, Lab
from tests.launch.jobs import launch, write_script

pytestmark = [pytest.mark.needs_netns, pytest.mark.ranks]

PLAIN_TORCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(4):
    if step == 2 and rank == 1 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.full((4,), float(step))
    dist.all_reduce(total)
    assert total.tolist() == [2.0 * step] * 4
dist.destroy_process_group()
leave(f"finished-{rank}", os.environ["MASTER_ADDR"])
"""


@pytest.mark.matrix
def test_a_plain_torch_job_spans_two_hosts_and_survives_a_kill(world: World, lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts(2)
    before = second.counters()
    outcomes = launch(
        world,
        write_script(tmp_path, PLAIN_TORCH),
        num_nodes=2,
        hosts=[first, second],
        nproc_per_node=1,
        max_restarts=1,
        token="secret",
    )
    for outcome in outcomes:
        assert outcome.value == 0, outcome.output
        assert "rank 1 on node 1 (" in outcome.output
        assert "--no-token" not in outcome.output
    assert [(tmp_path / f"finished-{rank}").read_text() for rank in range(2)] == [first.address] * 2
    assert (second.counters() - before).tx_bytes > 0


def test_without_a_token_between_machines_the_user_is_warned(world: World, lab: Lab, tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    for outcome in launch(world, script, num_nodes=2, hosts=lab.hosts(2), token=None, allows_no_token=True):
        assert outcome.value == 0, outcome.output
        assert "--no-token: anyone who reaches the master port can join" in outcome.output


def pull_cable_when(present: list[Path], host: Host) -> None:
    """Runs in a thread beside the job: cut the host off once all the files are there."""
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in present) and time.monotonic() < deadline:
        time.sleep(0.01)
    host.link_down()


def test_a_host_whose_cable_is_pulled_is_named_and_both_sides_end(world: World, lab: Lab, tmp_path: Path) -> None:
    first, second = lab.hosts(2)
    script = write_script(tmp_path, 'leave(f"rank-{rank}")\nsignal.pause()\n')
    present = [tmp_path / f"rank-{rank}" for rank in range(4)]
    cutter = threading.Thread(target=pull_cable_when, args=(present, second))
    cutter.start()
    try:
        outcomes = launch(world, script, num_nodes=2, hosts=[first, second], token="secret", heartbeat_timeout_s=1.0)
    finally:
        cutter.join()
    assert [outcome.value for outcome in outcomes] == [1, 1], [outcome.output for outcome in outcomes]
    assert "node 1 (" in outcomes[0].output
    assert "node 0 (" in outcomes[1].output
    for outcome in outcomes:
        assert "its launcher is gone: no sign of life for" in outcome.output
