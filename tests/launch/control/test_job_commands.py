"""Commands to a running launcher over its socket: who is asked, what is answered, what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from torsh_distributed.errors import CommunicationError, ConfigurationError, ProcessGroupNotFound
from torsh_distributed.launch.control.job_commands import JobCommands, RunningJob, ask_launcher, find_job, running_jobs
from torsh_distributed.launch.local.loop import Loop

JOB = RunningJob(pid=os.getpid(), run_id="a-job-of-this-test", num_ranks=2, node_rank=0, command="python train.py")


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A launcher's loop on a thread, open to commands."""

    def double(arguments: dict[str, Any], reply: Any) -> None:
        running.call_later(0.01, lambda: reply({"twice": 2 * arguments["number"]}))

    def end(_: dict[str, Any], reply: Any) -> None:
        reply({})
        running.stop(0)

    with Loop() as running, JobCommands(running, JOB, {"double": double, "end": end}):
        thread = threading.Thread(target=running.run)
        thread.start()
        yield running
        ask_launcher(JOB.pid, "end")
        thread.join(10)


def test_a_command_has_arguments_and_may_answer_later(loop: Loop) -> None:
    assert ask_launcher(JOB.pid, "double", number=21) == {"twice": 42}


def test_a_job_is_found_by_name_and_by_pid(loop: Loop) -> None:
    assert JOB in running_jobs()
    assert find_job(JOB.run_id) == find_job(str(JOB.pid)) == JOB
    with pytest.raises(ProcessGroupNotFound, match=r"(?s)no job named 'another'.*a-job-of-this-test"):
        find_job("another")


def test_of_two_jobs_with_one_name_the_pid_tells_which(loop: Loop) -> None:
    other = replace(JOB, pid=1 << 30)
    with JobCommands(loop, other, {}):
        with pytest.raises(ProcessGroupNotFound, match=r"(?s)several jobs are named.*give the pid"):
            find_job(JOB.run_id)
        assert find_job(str(other.pid)) == other


def test_what_is_not_known_is_not_answered(loop: Loop) -> None:
    with pytest.raises(CommunicationError, match="ended while it was asked"):
        ask_launcher(JOB.pid, "remove")


def test_one_process_has_one_job(loop: Loop) -> None:
    with Loop() as other, pytest.raises(ConfigurationError, match="this process runs a job already"):
        JobCommands(other, JOB, {})
