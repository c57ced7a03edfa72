"""The driver of a submitted script, on the cluster: `python -m torsh_distributed.clusters.ray.ray_job`.

Ray's job server starts it with the job in TORSH_RAY_JOB. It holds the ranks, shows their output with the rank before
each line, and ends with the exit code that `torsh run` would return. `… ray_job scale JOB N` asks a running one for
another size.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from torsh_distributed.clusters.hosted.submitted_job import drive, spec_of
from torsh_distributed.clusters.ray.actor_pool import LEADER_NAMESPACE, RayPool
from torsh_distributed.clusters.ray.ray_config import RayConfig
from torsh_distributed.clusters.ray.ray_connection import cluster_of_this_job, connected, take_carried_code
from torsh_distributed.clusters.ray.ray_engine import JOB_VARIABLE

_SCALE_S = 30.0
_FIND_S = 10.0


def run_job(job: dict[str, Any]) -> int:
    """Run the job to its end on the cluster that this process belongs to; its exit code."""
    carried = take_carried_code(own_variable=JOB_VARIABLE)
    import ray

    # Lines of the ranks come through the job, with their rank: Ray need not show them again.
    ray.init(address=cluster_of_this_job(), log_to_driver=False)
    try:
        spec = spec_of(job)
        pool = RayPool(
            ray,
            RayConfig(**job["config"]),
            is_elastic=spec.elastic is not None,
            leader_name=leader_name(job["job_id"]),
            carried=carried,
        )
        return drive(pool, spec)
    finally:
        ray.shutdown()


def leader_name(job_id: str) -> str:
    """The name of the actor through which a job is scaled."""
    return f"leader of {job_id}"


def scale_job(job_id: str, workers: int) -> int:
    """Ask the leader of a running job for another number of workers."""
    with connected(cluster_of_this_job()) as ray:
        leader = _find_leader(ray, job_id)
        if leader is None:
            print(f"no running job has the id {job_id}", file=sys.stderr)
            return 1
        if not ray.get(leader.scale.remote(workers), timeout=_SCALE_S):
            print(f"the job {job_id} was not submitted as elastic", file=sys.stderr)
            return 1
    return 0


def _find_leader(ray: Any, job_id: str) -> Any:
    """The job's leader; None if there is none after a while: a job that was just submitted has yet to start it."""
    pause, deadline_s = threading.Event(), time.monotonic() + _FIND_S
    while True:
        try:
            return ray.get_actor(leader_name(job_id), namespace=LEADER_NAMESPACE)
        except ValueError:
            if time.monotonic() > deadline_s:
                return None
        pause.wait(0.2)


def main() -> int:
    """As the module says."""
    if sys.argv[1:2] == ["scale"]:
        return scale_job(sys.argv[2], int(sys.argv[3]))
    return run_job(json.loads(os.environ.pop(JOB_VARIABLE)))


if __name__ == "__main__":
    sys.exit(main())
