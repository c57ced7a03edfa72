"""Wait for keys of any c10d store, and know a time-out when one is seen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def wait_for_keys(store: dist.Store, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all keys were set within the time. A store that is gone raises DistNetworkError.

    Each store says "too late" in its own way: TCPStore with DistStoreError, ours with TimeoutError, and torch's
    FileStore with a bare RuntimeError, which leaves no choice but to take that for a time-out too.
    """
    try:
        store.wait(list(keys), timedelta(seconds=max(timeout_s, 0.001)))
    except dist.DistNetworkError:
        raise
    except (RuntimeError, TimeoutError):
        return False
    return True
