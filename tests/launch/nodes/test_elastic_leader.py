"""Two kinds of leader: what a job whose workers stay the same answers, and one whose workers come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.terminal import Terminal
from torsh_distributed.launch.nodes.coordinator import JobPhase
from torsh_distributed.launch.nodes.elastic_leader import ElasticLeader
from torsh_distributed.launch.nodes.leader import Leader
from torsh_distributed.launch.nodes.records import (
    AddWorker,
    ChangeMembers,
    End,
    Failed,
    FromLeader,
    MemberSaid,
    Start,
    Unable,
)
from torsh_distributed.launch.spec import ElasticSpec, Entry, JobSpec

ELASTIC = ElasticSpec(min_workers=1, max_workers=4)
SPEC = JobSpec(entry=Entry(target="x.py"), nproc_per_node=2, run_id="r")
LOST = Failed(attempt=0, failure=EndReport(node_rank=0, node_name="n", rank=1, exit_code=3, cause="exit code 3"))


@pytest.mark.ranks
def test_workers_that_stay_the_same_cannot_be_scaled_and_a_lost_one_ends_the_job(tmp_path: Path) -> None:
    told: list[FromLeader] = []
    with (
        Loop() as loop,
        Terminal() as terminal,
        Leader(SPEC, loop, LauncherOutput(terminal), token="t", directory=tmp_path) as leader,
    ):
        leader.join(0, told.append)
        assert isinstance(told[-1], Start)
        assert "not started with --elastic" in leader.scale(3)["text"]
        leader.lose(EndReport(node_rank=0, node_name="n", cause="its disk is gone"))
        assert isinstance(told[-1], End)
        assert leader.coordinator.phase is JobPhase.OVER


@pytest.mark.ranks
@pytest.mark.parametrize("scales_first", [False, True])
def test_workers_that_come_and_go_are_replaced_and_scaled(tmp_path: Path, scales_first: bool) -> None:
    told: list[FromLeader] = []
    with (
        Loop() as loop,
        Terminal() as terminal,
        ElasticLeader(SPEC, ELASTIC, loop, LauncherOutput(terminal), token="t", directory=tmp_path) as leader,
    ):
        if scales_first:
            assert leader.scale(3) == {"is_done": False, "text": "the job is gathering"}
        leader.join(0, told.append)
        for member in range(2):
            leader.receive(0, MemberSaid(attempt=0, member=member, what="ready"))
        leader.receive(0, LOST)
        assert leader.coordinator.phase is JobPhase.RUNNING
        assert [one.members for one in told if isinstance(one, ChangeMembers)] == [(0,)]
        assert len([one for one in told if isinstance(one, AddWorker)]) == 1
        assert leader.scale(4)["is_done"]
        assert "outside the 1 to 4" in leader.scale(5)["text"]


@pytest.mark.ranks
def test_a_replacement_goes_to_a_node_that_has_a_gpu_for_it(tmp_path: Path) -> None:
    told: list[FromLeader] = []
    spec = JobSpec(entry=Entry(target="x.py"), nproc_per_node=1, nnodes=2, run_id="r", master_addr="127.0.0.1")
    with (
        Loop() as loop,
        Terminal() as terminal,
        ElasticLeader(spec, ELASTIC, loop, LauncherOutput(terminal), token="t", directory=tmp_path) as leader,
    ):
        leader.join(0, told.append)
        leader.join(1, lambda _: None)
        for member in range(2):
            leader.receive(member, MemberSaid(attempt=0, member=member, what="ready"))
        lost = EndReport(node_rank=1, node_name="n", rank=1, exit_code=3, cause="exit code 3")
        leader.receive(1, Failed(attempt=0, failure=lost))
        leader.receive(0, MemberSaid(attempt=0, member=0, what="entered", epoch=1))
        lacking = EndReport(node_rank=1, node_name="n", rank=2, cause="no GPU is left", lacks_gpu=True)
        leader.receive(1, Failed(attempt=0, failure=lacking))
        assert leader.coordinator.phase is JobPhase.RUNNING
    assert [one.node_rank for one in told if isinstance(one, AddWorker)] == [1, 0]


@pytest.mark.ranks
@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_node_that_cannot_start_its_workers_ends_the_job(tmp_path: Path, is_elastic: bool) -> None:
    told: list[FromLeader] = []
    with Loop() as loop, Terminal() as terminal:
        output = LauncherOutput(terminal)
        made = (
            ElasticLeader(SPEC, ELASTIC, loop, output, token="t", directory=tmp_path)
            if is_elastic
            else Leader(SPEC, loop, output, token="t", directory=tmp_path)
        )
        with made as leader:
            leader.join(0, told.append)
            failure = EndReport(node_rank=0, node_name="n", cause="1 GPU is left for 2 workers", lacks_gpu=True)
            leader.receive(0, Unable(attempt=7, failure=failure))
            assert leader.coordinator.phase is JobPhase.RUNNING, "of an attempt that is over"
            leader.receive(0, Unable(attempt=0, failure=failure))
            assert told[-1] == End(exit_code=1, failure=failure)
