"""Waits for keys of any c10d store and recognises a timeout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def wait_for_keys(store: dist.Store, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all keys were set in time. A store that is gone raises DistNetworkError.

    Each store reports a timeout in its own way: TCPStore with DistStoreError, ours with TimeoutError, and torch's
    FileStore with a bare RuntimeError, so that has to count as a timeout too.
    """
    try:
        store.wait(list(keys), timedelta(seconds=max(timeout_s, 0.001)))
    except dist.DistNetworkError:
        raise
    except (RuntimeError, TimeoutError):
        return False
    return True
