"""Messages from one rank to another, with tags, blocking or not."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torsh_distributed.comm.collectives.call import CallOptions, check_member, num_bytes, run
from torsh_distributed.comm.collectives.work import Work


def send(tensor: Tensor, dst: int, *, tag: int = 0, **options: Unpack[CallOptions]) -> None:
    """Send `tensor` to rank `dst`; returns when the tensor may be changed again."""
    isend(tensor, dst, tag=tag, **options).wait()


def recv(tensor: Tensor, src: int | None = None, *, tag: int = 0, **options: Unpack[CallOptions]) -> int:
    """Fill `tensor` with what rank `src` (None: any rank) sent under `tag`; returns the sender's rank."""
    return irecv(tensor, src, tag=tag, **options).wait()


def isend(tensor: Tensor, dst: int, *, tag: int = 0, **options: Unpack[CallOptions]) -> Work[None]:
    """Start sending; the tensor must not change before the work is waited for."""
    check_member(dst, "dst", options.get("group"))
    source = tensor.contiguous()
    return cast(
        Work[None],
        run(
            "send",
            num_bytes(tensor),
            lambda group, _: dist.isend(source, dst, group=group, tag=tag),
            lambda: None,
            async_op=True,
            peer=dst,
            **options,
        ),
    )


def irecv(tensor: Tensor, src: int | None = None, *, tag: int = 0, **options: Unpack[CallOptions]) -> Work[int]:
    """Start receiving; waiting for the work gives the sender's rank."""
    if src is not None:
        check_member(src, "src", options.get("group"))
    target = tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape)
    pending: list[dist.Work | None] = []

    def start(group: dist.ProcessGroup, _: bool) -> dist.Work | None:
        pending.append(dist.irecv(target, src, group=group, tag=tag))
        return pending[0]

    def finish() -> int:
        if target is not tensor:
            tensor.copy_(target)
        if src is not None or pending[0] is None:
            return cast(int, src)
        group = options.get("group")
        source = pending[0]._source_rank()
        return source if group is None else dist.get_global_rank(group, source)

    return cast(Work[int], run("recv", num_bytes(tensor), start, finish, async_op=True, peer=src, **options))
