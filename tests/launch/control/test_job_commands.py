"""Commands to a running job: asked by name, by its own user, one name for one job."""

from __future__ import annotations

import os
import threading

import pytest

from torsh_distributed.errors import ConfigurationError, ProcessGroupNotFound
from torsh_distributed.launch.control.job_commands import JobCommands, ask_job, running_jobs
from torsh_distributed.launch.local.loop import Loop


def test_a_job_answers_by_its_name_which_no_other_job_can_have() -> None:
    name = f"test-{os.getpid()}"
    with Loop() as loop, JobCommands(loop, name, lambda question: {"heard": question["workers"]}):
        thread = threading.Thread(target=loop.run)
        thread.start()
        assert ask_job(name, {"command": "scale", "workers": 5}) == {"heard": 5}
        assert name in running_jobs()
        with Loop() as other, pytest.raises(ConfigurationError, match="runs on this machine already"):
            JobCommands(other, name, lambda question: question)
        loop.call_later(0, lambda: loop.stop(0))
        ask_job(name, {"workers": 0})  # wakes the loop
        thread.join(5)
    with pytest.raises(ProcessGroupNotFound, match=f"no elastic job called {name}"):
        ask_job(name, {})
