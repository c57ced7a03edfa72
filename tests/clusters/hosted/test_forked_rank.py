"""Ranks of a script on one node, hosted by several processes of an engine: one interpreter imports torch for all."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.clusters.hosted.forked_rank import RankForker, can_fork
from torsh_distributed.clusters.hosted.rank_host import EntryWork, RankOutcome, RankTask
from torsh_distributed.clusters.hosted.rank_run import RankRun
from torsh_distributed.launch.spec import Entry

SCRIPT = """
import os, sys
had_torch = "torch" in sys.modules
print("argument", *sys.argv[1:], "has torch", had_torch, "in", os.getcwd(), "leads", os.getsid(0) == os.getpid())
print("mine", os.environ["RANK"], os.environ["COLOUR"], os.environ["OMP_NUM_THREADS"], __name__, sys.path[0])
if os.environ["RANK"] == "1":
    raise ValueError("of rank 1")
sys.exit(7)
"""


def host(rank: int, folder: Path, *, own_interpreter: bool, size: int = 2) -> tuple[RankRun, list[str]]:
    lines: list[str] = []

    def say(message: Mapping[str, Any]) -> None:
        lines.append(str(message["line"]))

    task = RankTask(
        member=rank,
        variables={"RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "COLOUR": f"colour {rank}"},
        secret=f"a secret of {folder}",
        work=EntryWork(
            entry=Entry(target="job.py", args=("one",)), working_dir=str(folder), own_interpreter=own_interpreter
        ),
    )
    return RankRun(task, say=say), lines


@pytest.mark.ranks
def test_ranks_of_a_node_are_forked_and_end_as_their_own_interpreters_would(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    found: dict[bool, list[tuple[RankOutcome, list[str]]]] = {}
    for own_interpreter in (False, True):
        hosts = [host(rank, tmp_path, own_interpreter=own_interpreter) for rank in range(2)]
        outcomes: dict[int, RankOutcome] = {}

        def run(rank: int, one: RankRun, outcomes: dict[int, RankOutcome] = outcomes) -> None:
            outcomes[rank] = one.run()

        threads = [threading.Thread(target=run, args=(rank, one)) for rank, (one, _) in enumerate(hosts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=100)
        found[own_interpreter] = [(outcomes[rank], lines) for rank, (_, lines) in enumerate(hosts)]
    for rank in range(2):
        (forked, said), (own, own_said) = found[False][rank], found[True][rank]
        assert said[:2] == [line.replace("has torch False", "has torch True") for line in own_said[:2]]
        assert said[0] == f"argument one has torch True in {tmp_path} leads True"
        assert said[1] == f"mine {rank} colour {rank} 1 __main__ {tmp_path}"
        assert forked.failure is not None
        assert own.failure is not None
        assert forked.failure == own.failure
    assert [outcome.failure.exit_code for outcome, _ in found[False] if outcome.failure is not None] == [7, 1]
    assert "spare.py" not in str(found[False][1][0].failure)


@pytest.mark.ranks
def test_a_rank_that_waits_for_torch_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    run, lines = host(0, tmp_path, own_interpreter=False)
    start = RankForker._start

    def start_and_abort(forker: RankForker) -> bool:
        is_started = start(forker)
        threading.Thread(target=run.abort, args=("the job ends",)).start()
        return is_started

    monkeypatch.setattr(RankForker, "_start", start_and_abort)
    outcome = run.run()
    assert outcome.failure is not None
    assert "ended before this rank had started" in outcome.failure.message
    assert lines == []


def test_a_rank_alone_on_its_node_or_with_faults_has_its_own_interpreter() -> None:
    assert can_fork({"LOCAL_WORLD_SIZE": "2"})
    assert not can_fork({})
    assert not can_fork({"LOCAL_WORLD_SIZE": "2", "TORSH_FAULTS": "kill rank 1 at step 2"})
