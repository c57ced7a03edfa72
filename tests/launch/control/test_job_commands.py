"""Commands to a running launcher over its socket: who is asked, what is answered, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from torsh_distributed.errors import CommunicationError, ConfigurationError, JobNotFound
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
    with pytest.raises(JobNotFound, match=r"(?s)no job named 'another'.*a-job-of-this-test"):
        find_job("another")


def test_of_two_jobs_with_one_name_the_pid_tells_which(loop: Loop) -> None:
    other = replace(JOB, pid=1 << 30)
    with JobCommands(loop, other, {}):
        with pytest.raises(JobNotFound, match=r"(?s)several jobs are named.*give the pid"):
            find_job(JOB.run_id)
        assert find_job(str(other.pid)) == other


def test_what_is_not_known_is_not_answered(loop: Loop) -> None:
    with pytest.raises(CommunicationError, match="ended while it was asked"):
        ask_launcher(JOB.pid, "remove")


def test_one_process_has_one_job(loop: Loop) -> None:
    with Loop() as other, pytest.raises(ConfigurationError, match="this process runs a job already"):
        JobCommands(other, JOB, {})


_SQUATTER = """
import os, socket, sys
pid, uid, names = int(sys.argv[1]), int(sys.argv[2]), []
os.setuid(65534)
for tail in ("", "-" + "0" * 32, "-" + "f" * 32):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.bind(f"\\0torsh-job-{uid}-{pid}{tail}")
    one.listen(0)
    names.append(one)
for other in range(1, 4):  # whose queues are full: whoever connects waits
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.bind(f"\\0torsh-job-{uid}-{other}-" + "0" * 32)
    one.listen(0)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(one.getsockname())
    names += [one, client]
print("bound", flush=True)
sys.stdin.read()
for one in names[:3]:
    one.setblocking(False)
    try:
        print(len(one.accept()[0].recv(100)), flush=True)
    except BlockingIOError:
        pass
"""


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process is started, which root alone can")
def test_a_strangers_sockets_stop_no_job_and_hear_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", _SQUATTER, str(JOB.pid), str(os.getuid())]
    stranger = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "bound\n"
    # Who waits for one of them waits longer than a test may take.
    monkeypatch.setitem(ask_launcher.__kwdefaults__, "timeout_s", 1000.0)
    with Loop() as running, JobCommands(running, JOB, {"end": lambda _, reply: (reply({}), running.stop(0))}):
        thread = threading.Thread(target=running.run)
        thread.start()
        assert [job.run_id for job in running_jobs() if job.pid == JOB.pid] == [JOB.run_id]
        ask_launcher(JOB.pid, "end")
        thread.join(10)
    heard, _ = stranger.communicate()
    assert [line for line in heard.splitlines() if line != "0"] == []
