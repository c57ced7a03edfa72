"""Python objects between ranks. They travel as data (see `object_encoding`): nothing that arrives is unpickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import SerializationError
from torsh_distributed.migrate.horovod.collectives.async_calls import allgather_async, broadcast_async_
from torsh_distributed.migrate.horovod.collectives.object_encoding import decode_object, encode_object
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set
from torsh_distributed.migrate.horovod.world_state import world


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of `root_rank` on every rank; on the others `obj` is not used.

    Raises SerializationError, on every rank, for an object that cannot be sent.
    """
    label = name if name is not None else "object"
    is_root = world().rank == root_rank
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    synchronize(broadcast_async_(size, root_rank, f"{label}.sz", process_set))
    buffer = data if is_root else torch.empty(int(size), dtype=torch.uint8)
    synchronize(broadcast_async_(buffer, root_rank, f"{label}.t", process_set))
    return obj if is_root and int(buffer[0]) == _OBJECT else _unpacked(buffer, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, by rank. Raises SerializationError, on every rank, if one of them cannot be sent."""
    label = name if name is not None else "objects"
    data = _packed(obj)
    sizes = synchronize(allgather_async(torch.tensor([data.numel()]), f"{label}.sz", process_set)).tolist()
    gathered = synchronize(allgather_async(data, f"{label}.t", process_set))
    return [_unpacked(part, rank) for rank, part in enumerate(torch.split(gathered, sizes))]


_OBJECT, _REFUSAL = 0, 1


def _packed(obj: Any) -> Tensor:
    """An object as bytes, or why it cannot be sent: the other ranks wait for one of the two."""
    try:
        data = bytes([_OBJECT]) + encode_object(obj)
    except SerializationError as error:
        data = bytes([_REFUSAL]) + f"{error.message}\0{error.hint or ''}".encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(data: Tensor, rank: int) -> Any:
    packed = data.numpy().tobytes()
    if packed[:1] == bytes([_REFUSAL]):
        message, _, hint = packed[1:].decode(errors="replace").partition("\0")
        raise SerializationError(f"rank {rank}: {message}", hint=hint or None, rank=rank)
    return decode_object(packed[1:])
