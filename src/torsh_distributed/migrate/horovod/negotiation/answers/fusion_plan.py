"""Which ready operations run as one: all-reduces of one kind share a buffer, up to a threshold; pure."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

from torsh_distributed.migrate.horovod.negotiation.answers.request_table import ReadyOp
from torsh_distributed.migrate.horovod.negotiation.kept_buffer import KeptBuffer
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, RequestFlags

_SHARED = int(RequestFlags.SHARED)


class PackedStep(list[ReadyOp]):
    """Operations that run as one, all-reduces in one buffer."""

    is_repeated = False
    """Whether the same object comes again when ranks repeat the operations."""
    buffer: KeptBuffer | None = None
    """Where a repeated step packs its tensors, once it has run."""

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of its operations."""
        return [one.request.name for one in self]


def fuse(ready: Sequence[ReadyOp], threshold_bytes: int) -> list[PackedStep]:
    """The operations in the order they run; those of one step are packed into one buffer.

    An operation joins the open buffer of its kind if it fits; the place of a buffer is that of its first operation.
    """
    steps: list[PackedStep] = []
    open_steps: dict[Hashable, tuple[PackedStep, int]] = {}
    for one in ready:
        key = _fusion_key(one)
        if key is None:
            steps.append(PackedStep([one]))
            continue
        size = one.request.num_bytes
        step, used = open_steps.get(key, (None, 0))
        if step is None or used + size > threshold_bytes:
            step, used = PackedStep(), 0
            steps.append(step)
        step.append(one)
        open_steps[key] = (step, used + size)
    return steps


def _fusion_key(one: ReadyOp) -> Hashable:
    """What operations in one buffer have in common; None for one that runs alone."""
    request = one.request
    if one.error or request.kind != OpKind.ALLREDUCE or request.flags & _SHARED:
        return None
    dtype = request.tensors[0][0]
    if len(request.tensors) > 1 and any(other != dtype for other, _ in request.tensors):
        return None
    return dtype, request.op, request.prescale, request.postscale, request.device, one.joined
