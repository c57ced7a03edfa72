"""The store that `torsh run` serves to its workers, and how torch's own `env://` finds it.

torch would open a TCPStore at MASTER_ADDR:MASTER_PORT, to which anyone may connect. The launcher serves a store that
asks for the job's secret instead, so the one function of torch that makes such stores is wrapped: for the job's own
address it opens the launcher's store, for every other address it does what it did.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from torsh_distributed.comm.store.registry import open_store as open_store_at
from torsh_distributed.comm.trust.job_secret import STORE_VARIABLE, job_secret
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.sections.recovery import RetryConfig


def job_store_url(host: str, port: int) -> str | None:
    """Where the launcher serves the store of the job at host:port; None if it serves none there."""
    url = os.environ.get(STORE_VARIABLE)
    is_ours = (host, str(port)) == (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    return url if url and is_ours else None


def open_job_store(url: str, timeout: timedelta, *, retry: RetryConfig | None = None) -> dist.Store:
    """Connect to the launcher's store; raises if this process does not know the job's secret."""
    secret = job_secret()
    if secret is None:
        raise ConfigurationError(
            "the job's store asks for a secret that this process does not have",
            hint="keep TORSH_SECRET_FILE in the environment of processes that join the job",
            store=url,
        )
    return open_store_at(url, timeout_s=timeout.total_seconds(), token=secret.decode(), retry=retry)
