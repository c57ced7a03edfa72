"""`run_training`: a function on ranks that live on the workers of a Dask cluster."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torsh_distributed.clusters.dask.dask_connection import client_of
from torsh_distributed.clusters.dask.rank_data import partitions_for
from torsh_distributed.clusters.dask.worker_pool import DaskPool
from torsh_distributed.clusters.hosted.hosted_job import HostedJob, HostedSpec
from torsh_distributed.clusters.hosted.rank_host import pack_function
from torsh_distributed.clusters.hosted.reporting import ReportSink
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec

R = TypeVar("R")


def run_training(
    client: Any,
    function: Callable[..., R],
    *,
    num_workers: int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    workers: Sequence[str] | None = None,
    name: str | None = None,
    max_restarts: int = 0,
    elastic: ElasticSpec | None = None,
    env: Mapping[str, str] | None = None,
    time_limit_s: float | None = None,
    on_report: ReportSink | None = None,
    start_timeout_s: float = 60.0,
) -> list[R]:
    """Call `function(*args, **kwargs)` on a rank on each of `num_workers` workers; returns their results by rank.

    `client`: a client, any cluster object (LocalCluster, dask-jobqueue, dask-kubernetes) or a scheduler's address.
    Without `num_workers`, all workers there are now; `workers` limits the choice to these addresses. All ranks start
    or none. Each finds its rank in the environment, as under `torsh run`.

    `data`: Dask arrays and dataframes by name. The function gets, under each name, the rank's rows (`RankRows`); they
    travel between workers only, and those that the worker holds already are not copied.

    If a rank is lost, an `elastic` job goes on in place and follows the size of the cluster; otherwise, and
    `max_restarts` times, all start again, and the Engine goes on from its last checkpoint. Raises ProcessFailure with
    the rank's traceback if the job fails. `on_report` takes what rank 0 says with `report`. Either way no rank is left.
    """
    if data and elastic is not None:
        raise InvalidArgument(
            "an elastic job cannot be given data: a lost rank takes its rows along",
            hint="leave out elastic and set max_restarts: Dask computes lost partitions again",
            data=list(data),
        )
    taken = set(data or ()) & set(kwargs or ())
    if taken:
        raise InvalidArgument("data and kwargs have the same name", names=sorted(taken))
    with client_of(client) as connected:
        size = num_workers if num_workers is not None else len(connected.scheduler_info(n_workers=-1)["workers"])
        if size < 1:
            raise InvalidArgument(
                "the Dask cluster has no workers", hint="start some, or give num_workers and wait", num_workers=size
            )
        work = pack_function(function, args, dict(kwargs or {}), pickler="cloudpickle")
        spec = HostedSpec(
            work=work,
            name=name or f"dask-{secrets.token_hex(4)}",
            num_workers=size,
            max_restarts=max_restarts,
            elastic=elastic,
            variables=dict(env or {}),
            time_limit_s=time_limit_s,
            on_report=on_report,
        )
        pool = DaskPool(
            connected,
            start_timeout_s=start_timeout_s,
            workers=workers,
            partitions=partitions_for(connected, data) if data else None,
            follows_size=elastic is not None,
            prepares=True,
        )
        return HostedJob(pool, spec).run()
