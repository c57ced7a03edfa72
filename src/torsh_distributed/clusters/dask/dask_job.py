"""The driver of a submitted script, beside the scheduler, whose address is its argument."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torsh_distributed.clusters.dask.dask_connection import JOB_VARIABLE, client_of
from torsh_distributed.clusters.dask.worker_pool import DaskPool
from torsh_distributed.clusters.hosted.submitted_job import drive, spec_of


def main() -> int:
    """Run the job in TORSH_DASK_JOB to its end; its exit code."""
    job: dict[str, Any] = json.loads(os.environ.pop(JOB_VARIABLE))
    spec = spec_of(job)
    with client_of(sys.argv[1]) as client:
        pool = DaskPool(
            client,
            start_timeout_s=job["config"]["start_timeout_s"],
            follows_size=spec.elastic is not None,
        )
        return drive(pool, spec)


if __name__ == "__main__":
    sys.exit(main())
