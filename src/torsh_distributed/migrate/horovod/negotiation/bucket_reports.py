"""Buckets of gradients that were reduced, as events: how large they were, how long it took, what was sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.compress.averaging.named_mean import ring_bytes
from torsh_distributed.migrate.horovod.negotiation.pending_op import PendingOp


def report_buckets(ops: Sequence[PendingOp | None], duration_s: float, group: dist.ProcessGroup) -> None:
    """Emit an event for each bucket among the operations of one step."""
    for op in ops:
        if op is None or op.bucket is None or op.error is not None:
            continue
        facts = op.bucket
        wire_bytes = op.wire_bytes
        if wire_bytes is None and facts.codec is not None:
            wire_bytes = ring_bytes(op.request.num_bytes, group)
        events.emit(
            events.BucketEvent(
                step=facts.step,
                index=facts.bucket,
                num_bytes=facts.num_bytes,
                duration_s=duration_s,
                codec=facts.codec,
                wire_bytes=wire_bytes,
            )
        )
