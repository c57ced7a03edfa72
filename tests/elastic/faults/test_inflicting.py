"""Faults that a process survives, each with its real effect."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.lab.network import Lab
from torsh_distributed import events
from torsh_distributed.elastic import Fault, InjectedFault, inject
from torsh_distributed.elastic.faults.inflicting import flip_byte, inflict
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument

pytestmark = pytest.mark.ranks


def test_exceptions_are_those_that_are_named() -> None:
    with pytest.raises(InjectedFault, match="raise rank 0 at step 0"):
        inflict(Fault.parse("raise rank 0 at step 0"))
    with pytest.raises(torch.OutOfMemoryError):
        inflict(Fault.parse("out_of_memory rank 0 at step 0"))


def test_no_thread_runs_while_the_lock_is_held() -> None:
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    before = time.monotonic()
    inflict(Fault.parse("lock_gil rank 0 at step 0 for 0.2 s"))
    after = time.monotonic()
    is_over.set()
    thread.join()
    assert after - before >= 0.2
    assert len([at for at in ticks if before + 0.02 < at < after - 0.02]) == 0


FULL = """
import errno, sys, time
from torsh_distributed.elastic import Fault
from torsh_distributed.elastic.faults.inflicting import inflict
inflict(Fault.parse("disk_full rank 0 at step 0 for 0.1 s"))
try:
    with open(sys.argv[1], "w") as file:
        file.write("x" * 9999)
except OSError as error:
    assert error.errno == errno.EFBIG, error
else:
    sys.exit("it was written")
deadline = time.monotonic() + 10
while True:
    try:
        with open(sys.argv[1], "w") as file:
            file.write("x" * 9999)
        break
    except OSError:
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def test_a_full_disk_takes_no_bytes_until_it_is_over(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FULL, str(tmp_path / "file")], check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "x" * 9999


def test_one_byte_is_flipped(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(range(100)))
    place = flip_byte(file)
    now = file.read_bytes()
    assert [at for at in range(100) if now[at] != at] == [place]
    with pytest.raises(InvalidArgument, match="no checkpoint was saved yet"):
        inflict(Fault.parse("flip_byte rank 0 at step 0"))
    inflict(Fault.parse(f"flip_byte rank 0 at step 0 on {file}"))
    assert file.read_bytes() != now


@pytest.mark.needs_netns
def test_a_link_goes_down_and_comes_back() -> None:
    with Lab() as lab:
        host = lab.host(0)
        name = host.interface
        for text, shown in (
            (f"link_down rank 0 at step 0 on {name} for 0.2 s", "state DOWN"),
            (f"slow_link rank 0 at step 0 on {name} to 0.01 gbps for 0.2 s", "tbf"),
        ):
            code = (
                "from torsh_distributed.elastic import Fault\n"
                "from torsh_distributed.elastic.faults.inflicting import inflict\n"
                "import subprocess, time\n"
                f"show = lambda: subprocess.check_output(['ip', 'link', 'show', 'dev', '{name}'], text=True)\n"
                f"inflict(Fault.parse('{text}'))\n"
                f"assert '{shown}' in show(), show()\n"
                "deadline = time.monotonic() + 10\n"
                f"while '{shown}' in show():\n"
                "    assert time.monotonic() < deadline\n"
                "    time.sleep(0.02)\n"
            )
            process = host.popen([sys.executable, "-c", code])
            assert process.wait(timeout=60) == 0


def test_a_link_that_is_not_there_is_told() -> None:
    with pytest.raises(FeatureNotAvailable, match="link set dev nowhere0 down"):
        inflict(Fault.parse("link_down rank 0 at step 0 on nowhere0"))


def test_a_slow_rank_is_slow_from_its_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    took = []
    with inject("slow rank 1 at step 2 for 0.05 s", "delay rank 1 at step 1 in forward for 0.03 s"):
        for step in range(4):
            started = time.monotonic()
            events.reached("step", step)
            events.reached("forward")
            took.append(time.monotonic() - started)
    assert took[0] < 0.03 <= took[1]
    assert min(took[2:]) >= 0.05
