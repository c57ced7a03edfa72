"""Jobs on Ray and Dask: the wait until the first step, and the steps of Ray Train on our backend and on gloo."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit

_NUM_WORKERS = 4
_WIDTH = 1024
"""Eight layers of this width have 8.4 million parameters."""
_BATCHES = (8, 32)
"""Samples of each rank in a step: as in the case `steps`, and one where products of matrices take most of the time."""
_TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point"]
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AIR_NEW_OUTPUT": "0"}


def _model() -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(8)))


def _engine_step() -> Callable[[int], object]:
    """A step of an Engine in the world that is up, with so many samples on each rank."""
    import torch

    import torsh_distributed as td

    model, rows = _model(), torch.randn(max(_BATCHES), _WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = td.parallelize(model, optimizer, td.Plan(), loss_fn=lambda output, _: output.square().mean())
    return lambda num_samples: engine.step((rows[:num_samples], rows[:num_samples]))


def _ddp_step() -> Callable[[int], object]:
    """A step as Ray Train's guide for PyTorch writes it."""
    import ray.train.torch

    return _bare_step(ray.train.torch.prepare_model(_model()))


def _bare_step(model: Any) -> Callable[[int], object]:
    """A step of a bare loop; with an unwrapped model nothing is communicated, which is the limit for all."""
    import torch

    rows = torch.randn(max(_BATCHES), _WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(num_samples: int) -> None:
        model(rows[:num_samples]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _median_s(step: Callable[[int], object], num_samples: int, num_steps: int) -> float:
    times = []
    for number in range(num_steps + 3):
        started = time.perf_counter()
        step(num_samples)
        if number >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def first_step() -> float:
    """Runs on every rank: join the world, do one step; the time on the clock when it is done."""
    import torsh_distributed as td

    td.init()
    _engine_step()(max(_BATCHES))
    return time.time()


_SCRIPT = """
from benchmarks.cases.cluster_ray import first_step

print("first step at", first_step(), flush=True)
"""


def _by_torsh_run(folder: Path) -> float:
    """Seconds from the command to the end of the slowest rank's first step."""
    script = folder / "first_step.py"
    script.write_text(_SCRIPT)
    command = [*_TORSH, "run", "--nproc-per-node", str(_NUM_WORKERS), str(script)]
    root = Path(__file__).parents[2]
    started = time.time()
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    times = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if "first step at" in line]
    if done.returncode or len(times) != _NUM_WORKERS:
        raise RuntimeError(f"torsh run failed: {done.stderr}")
    return max(times) - started


def _by_ray() -> float:
    from torsh_distributed.clusters.ray import run_training

    started = time.time()
    return max(run_training(first_step, num_workers=_NUM_WORKERS)) - started


class _Bare:
    """An actor that does nothing: what Ray takes for the start alone."""

    def ping(self) -> float:
        return time.time()


def actor_start(ray: Any, num_actors: int) -> float:
    """Seconds until so many actors that do nothing answer."""
    started = time.time()
    actors = [ray.remote(_Bare).options(num_cpus=1).remote() for _ in range(num_actors)]
    taken_s = max(ray.get([actor.ping.remote() for actor in actors])) - started
    for actor in actors:
        ray.kill(actor)
    return taken_s


def _train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker of Ray Train: first step, then the time of steps."""
    import ray.train

    step = _engine_step() if config["is_ours"] else _ddp_step()
    step(max(_BATCHES))
    first_at = time.time()
    found: dict[str, Any] = {"first_at": first_at}
    found["step_s"] = [_median_s(step, samples, config["steps"]) for samples in _BATCHES]
    if config["is_ours"]:
        alone = _bare_step(_model())
        found["alone_s"] = [_median_s(alone, samples, config["steps"]) for samples in _BATCHES]
    # Ray Train keeps metrics of reports with a checkpoint alone, so the numbers go into a file.
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["out"]).write_text(json.dumps(found))


def _by_ray_train(folder: Path, *, is_ours: bool, steps: int) -> tuple[float, dict[str, list[float]]]:
    """Seconds to the first step, and of a step with each number of samples by who does it, under Ray Train."""
    import ray.train
    from ray.train.torch import TorchTrainer

    from torsh_distributed.clusters.ray.train_backend import TorshTrainer

    trainer = (TorshTrainer if is_ours else TorchTrainer)(
        _train_loop,
        train_loop_config={"is_ours": is_ours, "steps": steps, "out": str(folder / "measured.json")},
        scaling_config=ray.train.ScalingConfig(num_workers=_NUM_WORKERS),
        run_config=ray.train.RunConfig(name="torsh" if is_ours else "gloo", storage_path=str(folder)),
    )
    started = time.time()
    trainer.fit()
    measured = json.loads((folder / "measured.json").read_text())
    steps_of = {"ours" if is_ours else "gloo": measured["step_s"]}
    if is_ours:
        steps_of["alone"] = measured["alone_s"]
    return float(measured["first_at"]) - started, steps_of


@contextlib.contextmanager
def local_ray(folder: Path, **arguments: Any) -> Iterator[Any]:
    """A Ray of four workers' room on this machine, with its token in the folder."""
    before = dict(os.environ)
    root = str(Path(__file__).parents[2])
    os.environ.update({**_QUIET, "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "PYTHONPATH": root})
    (folder / "token").write_text("a-token-of-the-benchmarks-0123456789")
    (folder / "token").chmod(0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        from torsh_distributed.clusters.ray.ray_connection import start_local

        start_local(ray, num_cpus=_NUM_WORKERS, log_to_driver=False, **arguments)
        try:
            yield ray
        finally:
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)


def _ray_rows(folder: Path, rounds: int, steps: int) -> Iterator[Row | Note]:
    first: dict[str, list[float]] = {"ours": [], "torsh run + actors": [], "Ray Train on gloo": []}
    actors: list[float] = []
    train_first: dict[str, list[float]] = {"ours": [], "gloo": []}
    train_steps: dict[tuple[str, int], list[float]] = {
        (who, samples): [] for who in (*train_first, "alone") for samples in _BATCHES
    }
    with local_ray(folder) as ray:
        # The first ones fill the page cache, and compile what Ray Train imports.
        _by_ray()
        _by_ray_train(folder, is_ours=False, steps=1)
        for number in range(rounds):
            first["ours"].append(_by_ray())
            actors.append(actor_start(ray, _NUM_WORKERS))
            first["torsh run + actors"].append(_by_torsh_run(folder) + actors[-1])
            both = [("ours", True), ("gloo", False)]
            for who, is_ours in both if number % 2 else reversed(both):
                wait_s, found = _by_ray_train(folder, is_ours=is_ours, steps=steps)
                train_first[who].append(wait_s)
                for whose, step_s in found.items():
                    for samples, one_s in zip(_BATCHES, step_s, strict=True):
                        train_steps[whose, samples].append(1 / one_s)
            first["Ray Train on gloo"].append(train_first["gloo"][-1])
    measured = {who: Measurement.of(values) for who, values in first.items()}
    ours, run = measured.pop("ours"), measured["torsh run + actors"]
    yield Row(name="Ray, run_training to the first step", unit=Unit.SECONDS, ours=ours, rivals=measured)
    yield Note(
        text=f"Four empty actors of Ray start in {statistics.median(actors):.2f} s. run_training takes "
        f"{ours.median / run.median:.2f} times `torsh run` and their start together; 1.2 times is the line."
    )
    yield Row(
        name="Ray Train, fit() to the first step",
        unit=Unit.SECONDS,
        ours=Measurement.of(train_first["ours"]),
        rivals={"TorchTrainer on gloo": Measurement.of(train_first["gloo"])},
    )
    for samples in _BATCHES:
        yield Row(
            name=f"Ray Train, steps of the 8.4 M MLP, {samples} samples a rank",
            unit=Unit.PER_SECOND,
            ours=Measurement.of(train_steps["ours", samples]),
            rivals={
                "TorchTrainer on gloo": Measurement.of(train_steps["gloo", samples]),
                "no communication, the limit": Measurement.of(train_steps["alone", samples]),
            },
        )


def _dask_rows(folder: Path, rounds: int) -> Iterator[Row]:
    from distributed import Client, LocalCluster

    from torsh_distributed.clusters.dask import run_training

    first: dict[str, list[float]] = {"cold": [], "warm": [], "torsh run": []}
    for _ in range(rounds):
        with (
            LocalCluster(
                n_workers=_NUM_WORKERS, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.CRITICAL
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            for kind in ("cold", "warm"):
                started = time.time()
                first[kind].append(max(run_training(client, first_step)) - started)
        first["torsh run"].append(_by_torsh_run(folder))
    rivals = {"torsh run": Measurement.of(first["torsh run"])}
    for kind, name in (("cold", "a worker's first job"), ("warm", "its next job")):
        yield Row(
            name=f"Dask, run_training to the first step, {name}",
            unit=Unit.SECONDS,
            ours=Measurement.of(first[kind]),
            rivals=rivals,
        )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    rounds, steps = (1, 5) if budget.is_quick else (5, 40)
    with tempfile.TemporaryDirectory(prefix="torsh-bench-") as folder:
        for name, rows in (
            ("ray", lambda: _ray_rows(Path(folder), rounds, steps)),
            ("distributed", lambda: _dask_rows(Path(folder), rounds)),
        ):
            try:
                __import__(name)
            except ImportError:
                yield Note(text=f"{name} is not installed")
            else:
                yield from rows()


CASE = Case(
    title="Ray and Dask: the wait until the first step, and Ray Train's steps",
    about="""Four workers on a cluster that is up. From the call of run_training to the end of the slowest rank's first
    step of an 8.4 million parameter MLP, against `torsh run` of the same work plus the start of four empty Ray actors,
    and against Ray Train's TorchTrainer on gloo. Dask's workers have imported torch after their first job. Steps of the
    same MLP under Ray Train: TorshTrainer with an Engine, TorchTrainer with prepare_model, as Ray's guide has it.""",
    rows=_rows,
)
