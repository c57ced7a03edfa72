"""Plain values between ranks, like torch's object collectives, but nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torsh_distributed.comm.collectives.call import CallOptions, resolve_group
from torsh_distributed.comm.collectives.moves import all_gather, broadcast, gather, scatter
from torsh_distributed.comm.collectives.point_to_point import recv, send
from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import InvalidArgument


def all_gather_varsize(tensor: Tensor, **options: Unpack[CallOptions]) -> list[Tensor]:
    """The tensors of all ranks, by rank, where dim 0 may differ from rank to rank; the other dims agree.

    Sizes travel first, then the rows, padded to the longest tensor.
    """
    if tensor.dim() == 0:
        raise InvalidArgument(
            "all_gather_varsize needs a tensor of one dim or more", hint="use all_gather for single values"
        )
    device = tensor.device
    counts = [int(count) for count in all_gather(torch.tensor(tensor.shape[0], device=device), **options)]
    gathered = all_gather(_pad(tensor, max(counts)), **options)
    return [rows[:count] for rows, count in zip(gathered, counts, strict=True)]


def all_gather_bytes(data: bytes, **options: Unpack[CallOptions]) -> list[bytes]:
    """The bytes of all ranks, by rank, which have one length: one collective, where `all_gather_object` takes two."""
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device(options))
    return [one.cpu().numpy().tobytes() for one in all_gather(sent, **options)]


def all_gather_object(value: Any, **options: Unpack[CallOptions]) -> list[Any]:
    """The values of all ranks, by rank."""
    return [_decode(data) for data in all_gather_varsize(_encode(value, options), **options)]


def broadcast_object(value: Any, src: int, **options: Unpack[CallOptions]) -> Any:
    """The value of rank `src`, on every rank; the other ranks' values are ignored."""
    is_source = dist.get_rank() == src
    data = _encode(value, options) if is_source else torch.empty(0, dtype=torch.uint8, device=_device(options))
    size = broadcast(torch.tensor(data.numel(), device=data.device), src, **options)
    buffer = data if is_source else data.new_empty(int(size))
    return _decode(broadcast(buffer, src, **options))


def gather_object(value: Any, dst: int, **options: Unpack[CallOptions]) -> list[Any] | None:
    """The values of all ranks, by rank, on rank `dst`; None on other ranks."""
    data = _encode(value, options)
    counts = [int(count) for count in all_gather(torch.tensor(data.numel(), device=data.device), **options)]
    gathered = gather(_pad(data, max(counts)), dst, **options)
    if gathered is None:
        return None
    return [_decode(rows[:count]) for rows, count in zip(gathered, counts, strict=True)]


def scatter_object(values: Sequence[Any] | None, src: int, **options: Unpack[CallOptions]) -> Any:
    """This rank's entry of the `values` that rank `src` passes; the others pass None."""
    num_ranks = resolve_group(options.get("group")).size()
    device = _device(options)
    parts: list[Tensor] | None = None
    sizes = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    if dist.get_rank() == src:
        if values is None or len(values) != num_ranks:
            raise InvalidArgument(
                "scatter_object takes one value for each rank on the source rank",
                hint=f"pass {num_ranks} values on rank {src}",
                num_values=None if values is None else len(values),
            )
        parts = [_encode(value, options) for value in values]
        sizes = torch.tensor([part.numel() for part in parts], device=device)
    broadcast(sizes, src, **options)
    longest = int(sizes.max())
    padded = None if parts is None else [_pad(part, longest) for part in parts]
    mine = scatter(torch.empty(longest, dtype=torch.uint8, device=device), src, padded, **options)
    return _decode(mine[: int(sizes[resolve_group(options.get("group")).rank()])])


def send_object(value: Any, dst: int, *, tag: int = 0, **options: Unpack[CallOptions]) -> None:
    """Send a value to rank `dst`, which calls `recv_object`."""
    data = _encode(value, options)
    send(torch.tensor(data.numel(), device=data.device), dst, tag=tag, **options)
    send(data, dst, tag=tag, **options)


def recv_object(src: int, *, tag: int = 0, **options: Unpack[CallOptions]) -> Any:
    """The value that rank `src` sent with `send_object`."""
    size = torch.tensor(0, device=_device(options))
    recv(size, src, tag=tag, **options)
    data = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    recv(data, src, tag=tag, **options)
    return _decode(data)


def _device(options: CallOptions) -> torch.device:
    return device_of_numbers(resolve_group(options.get("group")))


def device_of_numbers(group: dist.ProcessGroup) -> torch.device:
    """Where numbers of the host travel in this group: the CPU, unless its backend takes tensors on a GPU only."""
    types = {device.type for device in group._device_types}
    return torch.device("cpu") if "cpu" in types or not types else torch.device("cuda", torch.cuda.current_device())


def _encode(value: Any, options: CallOptions) -> Tensor:
    return torch.frombuffer(bytearray(serialize(value)), dtype=torch.uint8).to(_device(options))


def _decode(data: Tensor) -> Any:
    return deserialize(data.cpu().numpy().tobytes())


def _pad(rows: Tensor, num_rows: int) -> Tensor:
    padded = rows.new_zeros((num_rows, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded
