"""Dask clusters for the tests: a LocalCluster, and a scheduler with workers that are processes of their own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.bed.needs import library


@pytest.fixture(scope="module", autouse=True)
def _dask_threads() -> None:
    """Let Dask start the threads that it keeps for the whole process, so that no test is blamed for them."""
    if library("distributed") is not None:
        return
    from concurrent.futures import ThreadPoolExecutor

    from distributed.client import Future
    from distributed.utils import _offload_executor

    _offload_executor.submit(int).result()
    if Future._cb_executor is None:
        Future._cb_executor = ThreadPoolExecutor(1, thread_name_prefix="Dask-Callback-Thread")
        Future._cb_executor_pid = os.getpid()
    Future._cb_executor.submit(int).result()


@pytest.fixture(scope="module")
def dask_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a real LocalCluster: a scheduler in this process, two workers under nannies."""
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=":0",
            worker_dashboard_address=":0",
            # Its own: in the shared one it first purges what killed workers left, and a slow disk makes that a warning.
            local_directory=str(tmp_path_factory.mktemp("dask")),
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


class DaskProcesses:
    """A scheduler and workers as a user starts them on machines. Each leads a session, and all of it ends with it.

    If the test run is killed, the scheduler ends when it has been idle for a while, and the workers after it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "scheduler.json"
        self._started: list[subprocess.Popen[bytes]] = []
        self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--idle-timeout", "300 s")
        deadline = time.monotonic() + 120
        while not self._file.exists():
            assert time.monotonic() < deadline, "the scheduler does not start"
            time.sleep(0.02)
        self.address = str(json.loads(self._file.read_text())["address"])

    def _start(self, what: str, *further: str) -> None:
        command = [sys.executable, "-m", "dask", what, "--scheduler-file", str(self._file), "--no-dashboard", *further]
        root = Path(__file__).parents[3]
        self._started.append(
            subprocess.Popen(
                command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        )

    def add_worker(self, *, has_nanny: bool = True) -> None:
        """One more worker process."""
        nanny = "--nanny" if has_nanny else "--no-nanny"
        self._start("worker", "--nthreads", "1", "--host", "127.0.0.1", nanny, "--death-timeout", "60")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in reversed(self._started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            # A nanny that did not end in time, and workers that outlived theirs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)


@pytest.fixture(scope="module")
def dask_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaskProcesses, Any]]:
    """A scheduler and two workers under nannies, and a client of them."""
    from distributed import Client

    with DaskProcesses(tmp_path_factory.mktemp("dask")) as processes:
        for _ in range(2):
            processes.add_worker()
        with Client(processes.address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=120)
            yield processes, client
