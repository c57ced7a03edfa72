"""Clusters: from submitting a job to its first step, by engine; and thousands of ranks that join at once."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.cases.cluster_ray import actor_start, local_ray
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from benchmarks.light_ranks import JoinCost, join_ranks, most_ranks
from tests.bed import needs
from tests.clusters.dask.conftest import DaskProcesses
from tests.lab.network import Lab
from tests.lab.slurm_cluster import PROGRAMS, SlurmCluster
from tests.lab.ssh_hosts import SshHosts
from torsh_distributed.clusters.dask.dask_connection import client_of

_TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point"]
_TIMEOUT_S = 120.0
_FIRST, _JOINS = "submit", "ranks join"
_FIRST_STEP = """
import torch
from torch import nn

import torsh_distributed as td

td.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = td.parallelize(model, optimizer, td.Plan(training={"steps": 1}), loss_fn=nn.functional.mse_loss)
engine.step((torch.randn(32, 64), torch.randn(32, 64)))
if td.rank() == 0:
    print("first step", flush=True)
"""
Run = Callable[..., subprocess.Popen[str]]


def _until_first_step(command: list[str], run: Run) -> float:
    """Seconds from the command to the line that rank 0 prints after its first step; the job is then left to end."""
    start_s = time.perf_counter()
    process = run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said, taken_s = [], None
    for line in process.stdout:
        said.append(line)
        if "first step" in line and taken_s is None:
            taken_s = time.perf_counter() - start_s
    code = process.wait(timeout=_TIMEOUT_S)
    process.stdout.close()
    if code or taken_s is None:
        raise RuntimeError(f"`{' '.join(command)}` ended with {code}:\n{''.join(said)}")
    return taken_s


def _submit(engine: str, ranks: list[str], *settings: str) -> list[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return [*_TORSH, "submit", "--to", engine, *ranks, *words, "--follow"]


def _here(**env: str) -> Run:
    def run(command: list[str], **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(command, env={**os.environ, **env}, text=True, **options)  # type: ignore[call-overload,no-any-return]

    return run


def _mpi(ranks: list[str], state: dict[str, str]) -> Iterator[tuple[str, list[str], Run] | Note]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for name, program in (("MPICH", needs.mpiexec()), ("Open MPI", "mpiexec.openmpi")):
        if shutil.which(program) is None:
            yield Note(text=f"No row for {name}: there is no {program} on this machine.")
        else:
            yield f"mpi ({name})", _submit("mpi", ranks, f"mpiexec={program}"), _here(**state, **root)


def _slurm(
    stack: contextlib.ExitStack, folder: Path, ranks: list[str], state: dict[str, str]
) -> Iterator[tuple[str, list[str], Run] | Note]:
    if os.geteuid() != 0 or any(shutil.which(program) is None for program in PROGRAMS):
        yield Note(text="No row for SLURM: it is not installed here, or this user is not root.")
        return
    (folder / "slurm").mkdir()
    slurm = stack.enter_context(SlurmCluster(folder / "slurm"))
    yield "slurm", _submit("slurm", ranks), _here(**state, **slurm.env)


def _ssh(
    stack: contextlib.ExitStack, folder: Path, num_ranks: int, state: dict[str, str]
) -> Iterator[tuple[str, list[str], Run] | Note]:
    if needs.netns() is not None or shutil.which("/usr/sbin/sshd") is None:
        yield Note(text="No row for SSH: no network namespaces or no sshd here.")
        return
    lab = stack.enter_context(Lab())
    (folder / "ssh").mkdir()
    ssh = stack.enter_context(SshHosts(lab.hosts(2), folder / "ssh"))
    two_hosts = ["--nodes", "2", "--nproc-per-node", str(num_ranks // 2)]
    submitter = lab.host(2)
    yield (
        "ssh, two hosts",
        _submit("ssh", two_hosts, "hosts=node0,node1", f"config={ssh.config}"),
        lambda words, **options: submitter.popen(words, env=state, **options),
    )


def _dask(
    stack: contextlib.ExitStack, folder: Path, num_ranks: int, ranks: list[str], state: dict[str, str]
) -> Iterator[tuple[str, list[str], Run] | Note]:
    if (missing := needs.library("distributed")) is not None:
        yield Note(text=f"No row for Dask: {missing}.")
        return
    (folder / "dask").mkdir()
    processes = stack.enter_context(DaskProcesses(folder / "dask"))
    for _ in range(num_ranks):
        processes.add_worker()
    with client_of(processes.address) as client:
        client.wait_for_workers(num_ranks, timeout=_TIMEOUT_S)
    yield "dask", _submit("dask", ranks, f"address={processes.address}", "start_timeout_s=120"), _here(**state)


def _in_turns(command: list[str], run: Run, plain: list[str], num_samples: int) -> tuple[list[float], list[float]]:
    """Seconds to the first step by a command, and by `torsh run`."""
    ours, base = [], []
    for _ in range(num_samples):
        ours.append(_until_first_step(command, run))
        base.append(_until_first_step(plain, _here()))
    return ours, base


def _first_steps(budget: Budget, folder: Path) -> Iterator[Row | Note]:
    """The engines that this machine has, each in turns with `torsh run`."""
    num_ranks, num_samples = (2, 1) if budget.is_quick else (4, 3)
    script = folder / "job" / "first_step.py"
    script.parent.mkdir()  # of its own: Ray uploads the working directory
    script.write_text(_FIRST_STEP)
    state = {"TORSH_STATE_DIR": str(folder / "state")}
    ranks = ["--nproc-per-node", str(num_ranks), "--working-dir", str(script.parent)]
    plain = [*_TORSH, "run", "--nproc-per-node", str(num_ranks), str(script)]
    _until_first_step(plain, _here())  # fills the page cache, for whoever would come first
    for engine in (
        lambda _: _mpi(ranks, state),
        lambda stack: _slurm(stack, folder, ranks, state),
        lambda stack: _ssh(stack, folder, num_ranks, state),
        lambda stack: _dask(stack, folder, num_ranks, ranks, state),
    ):
        with contextlib.ExitStack() as stack:
            for found in engine(stack):
                if isinstance(found, Note):
                    yield found
                    continue
                name, command, run = found
                ours, base = _in_turns([*command, str(script)], run, plain, num_samples)
                yield Row(
                    name=f"submit --to {name}, {num_ranks} ranks: command to first step",
                    unit=Unit.SECONDS,
                    ours=Measurement.of(ours),
                    rivals={"torsh run": Measurement.of(base)},
                )
    yield from _ray_first_steps(folder, script, num_ranks, num_samples, plain, ranks, state)


def _ray_first_steps(
    folder: Path,
    script: Path,
    num_ranks: int,
    num_samples: int,
    plain: list[str],
    ranks: list[str],
    state: dict[str, str],
) -> Iterator[Row | Note]:
    """Ray, whose actors start first: what that takes is measured beside it."""
    if (missing := needs.library("ray")) is not None:
        yield Note(text=f"No row for Ray: {missing}.")
        return
    (folder / "ray").mkdir()
    with local_ray(folder / "ray", include_dashboard=True) as ray:
        address = f"address=http://{ray._private.worker.global_worker.node.webui_url}"
        python = f"python={sys.executable}"
        command = [*_submit("ray", ranks, address, python), str(script)]
        apart = [*_submit("ray", ranks, address, python, "own_interpreters=yes"), str(script)]
        _until_first_step(command, _here(**state))  # starts the job server's own processes
        taken: dict[str, list[float]] = {"ours": [], "apart": [], "run": [], "actors": []}
        for _ in range(num_samples):
            taken["ours"].append(_until_first_step(command, _here(**state)))
            taken["run"].append(_until_first_step(plain, _here()))
            taken["apart"].append(_until_first_step(apart, _here(**state)))
            taken["actors"].append(actor_start(ray, num_ranks))
    together = [one + other for one, other in zip(taken["run"], taken["actors"], strict=True)]
    rivals = {"torsh run": Measurement.of(taken["run"]), "torsh run + start of actors": Measurement.of(together)}
    for who, name in (("ours", ""), ("apart", ", an interpreter for each")):
        yield Row(
            name=f"submit --to ray, {num_ranks} ranks{name}: command to first step",
            unit=Unit.SECONDS,
            ours=Measurement.of(taken[who]),
            rivals=rivals,
        )
    yield Note(
        text=f"submit: {num_ranks} empty actors of Ray start in {Measurement.of(taken['actors']).median:.2f} s. Ranks "
        "on Ray and Dask are forked from one process of their node that has imported torch; `torsh run` gives each an "
        "interpreter, and so does `--set own_interpreters=yes`."
    )


def _joins(budget: Budget) -> Iterator[Row | Note]:
    """How the meeting of all ranks grows with their number."""
    sizes = (50, 200) if budget.is_quick else (1_000, min(10_000, most_ranks()))
    num_samples = 1 if budget.is_quick else 3
    found: dict[int, list[JoinCost]] = {size: [join_ranks(size) for _ in range(num_samples)] for size in sizes}
    for size, costs in found.items():
        for what, unit, values in (
            ("all joined", Unit.SECONDS, [cost.wall_s for cost in costs]),
            ("processor time of the store", Unit.SECONDS, [cost.store_cpu_s for cost in costs]),
            ("memory of the store, at most", Unit.BYTES, [float(cost.store_peak_bytes) for cost in costs]),
        ):
            yield Row(name=f"{size:,} ranks join: {what}", unit=unit, ours=Measurement.of(values))
    few, many = (min(found[size], key=lambda cost: cost.wall_s) for size in sizes)
    allowed = (many.num_ranks * math.log2(many.num_ranks)) / (few.num_ranks * math.log2(few.num_ranks))
    yield Note(
        text=f"ranks join, a load test: tasks over real sockets, not processes. Messages per join, both ways: "
        f"{few.messages_per_join:.1f} at {few.num_ranks:,} ranks, {many.messages_per_join:.1f} at {many.num_ranks:,}. "
        f"From {few.num_ranks:,} to {many.num_ranks:,} ranks the time grows {many.wall_s / few.wall_s:.1f} times, the "
        f"store's processor time {many.store_cpu_s / max(few.store_cpu_s, 0.01):.1f} times; N log N grows "
        f"{allowed:.1f} times. Every rank reads {few.verdict_bytes:,} and {many.verdict_bytes:,} bytes."
    )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if budget.wants(_FIRST):
        with tempfile.TemporaryDirectory() as folder:
            yield from _first_steps(budget, Path(folder))
    if budget.wants(_JOINS):
        yield from _joins(budget)


CASE = Case(
    title="Clusters: first steps by engine, and ranks by the thousand",
    about="""Seconds from the command to the end of the first training step on rank 0, whole processes with the import
    of torch: `torsh submit --follow` to a real mpiexec, SLURM, two hosts over SSH, Dask or Ray that is up, in turns
    with `torsh run` on one node. Then ranks that join one store at the same moment, over real sockets and with the
    proof of the job's secret: the time until all know each other, and what it takes of the store's process.""",
    rows=_rows,
    parts=(_FIRST, _JOINS),
)
