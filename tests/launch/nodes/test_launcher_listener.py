"""Who is let in by the leader: nodes that fit the job."""

from __future__ import annotations

import dataclasses

from torsh_distributed.comm.meeting.software_versions import own_software
from torsh_distributed.launch.nodes.launcher_listener import disagreement
from torsh_distributed.launch.nodes.records import JoinRequest
from torsh_distributed.launch.spec import Entry, JobSpec


def test_a_node_with_another_torch_is_not_let_in() -> None:
    spec = JobSpec(entry=Entry(target="x.py"), nnodes=2, nproc_per_node=1, run_id="r")
    fitting = JoinRequest(
        node_rank=1,
        node_name="b",
        nnodes=2,
        nproc_per_node=1,
        max_restarts=0,
        run_id="r",
        clock_s=0.0,
        **dataclasses.asdict(own_software()),
    )
    assert disagreement(spec, fitting) is None
    other = disagreement(spec, dataclasses.replace(fitting, torch="1.13.0"))
    assert other == f"torch is 1.13.0 there and {own_software().torch} on node 0"
