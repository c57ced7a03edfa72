"""A job under observation: real workers, a real launcher, pages read while it runs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest

from tests.bed.ports import free_port
from tests.bed.world import World
from tests.launch.jobs import launch, write_script
from torsh_distributed.observe.settings import ObserveSettings

pytestmark = pytest.mark.ranks

# torch's own DDP, without a word of this library in the script.
PLAIN_LOOP = """
    import os, sys, time, torch, torch.distributed as dist
    dist.init_process_group("shm")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(2000):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 20:
            go = torch.tensor(float(os.path.exists(sys.argv[1])))
            dist.broadcast(go, 0)
            if go:
                break
            time.sleep(0.02)
    dist.destroy_process_group()
"""

NO_TORCH = ("--start-method", "spawn")
"""For scripts that do not import it: there is nothing to import once for all workers."""


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def start(folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--nproc-per-node", "2", *options]
    command += [str(path), str(folder / "stop")]
    env = {**os.environ, "NO_COLOR": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)


def test_a_plain_torch_loop_is_seen_while_it_runs_and_reported_at_the_end(tmp_path: Path) -> None:
    port, page_port = free_port(), free_port()
    options = ["--prometheus-port", str(port), "--dashboard", "--dashboard-port", str(page_port)]
    options += ["--html-report", "report.html", "--export", f"csv:{tmp_path}/metrics.csv", "--export", "otlp:nonsense"]
    job = start(tmp_path, PLAIN_LOOP, *options)
    try:
        deadline = time.monotonic() + 60
        text = ""
        while not all(f'torsh_learning_rate{{rank="{rank}"}} 0.25' in text for rank in (0, 1)):
            assert time.monotonic() < deadline, text
            assert job.poll() is None, job.communicate()
            try:
                text = get(f"http://127.0.0.1:{port}/metrics")
            except OSError:
                time.sleep(0.1)
        state = json.loads(get(f"http://127.0.0.1:{page_port}/state.json"))
        (tmp_path / "stop").touch()
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, errors
    assert 'torsh_collective_bytes_total{op="all_reduce",rank="1"}' in text
    steps = [float(number) for number in re.findall(r'torsh_steps_total\{rank="\d"\} ([\d.]+)', text)]
    assert len(steps) == 2
    assert min(steps) >= 1
    assert "torsh_node_memory_total_bytes{" in text
    assert state["job"]["world_size"] == 2
    assert state["job"]["backend"] == "shm"
    assert state["ranks"][0]["memory"] > 2**20
    assert "the export otlp:nonsense does not work" in errors
    assert "report: report.html" in errors
    report = (tmp_path / "report.html").read_text()
    (data,) = re.findall(r'id="state">(.*?)</script>', report, re.DOTALL)
    last = json.loads(data)
    assert last["job"]["state"] == "finished"
    assert len(last["curve"]["step"]) >= 20
    assert last["ranks"][1]["wait_share"] is not None
    assert "torsh_loss" not in text, "nobody told the loss, so there is none"
    assert (tmp_path / "metrics.csv").read_text().count("torsh_steps") >= 2


def test_a_taken_port_and_an_unwritable_report_are_warnings(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = ["--prometheus-port", port, "--html-report", "/proc/no/report.html"]
        job = start(tmp_path, "print('trained')", *NO_TORCH, *options, "--dashboard", "--dashboard-port", port)
        output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, errors
    assert output.count("trained") == 2
    assert "the metrics page does not work: [Errno 98] Address already in use" in errors
    assert f"port {port} is taken: the dashboard takes another" in errors
    assert "dashboard at http://127.0.0.1:" in errors
    assert "the report does not work" in errors


def test_nobody_looks_and_nothing_is_started(tmp_path: Path) -> None:
    script = "import os, threading\nprint(os.environ.get('TORSH_METRICS'), threading.active_count())"
    job = start(tmp_path, script, *NO_TORCH)
    output, errors = job.communicate(timeout=60)
    assert output.count("None 2") == 2, (output, errors)


def test_node_0_sees_the_ranks_of_all_nodes_across_a_restart(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        from torsh_distributed import events, observe
        from torsh_distributed.launch.worker.recording.event_recording import report_metrics
        report_metrics()
        if attempt == 0 and rank == 3:
            sys.exit(7)
        for step in range(1, 4):
            events.emit(events.StepEvent(step=step, loss=1.0 / step, duration_s=0.01, num_samples=4))
        observe.metric("accuracy", unit="share").record(rank / 10)
        if attempt == 0:
            signal.pause()
        """,
    )
    report = tmp_path / "report.html"
    settings = ObserveSettings(report=str(report))
    first, second = launch(
        world, script, num_nodes=2, max_restarts=1, per_node=[{"observe": settings}, {"observe": ObserveSettings()}]
    )
    assert (first.value, second.value) == (0, 0), first.output + second.output
    assert f"report: {report}" in first.output
    (data,) = re.findall(r'id="state">(.*?)</script>', report.read_text(), re.DOTALL)
    state = json.loads(data)
    assert [rank["rank"] for rank in state["ranks"]] == [0, 1, 2, 3]
    assert [rank["step"] for rank in state["ranks"]] == [3, 3, 3, 3]
    (custom,) = state["custom"]
    assert (custom["name"], custom["low"], custom["high"]) == ("accuracy", 0.0, 0.3)
    told = [incident["action"] for incident in state["incidents"] if incident["type"] == "membership"]
    assert told == ["started", "lost", "restarted", "ended"]
    assert (state["job"]["attempt"], state["job"]["exit_code"]) == (1, 0)
    assert state["job"]["num_nodes"] == 2
