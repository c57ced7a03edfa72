"""Ranks on the workers of a real LocalCluster, and of a scheduler and workers that are processes of their own."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.clusters import rank_functions
from tests.clusters.dask.conftest import DaskProcesses
from tests.clusters.engine_marks import DASK
from torsh_distributed.clusters.dask import RankRows, rows_loader, run_search, run_training
from torsh_distributed.errors import (
    CommunicationError,
    ConfigurationError,
    FeatureNotAvailable,
    InvalidArgument,
    OperationTimeout,
    ProcessFailure,
    SerializationError,
)
from torsh_distributed.launch.spec import ElasticSpec

pytestmark = [*DASK, pytest.mark.ranks]


def data_on_ranks(points: RankRows, targets: RankRows) -> dict[str, Any]:
    """Train one epoch on the rows of this rank; tell which rows came in, and where they are."""
    import torch
    from torch import nn

    import torsh_distributed as td

    td.init()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    engine = td.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), td.Plan(), loss_fn=nn.functional.mse_loss
    )
    seen, losses = [], []
    for batch in engine.batches(rows_loader(points, targets, batch_size=8), epochs=1):
        seen += batch[0][:, 0].tolist()
        losses.append(engine.step(batch))
    from distributed import get_worker

    held = {id(value) for value in get_worker().data.values()}
    return {
        "seen": seen,
        "losses": losses,
        "num_whole": sum(id(piece) in held for piece in points.pieces),
        "num_pieces": len(points.pieces),
    }


def _placed(client: Any, values: np.ndarray, *, num_partitions: int) -> Any:
    """A Dask array whose partitions are on the workers that will need them."""
    import dask
    import dask.array as da

    known = client.scheduler_info(n_workers=-1)["workers"]
    workers = sorted(known, key=lambda worker: str(known[worker]["name"]))
    parts = np.array_split(values, num_partitions)
    placed = [
        client.scatter(part, workers=[workers[number * len(workers) // num_partitions]])
        for number, part in enumerate(parts)
    ]
    whole = [
        da.from_delayed(dask.delayed(one), shape=part.shape, dtype=part.dtype)
        for one, part in zip(placed, parts, strict=True)
    ]
    return da.concatenate(whole)


@pytest.mark.slow
def test_ranks_are_workers_that_start_together(dask_client: Any) -> None:
    """One job after another on two workers: a world, data, a rank that fails, refusals, a search."""
    found = run_training(dask_client, rank_functions.describe)
    assert [one["rank"] for one in found] == [0, 1]
    assert {(one["sum"], one["source"], one["backend"], one["has_token"]) for one in found} == {
        (3.0, "Dask", "torsh", False)
    }

    points = np.arange(160, dtype=np.float32).reshape(40, 4) / 160
    collection = _placed(dask_client, points, num_partitions=4)
    ranks = run_training(dask_client, data_on_ranks, data={"points": collection, "targets": collection[:, :1]})
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == pytest.approx(points[:, 0].tolist())
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert sum(one["num_whole"] for one in ranks) == sum(one["num_pieces"] for one in ranks) == 4, "no copy was made"

    with pytest.raises(ProcessFailure, match=r"rank 1 on Dask worker .* failed: ValueError: a mistake") as failed:
        run_training(dask_client, rank_functions.fail_on, args=(1,))
    assert "in fail_on" in "".join(failed.value.__notes__)

    other = SimpleNamespace(scheduler_address=dask_client.scheduler.address, security=None)
    assert len(run_training(other, rank_functions.describe)) == 2, "any object with an address is a cluster"
    with pytest.raises(FeatureNotAvailable, match="3 workers were asked for, and the Dask cluster has 2"):
        run_training(dask_client, rank_functions.describe, num_workers=3, start_timeout_s=0.1)
    with pytest.raises(SerializationError, match="argument 0"):
        run_training(dask_client, rank_functions.fail_on, args=(threading.Lock(),))
    best = run_search(
        dask_client, lambda x, budget: (x - 2) ** 2 / budget, {"x": [0, 1, 2, 3]}, method="successive_halving"
    )
    assert best.best.params == {"x": 2}
    assert {one.budget for one in best.trials} == {1, 2, 4, 8}


@pytest.mark.matrix
def test_after_a_worker_is_killed_all_start_again(dask_set: Any, tmp_path: Path) -> None:
    """The nanny brings the worker back."""
    _, client = dask_set
    assert run_training(client, rank_functions.die_once, args=(str(tmp_path / "died"), 1), max_restarts=1) == [1, 1]


@pytest.mark.matrix
def test_an_elastic_job_goes_on_in_place_and_takes_the_worker_that_comes_back(dask_set: Any) -> None:
    _, client = dask_set
    client.wait_for_workers(2, timeout=120)
    undisturbed = run_training(client, rank_functions.train, num_workers=2)
    disturbed = run_training(
        client,
        rank_functions.train,
        num_workers=2,
        kwargs={"die_at": 3},
        elastic=ElasticSpec(min_workers=1, max_workers=2, on_loss="wait"),
    )
    assert [one["member"] for one in disturbed] == [0, 2]
    for step, loss in undisturbed[0]["losses"].items():
        assert disturbed[0]["losses"][step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_job_grows_with_its_cluster(tmp_path: Path) -> None:
    with DaskProcesses(tmp_path) as processes:
        for _ in range(2):
            processes.add_worker()
        coming = threading.Timer(5.0, processes.add_worker)
        coming.start()
        ended = run_training(
            processes.address,
            rank_functions.train,
            num_workers=2,
            kwargs={"steps": 100_000, "until_size": 3},
            elastic=ElasticSpec(min_workers=1, max_workers=3),
            start_timeout_s=120.0,
        )
        coming.join()
    assert ended[0]["sizes"][-1] == 3
    assert len(ended) == 3


@pytest.mark.matrix
def test_a_worker_that_others_use_is_named(dask_client: Any, tmp_path: Path) -> None:
    release = tmp_path / "release"
    worker = min(dask_client.scheduler_info(n_workers=-1)["workers"])
    busy = dask_client.submit(_wait_for_file, str(release), workers=[worker], pure=False)
    try:
        with pytest.raises(OperationTimeout, match=f"1 of 2 workers were free for a rank.*busy: {worker}"):
            run_training(dask_client, rank_functions.describe, start_timeout_s=2.0)
    finally:
        release.touch()
        busy.result(timeout=30)
    assert len(run_training(dask_client, rank_functions.describe)) == 2, "nothing was left on the free worker"


def _wait_for_file(path: str) -> None:
    import time

    while not Path(path).exists():
        time.sleep(0.05)


@pytest.mark.matrix
def test_a_rank_that_does_not_end_is_ended_with_its_worker(dask_set: Any, tmp_path: Path) -> None:
    _, client = dask_set
    with pytest.raises(OperationTimeout, match="did not end within its"):
        run_training(client, rank_functions.wait_forever, num_workers=2, args=(str(tmp_path),), time_limit_s=15.0)
    client.wait_for_workers(2, timeout=120)
    assert len(run_training(client, rank_functions.describe, num_workers=2)) == 2


@pytest.mark.matrix
def test_workers_that_are_threads_are_refused() -> None:
    from distributed import LocalCluster

    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        pytest.raises(ConfigurationError, match="threads of one process"),
    ):
        run_training(cluster, rank_functions.describe)


def test_what_is_no_cluster_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a Dask client, a cluster or the address"):
        run_training(object(), rank_functions.describe)
    with pytest.raises(InvalidArgument, match="an elastic job cannot be given data"):
        run_training("tcp://127.0.0.1:1", rank_functions.describe, data={"x": 1}, elastic=ElasticSpec())


@pytest.mark.matrix
def test_processes_without_a_nanny_are_a_cluster_too(tmp_path: Path) -> None:
    with DaskProcesses(tmp_path) as processes:
        for _ in range(2):
            processes.add_worker(has_nanny=False)
        found = run_training(processes.address, rank_functions.describe, num_workers=2)
        assert [(one["rank"], one["sum"]) for one in found] == [(0, 3.0), (1, 3.0)]
        with pytest.raises(ProcessFailure, match="the Dask worker is lost"):
            run_training(processes.address, rank_functions.die_once, args=(str(tmp_path / "died"), 1), num_workers=2)


@pytest.mark.matrix
def test_no_scheduler_there_is_said_at_once() -> None:
    with pytest.raises(CommunicationError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1"):
        from torsh_distributed.clusters.dask.dask_connection import client_of

        with client_of("tcp://127.0.0.1:1", timeout_s=1.0):
            pass
