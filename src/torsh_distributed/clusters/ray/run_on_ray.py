"""`run_training`: a function on ranks that are actors of a Ray cluster."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torsh_distributed.clusters.hosted.function_packing import pack_function
from torsh_distributed.clusters.hosted.hosted_job import HostedJob, HostedSpec
from torsh_distributed.clusters.hosted.reporting import ReportSink
from torsh_distributed.clusters.ray.actor_pool import RayPool
from torsh_distributed.clusters.ray.ray_config import RayConfig
from torsh_distributed.clusters.ray.ray_connection import connected, refuse_ray_client
from torsh_distributed.launch.spec import ElasticSpec

R = TypeVar("R")


def run_training(
    function: Callable[..., R],
    *,
    num_workers: int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: RayConfig | None = None,
    name: str | None = None,
    max_restarts: int = 0,
    elastic: ElasticSpec | None = None,
    env: Mapping[str, str] | None = None,
    time_limit_s: float | None = None,
    on_report: ReportSink | None = None,
) -> list[R]:
    """Call `function(*args, **kwargs)` on `num_workers` actors; returns their results by rank.

    Each finds its rank in the environment, as under `torsh run`: `td.init()` and everything after it are the same.
    Ranks of one node share memory. If a rank or its node is lost, an `elastic` job goes on in place; otherwise, and
    `max_restarts` times, all start again, and the Engine goes on from its last checkpoint. Raises ProcessFailure with
    the rank's traceback if the job fails. Either way no actor is left. `on_report` takes what rank 0 says by `report`.
    """
    chosen = config or RayConfig()
    with connected(chosen.address) as ray:
        refuse_ray_client(ray)
        work = pack_function(function, args, dict(kwargs or {}), pickler="ray.cloudpickle")
        spec = HostedSpec(
            work=work,
            name=name or f"ray-{secrets.token_hex(4)}",
            num_workers=num_workers,
            max_restarts=max_restarts,
            elastic=elastic,
            variables=dict(env or {}),
            time_limit_s=time_limit_s,
            on_report=on_report,
        )
        return HostedJob(RayPool(ray, chosen, is_elastic=elastic is not None, prepares=True), spec).run()
